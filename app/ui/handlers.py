"""What happens when something on the page is used. Every handler returns the parts that changed."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import gradio as gr

from app.chat import Selection
from app.documents.document import without_halves
from app.errors import NotReady, OctavoError, UsageError, describe
from app.evidence import Passage, Quote
from app.service import ChatService, PlanView
from app.ui import options, sidebar, source, views
from app.ui.attachment import Attachment
from app.ui.parts import BUSY, IDLE, Changes, Parts, field, files, number
from app.ui.session import Loading, Session, Sessions
from app.ui.uploads import Uploads

log = logging.getLogger("octavo.ui")

# Ten updates a second look continuous; a long answer is sent less often, as the browser lays all of it out each time.
UPDATE_S = 0.1
CHARS_FOR_DOUBLE_TIME = 8_000
COUNTDOWN_S = 0.5
STATUS_S = 1.0
_PLACE = re.compile(r"(?P<kind>[pq])(?P<at>\d{1,3})(?::(?P<page>\d{1,9}))?", re.ASCII)  # passage or quote, and a page
SECRET_CHARS = 24  # of a browser's secret; a shorter one is not from here


@dataclass
class Seen:
    """What a tab shows, to compare with; when parts of it were drawn; the length of its answer's last piece."""

    shown: object = None
    lists: object = None
    loading: object = None
    version: int = -1
    strip_at: float = 0.0
    status_at: float = 0.0
    piece: int = 0


class Handlers:
    """One object a page design; what belongs to one tab is in its Session."""

    def __init__(self, service: ChatService, loading: Loading, uploads: Uploads, parts: Parts) -> None:
        self.service = service
        self.loading = loading
        self.uploads = uploads
        self.parts = parts
        self.sessions = Sessions(service)

    async def opened(self, token: str, secret: str, arrival: str, request: gr.Request) -> AsyncIterator[Changes]:
        """A page was loaded: find its chat again or begin one, and show what happens there.

        `arrival` is the browser's word for how it came to be loaded.
        """
        parts = self.parts
        secret = secret if len(secret) >= SECRET_CHARS else secrets.token_urlsafe(SECRET_CHARS)
        owner = self.service.library.owner(secret)
        session = await self.sessions.open(token, owner, request.session_hash or "", again=arrival == "reload")
        yield {parts.session: session, parts.tab: session.token, parts.browser: secret}
        async for changes in self._watch(session, request.session_hash or ""):
            yield changes

    async def _watch(self, session: Session, page: str) -> AsyncIterator[Changes]:
        """Show what changes in a tab's chat and lists, whichever tab or answer changed it, until the page is gone."""
        seen = Seen()
        while session.page == page:
            try:
                changes = await self._news(session, seen)
            except Exception as error:
                changes = {self.parts.strip: self._error(error)}
            if changes:
                yield changes
            await asyncio.sleep(UPDATE_S * (1 + seen.piece / CHARS_FOR_DOUBLE_TIME))

    async def _news(self, session: Session, seen: Seen) -> Changes:
        """What a tab has not shown yet."""
        parts, conversation, now = self.parts, session.conversation, time.monotonic()
        before, seen.lists = seen.lists, self.sessions.lists(session.owner)
        changes = self._lists(session) if seen.lists != before else {}
        shown, seen.shown = seen.shown, self._shown(session)
        if seen.shown != shown:
            seen.version, seen.piece = -1, 0
            return await self._everything(session)
        if (answer := conversation.running) is not None:
            if answer.phase == "queued":
                self.sessions.give_way()
            if answer.version != seen.version or now - seen.strip_at > COUNTDOWN_S:
                seen.version, seen.strip_at = answer.version, now
                changes[parts.strip] = views.running_strip(answer)
                if answer.text:  # each time, since what is left out once is sent whole after that
                    changes[parts.chat] = views.messages(conversation, session.first)
                    seen.piece = len(answer.pieces.of(answer.text)[-1])
                if now - seen.status_at > STATUS_S:
                    seen.status_at = now
                    changes[parts.status] = self._status(session)
        elif not self.service.ready:
            before, seen.loading = seen.loading, (self.loading.stage, self.loading.share)
            if seen.loading != before:
                changes[parts.strip] = await self._plan_strip(session)
        return changes

    def _shown(self, session: Session) -> object:
        """Equal as long as a tab needs no more than the answer in progress drawn anew."""
        conversation, service = session.conversation, self.service
        model = service.ready, service.load_error
        return conversation, conversation.version, conversation.running, session.first, session.editing, model

    def left(self, request: gr.Request) -> None:
        """A page was closed or reloaded."""
        self.sessions.leave(request.session_hash or "")

    async def asked(self, session: Session, question: str) -> AsyncIterator[Changes]:
        """A question was sent. What does not fit is said at once, and the question stays in its box."""
        parts, conversation = self.parts, session.conversation
        if (running := conversation.running) is not None and not running.stopping:
            yield {parts.strip: views.running_strip(running)}
            return
        if not question.strip():
            yield {parts.strip: await self._plan_strip(session)}
            return
        if (unread := conversation.unread) is not None:
            yield {parts.strip: views.wait_strip(unread)}
            return
        if self.service.ready and running is None and session.editing is None:
            try:
                plan = await asyncio.to_thread(conversation.plan, question)
            except Exception as error:
                yield {parts.strip: self._error(error)}
                return
            if not plan.fits:
                yield {parts.strip: self._plan_view(session, plan)}
                return
        instead_of, session.editing = session.editing, None
        yield {parts.question: gr.Textbox(value="", **BUSY)}
        await asyncio.to_thread(conversation.ask, without_halves(question).strip(), instead_of)
        self.sessions.changed(session.owner)

    def stopped(self, session: Session) -> Changes:
        """Stop was pressed."""
        parts = self.parts
        session.conversation.stop()
        if (running := session.conversation.running) is None:
            return {parts.question: gr.Textbox(**IDLE)}
        return {
            parts.strip: views.running_strip(running),
            parts.question: gr.Textbox(**IDLE),
        }

    def cleared(self, session: Session) -> Changes:
        """A new chat was asked for."""
        self.sessions.clear(session)
        return self._nothing()

    def _nothing(self) -> Changes:
        """What a handler gives that changes nothing itself: without a word from it, every part would be emptied."""
        return {self.parts.tab: gr.skip()}

    async def acted(self, session: Session, event: gr.EventData) -> AsyncIterator[Changes]:
        """Something was done to a chat, a turn or a document of the library."""
        yield self._nothing()
        try:
            async for changes in self._act(session, event):
                yield changes
        except OSError as error:
            yield {self.parts.strip: self._error(error)}

    async def _act(self, session: Session, event: gr.EventData) -> AsyncIterator[Changes]:
        parts, conversation = self.parts, session.conversation
        what, wanted, value = field(event, "do"), str(field(event, "id") or ""), str(field(event, "value") or "")
        on_turn = what in ("edit", "unedit", "again", "resume", "branch", "fork")
        if on_turn and (running := conversation.running) is not None and what != "fork":
            yield {parts.strip: views.running_strip(running)}
            return
        if on_turn and what != "unedit" and wanted not in conversation.chat.tree:
            return
        match what:
            case "open":
                await asyncio.to_thread(self.sessions.show, session, wanted)
            case "older":
                session.show_earlier()
            case "search":
                session.words = value
                yield self._lists(session)
            case "rename" | "delete" | "pin" | "forget":
                await asyncio.to_thread(self._change_lists, session, what, wanted, value)
            case "source" if wanted in conversation.chat.tree:
                yield {parts.source: await asyncio.to_thread(self._source, session, wanted, value)}
            case "earlier":
                conversation.read_earlier(wanted)
                yield await self._after_documents(session)
            case "options":
                yield {parts.options: options.form(conversation.chat)}
            case "keep":
                try:
                    options.take(conversation.chat, value)
                except UsageError as error:
                    yield {parts.strip: views.error_strip(error)}
                    return
                await asyncio.to_thread(conversation.save)
                conversation.version += 1
                yield {parts.options: "", parts.strip: await self._plan_strip(session)}
            case "use":
                if await asyncio.to_thread(conversation.use, wanted):
                    yield {parts.shelf: views.shelf(conversation.shelf)}
                    yield await self._after_documents(session)
                else:
                    gone = UsageError("The text of this document is gone. Add the file again.")
                    yield {parts.strip: views.error_strip(gone)}
            case "fork":
                await asyncio.to_thread(self.sessions.fork, session, wanted)
            case "branch":
                await asyncio.to_thread(conversation.show, wanted)
            case "edit":
                session.editing = wanted
                yield {parts.question: gr.Textbox(value=conversation.chat.tree[wanted].question)}
            case "unedit":
                session.editing = None
                yield {parts.question: gr.Textbox(value="")}
            case "again" | "resume":
                await asyncio.to_thread(conversation.ask_again if what == "again" else conversation.resume, wanted)

    def _source(self, session: Session, turn_id: str, value: str) -> str:
        """What a card of evidence or a quote opens; `value` names it, and the page where another is asked for."""
        wanted, turn = _PLACE.fullmatch(value), session.conversation.chat.tree[turn_id]
        if wanted is None:
            return ""
        places: Sequence[Passage | Quote] = turn.passages if wanted["kind"] == "p" else turn.quotes
        at = int(wanted["at"])
        if at >= len(places) or places[at].document is None:
            return ""
        read = (s.document for turn in session.conversation.chat.path(turn_id) for s in turn.sources)
        document = next((d for d in read if d.pages and Selection.whole(d).label == places[at].document), None)
        if document is None:
            return source.gone(places[at])
        card = wanted["kind"] + wanted["at"]
        return source.view(document, places[at], turn_id, card, int(wanted["page"]) if wanted["page"] else None)

    def _change_lists(self, session: Session, what: str, wanted: str, value: str) -> None:
        owner = session.owner
        match what:
            case "rename":
                owner.chats.rename(wanted, value)
                self.sessions.rename(owner, wanted)
            case "delete":
                chat = self.sessions.forget(owner, wanted) or owner.open_chat(wanted)
                if chat is None:  # damaged: nothing else is known of it
                    owner.chats.delete(wanted)
                else:
                    self.service.delete_chat(owner, chat)
            case "pin":
                owner.pin(wanted, value == "true")
            case "forget":
                owner.remove(wanted)
                if wanted not in self.service.library.listed():
                    self.service.forget(wanted)
                self.service.library.sweep(self.service.forget)
        self.sessions.changed(owner)

    async def added(self, session: Session, event: gr.EventData) -> AsyncIterator[Changes]:
        """Files have arrived: read them one after another, then say what they need."""
        parts, conversation = self.parts, session.conversation
        arrived = []
        for upload_id, name in files(event):
            attachment = Attachment(str(name)[:200], arrived=self.uploads.arrived(upload_id))
            conversation.shelve(attachment)
            arrived.append((upload_id, attachment))
        yield {parts.shelf: views.shelf(conversation.shelf)}
        for upload_id, attachment in arrived:
            await asyncio.to_thread(self._read, upload_id, attachment)
            if session.conversation is conversation:
                yield {parts.shelf: views.shelf(conversation.shelf)}
        yield await self._after_documents(session)

    def _read(self, upload_id: object, attachment: Attachment) -> None:
        try:
            upload = self.uploads.take(upload_id)
            try:
                document = self.service.add_document(upload.path, upload.name)
            finally:
                upload.delete()
        except Exception as error:
            attachment.error, status, _ = describe(error)
            if status >= 500:
                log.exception("A document could not be read")
            return
        attachment.name = document.name
        attachment.last = len(document.pages)
        attachment.document = document

    async def removed(self, session: Session, event: gr.EventData) -> Changes:
        """A document was taken off the shelf."""
        wanted, conversation = field(event, "id"), session.conversation
        conversation.shelf = [attachment for attachment in conversation.shelf if attachment.id != wanted]
        return await self._after_documents(session)

    async def paged(self, session: Session, event: gr.EventData) -> Changes:
        """Other pages of a document were chosen."""
        for attachment in session.conversation.readable:
            if attachment.id == field(event, "id"):
                attachment.choose(number(event, "first", attachment.first), number(event, "last", attachment.last))
        return await self._after_documents(session)

    async def suggested(self, session: Session) -> Changes:
        """The pages that should fit were accepted."""
        conversation = session.conversation
        try:
            suggestion = conversation.suggest(await asyncio.to_thread(conversation.plan))
        except OctavoError as error:
            return {self.parts.strip: self._error(error)}
        if suggestion is not None:
            attachment, first, last = suggestion
            attachment.choose(first, last)
        return await self._after_documents(session)

    async def _after_documents(self, session: Session) -> Changes:
        """The shelf with its token counts, and the plan; other tabs with this chat draw them too."""
        changes = await self._documents(session)
        session.conversation.version += 1
        return changes

    async def _documents(self, session: Session) -> Changes:
        parts, conversation = self.parts, session.conversation
        try:
            await asyncio.to_thread(conversation.count_tokens)
        except Exception as error:
            return {parts.shelf: views.shelf(conversation.shelf), parts.strip: self._error(error)}
        return {parts.strip: await self._plan_strip(session), parts.shelf: views.shelf(conversation.shelf)}

    async def _everything(self, session: Session) -> Changes:
        parts = self.parts
        busy = session.conversation.running is not None
        return {
            parts.question: gr.Textbox(**(BUSY if busy else IDLE)),
            parts.status: self._status(session),
            **self._conversation(session),
            **await self._documents(session),
            **self._lists(session),
        }

    def _conversation(self, session: Session) -> Changes:
        parts, conversation = self.parts, session.conversation
        asked = bool(conversation.chat.tree)
        return {
            parts.welcome: gr.HTML(visible=not asked),
            parts.chat: gr.Chatbot(views.messages(conversation, session.first), visible=asked),
            parts.turns: views.turns(conversation, session.first),
        }

    def _lists(self, session: Session) -> Changes:
        """The panel with chats and library."""
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
        library = sidebar.library(known, service.saved_bytes, held, quota, views.size, note)
        return {parts.chats: chats, parts.library: library}

    async def _plan_strip(self, session: Session) -> str:
        conversation = session.conversation
        if (running := conversation.running) is not None:
            return views.running_strip(running)
        if self.service.load_error is not None:
            return views.error_strip(self.service.load_error, "The model could not be loaded. ")
        if not self.service.ready:
            return self._loading_strip()
        if session.editing is not None:
            return views.edit_strip()
        if not conversation.readable:
            return views.idle_strip(bool(conversation.chat.tree))
        try:
            return self._plan_view(session, await asyncio.to_thread(conversation.plan))
        except Exception as error:
            return self._error(error)

    def _plan_view(self, session: Session, plan: PlanView) -> str:
        suggestion = session.conversation.suggest(plan)
        return views.plan_strip(plan, suggestion[1:] if suggestion is not None else None)

    def _error(self, error: BaseException) -> str:
        if isinstance(error, NotReady):
            return self._loading_strip()
        if describe(error)[1] >= 500:
            log.error("The page met an error", exc_info=error)
        return views.error_strip(error)

    def _loading_strip(self) -> str:
        return views.loading_strip(self.loading.stage, self.loading.share)

    def _status(self, session: Session) -> str:
        chat = session.conversation.chat
        return views.status(self.service.status(chat) if self.service.ready else None, options.name_of(chat.sampling))
