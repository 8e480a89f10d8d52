"""One chat that is open: its answer in progress, and the documents that wait for its next question."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from app.chat import Chat, Selection, Turn
from app.documents import Document
from app.engine.types import SamplingParams
from app.errors import Cancelled
from app.library import Owner
from app.service import ChatService, MemoryBegins, PlanView
from app.ui.answer import Answer
from app.ui.attachment import Attachment

log = logging.getLogger("octavo.ui")


class Conversation:
    """A chat and what happens in it. It lives as long as a tab shows it or an answer runs; the chat itself is on disk.

    Its documents are never part of the messages that the browser shows.
    """

    def __init__(self, service: ChatService, owner: Owner, chat: Chat | None = None) -> None:
        self.service = service
        self.owner = owner
        self.chat = chat or service.new_chat()
        self.deleted = False
        self.unsaved = ""  # why the disk does not hold what is shown
        self.asking = asyncio.Lock()  # held while a question is looked at: who presses twice asks once
        self._versions = count()
        self._shelving = threading.RLock()  # answers end in threads, and put back what they have not read
        self.shelf = []
        self._put_back(self._unanswered())  # the program may have ended before they were read
        self._tokenizing = threading.Lock()  # so that no document is counted twice at the same time
        self._planning: asyncio.Future[None] | None = None
        self._planned: tuple[object, PlanView | Exception | None] = (None, None)
        self._answers: list[Answer] = []
        self._unlisted: dict[str, tuple[Document, int | None]] = {}  # by label: for the library, with its tokens

    def changed(self) -> None:
        """Something beside the answer in progress is another now: every tab that shows the chat draws it anew."""
        self._version = next(self._versions)  # no number twice, whichever threads count

    @property
    def version(self) -> object:
        """Equal as long as nothing beside the answer in progress has changed; a file that was read has."""
        return self._version, [(item.document is None, item.error) for item in self._shelf]

    @property
    def shelf(self) -> list[Attachment]:
        """Documents that wait for the next question; never changed in place."""
        return self._shelf

    @shelf.setter
    def shelf(self, attachments: list[Attachment]) -> None:
        self._shelf = attachments
        self.changed()

    @property
    def running(self) -> Answer | None:
        """The answer in progress, also while it is being stopped."""
        return self._answers[-1] if self._answers and not self._answers[-1].finished.is_set() else None

    def live(self, turn: Turn) -> Answer | None:
        """The answer to a turn while it is not in the chat yet."""
        return next((a for a in self._answers if a.turn_id == turn.id and not a.finished.is_set()), None)

    @property
    def asked(self) -> bool:
        """Whether there is a question; until then the chat is in no list."""
        return bool(self.chat.tree)

    @property
    def length(self) -> int:
        """Turns of the branch that is shown."""
        return len(self.chat.path(self.chat.head))

    @property
    def readable(self) -> list[Attachment]:
        """Documents of the shelf that can be asked about."""
        return [attachment for attachment in self.shelf if attachment.document is not None]

    @property
    def unread(self) -> Attachment | None:
        """A document whose file is being read just now."""
        return next((item for item in self.shelf if item.document is None and not item.error), None)

    def plan(self, question: str = "") -> PlanView:
        """What the next question would need; slow where tokens are not counted yet. Raises what the service raises."""
        self._count_tokens()
        with self._tokenizing:
            return self.service.plan(self.chat, [attachment.source for attachment in self.readable], question)

    def plan_ahead(self, wanted: object) -> asyncio.Future[None] | None:
        """Count tokens and plan the next question in a thread; None where that is done, or under way, already.

        `wanted` is equal as long as nothing has changed that the plan depends on.
        """
        if wanted == self._planned[0] or (self._planning is not None and not self._planning.done()):
            return None
        self._planning = asyncio.get_running_loop().run_in_executor(None, self._plan_for, wanted)
        return self._planning

    def planned(self, wanted: object) -> PlanView | Exception | None:
        """What the next question would take, or why that cannot be told; None while it is not known."""
        made_for, plan = self._planned
        return plan if made_for == wanted else None

    def _plan_for(self, wanted: object) -> None:
        plan: PlanView | Exception | None = None
        try:
            if self.service.ready and self.running is None:
                plan = self.plan() if self.readable else None
            elif self.service.ready:  # the cards have their tokens all the same
                self._count_tokens()
        except Exception as error:
            plan = error
        self._planned = wanted, plan

    @property
    def memory_begins(self) -> MemoryBegins | None:
        """Where the chat's memory begins, an answer in progress counted; None while nothing is forgotten."""
        if not self.service.ready:
            return None
        running = self.running
        if running is None or running.progress is None:
            return self.service.memory_begins(self.chat)
        return self.service.memory_begins(self.chat, running.progress.total, running.tokens)

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

    def _count_tokens(self) -> None:
        """Fill in the counts that are missing; of pages that nobody wants any more it is given up."""
        for attachment in self.readable:
            source = attachment.source

            def gone(attachment: Attachment = attachment, source: Selection = source) -> bool:
                return attachment not in self.shelf or attachment.source != source

            def tell(share: float, attachment: Attachment = attachment) -> None:
                attachment.counted = share

            if attachment.tokens is None:
                with self._tokenizing, suppress(Cancelled):
                    tokens = self.service.count_tokens(source, tell, gone)
                    attachment.counts[source.first_page, source.last_page] = tokens

    def shelve(self, attachment: Attachment) -> None:
        """Put a document that was uploaded on the shelf, in the order of arrival: word of a later one may overtake."""
        with self._shelving:
            shelf = list(self.shelf)
            at = len(shelf)
            while at and shelf[at - 1].arrived > attachment.arrived:
                at -= 1
            shelf.insert(at, attachment)
            self.shelf = shelf

    def drop_refused(self) -> None:
        """Take the files off the shelf that could not be read."""
        with self._shelving:
            if any(item.error for item in self.shelf):
                self.shelf = [item for item in self.shelf if not item.error]

    def take_over(self, other: Conversation) -> None:
        """Have what waits on the shelf of another chat wait here; a file that is being read is read for this one."""
        with other._shelving:
            waiting, other.shelf = [item for item in other.shelf if not item.error], []
        with self._shelving:
            here = {item.source.key for item in self.readable}
            new = [item for item in waiting if item.document is None or item.source.key not in here]
            self.shelf = [*self.shelf, *new]

    def read_earlier(self, attachment_id: str) -> None:
        """Move a document of the shelf one place up: documents are read in its order."""
        with self._shelving:
            shelf = list(self.shelf)
            for at in range(1, len(shelf)):
                if shelf[at].id == attachment_id:
                    shelf[at - 1 : at + 1] = shelf[at], shelf[at - 1]
                    break
            self.shelf = shelf

    def take_off(self, attachment_id: str) -> None:
        """Take a document off the shelf."""
        with self._shelving:
            self.shelf = [item for item in self.shelf if item.id != attachment_id]

    def choose(self, attachment: Attachment, first: int, last: int) -> None:
        """Read only these pages of a document."""
        attachment.choose(first, last)
        self.changed()

    def use(self, document: Document) -> None:
        """Put a document of the library on the shelf, where it is not there yet."""
        new = Attachment.of(Selection.whole(document))
        with self._shelving:
            if not any(item.source.label == new.source.label for item in self.readable):
                self.shelf = [*self.shelf, new]

    def ask(self, question: str, instead_of: str | None = None) -> Answer:
        """Start an answer over the shelf's documents, which move into the chat with it.

        With the id of a turn the question takes the place of that one's, on a branch of its own.
        """
        sources: list[Selection] = []
        if instead_of is not None:
            replaced = self.chat.tree[instead_of]
            self.chat.head, sources = replaced.parent, list(replaced.sources)
        with self._shelving:
            shelf, attachments = self.shelf, self.readable
            # What stays are files that are still read.
            self.shelf = [item for item in shelf if item not in attachments and not item.error]
        for attachment in attachments:
            document, tokens = attachment.source.document, attachment.tokens if attachment.whole else None
            self._unlisted[attachment.source.label] = document, tokens
        return self._start(question, [*sources, *(attachment.source for attachment in attachments)])

    def ask_again(self, turn_id: str) -> Answer:
        """Answer a question another time: sampled, since the likeliest answer is there already, and marked so.

        Its documents that a stop put back on the shelf are asked about with it.
        """
        turn = self.chat.tree[turn_id]
        asked = {source.key for source in turn.sources}
        with self._shelving:
            self.shelf = [item for item in self.shelf if item.document is None or item.source.key not in asked]
        self.chat.head = turn.parent
        chosen = self.chat.sampling
        if chosen.temperature == 0:
            chosen = replace(chosen, temperature=0.7, top_p=0.95)
        varied = replace(chosen, seed=random.getrandbits(32)) if turn.answered else turn.sampling
        return self._start(turn.question, turn.sources, varied)

    def resume(self, turn_id: str) -> Answer:
        """Go on with an answer that was stopped or cut."""
        turn = self.chat.tree[turn_id]
        self.chat.show(turn_id)
        varied = turn.sampling and replace(turn.sampling, max_new_tokens=self.chat.sampling.max_new_tokens)
        return self._run(Answer(turn, turn.sources, varied, resumed=True))

    def stop(self) -> None:
        if (answer := self.running) is not None:
            answer.stop()

    def save(self) -> None:
        """Write the chat to disk as it stands, and to the library what is not there yet of its documents.

        Where that fails the chat goes on in memory, and `unsaved` says why.
        """
        if self.deleted:
            return
        try:
            for label, (document, tokens) in list(self._unlisted.items()):
                self.owner.add(document, tokens)
                self._unlisted.pop(label, None)
            running = self.running
            self.owner.save_chat(self.chat, None if running is None else (running.turn_id, running.text))
            self.unsaved = ""
        except OSError as error:
            if not self.unsaved:  # once, not with every question
                log.error("Nothing can be saved: %s", error)
            self.unsaved = f"This chat is not saved: {error.strerror or error}. Make room on the disk, then ask on."

    def _start(self, question: str, sources: Sequence[Selection], sampling: SamplingParams | None = None) -> Answer:
        previous = self.running
        carried = previous.sources if previous is not None else ()
        turn = self.chat.begin(question, sources, sampling)
        return self._run(Answer(turn, (*carried, *sources), sampling))

    def _run(self, answer: Answer) -> Answer:
        previous = self.running
        self._answers = [a for a in self._answers if not a.finished.is_set()] + [answer]
        self.save()
        answer.start(self.service, self.chat, previous, self.save, self._ended)
        self.changed()
        return answer

    def show(self, turn_id: str) -> None:
        """Show the branch with this turn."""
        self.chat.show(turn_id)
        self.save()
        self.changed()

    def _ended(self, answer: Answer) -> None:
        """Documents that the chat has not read, as the question was stopped or failed, wait on the shelf again."""
        if self._answers[-1:] == [answer]:
            with self._shelving:
                self._put_back(answer.sources)
        self.save()

    def _put_back(self, sources: Iterable[Selection]) -> None:
        """In front of the shelf, where the chat has not read them."""
        here = {item.source.key for item in self.readable}
        unread = [source for source in sources if not self.chat.has(source) and source.key not in here]
        self.shelf = [Attachment.of(source) for source in unread if source.document.pages] + self.shelf

    def _unanswered(self) -> Iterator[Selection]:
        """What the last questions were about, as far back as none was answered."""
        for turn in reversed(self.chat.path(self.chat.head)):
            if turn.answered:
                return
            yield from turn.sources
