"""What one browser tab holds, and how a reload finds it again."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from app.library import Owner
from app.service import ChatService
from app.ui.conversation import Conversation

# How long a closed tab is remembered with what waits on its shelf; its chat is on disk.
REMEMBER_S = 600.0
# An answer that no page shows goes on, so that a reload or a dropped connection loses nothing; after this time it gives
# way when somebody else waits for the engine.
UNWATCHED_S = 15.0
ATTEND_S = 1.0
OPEN_S = 30.0  # that what is used on a page waits at most until the page is known
TURNS = 30  # that a page holds at first, and how many more it gets when somebody asks for earlier ones

SECRET_CHARS = 24  # of a browser's secret at least; a shorter one, or with what no header carries, is not from here
SECRET = re.compile(rf"[!-~]{{{SECRET_CHARS},200}}")

_LOST = "Documents that waited here for a question are not kept any more. Add them again."


@dataclass
class Loading:
    """Told by the service how far the model is: a stage and a share from 0 to 1.

    `anew` has an entry for every change of settings under way, for which it is opened another time.
    """

    stage: str = ""
    share: float = 0.0
    anew: list[object] = field(default_factory=list)

    def __call__(self, stage: str, share: float) -> None:
        self.stage, self.share = stage, share


class Session:
    """The state of one tab: whose it is, and which chat it shows; `words` are what its list is searched for."""

    def __init__(self, owner: Owner, page: str, conversation: Conversation) -> None:
        self.token = secrets.token_urlsafe(24)
        self.owner = owner
        self.page: str | None = page
        self.left_at = 0.0
        self.words = ""
        self.tested: dict[str, str] = {}  # by the chat's id, the document that was chosen there for the self-test
        self.draft = conversation  # the tab's new chat; another is begun once it was asked
        self.show(conversation)

    def show(self, conversation: Conversation) -> None:
        """Have the tab show a conversation: its newest turns, and earlier ones when they are asked for."""
        self.conversation = conversation
        self.hidden = conversation.length  # how many turns the page leaves out
        self.show_earlier()
        self.editing: str | None = None  # the turn whose question the next one replaces
        self.lost_at: object = None  # the conversation's version by which documents that had waited were gone
        self.refusal: tuple[object, str] = (None, "")  # of what, and the line that says why; see Drawing.refuse

    @property
    def kept(self) -> str:
        """What the tab keeps, to be found again: its secret, its chat, and how many documents wait there."""
        waiting = sum(not item.error for item in self.conversation.shelf)
        return f"{self.token} {self.conversation.chat.id} {waiting}"

    @property
    def busy(self) -> bool:
        """Whether its conversation holds what is nowhere else: an answer that is written, or what no disk took."""
        return self.conversation.running is not None or bool(self.conversation.unsaved)

    @property
    def lost(self) -> str:
        """What to tell of documents that waited and are gone, until something is done in the chat."""
        return _LOST if self.lost_at == self.conversation.version else ""

    def show_earlier(self) -> None:
        """Show more turns of a long chat."""
        self.hidden = max(0, min(self.hidden, self.conversation.length) - TURNS)

    @property
    def first(self) -> int:
        """The first turn that is shown, counted from 0; of a shorter branch there are as many as of a long one."""
        return min(self.hidden, max(0, self.conversation.length - TURNS))


class Sessions:
    """Sessions by the secret that a tab keeps, so that a reload finds its chat; two tabs never share one.

    Chats belong to the secret of the browser, which all of its tabs share: any of them may open any of its chats.
    """

    def __init__(self, service: ChatService) -> None:
        self.service = service
        self._sessions: dict[str, Session] = {}
        self._changes: Counter[int] = Counter()  # of the lists of each owner

    def changed(self, owner: Owner) -> None:
        """The lists of an owner are others now: every tab that shows them is to draw them anew."""
        self._changes[id(owner)] += 1

    def changes(self, owner: Owner) -> int:
        """How often the lists of an owner have changed."""
        return self._changes[id(owner)]

    def lists(self, owner: Owner) -> object:
        """Equal as long as the lists of an owner look the same."""
        return self.changes(owner), self.running(owner)

    async def open(self, kept: str, owner: Owner, page: str, again: bool = False) -> Session:
        """The session that a tab `kept` when its page is gone or is loaded `again`, else a new one; `page` holds it.

        Where the tab's secret is not known any more, as after a restart, a new one shows the chat that the tab showed.
        """
        token, chat_id, waiting, *_ = [*kept.split(" "), "", ""]
        session = self._sessions.get(token)
        if session is not None and session.owner is not owner:
            session = None
        forgotten = session is None
        for _ in range(10):  # Going back to a page can be faster than the news that the old one is gone.
            if session is None or session.page is None or again:
                break
            await asyncio.sleep(0.1)
        if session is None or (session.page is not None and not again):
            session = Session(owner, page, Conversation(self.service, owner))
            self._sessions[session.token] = session
        session.page = None  # until what was refused on the page before is gone with it
        self._left(session.conversation)
        session.page = page
        if forgotten:
            with suppress(OSError):  # who opens it from the list is told
                await self.show(session, chat_id)
            if waiting.strip("0") and not session.conversation.shelf:
                session.lost_at = session.conversation.version
        return session

    async def of(self, page: str) -> Session | None:
        """The session of a page, which is used before it is opened where machines are busy; None if it never is."""
        for _ in range(int(OPEN_S / 0.05)):
            for session in list(self._sessions.values()):
                if session.page == page:
                    return session
            await asyncio.sleep(0.05)
        return None

    async def show(self, session: Session, chat_id: str) -> None:
        """Have a tab show a saved chat, with its answer if one runs; nothing happens when it is not this browser's."""
        conversation = self._opened(session.owner, chat_id)
        if conversation is None:
            chat = await asyncio.to_thread(session.owner.open_chat, chat_id)
            conversation = self._opened(session.owner, chat_id)  # by another tab meanwhile
            if conversation is None and chat is not None and not session.owner.chats.deleted(chat_id):
                conversation = Conversation(self.service, session.owner, chat)
        if conversation is not None and not conversation.deleted:
            self._replace(session, conversation)

    def _opened(self, owner: Owner, chat_id: str) -> Conversation | None:
        """A chat of this browser that is open already."""
        own = [s.conversation for s in list(self._sessions.values()) if s.owner is owner]
        return next((conversation for conversation in own if conversation.chat.id == chat_id), None)

    def clear(self, session: Session) -> None:
        """Have a tab begin a new chat, with what waits on its shelf; what runs in the old one goes on."""
        old, new = session.conversation, session.draft
        new.drop_refused()
        if new.asked or new.deleted or (new is old and old.asking.locked()):
            new = session.draft = Conversation(self.service, session.owner)
        if new is not old:
            self._replace(session, new)
            if not self._shown(old) and not old.asking.locked():  # else a question is looked at that is about it
                new.take_over(old)

    def keep(self, session: Session, conversation: Conversation) -> Conversation:
        """Where a refused question's documents are: in its chat, or in the tab's new one if nothing leads there."""
        if conversation.asked or conversation is session.draft or self._shown(conversation):
            return conversation
        session.draft.take_over(conversation)
        return session.draft

    def fork(self, session: Session, turn_id: str) -> None:
        """Have a tab go on from an answer in a chat of its own."""
        chat = self.service.fork(session.conversation.chat, turn_id)
        session.owner.save_chat(chat)
        self.changed(session.owner)
        self._replace(session, Conversation(self.service, session.owner, chat))

    def running(self, owner: Owner) -> set[str]:
        """Ids of the chats of a browser that are answering."""
        own = [s.conversation for s in list(self._sessions.values()) if s.owner is owner]
        return {conversation.chat.id for conversation in own if conversation.running is not None}

    def rename(self, owner: Owner, chat_id: str, title: str) -> None:
        """Give a chat another title, also where a tab shows it."""
        owner.chats.rename(chat_id, title, [s.conversation.chat for s in self._showing(owner, chat_id)])
        self.changed(owner)

    def forget(self, owner: Owner, chat_id: str) -> None:
        """Stop a chat and delete it; the tabs that show it begin a new one.

        Where the disk does not let go of it (OSError), it is there as before, but for an answer that was stopped.
        """
        doomed = [session.conversation for session in self._showing(owner, chat_id)]  # their tabs may go elsewhere
        for conversation in doomed:
            conversation.deleted = True
            conversation.stop()
        chat = doomed[0].chat if doomed else None
        try:
            if (chat := chat or owner.open_chat(chat_id)) is not None:
                self.service.delete_chat(owner, chat)
            else:  # damaged: nothing else is known of it
                owner.chats.delete(chat_id)
        except OSError:
            for conversation in doomed:
                conversation.deleted = False
                conversation.save()  # an answer may have ended meanwhile
            raise
        self.changed(owner)
        for session in self._showing(owner, chat_id):  # another tab may have opened it meanwhile
            session.conversation.deleted = True
            session.conversation.stop()
            old, session.draft = session.conversation, Conversation(self.service, owner)
            session.draft.take_over(old)
            session.show(session.draft)

    def _showing(self, owner: Owner, chat_id: str) -> list[Session]:
        """The sessions that show a chat; those with a page first, so that what waits goes on where somebody sees it."""
        own = [session for session in list(self._sessions.values()) if session.owner is owner]
        return sorted((s for s in own if s.conversation.chat.id == chat_id), key=lambda s: s.page is None)

    def leave(self, page: str) -> None:
        """The page is closed or reloaded; its answer goes on."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.page == page:
                session.page, session.left_at = None, now
            elif session.page is None and now - session.left_at > REMEMBER_S and not session.busy:
                self._sessions.pop(session.token, None)

    async def attend(self) -> None:
        """For as long as the page is served: see to it that whoever waits, on a page or not, need not wait for ever,
        and that what a full disk did not take is written when there is room."""
        while True:
            await asyncio.sleep(ATTEND_S)
            self._give_way()
            for session in list(self._sessions.values()):
                conversation = session.conversation
                if conversation.unsaved and conversation.running is None and not conversation.deleted:
                    await asyncio.to_thread(conversation.save)
                    if not conversation.unsaved:
                        self.changed(session.owner)

    def _give_way(self) -> None:
        """Where somebody waits who is not such a one himself: stop an answer that no page has shown for a while.

        What it has read stays read. One that is in line holds nobody up.
        """
        now = time.monotonic()
        seen_at: dict[Conversation, float] = {}  # by a page last: a chat is left when the last of its tabs is
        for session in list(self._sessions.values()):
            at = now if session.page is not None else session.left_at
            seen_at[session.conversation] = max(at, seen_at.get(session.conversation, at))
        unseen = [conversation.running for conversation, at in seen_at.items() if now - at > UNWATCHED_S]
        unwatched = [answer for answer in unseen if answer is not None]
        queued = sum(answer.phase == "queued" for answer in unwatched)
        if self.service.waiting > queued:
            for answer in unwatched:
                if answer.phase != "queued":
                    answer.stop()

    def _left(self, conversation: Conversation) -> None:
        """A page goes elsewhere: files that were refused are told of no longer, unless another shows the chat."""
        if not self._shown(conversation):
            conversation.drop_refused()

    def _shown(self, conversation: Conversation) -> bool:
        """Whether a page shows a conversation."""
        sessions = list(self._sessions.values())
        return any(session.page is not None and session.conversation is conversation for session in sessions)

    def _replace(self, session: Session, conversation: Conversation) -> None:
        """Show another chat. What runs or waits in the old one is held by a session without a page."""
        old, now = session.conversation, time.monotonic()
        session.show(conversation)
        self._left(old)
        holder = next((other for other in list(self._sessions.values()) if other.conversation is old), None)
        if holder is None and (old.running is not None or old.asking.locked() or old.shelf or old.unsaved):
            holder = Session(session.owner, "", old)
            holder.page = None
            self._sessions[holder.token] = holder
        if holder is not None and holder.page is None:
            holder.left_at = now
