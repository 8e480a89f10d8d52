"""What happens when something on the page is used. Every handler returns the parts that changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.errors import NotReady, OctavoError, describe
from app.service import ChatService, PlanView
from app.ui import views
from app.ui.answer import Answer
from app.ui.attachment import Attachment
from app.ui.session import Loading, Session, Sessions
from app.ui.uploads import Uploads

log = logging.getLogger("octavo.ui")

# Ten updates a second look continuous; a long answer is sent less often, as the browser lays all of it out each time.
UPDATE_S = 0.1
CHARS_FOR_DOUBLE_TIME = 8_000
COUNTDOWN_S = 0.5
STATUS_S = 1.0

# Properties of the question box: which button it shows.
IDLE: dict[str, Any] = {"submit_btn": "Ask", "stop_btn": False}
BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": "Stop"}

Changes = dict[Any, Any]


@dataclass(frozen=True)
class Parts:
    """The components that handlers change."""

    session: gr.State
    tab: gr.Textbox
    welcome: gr.HTML
    chat: gr.Chatbot
    strip: gr.HTML
    shelf: gr.HTML
    question: gr.Textbox
    status: gr.HTML

    @property
    def all(self) -> list[Any]:
        return list(vars(self).values())


class Handlers:
    """One object a page design; what belongs to one tab is in its Session."""

    def __init__(self, service: ChatService, loading: Loading, uploads: Uploads, parts: Parts) -> None:
        self.service = service
        self.loading = loading
        self.uploads = uploads
        self.parts = parts
        self.sessions = Sessions(service)

    async def opened(self, token: str, request: gr.Request) -> AsyncIterator[Changes]:
        """A page was loaded: find its chat again or begin one, then wait for the model with it."""
        parts = self.parts
        session = await self.sessions.open(token, request.session_hash or "")
        yield {parts.session: session, parts.tab: session.token, **await self._everything(session)}
        if (answer := session.running) is not None:
            async for changes in self._follow(session, answer):
                yield changes
        if not self.service.ready:
            stage = None
            while not self.service.ready and self.service.load_error is None:
                if stage != (stage := (self.loading.stage, self.loading.share)) and session.running is None:
                    yield {parts.strip: self._loading_strip()}
                await asyncio.sleep(UPDATE_S)
            yield await self._after_documents(session) | {parts.status: self._status(session)}

    def left(self, request: gr.Request) -> None:
        """A page was closed or reloaded."""
        self.sessions.leave(request.session_hash or "")

    async def asked(self, session: Session, question: str) -> AsyncIterator[Changes]:
        """A question was sent. What does not fit is said at once, and the question stays in its box."""
        parts = self.parts
        if (running := session.running) is not None and not running.stopping:
            yield {parts.strip: views.running_strip(running)}
            return
        if not question.strip():
            yield {parts.strip: await self._plan_strip(session)}
            return
        if (unread := session.unread) is not None:
            yield {parts.strip: views.wait_strip(unread)}
            return
        try:
            plan = await asyncio.to_thread(session.plan, question) if self.service.ready and running is None else None
        except Exception as error:
            yield {parts.strip: self._error(error)}
            return
        if plan is not None and not plan.fits:
            yield {parts.strip: self._plan_view(session, plan)}
            return
        answer = session.ask(question.strip())
        yield {
            parts.welcome: gr.HTML(visible=False),
            parts.chat: gr.Chatbot(views.messages(session), visible=True),
            parts.shelf: views.shelf(session.shelf),
            parts.strip: views.running_strip(answer),
            parts.question: gr.Textbox(value="", **BUSY),
        }
        async for changes in self._follow(session, answer):
            yield changes

    async def _follow(self, session: Session, answer: Answer) -> AsyncIterator[Changes]:
        """Show an answer as it comes, until it has ended or another has taken its place."""
        parts, seen, shown, strip_at, status_at = self.parts, -1, "", 0.0, 0.0
        while session.answers[-1:] == [answer]:
            if answer.finished.is_set():
                yield {
                    parts.chat: views.messages(session),
                    parts.question: gr.Textbox(**IDLE),
                    **await self._after_documents(session),
                    parts.status: self._status(session),
                }
                return
            now = time.monotonic()
            if answer.version != seen or now - strip_at > COUNTDOWN_S:
                seen, strip_at = answer.version, now
                changes: Changes = {parts.strip: views.running_strip(answer)}
                if answer.text != shown:
                    shown = answer.text
                    changes[parts.chat] = views.messages(session)
                if now - status_at > STATUS_S:
                    status_at = now
                    changes[parts.status] = self._status(session)
                yield changes
            await asyncio.sleep(UPDATE_S * (1 + len(shown) / CHARS_FOR_DOUBLE_TIME))

    def stopped(self, session: Session) -> Changes:
        """Stop was pressed."""
        parts = self.parts
        session.stop()
        if (running := session.running) is None:
            return {parts.question: gr.Textbox(**IDLE)}
        return {
            parts.strip: views.running_strip(running),
            parts.question: gr.Textbox(**IDLE),
        }

    async def cleared(self, session: Session) -> Changes:
        """A new chat was asked for."""
        session.clear()
        return await self._everything(session)

    async def added(self, session: Session, event: gr.EventData) -> AsyncIterator[Changes]:
        """Files have arrived: read them one after another, then say what they need."""
        parts = self.parts
        arrived = [(upload_id, Attachment(str(name)[:200])) for upload_id, name in _pairs(event)]
        session.shelf = session.shelf + [attachment for _, attachment in arrived]
        yield {parts.shelf: views.shelf(session.shelf)}
        for upload_id, attachment in arrived:
            await asyncio.to_thread(self._read, upload_id, attachment)
            yield {parts.shelf: views.shelf(session.shelf)}
        yield await self._after_documents(session)

    def _read(self, upload_id: object, attachment: Attachment) -> None:
        try:
            upload = self.uploads.take(upload_id)
            try:
                document = self.service.add_document(upload.path, upload.name)
            finally:
                upload.path.unlink(missing_ok=True)
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
        wanted = _field(event, "id")
        session.shelf = [attachment for attachment in session.shelf if attachment.id != wanted]
        return await self._after_documents(session)

    async def paged(self, session: Session, event: gr.EventData) -> Changes:
        """Other pages of a document were chosen."""
        for attachment in session.readable:
            if attachment.id == _field(event, "id"):
                attachment.choose(_page(event, "first", attachment.first), _page(event, "last", attachment.last))
        return await self._after_documents(session)

    async def suggested(self, session: Session) -> Changes:
        """The pages that should fit were accepted."""
        try:
            suggestion = session.suggest(await asyncio.to_thread(session.plan))
        except OctavoError as error:
            return {self.parts.strip: self._error(error)}
        if suggestion is not None:
            attachment, first, last = suggestion
            attachment.choose(first, last)
        return await self._after_documents(session)

    async def _after_documents(self, session: Session) -> Changes:
        """The shelf with its token counts, and the plan."""
        try:
            await asyncio.to_thread(session.count_tokens)
        except Exception as error:
            return {self.parts.shelf: views.shelf(session.shelf), self.parts.strip: self._error(error)}
        return {self.parts.strip: await self._plan_strip(session), self.parts.shelf: views.shelf(session.shelf)}

    async def _everything(self, session: Session) -> Changes:
        parts = self.parts
        busy = session.running is not None
        return {
            parts.welcome: gr.HTML(visible=not session.answers),
            parts.chat: gr.Chatbot(views.messages(session), visible=bool(session.answers)),
            parts.question: gr.Textbox(**(BUSY if busy else IDLE)),
            parts.status: self._status(session),
            **await self._after_documents(session),
        }

    async def _plan_strip(self, session: Session) -> str:
        if (running := session.running) is not None:
            return views.running_strip(running)
        if self.service.load_error is not None:
            return views.error_strip(self.service.load_error, "The model could not be loaded. ")
        if not self.service.ready:
            return self._loading_strip()
        if not session.readable:
            return views.idle_strip(bool(session.answers))
        try:
            return self._plan_view(session, await asyncio.to_thread(session.plan))
        except Exception as error:
            return self._error(error)

    def _plan_view(self, session: Session, plan: PlanView) -> str:
        suggestion = session.suggest(plan)
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
        return views.status(self.service.status(session.chat) if self.service.ready else None)


def _field(event: gr.EventData, name: str) -> Any:
    return event._data.get(name) if isinstance(event._data, dict) else None


def _pairs(event: gr.EventData) -> list[tuple[object, object]]:
    files = _field(event, "files")
    return [(file.get("id"), file.get("name")) for file in files if isinstance(file, dict)] if files else []


def _page(event: gr.EventData, name: str, otherwise: int) -> int:
    try:
        return int(_field(event, name))
    except (TypeError, ValueError):
        return otherwise
