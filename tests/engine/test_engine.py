"""The worker: events, cancelling, waiting in line, failures; all on a fake runner."""

from __future__ import annotations

import ast
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine
from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine
from app.engine.generation import Generation
from app.engine.stats import CostModel, Totals
from app.engine.types import Done, Failed, GenerationRequest, Progress, Queued, SamplingParams, Token, Usage
from app.errors import ContextTooLong, OctavoError
from models.errors import BadLogits
from tests.fakes import END, FakeRunner, FakeSlot, FakeTokenizer

Make = Callable[..., Engine]
WAIT = 10.0


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def build(**runner: Any) -> Engine:
        tokenizer = FakeTokenizer()
        engines.append(Engine(FakeRunner(**runner), lambda stop: Detokenizer(tokenizer, stop)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
        assert fake(engine).open_slots == 0


def fake(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


def request(prompt: str = "Question?", chat_id: str | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(tuple(prompt.encode()), SamplingParams(**sampling), frozenset({END}), chat_id)


def done(generation: Generation) -> Done:
    event = list(generation)[-1]
    assert isinstance(event, Done), event
    return event


class Gate:
    """Lets a runner's step wait: `reached` says that it is there, `open` lets it go on."""

    def __init__(self, step: str, at: int) -> None:
        self.step, self.at = step, at
        self.reached, self.open = threading.Event(), threading.Event()
        self.count = 0

    def __call__(self, step: str, slot: FakeSlot) -> None:
        if step == self.step:
            self.count += 1
            if self.count == self.at:
                self.reached.set()
                assert self.open.wait(WAIT)


def test_an_answer_is_progress_then_tokens_then_done(make: Make) -> None:
    engine = make(answer=lambda prompt: "Å 😀!")
    events = list(engine.submit(request("x" * 40)))
    progress = [event for event in events if isinstance(event, Progress)]
    assert [(event.done, event.total, event.cached) for event in progress] == [(n, 40, 0) for n in (0, 16, 32, 40)]
    assert all(event.tokens_per_s > 0 for event in progress[1:])
    assert all(event.seconds_left > 0 for event in progress[1:-1])
    assert progress[-1].seconds_left == 0
    tokens = [event for event in events if isinstance(event, Token)]
    assert [event.text for event in tokens] == ["", "Å", " ", "", "", "", "😀", "!"]
    last = events[-1]
    assert isinstance(last, Done)
    assert (last.finish_reason, last.text) == ("stop", "Å 😀!")
    assert last.token_ids == (*"Å 😀!".encode(), END)
    assert last.usage == Usage(40, 0, 9)
    assert last.timings.prefill_tokens_per_s > 0
    assert last.timings.decode_ms_per_token > 0
    assert last.memory.weights_bytes == 1000
    assert events == [*progress, *tokens, last]


@pytest.mark.parametrize("chunk", [1, 7, 20, 39, 40, 41])
def test_chunks_of_any_size_read_each_token_once_and_in_order(make: Make, chunk: int) -> None:
    engine = make(chunk=chunk)
    prompt = bytes(range(40)).decode()
    events = list(engine.submit(request(prompt, "chat")))
    assert fake(engine).kept["chat"][:40] == tuple(range(40))
    assert fake(engine).read == 40
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == [*range(0, 40, chunk), 40]


def test_the_length_wanted_and_the_context_both_end_an_answer(make: Make) -> None:
    engine = make(answer=lambda prompt: "abcdef" * 10, capacity=20)
    short = done(engine.submit(request("x" * 10, max_new_tokens=4)))
    assert (short.finish_reason, short.text) == ("length", "abcd")
    for wanted in (None, 20, 1000):
        full = done(engine.submit(request("x" * 10, max_new_tokens=wanted)))
        assert (full.finish_reason, len(full.token_ids), full.usage.prompt_tokens) == ("length", 10, 10)


@pytest.mark.parametrize(("length", "fits"), [(19, True), (20, False), (21, False)])
def test_prompts_around_the_limit(make: Make, length: int, fits: bool) -> None:
    engine = make(capacity=20)
    last = list(engine.submit(request("x" * length)))[-1]
    if fits:
        assert isinstance(last, Done)
        assert len(last.token_ids) == 1
    else:
        assert isinstance(last, Failed)
        assert isinstance(last.error, ContextTooLong)
        assert (last.error.need, last.error.limit) == (length + 1, 20)
        assert fake(engine).starts == 0


def test_stop_strings_end_the_answer_before_them(make: Make) -> None:
    engine = make(answer=lambda prompt: "one\n\ntwo")
    events = list(engine.submit(request(stop=("\n\n",))))
    assert "".join(event.text for event in events if isinstance(event, Token)) == "one"
    assert isinstance(events[-1], Done)
    assert (events[-1].finish_reason, events[-1].text) == ("stop", "one")


def test_text_held_for_a_stop_string_comes_at_the_end(make: Make) -> None:
    engine = make(answer=lambda prompt: "ends with <")
    for limit in (None, 11):
        events = list(engine.submit(request(stop=("</s>",), max_new_tokens=limit)))
        assert "".join(event.text for event in events if isinstance(event, Token)) == "ends with <"


def test_endless_repetition_ends_as_a_loop(make: Make) -> None:
    engine = make(answer=lambda prompt: "So: " + "again and " * 90)
    answer = done(engine.submit(request()))
    assert answer.finish_reason == "loop"
    assert len(answer.token_ids) == len("So:") + 256


def test_cancel_during_prefill_stops_within_the_chunk_and_publishes_what_was_read(make: Make) -> None:
    gate = Gate("prefill", at=2)
    engine = make(hook=gate)
    generation = engine.submit(request("x" * 100, "chat"))
    assert gate.reached.wait(WAIT)
    generation.cancel()
    gate.open.set()
    end = done(generation)
    assert (end.finish_reason, end.text, end.token_ids) == ("cancelled", "", ())
    assert fake(engine).read == 32
    assert fake(engine).kept == {"chat": tuple(b"x" * 32)}
    again = done(engine.submit(request("x" * 100, "chat")))
    assert again.usage.cached_tokens == 32


def test_cancel_during_decode_stops_within_a_token(make: Make) -> None:
    gate = Gate("decode", at=3)
    engine = make(answer=lambda prompt: "abcdefgh", hook=gate)
    generation = engine.submit(request("x" * 10, "chat"))
    assert gate.reached.wait(WAIT)
    generation.cancel()
    gate.open.set()
    end = done(generation)
    assert (end.finish_reason, end.text, end.token_ids) == ("cancelled", "abc", tuple(b"abc"))
    assert gate.count == 3
    assert fake(engine).kept == {"chat": tuple(b"x" * 10 + b"abc")}


def test_cancel_in_the_queue_is_immediate_and_the_others_move_up(make: Make) -> None:
    gate = Gate("prefill", at=1)
    engine = make(hook=gate)
    first = engine.submit(request("1"))
    assert gate.reached.wait(WAIT)
    second, third = engine.submit(request("2")), engine.submit(request("3"))
    assert engine.busy
    second.cancel()
    assert [type(event) for event in second] == [Queued, Done]
    assert second.finished.is_set()
    assert not first.finished.is_set()
    gate.open.set()
    assert [event.place for event in third if isinstance(event, Queued)] == [2, 1]
    assert done(first).text == "Yes."
    assert fake(engine).starts == 2


def test_a_request_that_need_not_wait_is_not_queued(make: Make) -> None:
    engine = make()
    for _ in range(3):
        assert not any(isinstance(event, Queued) for event in engine.submit(request()))


def test_leaving_the_loop_cancels(make: Make) -> None:
    engine = make(answer=lambda prompt: "word " * 100, capacity=5000)
    generation = engine.submit(request())
    for event in generation:
        if isinstance(event, Token):
            break
    assert generation.cancelled
    assert generation.finished.wait(WAIT)
    assert done(generation).finish_reason == "cancelled"
    assert list(generation) == []


@pytest.mark.parametrize("started", [False, True])
def test_dropping_the_answer_cancels(make: Make, started: bool) -> None:
    gate = Gate("prefill", at=2)
    engine = make(hook=gate)
    generation = engine.submit(request("x" * 100))
    finished = generation.finished
    events = iter(generation)
    if started:
        assert isinstance(next(events), Progress)
    assert gate.reached.wait(WAIT)
    del generation, events
    gc.collect()
    gate.open.set()
    assert finished.wait(WAIT)
    assert fake(engine).read == 32


def test_cancelled_is_not_said_of_an_answer_that_ended(make: Make) -> None:
    generation = make().submit(request())
    assert done(generation).finish_reason == "stop"
    generation.cancel()
    assert not generation.cancelled


def test_a_failure_is_an_event_and_harms_no_other(make: Make) -> None:
    def fail(step: str, slot: FakeSlot) -> None:
        if step == "decode" and slot.ids[0] == ord("b"):
            raise OSError("the device went away")

    engine = make(answer=lambda prompt: f"I am {chr(prompt[0])}.", hook=fail)
    good, bad, other = (engine.submit(request(name, name)) for name in ("a", "b", "c"))
    assert done(good).text == "I am a."
    last = list(bad)[-1]
    assert isinstance(last, Failed)
    assert str(last.error) == "the device went away"
    assert done(other).text == "I am c."
    assert fake(engine).open_slots == 0
    assert set(fake(engine).kept) == {"a", "c"}
    assert not engine.busy


def test_running_out_of_memory_frees_what_the_request_held(make: Make) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def exhaust(step: str, slot: FakeSlot) -> None:
        if not held:
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            raise MemoryError

    engine = make(hook=exhaust)
    last = list(engine.submit(request()))[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, MemoryError)
    assert held[0]() is None  # although the error, and its traceback, are still here
    assert done(engine.submit(request())).text == "Yes."


def test_logits_that_are_not_finite_fail_with_their_step(make: Make) -> None:
    engine = make(answer=lambda prompt: "abc")
    runner = fake(engine)
    plain = runner.logits

    def logits(best: int) -> torch.Tensor:
        return torch.full((258,), torch.nan) if best == ord("c") else plain(best)

    runner.logits = logits  # type: ignore[method-assign]
    last = list(engine.submit(request()))[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, BadLogits)
    assert "token 3" in str(last.error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_the_worker_outlives_everything(make: Make, error: BaseException) -> None:
    errors = [error]

    def leave(step: str, slot: FakeSlot) -> None:
        if errors:
            raise errors.pop()

    engine = make(hook=leave)
    assert isinstance(list(engine.submit(request()))[-1], Failed)
    assert done(engine.submit(request())).text == "Yes."


def test_on_done_comes_before_the_event_and_its_failure_is_told(make: Make) -> None:
    engine = make()
    order: list[str] = []
    generation = engine.submit(request(), lambda event: order.append(event.text))
    order.extend("event" for event in generation if isinstance(event, Done))
    assert order == ["Yes.", "event"]

    def refuse(event: Done) -> None:
        raise ValueError("no room in the history")

    assert isinstance(list(engine.submit(request(), refuse))[-1], Failed)
    assert done(engine.submit(request())).text == "Yes."


def test_next_event_gives_up_after_its_timeout(make: Make) -> None:
    gate = Gate("prefill", at=1)
    engine = make(hook=gate)
    generation = engine.submit(request())
    assert isinstance(generation.next_event(WAIT), Progress)
    assert generation.next_event(0.01) is None
    gate.open.set()
    assert generation.result().text == "Yes."
    assert generation.next_event() is None


def test_close_cancels_what_runs_and_waits_and_refuses_more(make: Make) -> None:
    gate = Gate("prefill", at=1)
    engine = make(hook=gate)
    running, waiting = engine.submit(request("x" * 100)), engine.submit(request())
    assert gate.reached.wait(WAIT)
    threading.Timer(0.05, gate.open.set).start()
    engine.close()
    assert done(running).finish_reason == done(waiting).finish_reason == "cancelled"
    with pytest.raises(OctavoError, match="closed"):
        engine.submit(request())


def test_wrong_requests_are_refused_before_they_wait(make: Make) -> None:
    engine = make()
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.submit(GenerationRequest(()))
    with pytest.raises(ValueError, match="top_p"):
        engine.submit(request(top_p=2.0))


def test_many_at_once_get_their_own_answers(make: Make) -> None:
    engine = make(answer=lambda prompt: f"For {bytes(prompt).decode()}.")
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = done(engine.submit(request(f"person {number}", str(number)))).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert answers == {number: f"For person {number}." for number in range(20)}


def test_cancelling_at_any_moment_ends_every_answer(make: Make) -> None:
    engine = make(answer=lambda prompt: "word " * 50, hook=lambda step, slot: time.sleep(0.0002))
    generations = []
    for number in range(40):
        generation = engine.submit(request("x" * (1 + number % 50), str(number)))
        threading.Timer(0.0005 * number, generation.cancel).start()
        generations.append(generation)
    for generation in generations:
        end = done(generation)
        assert end.text == "word " * 50 or end.finish_reason == "cancelled"
    assert fake(engine).open_slots == 0


def test_progress_is_what_the_device_has_read(make: Make) -> None:
    engine = make(behind=True)
    events = list(engine.submit(request("x" * 50)))
    assert [event.done for event in events if isinstance(event, Progress)] == [0, 16, 32, 50]
    assert isinstance(events[-1], Done)


def test_a_prompt_may_take_hours_while_it_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk tells how far it is and what is left; no clock ends what goes on."""
    hours = [0.0]
    for clock in ("perf_counter", "monotonic", "time"):
        plain = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda plain=plain: plain() + hours[0])

    def chunk(step: str, slot: FakeSlot) -> None:
        hours[0] += 700.0

    engine = make(hook=chunk, answer=lambda prompt: "Yes")
    events = list(engine.submit(request("x" * 160)))
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.done for event in progress] == list(range(0, 161, 16))
    for event in progress[1:]:
        assert event.seconds_left == pytest.approx(700 * (160 - event.done) / 16, rel=0.01)
    assert isinstance(events[-1], Done)
    assert events[-1].text == "Yes"


def test_time_left_follows_a_cost_that_grows_with_depth() -> None:
    cost = CostModel()
    assert cost.seconds(0, 10) is None

    def true(start: int, end: int) -> float:
        return 1e-4 * (end - start) + 1e-9 * (end**2 - start**2)

    for start in range(0, 100_000, 10_000):
        cost.observe(start, start + 10_000, true(start, start + 10_000))
    assert cost.seconds(100_000, 1_000_000) == pytest.approx(true(100_000, 1_000_000), rel=1e-6)


def test_before_depth_was_seen_the_models_arithmetic_stands_in() -> None:
    cost = CostModel(ratio=1e-5)
    cost.observe(0, 1000, 1e-4 * 1000 + 1e-9 * 1000**2)
    assert cost.seconds(0, 100_000) == pytest.approx(1e-4 * 1e5 + 1e-9 * 1e10, rel=1e-6)


def test_a_few_tokens_do_not_spoil_the_estimate() -> None:
    cost = CostModel()
    for _ in range(5):
        cost.observe(0, 2000, 2.0)
        cost.observe(2000, 2010, 0.2)  # ten tokens, nearly all of it overhead
    assert cost.seconds(0, 2000) == pytest.approx(2.0, rel=0.15)


# Seconds of each chunk of 8,192 tokens as one H200 read 327,680 of them; two chunks in which kernels were compiled, at
# 1.43 and 2.0, are replaced by their neighbours' mean.
MEASURED = (
    *(0.1572, 0.1784, 0.202, 0.2281, 0.2595, 0.2859, 0.3123, 0.3388, 0.3693, 0.4059, 0.4207, 0.4666, 0.4775, 0.5199),
    *(0.5336, 0.5699, 0.5939, 0.6195, 0.6568, 0.676, 0.7058, 0.7345, 0.7666, 0.7872, 0.8148, 0.8443, 0.873, 0.9055),
    *(0.9294, 0.9518, 0.9816, 1.0149, 1.0332, 1.0675, 1.094, 1.1216, 1.1457, 1.1773, 1.2058, 1.2356),
)


def test_time_left_is_right_after_the_first_tenth_of_a_measured_run() -> None:
    cost, chunk = CostModel(), 8192
    total = chunk * len(MEASURED)
    for number, seconds in enumerate(MEASURED):
        cost.observe(number * chunk, (number + 1) * chunk, seconds)
        if 10 * (number + 1) >= len(MEASURED) and number + 1 < len(MEASURED):
            left = sum(MEASURED[number + 1 :])
            assert cost.seconds((number + 1) * chunk, total) == pytest.approx(left, rel=0.1), number


@pytest.mark.parametrize(("linear", "quadratic"), [(2e-5, 2e-10), (2e-5, 0.0), (1e-6, 3e-9), (1e-3, 1e-8)])
def test_time_left_is_right_after_the_first_tenth_with_noise(linear: float, quadratic: float) -> None:
    noise = random.Random(1)
    cost, chunk, chunks = CostModel(ratio=0.2 * quadratic / linear), 4096, 250  # what the arithmetic says is far off
    exact = [linear * chunk + quadratic * chunk**2 * (2 * i + 1) for i in range(chunks)]
    for number, seconds in enumerate(exact):
        cost.observe(number * chunk, (number + 1) * chunk, seconds * noise.uniform(0.99, 1.01))
        if 10 * (number + 1) >= chunks and number + 1 < chunks:
            left = sum(exact[number + 1 :])
            assert cost.seconds((number + 1) * chunk, chunk * chunks) == pytest.approx(left, rel=0.1), number


def test_the_engine_knows_nothing_of_pages_and_servers() -> None:
    for file in Path(app.engine.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        tops = {name.split(".")[0] for name in names}
        assert not tops & {"gradio", "fastapi", "starlette", "transformers", "tokenizers"}, file
        outside = ("app.ui", "app.api", "app.service", "app.local", "app.remote")
        assert not {name for name in names if name.startswith(outside)}, file


def test_requests_that_end_in_many_threads_are_all_counted() -> None:
    totals = Totals()
    switch, ends = sys.getswitchinterval(), 2000
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [totals.ended("stop") for _ in range(ends)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            totals.as_dict()
    finally:
        sys.setswitchinterval(switch)
    assert totals.as_dict()["requests"] == {"stop": 8 * ends}


def test_work_between_requests_comes_in_its_turn_and_harms_none(make: Make) -> None:
    gate, order = threading.Event(), []
    engine = make(hook=lambda step, slot: gate.wait(WAIT))
    first = engine.submit(request("First?"), lambda done: order.append("first"))

    def work() -> None:
        order.append("work")
        assert done(engine.submit(request("Of the work itself?"))).text == "Yes."  # at once, though another waits

    thread = threading.Thread(target=engine.between, args=(work,))
    thread.start()
    while not engine.waiting:
        time.sleep(0.001)
    second = engine.submit(request("Second?"), lambda done: order.append("second"))
    assert not order
    gate.set()
    assert done(first).text == done(second).text == "Yes."
    thread.join(WAIT)
    assert order == ["first", "work", "second"]
    with pytest.raises(ZeroDivisionError):
        engine.between(lambda: print(1 // 0))
    assert done(engine.submit(request("After it?"))).text == "Yes."


def test_work_that_waits_hears_of_the_end(make: Make) -> None:
    gate, failed = threading.Event(), []
    engine = make(hook=lambda step, slot: gate.wait(WAIT))
    running = engine.submit(request("First?"))

    def wait() -> None:
        try:
            engine.between(lambda: None)
        except OctavoError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not engine.waiting:
        time.sleep(0.001)
    closing = threading.Thread(target=engine.close)
    closing.start()
    thread.join(WAIT)
    gate.set()
    closing.join(WAIT)
    assert failed == ["The engine is closed."]
    assert done(running).finish_reason == "cancelled"


def test_an_estimate_forgets_a_busy_machine_at_once() -> None:
    cost = CostModel()
    for start in range(0, 20 * 256, 256):
        cost.observe(start, start + 256, 2.5)  # other programs took the processors
    assert cost.seconds(0, 256) == pytest.approx(2.5, rel=0.2)
    cost.observe(0, 256, 0.25)
    cost.observe(256, 512, 0.25)
    estimate = cost.seconds(0, 512)
    assert estimate is not None and estimate < 1.0
