"""What one browser tab holds: its chat, the documents that wait to be read, its questions and answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from app.service import ChatService, MemoryBegins, PlanView
from app.ui.answer import Answer
from app.ui.attachment import Attachment

# How long the chat of a closed page can be found again by a reload.
REMEMBER_S = 600.0


@dataclass
class Loading:
    """Told by the service how far the model is: a stage and a share from 0 to 1."""

    stage: str = ""
    share: float = 0.0

    def __call__(self, stage: str, share: float) -> None:
        self.stage, self.share = stage, share


class Session:
    """The state of one tab. Its documents are never part of the messages that the browser shows."""

    def __init__(self, service: ChatService, page: str) -> None:
        self.service = service
        self.token = secrets.token_urlsafe(24)
        self.page: str | None = page
        self.left_at = 0.0
        self.chat = service.new_chat()
        self.shelf: list[Attachment] = []
        self.answers: list[Answer] = []

    @property
    def running(self) -> Answer | None:
        """The answer in progress, also while it is being stopped."""
        return self.answers[-1] if self.answers and not self.answers[-1].finished.is_set() else None

    @property
    def readable(self) -> list[Attachment]:
        """Documents of the shelf that can be asked about."""
        return [attachment for attachment in self.shelf if attachment.document is not None]

    @property
    def unread(self) -> Attachment | None:
        """A document whose file is being read just now."""
        return next((item for item in self.shelf if item.document is None and not item.error), None)

    def plan(self, question: str = "") -> PlanView:
        """What the next question would need. Raises what the service raises."""
        return self.service.plan(self.chat, [attachment.source for attachment in self.readable], question)

    @property
    def memory_begins(self) -> MemoryBegins | None:
        """Where the chat's memory begins, an answer in progress counted; None while nothing is forgotten."""
        if not self.service.ready:
            return None
        running = self.running
        length = running.progress.total + running.tokens if running is not None and running.progress is not None else 0
        return self.service.memory_begins(self.chat, length)

    def suggest(self, plan: PlanView) -> tuple[Attachment, int, int] | None:
        """Pages of the largest document that should fit, judged by their share of its text; None when none would."""
        counted = [attachment for attachment in self.readable if attachment.tokens and len(attachment.pages) > 1]
        if plan.fits or plan.capacity is None or not counted:
            return None
        largest = max(counted, key=lambda attachment: attachment.tokens or 0)
        tokens = largest.tokens or 0
        room = tokens - (plan.prompt_tokens - plan.capacity) - plan.capacity // 16  # some room for an answer
        pages = largest.pages
        chars = pages[-1].end - pages[0].start
        fitting = [page for page in pages if (page.end - pages[0].start) / chars * tokens <= room * 0.97]
        return (largest, largest.first, fitting[-1].number) if fitting else None

    def count_tokens(self) -> None:
        """Fill in the token counts that are missing, as far as the tokenizer is there."""
        for attachment in self.readable:
            if attachment.tokens is None and self.service.ready:
                attachment.tokens = self.service.count_tokens(attachment.source)

    def ask(self, question: str) -> Answer:
        """Start an answer over the shelf's documents, which move into the chat with it."""
        previous, attachments = self.running, self.readable
        self.shelf = []
        answer = Answer(question, attachments, previous.documents if previous is not None else ())
        self.answers.append(answer)
        answer.start(self.service, self.chat, previous, self._ended)
        return answer

    def _ended(self, answer: Answer) -> None:
        """Documents that the chat has not read, as the question was stopped or failed, wait on the shelf again."""
        if self.answers[-1:] == [answer]:
            unread = [document for document in answer.documents if not self.chat.has(document.source)]
            self.shelf = unread + self.shelf

    def stop(self) -> None:
        if (answer := self.running) is not None:
            answer.stop()

    def clear(self) -> None:
        """Stop, forget everything, begin a new chat."""
        self.stop()
        self.chat = self.service.new_chat()
        self.shelf, self.answers = [], []


class Sessions:
    """Sessions by the secret that a tab keeps, so that a reload finds its chat; two tabs never share one."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._sessions: dict[str, Session] = {}

    async def open(self, token: str, page: str) -> Session:
        """The session of a tab's secret when its page is gone, else a new one, now held by `page`."""
        session = self._sessions.get(token)
        for _ in range(10):  # A reload can be faster than the news that the old page is gone.
            if session is None or session.page is None:
                break
            await asyncio.sleep(0.1)
        if session is None or session.page is not None:
            session = Session(self._service, page)
            self._sessions[session.token] = session
        session.page = page
        return session

    def leave(self, page: str) -> None:
        """The page is closed: its answer stops at the next chunk or token."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.page == page:
                session.page, session.left_at = None, now
                session.stop()
            elif session.page is None and now - session.left_at > REMEMBER_S:
                del self._sessions[session.token]
