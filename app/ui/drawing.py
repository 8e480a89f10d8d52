"""What a tab shows: drawn anew where it has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass

import gradio as gr

from app.errors import NotReady, describe
from app.service import ChatService, PlanView
from app.ui import frame, messages, options, shelf, sidebar, status, strip
from app.ui.answer import Answer
from app.ui.parts import BUSY, IDLE, Changes, Parts
from app.ui.session import Loading, Session, Sessions

log = logging.getLogger("octavo.ui")

# Ten updates a second look continuous; a long answer is sent less often, as the browser lays all of it out each time.
UPDATE_S = 0.1
CHARS_FOR_DOUBLE_TIME = 8_000
COUNTDOWN_S = 0.5
STATUS_S = 1.0
# A page hears from its server at least every so often; after this silence it looks whether the connection is dead.
PULSE_S = 5.0
QUIET_S = 30.0


@dataclass
class Seen:
    """What a tab shows, to compare with; when parts of it were drawn; the length of its answer's last piece."""

    shown: object = None
    lists: object = None
    loading: object = None
    version: int = -1
    strip_at: float = 0.0
    status_at: float = 0.0
    pulse_at: float = 0.0
    piece: int = 0


class Drawing:
    """Draws the parts of a page for a session."""

    def __init__(self, service: ChatService, loading: Loading, parts: Parts, sessions: Sessions) -> None:
        self.service = service
        self.loading = loading
        self.parts = parts
        self.sessions = sessions

    async def news(self, session: Session, seen: Seen) -> Changes:
        """What a tab has not shown yet."""
        parts, conversation, now = self.parts, session.conversation, time.monotonic()
        before, seen.lists = seen.lists, self.sessions.lists(session.owner)
        changes = await self.lists(session) if seen.lists != before else {}
        shown, seen.shown = seen.shown, self._shown(session)
        if seen.shown != shown:
            seen.version, seen.piece = -1, 0
            return await self.everything(session)
        if (answer := conversation.running) is not None:
            if answer.phase == "queued":
                self.sessions.give_way()
            if answer.version != seen.version or now - seen.strip_at > COUNTDOWN_S:
                seen.version, seen.strip_at = answer.version, now
                changes[parts.strip] = self._running(answer)
                if answer.text:  # each time, since what is left out once is sent whole after that
                    changes[parts.chat] = messages.messages(conversation, session.first)
                    seen.piece = len(answer.pieces.of(answer.text)[-1])
                if now - seen.status_at > STATUS_S:
                    seen.status_at = now
                    changes[parts.status] = self.status(session)
        if now - seen.pulse_at > PULSE_S:
            seen.pulse_at = now
            changes |= {parts.pulse: f"{now:.1f}", parts.session: session}  # which the library forgets otherwise
        if conversation.running is None and (self.loading.anew or not self.service.ready):
            before, seen.loading = seen.loading, (self.loading.stage, self.loading.share)
            if seen.loading != before:
                changes[parts.strip] = await self.plan_strip(session)
        return changes

    def _shown(self, session: Session) -> object:
        """Equal as long as a tab needs no more than the answer in progress drawn anew."""
        conversation, service = session.conversation, self.service
        model = service.ready, service.load_error, bool(self.loading.anew)
        return conversation, conversation.version, conversation.running, session.first, session.editing, model

    async def after_documents(self, session: Session) -> Changes:
        """The shelf with its token counts, and the plan; other tabs with this chat draw them too."""
        changes = await self.documents(session)
        session.conversation.version += 1
        return changes

    async def documents(self, session: Session) -> Changes:
        """The shelf with its token counts, and the plan."""
        parts, conversation = self.parts, session.conversation
        try:
            await asyncio.to_thread(conversation.count_tokens)
        except Exception as error:
            return {parts.shelf: shelf.cards(conversation.shelf), parts.strip: self.error(error)}
        return {parts.strip: await self.plan_strip(session), parts.shelf: shelf.cards(conversation.shelf)}

    async def everything(self, session: Session) -> Changes:
        """All that depends on which chat is shown."""
        parts = self.parts
        busy = session.conversation.running is not None
        return {
            parts.question: gr.Textbox(**(BUSY if busy else IDLE)),
            parts.status: self.status(session),
            **self._conversation(session),
            **await self.documents(session),
            **await self.lists(session),
        }

    def _conversation(self, session: Session) -> Changes:
        parts, conversation = self.parts, session.conversation
        asked = bool(conversation.chat.tree)
        return {
            parts.welcome: gr.HTML(self._welcome(), visible=not asked),
            parts.chat: gr.Chatbot(messages.messages(conversation, session.first), visible=asked),
            parts.turns: messages.turns(conversation, session.first),
        }

    def _welcome(self) -> str:
        own = self.service.settings.engine == "own"
        return frame.welcome(self.service.status()["note"] if self.service.ready else "", own)

    async def lists(self, session: Session) -> Changes:
        """The panel with chats and library, as the disk has them."""
        return await asyncio.to_thread(self._lists, session)

    def _lists(self, session: Session) -> Changes:
        parts, owner, service = self.parts, session.owner, self.service
        running = self.sessions.running(owner)
        try:
            found, known = owner.chats.find(session.words), owner.documents()
            unread = owner.chats.unread
        except OSError as error:
            found, known, unread = [], [], describe(error)[0]
        chats = sidebar.chats(found, session.conversation.chat.id, running, session.words)
        held, quota = service.saved_bytes(), service.saved_quota
        note = session.conversation.unsaved or unread or service.saved_note
        library = sidebar.library(
            known, service.opens_at_once, service.saved_bytes, service.reading_seconds, held, quota, note
        )
        return {parts.chats: chats, parts.library: library}

    async def plan_strip(self, session: Session) -> str:
        """Where the answer stands, else what the next question would take."""
        conversation = session.conversation
        if (running := conversation.running) is not None:
            return self._running(running)
        if self.service.load_error is not None:
            return strip.error(self.service.load_error, "The model could not be loaded. ")
        if not self.service.ready:
            return self._loading()
        if self.loading.anew:
            return strip.anew(self.loading.stage, self.loading.share, asked=False)
        if session.editing is not None:
            return strip.editing()
        if not conversation.readable:
            return strip.idle(bool(conversation.chat.tree), conversation.unsaved)
        try:
            return self.plan_view(session, await asyncio.to_thread(conversation.plan))
        except Exception as error:
            return self.error(error)

    def plan_view(self, session: Session, plan: PlanView) -> str:
        """A plan, with pages that should fit where it does not."""
        suggestion = session.conversation.suggest(plan)
        return strip.plan(plan, suggestion[1:] if suggestion is not None else None)

    def error(self, error: BaseException) -> str:
        """What went wrong; the log has all of what is not a person's to mend."""
        if isinstance(error, NotReady):
            return self._loading()
        if describe(error)[1] >= 500:
            log.error("The page met an error", exc_info=error)
        return strip.error(error)

    def _running(self, answer: Answer) -> str:
        """Where an answer in progress stands; one in line is behind a model that is opened anew."""
        if self.loading.anew and answer.phase == "queued" and not answer.stopping:
            return strip.anew(self.loading.stage, self.loading.share, asked=True)
        return strip.running(answer)

    def _loading(self) -> str:
        return strip.loading(self.loading.stage, self.loading.share)

    def status(self, session: Session) -> str:
        """The line at the foot; what is read and written of an answer in progress counts, be it in the chat or not."""
        conversation = session.conversation
        facts = self.service.status(conversation.chat) if self.service.ready else None
        if facts is not None and (running := conversation.running) is not None and running.progress is not None:
            used = max(facts["context_used"], running.progress.done + running.tokens)
            begins = conversation.memory_begins
            facts |= {"context_used": used, "memory_begins": asdict(begins) if begins is not None else None}
        return status.status(facts, options.name_of(conversation.chat.sampling))
