"""What happens when something on the page is used. Every handler returns the parts that changed."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from functools import partial

import gradio as gr

from app.chat import Selection
from app.documents import Document
from app.documents.document import shortened, without_halves
from app.errors import OctavoError, UsageError
from app.evidence import Passage, Quote
from app.ui import options, source, strip
from app.ui.attachment import Attachment
from app.ui.conversation import Conversation
from app.ui.drawing import UPDATE_S, Drawing, Seen
from app.ui.parts import BUSY, IDLE, Changes, Parts, field, files, number
from app.ui.session import SECRET, SECRET_CHARS, Loading, Session, Sessions
from app.ui.uploads import Uploads

_PLACE = re.compile(r"(?P<kind>[pq])(?P<at>\d{1,3})(?::(?P<page>\d{1,9}))?", re.ASCII)  # passage or quote, and a page


class Handlers:
    """One object a page design; what belongs to one tab is in its Session."""

    def __init__(self, sessions: Sessions, loading: Loading, uploads: Uploads, parts: Parts) -> None:
        self.service = sessions.service
        self.uploads = uploads
        self.parts = parts
        self.sessions = sessions
        self.draw = Drawing(loading, parts, sessions)

    async def opened(self, kept: str, secret: str, arrival: str, request: gr.Request) -> AsyncIterator[Changes]:
        """A page was loaded: find its chat again or begin one, and show what happens there.

        `kept` is what the tab has, see Session.kept; `arrival` is the browser's word for how it came to be loaded.
        """
        parts = self.parts
        secret = secret if SECRET.fullmatch(secret) else secrets.token_urlsafe(SECRET_CHARS)
        owner = self.service.library.owner(secret)
        session = await self.sessions.open(kept, owner, request.session_hash or "", again=arrival == "reload")
        yield {parts.session: session, parts.tab: session.kept}
        async for changes in self._watch(session, request.session_hash or ""):
            yield changes

    async def _watch(self, session: Session, page: str) -> AsyncIterator[Changes]:
        """Show what changes in a tab's chat and lists, whichever tab or answer changed it, until the page is gone."""
        seen = Seen()
        while session.page == page:
            try:
                changes = await self.draw.news(session, seen)
            except Exception as error:
                changes = {self.parts.strip: self.draw.error(error)}
            if changes:
                yield changes
            await asyncio.sleep(UPDATE_S)

    def left(self, request: gr.Request) -> None:
        """A page was closed or reloaded."""
        self.sessions.leave(request.session_hash or "")

    async def _session(self, known: Session | None, request: gr.Request) -> Session:
        """The session of the page that something was used on, be it before the page had word of its session."""
        session = known or await self.sessions.of(request.session_hash or "")
        if session is None:
            raise gr.Error("This page is not known here any more. Load it again.", print_exception=False)
        return session

    async def asked(self, known: Session | None, question: str, request: gr.Request) -> AsyncIterator[Changes]:
        """A question was sent. What does not fit is said at once, and the question stays in its box."""
        session = await self._session(known, request)
        conversation, instead_of = session.conversation, session.editing  # the tab may show another meanwhile
        async with conversation.asking:
            running = conversation.running
            if running is None or running.stopping:
                why = await self._why_not(conversation, question, instead_of) if question.strip() else ""
                if why is not None and not conversation.deleted:
                    self.draw.refuse(session, self.sessions.keep(session, conversation), why)
                elif not conversation.deleted:
                    if session.conversation is conversation:
                        session.editing = None
                        yield {self.parts.question: gr.Textbox(value="", **BUSY)}
                    await asyncio.to_thread(conversation.ask, without_halves(question).strip(), instead_of)
                    self.sessions.changed(session.owner)
        yield self._nothing()

    async def _why_not(self, conversation: Conversation, question: str, editing: str | None) -> str | Exception | None:
        """Why a question cannot be asked now, as far as that is known before it is."""
        if (unread := conversation.unread) is not None:
            return strip.waiting(unread)
        if not self.service.ready or conversation.running is not None or editing is not None:
            return None
        try:
            plan = await asyncio.to_thread(conversation.plan, question)
        except Exception as error:
            return error
        return None if plan.fits else self.draw.plan_view(conversation, plan)

    async def stopped(self, known: Session | None, request: gr.Request) -> Changes:
        """Stop was pressed."""
        session = await self._session(known, request)
        session.conversation.stop()
        return {self.parts.question: gr.Textbox(**IDLE)}  # where it stands is drawn by the page's own loop

    async def cleared(self, known: Session | None, request: gr.Request) -> Changes:
        """A new chat was asked for."""
        session = await self._session(known, request)
        self.sessions.clear(session)
        return self._nothing()

    def _nothing(self) -> Changes:
        """What a handler gives that only changes things, which the page's loop draws: no word would empty all parts."""
        return {self.parts.tab: gr.skip()}

    async def acted(self, known: Session | None, event: gr.EventData, request: gr.Request) -> Changes:
        """Something was done to a chat, a turn or a document of the library."""
        session = await self._session(known, request)
        conversation = session.conversation
        # What moves the head of the chat, or asks, waits for a question that is looked at: it was asked before.
        moves = field(event, "do") in ("again", "resume", "branch")
        try:
            async with conversation.asking if moves else nullcontext():
                return self._nothing() | await self._act(session, event)
        except (OSError, UsageError) as error:
            self.draw.refuse(session, conversation, error)
            return self._nothing()

    async def _act(self, session: Session, event: gr.EventData) -> Changes:
        """Do it; gives what is no part of what the page's own loop draws."""
        parts, conversation = self.parts, session.conversation
        what, wanted, value = field(event, "do"), str(field(event, "id") or ""), str(field(event, "value") or "")
        on_turn = what in ("edit", "unedit", "again", "resume", "branch", "fork")
        if on_turn and (conversation.deleted or (conversation.running is not None and what != "fork")):
            return {}
        if on_turn and what != "unedit" and wanted not in conversation.chat.tree:
            return {}
        match what:
            case "open":
                await self.sessions.show(session, wanted)
            case "older":
                session.show_earlier()
            case "search":
                session.words = value
            case "rename" | "delete" | "pin" | "forget":
                await asyncio.to_thread(self._change_lists, session, what, wanted, value)
            case "source" if wanted in conversation.chat.tree:
                return {parts.source: await asyncio.to_thread(self._source, session, wanted, value)}
            case "earlier":
                conversation.read_earlier(wanted)
            case "options":
                return {parts.options: options.form(conversation.chat)}
            case "keep":
                options.take(conversation.chat, value)
                await asyncio.to_thread(conversation.save)
                conversation.changed()
                return {parts.options: ""}
            case "use":
                document = await asyncio.to_thread(session.owner.open, wanted)
                if document is None:
                    raise UsageError("The text of this document is gone. Add the file again.")
                conversation.use(document)
            case "fork":
                await asyncio.to_thread(self.sessions.fork, session, wanted)
            case "branch":
                await asyncio.to_thread(conversation.show, wanted)
            case "edit":
                session.editing = wanted
                return {parts.question: gr.Textbox(value=conversation.chat.tree[wanted].question)}
            case "unedit":
                session.editing = None  # the script puts back what stood in the box before
            case "again" | "resume":
                await asyncio.to_thread(conversation.ask_again if what == "again" else conversation.resume, wanted)
        return {}

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
        try:
            match what:
                case "rename":
                    self.sessions.rename(owner, wanted, value)
                case "delete":
                    self.sessions.forget(owner, wanted)
                case "pin":
                    owner.pin(wanted, value == "true")
                case "forget":
                    owner.remove(wanted)
                    if wanted not in self.service.library.listed():
                        self.service.forget(wanted)
                    self.service.library.sweep(self.service.forget)
        finally:
            self.sessions.changed(owner)

    async def added(self, known: Session | None, event: gr.EventData, request: gr.Request) -> Changes:
        """Files have arrived: read them one after another."""
        session = await self._session(known, request)
        conversation = session.conversation
        arrived = []
        for upload_id, name in files(event):
            attachment = Attachment(shortened(str(name), 200), arrived=self.uploads.arrived(upload_id))
            conversation.shelve(attachment)
            arrived.append((upload_id, attachment))
        for upload_id, attachment in arrived:
            await asyncio.to_thread(attachment.read, partial(self._document, upload_id))
        return self._nothing()

    def _document(self, upload_id: object) -> Document:
        """What an upload holds, which is gone then."""
        upload = self.uploads.take(upload_id)
        try:
            return self.service.add_document(upload.path, upload.name)
        finally:
            upload.delete()

    async def removed(self, known: Session | None, event: gr.EventData, request: gr.Request) -> Changes:
        """A document was taken off the shelf."""
        session = await self._session(known, request)
        session.conversation.take_off(str(field(event, "id")))
        return self._nothing()

    async def paged(self, known: Session | None, event: gr.EventData, request: gr.Request) -> Changes:
        """Other pages of a document were chosen."""
        session = await self._session(known, request)
        for attachment in session.conversation.readable:
            if attachment.id == field(event, "id"):
                first, last = number(event, "first", attachment.first), number(event, "last", attachment.last)
                session.conversation.choose(attachment, first, last)
        return self._nothing()

    async def suggested(self, known: Session | None, request: gr.Request) -> Changes:
        """The pages that should fit were accepted."""
        session = await self._session(known, request)
        conversation = session.conversation
        try:
            suggestion = conversation.suggest(await asyncio.to_thread(conversation.plan))
        except OctavoError as error:
            self.draw.refuse(session, conversation, error)
            return self._nothing()
        if suggestion is not None:
            conversation.choose(*suggestion)
        return self._nothing()
