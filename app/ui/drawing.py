"""What a tab shows: drawn anew where it has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass

import gradio as gr

from app.errors import NotReady, describe
from app.service import PlanView
from app.ui import frame, messages, options, shelf, sidebar, status, strip
from app.ui.answer import Answer
from app.ui.conversation import Conversation
from app.ui.parts import BUSY, IDLE, Changes, Parts
from app.ui.session import Loading, Session, Sessions

log = logging.getLogger("octavo.ui")

# Ten updates a second look continuous; an answer whose last piece is long is sent less often: for so many characters of
# it, which the browser lays out each time, an update is left out.
UPDATE_S = 0.1
CHARS_PER_UPDATE = 8_000
COUNTDOWN_S = 0.5
STATUS_S = 1.0
# A page hears from its server at least every so often; after this silence it looks whether the connection is dead.
PULSE_S = 5.0
QUIET_S = 30.0


@dataclass
class Seen:
    """What a tab shows, to compare with; when parts of it were drawn; the length of its answer's last piece."""

    shown: object = None
    dock: object = None
    lists: object = None
    listing: asyncio.Future[Changes] | None = None  # the lists, on their way
    version: int = -1
    answer_at: float = 0.0
    status_at: float = 0.0
    pulse_at: float = 0.0
    piece: int = 0


class Drawing:
    """Draws the parts of a page for a session.

    Nobody else draws the conversation, the shelf, the line above the question box and the lists: where two do, an older
    drawing may come last.
    """

    def __init__(self, loading: Loading, parts: Parts, sessions: Sessions) -> None:
        self.service = sessions.service
        self.loading = loading
        self.parts = parts
        self.sessions = sessions

    async def news(self, session: Session, seen: Seen) -> Changes:
        """What a tab has not shown yet, as it is at this moment.

        What may take long (tokens and plans, and lists, which are read from disk) is made in threads and drawn when it
        is there. Most of it takes no time worth showing, so that it is waited for a moment.
        """
        begun = [session.conversation.plan_ahead(self._plan_of(session)), self._list_ahead(session, seen)]
        if waited := [work for work in begun if work is not None]:
            await asyncio.wait(waited, timeout=UPDATE_S)
        lists: Changes = {}
        if seen.listing is not None and seen.listing.done():
            listing, seen.listing = seen.listing, None
            lists = listing.result()
        shown, seen.shown = seen.shown, self._shown(session)
        if seen.shown != shown:
            seen.version, seen.piece = -1, 0
            changes = self._everything(session)
        else:
            changes = self._progress(session, seen)
        dock, seen.dock = seen.dock, self._dock(session)
        if seen.dock != dock:
            cards = shelf.cards(session.conversation.shelf)
            changes |= {self.parts.shelf: cards, self.parts.strip: self.plan_strip(session)}
        return lists | changes

    @property
    def _model(self) -> object:
        """Equal as long as the model can be asked the same."""
        return self.service.ready, self.service.load_error, bool(self.loading.anew)

    def _plan_of(self, session: Session) -> object:
        """Equal as long as the next question would take the same."""
        return session.conversation.version, session.conversation.running, self._model

    def _shown(self, session: Session) -> object:
        """Equal as long as a tab needs no more of the conversation than the answer in progress drawn anew."""
        return session.conversation, self._plan_of(session), session.first, session.editing

    def _dock(self, session: Session) -> object:
        """Equal as long as what stands below the conversation looks the same, but for an answer in progress."""
        conversation = session.conversation
        loading = None if self.service.ready and not self.loading.anew else (self.loading.stage, self.loading.share)
        tokens = [item.tokens or f"{item.counted:.0%}" for item in conversation.shelf]
        plan = conversation.planned(self._plan_of(session))
        return self._shown(session), loading, tokens, plan, session.refusal

    def _list_ahead(self, session: Session, seen: Seen) -> asyncio.Future[Changes] | None:
        """Begin to read the lists in a thread, if they look otherwise now and none are on their way."""
        conversation = session.conversation
        lists = self.sessions.lists(session.owner), session.words, conversation, conversation.version, self._model
        if seen.listing is not None or seen.lists == lists:
            return None
        seen.lists = lists
        seen.listing = asyncio.get_running_loop().run_in_executor(None, self._lists, session)
        return seen.listing

    def _progress(self, session: Session, seen: Seen) -> Changes:
        """What is new of an answer in progress, and a sign of life."""
        parts, conversation, now = self.parts, session.conversation, time.monotonic()
        changes: Changes = {}
        if (answer := conversation.running) is not None:
            pause = UPDATE_S * (seen.piece // CHARS_PER_UPDATE)
            if now - seen.answer_at > (pause if answer.version != seen.version else max(pause, COUNTDOWN_S)):
                seen.version, seen.answer_at = answer.version, now
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
        return changes

    def _everything(self, session: Session) -> Changes:
        """All that depends on which chat is shown; what is below it comes with it."""
        busy = session.conversation.running is not None
        return {
            self.parts.tab: session.kept,
            self.parts.question: gr.Textbox(**(BUSY if busy else IDLE)),
            self.parts.status: self.status(session),
            **self._conversation(session),
        }

    def refuse(self, session: Session, conversation: Conversation, why: str | Exception) -> None:
        """Say above the question box why something was not done, until that is another matter; "" for no more of it."""
        session.refusal = self._matter(session, conversation), why if isinstance(why, str) else self.error(why)

    def _matter(self, session: Session, conversation: Conversation) -> object:
        """Equal as long as a refusal is about what is shown."""
        return conversation, conversation.version, session.editing, self._model

    def _conversation(self, session: Session) -> Changes:
        parts, conversation = self.parts, session.conversation
        asked = conversation.asked
        return {
            parts.welcome: gr.HTML(self._welcome(), visible=not asked),
            parts.chat: gr.Chatbot(messages.messages(conversation, session.first), visible=asked),
            parts.turns: messages.turns(conversation, session.first),
        }

    def _welcome(self) -> str:
        own = self.service.settings.engine == "own"
        return frame.welcome(self.service.status()["note"] if self.service.ready else "", own)

    def _lists(self, session: Session) -> Changes:
        parts, owner, service = self.parts, session.owner, self.service
        running, changes = self.sessions.running(owner), self.sessions.changes(owner)
        try:
            found, known = owner.chats.find(session.words), owner.documents()
            unread = owner.chats.unread
            at_once = {entry.label for entry in known if service.opens_at_once(entry.label)}
        except OSError as error:
            found, known, at_once, unread = [], [], set(), describe(error)[0]
        chats = sidebar.chats(found, session.conversation.chat.id, running, session.words, changes)
        held, quota = service.saved_bytes(), service.saved_quota
        note = session.conversation.unsaved or unread or service.saved_note
        library = sidebar.library(known, at_once, service.saved_bytes, service.reading_seconds, held, quota, note)
        return {parts.chats: chats, parts.library: library}

    def plan_strip(self, session: Session) -> str:
        """Where the answer stands, else what was refused, else what the next question would take."""
        conversation = session.conversation
        if (running := conversation.running) is not None:
            return self._running(running)
        matter, why = session.refusal
        if why and matter == self._matter(session, conversation):
            return why
        if self.service.load_error is not None:
            return strip.error(self.service.load_error, "The model could not be loaded. ")
        if not self.service.ready:
            return self._loading()
        if self.loading.anew:
            return strip.anew(self.loading.stage, self.loading.share, asked=False)
        if session.editing is not None:
            return strip.editing()
        if not conversation.readable:
            return strip.idle(conversation.asked, conversation.unsaved or session.lost)
        plan = conversation.planned(self._plan_of(session))
        if plan is None:
            return strip.counting()
        return self.error(plan) if isinstance(plan, Exception) else self.plan_view(conversation, plan)

    def plan_view(self, conversation: Conversation, plan: PlanView) -> str:
        """A plan, with pages that should fit where it does not."""
        return strip.plan(plan, conversation.suggest(plan))

    def error(self, error: BaseException) -> str:
        """What went wrong; the log has all of what is not a person's to mend."""
        if isinstance(error, NotReady):
            return self._loading()
        if describe(error)[1] >= 500:  # of a disk that is full or read-only a line says all
            log.error("The page met an error: %s", error, exc_info=None if isinstance(error, OSError) else error)
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
