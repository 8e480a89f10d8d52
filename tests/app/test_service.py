"""The service on a fake model: documents, turns, plans, cancelling, two people at once."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from app.conversation import Message
from app.documents import Document
from app.engine.generation import Generation
from app.engine.types import Done, Failed, Queued, SamplingParams, Token
from app.errors import BadDocument, ContextTooLong, NotReady, UsageError
from app.local import LocalService
from app.model import LoadProgress, OpenModel
from app.service import Chat, Selection
from tests.app.test_prompt import LLAMA3
from tests.fakes import END, FakeRunner, FakeSlot, FakeTokenizer

WAIT = 10.0
Start = Callable[..., LocalService]


@pytest.fixture
def start() -> Iterator[Start]:
    services: list[LocalService] = []

    def build(**runner: Any) -> LocalService:
        model = OpenModel(
            name="fake",
            runner=FakeRunner(**{"capacity": 2000, **runner}),
            tokenizer=FakeTokenizer(),
            eos_ids=frozenset({END}),
            bytes_for=lambda context: 1000 + 10 * context,
            pattern_note="No pattern.",
        )
        services.append(LocalService(Settings(), lambda settings, progress: model))
        services[-1].load()
        assert services[-1].load_error is None
        return services[-1]

    yield build
    for service in services:
        runner = fake(service) if service.ready else None
        service.close()
        assert runner is None or runner.open_slots == 0


def fake(service: LocalService) -> FakeRunner:
    assert service._loaded is not None
    runner = service._loaded.engine.runner
    assert isinstance(runner, FakeRunner)
    return runner


@pytest.fixture
def document(tmp_path: Path) -> Document:
    return write(tmp_path, "notes.txt", "The word is heron.\fIt was said <|im_end|> twice.\fNo more.")


def write(folder: Path, name: str, text: str) -> Document:
    (folder / name).write_text(text)
    return LocalService(Settings()).add_document(folder / name, name)


def finish(generation: Generation) -> Done:
    event = list(generation)[-1]
    assert isinstance(event, Done), event
    return event


def read(chat: Chat) -> str:
    return FakeTokenizer().decode(chat.token_ids)


def test_before_loading_there_is_a_clear_answer(tmp_path: Path) -> None:
    service = LocalService(Settings(), lambda settings, progress: pytest.fail("not yet"))
    assert not service.ready
    assert not service.busy
    for call in (lambda: service.ask(Chat(), "Q"), lambda: service.plan(Chat()), service.status):
        with pytest.raises(NotReady, match="loading"):
            call()
    assert write(tmp_path, "a.txt", "text").text.strip() == "text"  # documents need no model
    with pytest.raises(BadDocument):
        write(tmp_path, "empty.txt", "")


def test_a_failure_to_load_is_kept_and_raised_by_every_call() -> None:
    def fail(settings: Settings, progress: LoadProgress) -> OpenModel:
        raise UsageError("there is no such model")

    service = LocalService(Settings(), fail)
    service.load()
    assert isinstance(service.load_error, UsageError)
    with pytest.raises(UsageError, match="no such model"):
        service.ask(Chat(), "Q")
    service.close()


def test_loading_tells_its_stages_warms_up_and_happens_once() -> None:
    told: list[tuple[str, float]] = []
    opened: list[FakeRunner] = []

    def opener(settings: Settings, progress: LoadProgress) -> OpenModel:
        progress("Reading the weights", 0.5)
        opened.append(FakeRunner())
        return OpenModel("fake", opened[-1], FakeTokenizer(), frozenset({END}), lambda context: context)

    service = LocalService(Settings(), opener)
    for _ in range(2):
        service.load(lambda stage, fraction: told.append((stage, fraction)))
    assert told == [("Reading the weights", 0.5), ("Warming up", 0.95), ("Ready", 1.0)]
    assert len(opened) == 1
    assert (opened[0].starts, opened[0].kept) == (1, {})
    assert service.status()["ms_per_token"] == 0  # nothing was asked yet
    service.close()


def test_close_while_loading_leaves_nothing_running() -> None:
    reached, go = threading.Event(), threading.Event()
    runner = FakeRunner()

    def slow(settings: Settings, progress: LoadProgress) -> OpenModel:
        reached.set()
        assert go.wait(WAIT)
        return OpenModel("fake", runner, FakeTokenizer(), frozenset(), lambda context: context)

    service = LocalService(Settings(), slow)
    loading = threading.Thread(target=service.load)
    loading.start()
    assert reached.wait(WAIT)
    service.close()
    go.set()
    loading.join(WAIT)
    assert not service.ready
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-engine"]
    with pytest.raises(NotReady, match="closed"):
        service.ask(Chat(), "Q")


def test_documents_stand_before_the_question_and_their_control_tokens_are_text(
    start: Start, document: Document
) -> None:
    service = start()
    chat = service.new_chat("Be brief.")
    answer = finish(service.ask(chat, " What is the word? ", [document]))
    assert answer.text == "Yes."
    assert read(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nDocument: notes.txt (pages 1-3 of 3)\n\n"
        f"{document.text.strip()}\n\nAnswer from the document above.\n\nWhat is the word?<|im_end|>\n"
        "<|im_start|>assistant\nYes."
    )
    assert chat.token_ids.count(END) == 2  # the document's <|im_end|> is not one
    assert answer.usage.prompt_tokens == chat.token_count - len("Yes.")


def test_the_second_turn_reads_only_what_is_new(start: Start, document: Document) -> None:
    service = start()
    chat = service.new_chat()
    first = finish(service.ask(chat, "First?", [document]))
    before = chat.token_ids
    fake(service).read = 0
    second = finish(service.ask(chat, "Second?", [document]))
    assert chat.token_ids[: len(before)] == before
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len("Yes.")
    new = len("E\nSuser\nSecond?E\nSassistant\n")  # E and S: the control tokens, one id each
    assert second.usage.prompt_tokens - second.usage.cached_tokens == fake(service).read == new
    assert read(chat).count("heron") == 1
    assert [turn.sources for turn in chat.turns] == [(Selection.whole(document),), ()]


def test_a_later_document_is_appended(start: Start, document: Document, tmp_path: Path) -> None:
    service = start()
    chat = service.new_chat()
    finish(service.ask(chat, "First?", [document]))
    before = chat.token_ids
    other = write(tmp_path, "other.txt", "A second text.")
    finish(service.ask(chat, "Second?", [document, other]))
    assert chat.token_ids[: len(before)] == before
    assert read(chat).endswith("above.\n\nSecond?<|im_end|>\n<|im_start|>assistant\nYes.")
    assert "Document: other.txt (page 1 of 1)\n\nA second text.\n" in read(chat)


def test_pages_can_be_chosen(start: Start, document: Document) -> None:
    service = start()
    chat = service.new_chat()
    part = Selection(document, 2, 2)
    assert service.count_tokens(part) == len(part.text.strip())
    assert service.count_tokens(document) > service.count_tokens(part)
    finish(service.ask(chat, "Q?", [part]))
    assert "Document: notes.txt (page 2 of 3)" in read(chat)
    assert "heron" not in read(chat)
    with pytest.raises(UsageError, match="pages 1 to 3"):
        service.ask(chat, "Q?", [Selection(document, 2, 9)])


def test_a_document_is_tokenised_once(start: Start, document: Document) -> None:
    service = start()
    told: list[float] = []
    service.count_tokens(document, progress=told.append)
    assert told == [1.0]
    tokenizer = service._need().model.tokenizer
    assert isinstance(tokenizer, FakeTokenizer)
    tokenizer.encoded.clear()
    for question in "abc":
        service.plan(service.new_chat(), [document], question)
    finish(service.ask(service.new_chat(), "Q?", [document]))
    assert not any("heron" in text for text in tokenizer.encoded)


def test_the_plan_says_what_the_question_will_take(start: Start, document: Document) -> None:
    service = start()
    chat = service.new_chat()
    plan = service.plan(chat, [document], "First?")
    answer = finish(service.ask(chat, "First?", [document]))
    assert plan.fits
    assert plan.prompt_tokens == plan.new_tokens == answer.usage.prompt_tokens
    assert (plan.capacity, plan.bytes) == (2000, 1000 + 10 * plan.prompt_tokens)
    assert plan.seconds_estimate is not None
    assert plan.seconds_estimate > 0
    assert f"{plan.new_tokens:,} tokens to read" in plan.message
    later = service.plan(chat, [document], "Second?")
    assert later.prompt_tokens == chat.token_count + later.new_tokens
    assert later.new_tokens < 50


def test_too_long_is_told_with_both_counts_before_and_on_asking(start: Start, tmp_path: Path) -> None:
    service = start(capacity=300)
    chat = service.new_chat()
    long = write(tmp_path, "long.txt", "word " * 100)
    plan = service.plan(chat, [long], "Q?")
    assert not plan.fits
    assert f"{plan.prompt_tokens + 1:,} tokens; the context holds 300" in plan.message
    with pytest.raises(ContextTooLong) as caught:
        service.ask(chat, "Q?", [long])
    assert (caught.value.need, caught.value.limit) == (plan.prompt_tokens + 1, 300)
    assert not chat.turns
    assert finish(service.ask(chat, "Q?")).text == "Yes."  # the chat is as it was


def test_too_long_names_the_largest_of_several_documents(start: Start, tmp_path: Path) -> None:
    service = start(capacity=600)
    chat = service.new_chat()
    read, short, long = (write(tmp_path, f"{name}.txt", f"{name} " * 30) for name in ("read", "s", "longer"))
    says = rf"longer\.txt is the largest document: {service.count_tokens(long):,} tokens\. Choose fewer"
    plan = start(capacity=300).plan(Chat(), [short, long], "Q?")
    assert re.search(says, plan.message)
    finish(service.ask(chat, "Q?", [read]))
    says = says.replace("Choose", "The chat so far has .* or choose")
    with pytest.raises(ContextTooLong, match=says):
        service.ask(chat, "Q?", [long, write(tmp_path, "m.txt", "m " * 100)])
    with pytest.raises(ContextTooLong, match=r"longer\.txt is the largest"):
        service.converse([Message("user", "Q? " * 150, (Selection.whole(long), Selection.whole(short)))])
    with pytest.raises(ContextTooLong) as caught:
        service.ask(service.new_chat(), "Q? " * 300, [short])
    assert "largest" not in str(caught.value)


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (0, False), (-1, False)])
def test_prompts_around_the_limit(start: Start, spare: int, fits: bool) -> None:
    need = start().plan(Chat(), [], "Question?").prompt_tokens
    service = start(capacity=need + spare)
    assert service.plan(Chat(), [], "Question?").fits is fits
    if fits:
        done = finish(service.ask(Chat(), "Question?", sampling=SamplingParams(max_new_tokens=500)))
        assert (done.finish_reason, done.text, done.usage.prompt_tokens) == ("length", "Y", need)
    else:
        with pytest.raises(ContextTooLong):
            service.ask(Chat(), "Question?")


def test_a_chat_that_outgrows_the_context_says_so(start: Start) -> None:
    service = start(capacity=150)
    chat = service.new_chat()
    finish(service.ask(chat, "And then?"))
    before = chat.token_ids
    says = rf"the context holds 150\. The chat so far has {len(before)}\. Start a new chat"
    with pytest.raises(ContextTooLong, match=says):
        service.ask(chat, "And then? " * 20)
    assert chat.token_ids == before


def test_wrong_questions_are_usage_errors(start: Start) -> None:
    service = start()
    with pytest.raises(UsageError, match="empty"):
        service.ask(service.new_chat(), "  \n")
    with pytest.raises(UsageError, match="temperature"):
        service.ask(service.new_chat(), "Q?", sampling=SamplingParams(temperature=-1))


def hold(step: str, at: int) -> tuple[Callable[[str, FakeSlot], None], threading.Event, threading.Event]:
    """A hook that waits at the `at`th such step: (hook, it is there, let it go)."""
    reached, go, seen = threading.Event(), threading.Event(), [0]

    def hook(now: str, slot: FakeSlot) -> None:
        if now == step:
            seen[0] += 1
            if seen[0] == at:
                reached.set()
                assert go.wait(WAIT)

    return hook, reached, go


def test_stop_then_ask_at_once(start: Start, document: Document) -> None:
    service = start(answer=lambda prompt: "a long answer")
    chat = service.new_chat()
    fake(service).hook, reached, go = hold("decode", 6)
    first = service.ask(chat, "First?", [document])
    assert reached.wait(WAIT)
    with pytest.raises(UsageError, match="still answering"):
        service.ask(chat, "Second?")
    first.cancel()
    threading.Timer(0.05, go.set).start()
    second = finish(service.ask(chat, "Second?", [document]))  # waits for the first one's last step
    assert finish(first).text == "a long"
    assert [turn.answer for turn in chat.turns] == ["a long", "a long answer"]
    assert "a long<|im_end|>\n<|im_start|>user\nSecond?" in read(chat)
    assert second.usage.cached_tokens == len(chat.turns[0].prompt_ids) + len(chat.turns[0].answer_ids)


def test_an_answer_cancelled_before_its_first_word_leaves_the_chat_as_it_was(start: Start, document: Document) -> None:
    service = start()
    chat = service.new_chat()
    fake(service).hook, reached, go = hold("prefill", 2)
    generation = service.ask(chat, "First?", [document])
    assert reached.wait(WAIT)
    generation.cancel()
    go.set()
    assert finish(generation).finish_reason == "cancelled"
    assert chat.turns == []
    again = finish(service.ask(chat, "Another?", [document]))
    assert again.usage.cached_tokens == 32  # both chunks that were read
    assert read(chat).count("heron") == 1


def test_an_answer_that_nobody_waits_for_is_cancelled_and_the_chat_goes_on(start: Start) -> None:
    service = start()
    chat = service.new_chat()
    fake(service).hook, reached, go = hold("prefill", 1)
    generation = service.ask(chat, "First?")
    assert reached.wait(WAIT)
    del generation
    gc.collect()
    threading.Timer(0.05, go.set).start()
    assert finish(service.ask(chat, "Second?")).text == "Yes."
    assert [turn.question for turn in chat.turns] == ["Second?"]


def test_a_failed_answer_leaves_the_chat_as_it_was(start: Start) -> None:
    service = start()
    chat = service.new_chat()
    finish(service.ask(chat, "First?"))
    before = chat.token_ids

    def fail(step: str, slot: FakeSlot) -> None:
        raise OSError("gone")

    fake(service).hook = fail
    assert isinstance(list(service.ask(chat, "Second?"))[-1], Failed)
    assert chat.token_ids == before
    fake(service).hook = lambda step, slot: None
    assert finish(service.ask(chat, "Third?")).text == "Yes."


def test_two_people_wait_for_each_other_and_never_share_a_word(start: Start, tmp_path: Path) -> None:
    service = start(answer=lambda prompt: "Ada" if b"Ada" in bytes(i % 256 for i in prompt) else "Bo")
    fake(service).hook, reached, go = hold("prefill", 1)
    chats = {name: service.new_chat() for name in ("Ada", "Bo")}
    generations = {}
    for name, chat in chats.items():
        generations[name] = service.ask(chat, f"Who is {name}?", [write(tmp_path, f"{name}.txt", f"I am {name}.")])
        assert reached.wait(WAIT)
    assert service.busy
    assert generations["Bo"].next_event(WAIT) == Queued(1)
    go.set()
    for name, other in (("Ada", "Bo"), ("Bo", "Ada")):
        events = list(generations[name])
        assert "".join(event.text for event in events if isinstance(event, Token)) == name
        assert other not in read(chats[name])
    assert not service.busy


def test_status_tells_what_people_want_to_know(start: Start) -> None:
    service = start()
    chat = service.new_chat()
    finish(service.ask(chat, "Q?"))
    status = service.status(chat)
    assert (status["model"], status["pattern"], status["context_capacity"]) == ("fake", "No pattern.", 2000)
    assert status["context_used"] == chat.token_count
    assert status["memory"]["weights_bytes"] == 1000
    assert status["settings"]["weights"] == "fake"
    assert status["ms_per_token"] > 0
    assert status["prefill_tokens_per_s"] > 0
    assert service.status()["context_used"] == 0


def test_an_endless_context_never_fills_and_tells_where_its_memory_begins(start: Start, document: Document) -> None:
    service = start(capacity=None, answer=lambda prompt: "a" * 30 + "b" * 30)
    chat = service.new_chat()
    assert service.status(chat)["context_capacity"] is None
    long = "The story goes on and on. " * 200
    plan = service.plan(chat, [document], long)
    assert plan.fits
    assert plan.capacity is None
    assert plan.message.endswith("tokens, of which only the last 100 are remembered.")
    assert service.plan(chat, question="Hm?").message == "To read: 22 tokens, the last 100 are remembered."
    assert service.memory_begins(chat) is None
    assert service.memory_begins(chat, 104) is None  # the first 4 and the last 100: nothing is missing
    running = service.memory_begins(chat, 105)
    assert running is not None
    assert (running.forgotten, running.turn, running.in_answer, running.words) == (1, 0, False, "")
    running = service.memory_begins(chat, 50, 150)
    assert running is not None
    assert (running.forgotten, running.turn, running.in_answer) == (96, 0, True)

    finish(service.ask(chat, long, [document]))
    begins = service.memory_begins(chat)
    assert begins is not None
    assert (begins.forgotten, begins.turn, begins.in_answer) == (chat.token_count - 104, 0, False)
    first = chat.token_ids[-100:]
    assert FakeTokenizer().decode(first).startswith(begins.words.split()[0])
    finish(service.ask(chat, "?"))
    begins = service.memory_begins(chat)
    assert begins is not None
    assert (begins.turn, begins.in_answer) == (0, True)
    assert set(begins.words) <= {"a", "b"}
    assert service.status(chat)["memory_begins"]["forgotten"] == begins.forgotten


def test_an_endless_answer_has_no_limit_but_the_one_that_was_asked_for(start: Start) -> None:
    letters = random.Random(0).choices("abcdefgh", k=4000)
    service = start(capacity=None, answer=lambda prompt: "".join(letters) + "and on " * 200)  # the end goes in circles
    done = finish(service.ask(service.new_chat(), "Go on"))
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", 5401)
    done = finish(service.ask(service.new_chat(), "Go on", sampling=SamplingParams(max_new_tokens=5000)))
    assert (done.finish_reason, done.usage.completion_tokens) == ("length", 5000)
    generation = service.ask(service.new_chat(), "Go on")
    for event in generation:
        if isinstance(event, Token):
            generation.cancel()
            break
    assert service.ask(service.new_chat(), "Again", sampling=SamplingParams(max_new_tokens=1)).result()


def test_a_limited_context_has_no_memory_that_begins(start: Start) -> None:
    service = start()
    chat = service.new_chat()
    finish(service.ask(chat, "Q " * 300))
    assert service.memory_begins(chat) is None
    assert service.status(chat)["memory_begins"] is None


def test_going_back_editing_and_asking_again_equal_a_fresh_run(start: Start, document: Document) -> None:
    """Every branch sends the prompt that a chat with only that branch would send."""
    service = start()
    chat = service.new_chat()
    finish(service.ask(chat, "First?", [document]))
    finish(service.ask(chat, "Second?"))
    first, second = chat.turns
    chat.head = first.id  # back: the second question asked otherwise
    finish(service.ask(chat, "Second, edited?"))
    fresh = service.new_chat()
    finish(service.ask(fresh, "First?", [document]))
    finish(service.ask(fresh, "Second, edited?"))
    assert chat.token_ids == fresh.token_ids
    chat.head = None  # the first question edited: the document is read again with it, out of the cache
    finish(service.ask(chat, "First, edited?", [document]))
    other = service.new_chat()
    finish(service.ask(other, "First, edited?", [document]))
    assert chat.token_ids == other.token_ids
    chat.show(second.id)
    assert [turn.question for turn in chat.turns] == ["First?", "Second?"]
    fork = service.fork(chat, first.id)
    finish(service.ask(fork, "Third?"))
    assert [turn.question for turn in fork.turns] == ["First?", "Third?"]
    assert [turn.question for turn in chat.turns] == ["First?", "Second?"]
    assert len(chat.tree) == 4


def test_a_stopped_answer_goes_on_from_its_last_token(start: Start, document: Document) -> None:
    service = start(answer=lambda prompt: "a long answer" if bytes(i % 256 for i in prompt).endswith(b"t\n") else " on")
    chat = service.new_chat()
    fake(service).hook, reached, go = hold("decode", 6)
    generation = service.ask(chat, "First?", [document])
    assert reached.wait(WAIT)
    generation.cancel()
    go.set()
    finish(generation)
    turn = chat.turns[0]
    assert (turn.answer, turn.finish_reason) == ("a long", "cancelled")
    fake(service).hook = lambda step, slot: None
    chat.update(turn.id, error="Going on failed once.")
    more = finish(service.resume(chat, turn.id))
    assert (more.text, chat.turns[0].error) == (" on", "")
    assert (chat.turns[0].answer, chat.turns[0].finish_reason) == ("a long on", "stop")
    assert read(chat).endswith("assistant\na long on")
    with pytest.raises(UsageError, match="stopped or cut"):
        service.resume(chat, turn.id)


def test_an_answer_that_filled_the_context_cannot_go_on_and_harms_nobody(start: Start) -> None:
    """Both counts are told; this chat stays as it is, and others are answered."""
    service = start(capacity=100, answer=lambda prompt: "abcdefgh" * 30)
    chat = service.new_chat("Be brief.")
    full = finish(service.ask(chat, "Go on?"))
    assert (full.finish_reason, chat.token_count) == ("length", 100)
    before, turns = chat.token_ids, list(chat.turns)
    says = r"needs 101 tokens; the context holds 100\. The chat so far has 100\. Start a new chat"
    with pytest.raises(ContextTooLong, match=says):
        service.resume(chat, turns[0].id)
    assert (chat.token_ids, chat.turns) == (before, turns)
    assert finish(service.ask(service.new_chat(), "You?")).finish_reason == "length"


class _Ids(str):
    """An answer in tokens that encoding its text would not give."""

    ids = b""

    def encode(self, *options: Any) -> bytes:
        return self.ids


def test_history_is_what_was_generated_not_what_its_text_would_be_encoded_as(start: Start) -> None:
    answer = _Ids("Yes.")
    answer.ids = b"Y\xff."
    service = start(answer=lambda prompt: answer)
    tokenizer = service._need().model.tokenizer
    plain = tokenizer.token_bytes
    tokenizer.token_bytes = lambda token: b"es" if token == 255 else plain(token)  # type: ignore[method-assign]
    chat = service.new_chat()
    first = finish(service.ask(chat, "First?"))
    assert first.text == "Yes."
    second = finish(service.ask(chat, "Second?"))
    assert chat.token_ids.count(255) == 2
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(b"Y\xff.")


def test_an_answer_ends_at_the_models_end_token_and_at_its_templates() -> None:
    """A model of two end tokens, one in its configuration and one that its template ends turns with."""
    tokenizer = FakeTokenizer(LLAMA3)
    tokenizer.special_ids |= {"<|start|>": 252, "<|end|>": 253, "<|eot_id|>": 254}
    tokenizer.template_variables = {"bos_token": ""}
    tokenizer.eos_ids = frozenset()
    for end in (254, END):
        answer = _Ids("Yes.")
        answer.ids = b"Yes." + (b"\xfe more" if end == 254 else b"")
        runner = FakeRunner(answer=lambda prompt, answer=answer: answer)
        model = OpenModel("fake", runner, tokenizer, frozenset({END}), lambda context: context)
        service = LocalService(Settings(), lambda settings, progress, model=model: model)
        service.load()
        done = finish(service.ask(service.new_chat(), "Q?"))
        assert (done.finish_reason, done.text, done.token_ids[-1]) == ("stop", "Yes.", end)
        service.close()


def test_an_answer_whose_evidence_fails_is_not_lost(
    start: Start, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> list[Any]:
        raise RuntimeError("broken")

    service = start()
    chat = service.new_chat()
    monkeypatch.setattr("app.local.service.quotes", broken)
    with pytest.raises(RuntimeError, match="broken"):
        service.ask(chat, "First?", [document]).result()
    assert [(turn.answer, turn.answered) for turn in chat.turns] == [("Yes.", True)]


def test_where_documents_end_is_marked(start: Start, document: Document, tmp_path: Path) -> None:
    service = start()
    seen: list[Any] = []
    begin = fake(service).start
    fake(service).start = lambda *args: seen.append(args) or begin(*args)  # type: ignore[method-assign]
    chat = service.new_chat()
    other = write(tmp_path, "other.txt", "Document: not a border. Another text.")
    finish(service.ask(chat, "First?", [document, other]))
    prompt, marks, _ = seen[0]
    for mark, text, source in zip(marks, (document, other), chat.turns[0].sources, strict=True):
        assert bytes(i % 256 for i in prompt[: mark.position]).endswith(text.text.strip().encode())
        assert mark.label == source.label
    finish(service.ask(chat, "Second?"))
    assert seen[1][1] == ()


def test_a_question_is_watched_from_what_frames_it(
    start: Start, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    seen: list[tuple[int, int]] = []
    watch = FakeSlot.watch
    monkeypatch.setattr(FakeSlot, "watch", lambda slot, *places: seen.append(places) or watch(slot, *places))
    chat = service.new_chat()
    finish(service.ask(chat, "Nothing to look at?"))
    finish(service.ask(chat, " Where is it? ", [document]))
    finish(service.ask(chat, "And who?"))
    ids = [turn.prompt_ids for turn in chat.turns]
    prompt = bytes(i % 256 for i in chat.token_ids)
    assert len(seen) == 2 and prompt[: seen[0][0]].endswith(document.text.strip().encode())
    assert prompt[seen[0][1] :].startswith(b"Where is it?") and prompt[seen[1][1] :].startswith(b"And who?")
    assert seen[1][0] == len(chat.token_ids) - len(ids[-1]) - len(chat.turns[-1].answer_ids)  # the turn before


def test_a_chat_of_another_model_or_with_lost_ids_is_encoded_anew(start: Start, document: Document) -> None:
    service = start()
    chat = service.new_chat("Be brief.")
    finish(service.ask(chat, "First?", [document]))
    finish(service.ask(chat, "Second?"))
    want = chat.token_ids
    chat.ids_of = "another model"
    for turn in chat.turns:
        chat.update(turn.id, prompt_ids=(1, 2, 3), answer_ids=(4,))
    service.plan(chat)
    assert chat.token_ids == want
    chat.update(chat.turns[0].id, prompt_ids=())
    finish(service.ask(chat, "Third?"))
    assert chat.token_ids[: len(want)] == want
    chat.update(chat.turns[0].id, answer_ids=())
    finish(service.ask(chat, "Fourth?"))
    assert chat.token_ids[: len(want)] == want


def test_the_collector_does_not_look_through_what_was_loaded(start: Start) -> None:
    start()
    kept = len(gc.get_objects())
    try:
        assert gc.get_freeze_count() > 20 * kept
    finally:
        gc.unfreeze()
