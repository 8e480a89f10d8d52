"""A conversation as chat messages, and facts for what stands beside them; every text from outside is escaped here."""

from __future__ import annotations

import json
from functools import lru_cache
from html import escape
from typing import Any

from app.chat import CUT, Selection, Turn
from app.documents import Document, is_code
from app.engine.types import SamplingParams
from app.evidence import Passage
from app.places import parts_of, told
from app.service import MemoryBegins
from app.ui.answer import Answer
from app.ui.conversation import Conversation
from app.ui.markdown import plain
from app.ui.pieces import Pieces
from app.words import plural

_LOOP = "Stopped here: it began to repeat itself. Balanced, or a repetition penalty of 1.1, may help: see Settings."

_INTERRUPTED = {
    True: "Interrupted: the program ended here. These are the words that were saved.",
    False: "Interrupted: the program ended here. What was read is kept; ask again to go on.",
}


def messages(conversation: Conversation, first: int) -> list[Any]:
    """The turns from number `first` on for the chat component: questions as typed, answers as Markdown in pieces."""
    shown: list[Any] = []
    begins, number = conversation.memory_begins, 0
    for at, turn in enumerate(conversation.chat.path(conversation.chat.head)):
        live = conversation.live(turn)
        takes_part = turn.answered or live is not None
        here = begins is not None and number == begins.turn and takes_part
        number += takes_part
        if at < first:
            continue
        question, text = _files(turn) + plain(turn.question), _answer_text(turn, live)
        if here and begins is not None:
            if begins.in_answer:
                text[0] = _memory_line(begins, "this answer") + text[0]
            else:
                question = _memory_line(begins, "what was read here") + question
        shown += [_message("user", [question]), _message("assistant", text)]
    return shown


def turns(conversation: Conversation, first: int) -> str:
    """What the page's script needs for the buttons at questions and answers from number `first` on, in their order."""
    chat, facts = conversation.chat, []
    path = chat.path(chat.head)
    sources = {id(s.document): s.document for turn in path for s in turn.sources if s.document.pages}
    read = {Selection.whole(document).label: document for document in sources.values()}
    for turn in path[first:]:
        ids = [other.id for other in chat.siblings(turn.id)]
        at = ids.index(turn.id)
        facts.append(
            {
                "id": turn.id,
                "at": at + 1,
                "of": len(ids),
                "before": ids[at - 1] if at else "",
                "after": ids[at + 1] if at + 1 < len(ids) else "",
                "live": conversation.live(turn) is not None,
                "passages": [_card_facts(passage, read.get(passage.document)) for passage in turn.passages],
                "quotes": [
                    {"text": q.text, "found": bool(q.name), "place": told(q, read.get(q.document or ""))}
                    for q in turn.quotes
                ],
                "again": _again(turn, chat.sampling),
                "varied": turn.answered and turn.sampling is not None,
                "resume": turn.answered and turn.finish_reason in CUT and conversation.service.resumes,
            }
        )
    return f'<div data-turns="{escape(json.dumps(facts))}" data-first="{first}" data-chat="{chat.id}"></div>'


def _again(turn: Turn, sampling: SamplingParams) -> str:
    """What asking again does, where there is an answer."""
    if not turn.answered:
        return ""
    if sampling.temperature == 0:
        return "in other words: sampled, since at Exact the likeliest answer is the first one"
    return "in other words"


def _card_facts(passage: Passage, document: Document | None) -> dict[str, Any]:
    """A passage for its card: the words that were looked at most, with a few before them, and what follows."""
    text, low, code = passage.excerpt, passage.key_start, is_code(passage.name)
    high = passage.key_end or len(text)
    cut = ("\u2026\n" if code else "\u2026 ") if passage.shown else ""
    before = cut + text[passage.shown : low]
    said = {"before": before, "key": text[low:high], "after": text[high:]}
    return {"place": told(passage, document), "code": code, "strength": passage.strength, **said}


def _memory_line(begins: MemoryBegins, where: str) -> str:
    """The line where an endless chat's memory begins."""
    words = f", at \u201c{escape(begins.words)}\u201d" if begins.words else ""
    kept = f" All before it is forgotten, but for the first {plural(begins.sink, 'token')}." if begins.sink else ""
    kept = kept or " All before it is forgotten."
    return f'<div class="oc-memory" role="note">Memory begins in {where}{words}.{kept}</div>\n\n'


def _message(role: str, pieces: list[str]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": piece} for piece in pieces]}


def _files(turn: Turn) -> str:
    if not turn.sources:
        return ""
    chips = "".join(f'<span class="oc-file">{escape(_label(source))}</span>' for source in turn.sources)
    return f'<div class="oc-files">{chips}</div>\n\n'


def _label(source: Selection) -> str:
    whole = (source.first_page, source.last_page) == (1, len(source.document.pages))
    name = source.document.name
    return name if whole else f"{name}, {parts_of(source.document)}s {source.first_page}-{source.last_page}"


def _answer_text(turn: Turn, live: Answer | None) -> list[str]:
    if live is not None:
        waiting = '<span class="oc-dots" role="img" aria-label="Working"><i></i><i></i><i></i></span>'
        return live.pieces.of(live.text) if live.text else [waiting]
    note, pieces = _note(turn), list(_settled(turn.answer))
    if note is not None:
        # A piece of its own: behind an open fence it would become code.
        pieces.append(f'<div class="{note[0]}">{escape(note[1])}</div>')
    return pieces


@lru_cache(maxsize=1024)
def _settled(answer: str) -> tuple[str, ...]:
    """Answers that are whole: a long chat is drawn ten times a second while its newest answer is written."""
    return tuple(Pieces().of(answer, growing=False))


def _note(turn: Turn) -> tuple[str, str] | None:
    """(class, text) of what is to be said below an answer that did not end by itself."""
    if turn.error:
        return "oc-failed", turn.error
    return {
        "cancelled": ("oc-note", "Stopped."),
        "length": ("oc-note", "Cut here: the answer reached the limit of tokens."),
        "loop": ("oc-note", _LOOP),
        "interrupted": ("oc-note", _INTERRUPTED[bool(turn.answer)]),
        "failed": ("oc-failed", "No answer."),
    }.get(turn.finish_reason)
