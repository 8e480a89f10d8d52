"""Where the memory of an endless chat begins."""

from __future__ import annotations

from app.chat import Chat
from app.local.loaded import Loaded
from app.service import MemoryBegins

_WORDS = 12  # tokens shown of what is remembered first


def memory_begins(loaded: Loaded, chat: Chat, prompt: int = 0, answer: int = 0) -> MemoryBegins | None:
    """None while nothing is forgotten; see ChatService.memory_begins."""
    if loaded.engine.runner.capacity is not None:
        return None
    turns = tuple(chat.turns)
    known = sum(len(turn.prompt_ids) + len(turn.answer_ids) for turn in turns)
    first = max(known, prompt + answer) - loaded.recent
    if first <= loaded.sink:
        return None
    at = first
    for index, turn in enumerate(turns):
        for in_answer, ids in ((False, turn.prompt_ids), (True, turn.answer_ids)):
            if at < len(ids):
                words = loaded.words(ids[at : at + _WORDS])
                return MemoryBegins(first - loaded.sink, loaded.sink, index, in_answer, words)
            at -= len(ids)
    return MemoryBegins(first - loaded.sink, loaded.sink, len(turns), first >= prompt, "")
