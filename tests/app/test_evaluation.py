"""Needle, RULER and LongBench on a scripted model that reads its prompt, and metrics worked out by hand."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.needle as bench
from app.__main__ import main
from app.errors import UsageError
from app.evaluation import metrics
from app.evaluation.commands import RULER_TASKS
from app.evaluation.examiner import Examiner, Journal, Stopped
from app.evaluation.haystack import Haystack, read_haystack
from app.evaluation.longbench import Item, digest, longbench, prompt_of, read_items, score
from app.evaluation.needle import Grid, heat_map, needle
from app.evaluation.passkeys import PromptMaker
from app.evaluation.ruler import TASKS, found_share, ruler
from app.evaluation.selftest import SelfTest
from app.model import OpenModel
from tests.fakes import FakeRunner, FakeSlot, FakeTokenizer

TEXT = "The harbour was quiet in the morning. Nobody had seen the boat leave, and the fog hid the far shore. " * 60
TOKENIZER = FakeTokenizer()


def found(prompt: tuple[int, ...]) -> str:
    """Reads the code that the question asks for; blind to what lies in the middle third."""
    text = TOKENIZER.decode(prompt)
    document, question = text.rsplit("Answer from the document above.", 1)
    name = re.search(r"pass code of the (.+?)\?", question)
    assert name is not None
    third = len(document) // 3
    sighted = document[:third] + " ... " + document[2 * third :]
    code = re.search(rf"pass code of the {name[1]} is (\d+)", sighted)
    return f"It is {code[1]}." if code else "I do not know."


_opened: list[Examiner] = []


def examiner(runner: FakeRunner) -> Examiner:
    """Closed when the test has ended."""
    _opened.append(Examiner(OpenModel("fake", runner, TOKENIZER, frozenset(), lambda context: 0)))  # type: ignore[arg-type]
    return _opened[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture
def haystack() -> Haystack:
    return Haystack.of(TEXT, TOKENIZER)


@pytest.mark.parametrize("multi", [False, True])
def test_needle_tells_what_is_found_and_where(multi: bool, haystack: Haystack, tmp_path: Path) -> None:
    grid = Grid((3000, 6000), depths=5, trials=2, multi=multi)
    asked = examiner(FakeRunner(found, capacity=8000, chunk=4096))
    result = needle(asked, haystack, grid, Journal(tmp_path / "needle.jsonl", {}))
    asked.close()
    assert result["hits"] == [[1, 1, 0, 1, 1]] * 2
    assert result["accuracy"] == pytest.approx(0.8)
    heat_map(np.array(result["hits"]), grid.lengths, result["depths"], tmp_path / "needle.png")
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_evaluation_goes_on_and_another_is_refused(haystack: Haystack, tmp_path: Path) -> None:
    file = tmp_path / "needle.jsonl"
    grid = Grid((3000,), depths=4)
    whole = needle(examiner(FakeRunner(found, 8000, 4096)), haystack, grid, Journal(file, {"a": 1}))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:20])  # cut in the midst of a line
    runner = FakeRunner(found, 8000, 4096)
    assert needle(examiner(runner), haystack, grid, Journal(file, {"a": 1})) == whole
    assert runner.starts == 2
    assert len(file.read_text().splitlines()) == 5
    with pytest.raises(UsageError, match="another evaluation: a differ"):
        Journal(file, {"a": 2})


def test_needles_share_what_they_begin_with(haystack: Haystack, tmp_path: Path) -> None:
    marks: list[int] = []

    class Noting(FakeRunner):
        def start(self, prompt_ids, marks_=(), tell=None):  # type: ignore[no-untyped-def]
            (mark,) = marks_
            assert b"is" not in bytes(i for i in prompt_ids[:2] if i < 256)
            begins = TOKENIZER.decode(prompt_ids[: mark.position])
            assert "pass code" not in begins
            assert TOKENIZER.decode(prompt_ids[mark.position :]).startswith(" The pass code")
            marks.append(mark.position)
            return super().start(prompt_ids)

    needle(examiner(Noting(found, 8000, 4096)), haystack, Grid((3000, 6000), 4), Journal(tmp_path / "n.jsonl", {}))
    assert marks == sorted(marks) and len(marks) == 8  # each can start from the one before


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Grid((100,)), "256 tokens or more"),
        (Grid((7990,)), "the context holds 8,000"),
        (Grid((3000,), depths=0), "1 or more"),
        (Grid((600,), depths=10, multi=True), "fewer --depths"),
        (Grid((3000, 4000), depths=400), "These are 800 needles"),
    ],
)
def test_grids_that_cannot_be_asked(grid: Grid, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid.check(8000)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_ruler_prompts_hold_what_they_ask_for(name: str, haystack: Haystack) -> None:
    words = " ".join("".join(random.Random(i).choices("abcdefgh", k=6)) for i in range(400))
    maker = PromptMaker(TOKENIZER, Haystack.of(TEXT + words + ".", TOKENIZER))
    task = TASKS[name](maker, 6000, random.Random(3))
    assert abs(len(task.ids) - 6000) < 400
    document, question = TOKENIZER.decode(task.ids).rsplit("Answer from the document above.", 1)
    for word in task.expected:
        assert word in document and word not in question
    assert TASKS[name](maker, 6000, random.Random(3)).ids == task.ids
    if name == "common-words":
        listed = re.findall(r"\d+\. (\w+)", document)
        most = sorted(set(listed), key=lambda word: -listed.count(word))
        assert set(most[:10]) == set(task.expected)
        assert listed.count(most[9]) > listed.count(most[10])


def test_ruler_scores(haystack: Haystack, tmp_path: Path) -> None:
    assert found_share("It is 123 and 45.", ["123", "456", "45"]) == pytest.approx(2 / 3)
    assert found_share("1234", ["123"]) == 0  # a longer number is another
    asked = examiner(FakeRunner(found, 8000, 4096))
    maker = PromptMaker(TOKENIZER, haystack)
    scores = ruler(asked, maker, ["multi-key"], [3000], 6, 0, Journal(tmp_path / "r.jsonl", {}))
    assert 0 < scores["multi-key"]["3000"] < 1
    with pytest.raises(UsageError, match="no task x"):
        ruler(asked, maker, ["x"], [3000], 1, 0, Journal(tmp_path / "r.jsonl", {}))


def test_ruler_variables_are_those_of_one_chain(haystack: Haystack) -> None:
    """What is expected is found again by following the assignments as a reader would."""
    task = TASKS["variables"](PromptMaker(TOKENIZER, haystack), 6000, random.Random(5))
    document, question = TOKENIZER.decode(task.ids).rsplit("Answer from the document above.", 1)
    value = re.search(r"have the value (\w+),", question)
    assert value is not None
    pairs = re.findall(r"(\w+) = (?:VAR )?(\w+)", document)
    holding = {value[1]}
    for name, source in pairs * len(pairs):
        if source in holding:
            holding.add(name)
    assert holding - {value[1]} == set(task.expected)


def test_needle_bars_by_hand() -> None:
    names = ["prose", "code", "manual 1"]

    def side(lengths: tuple[int, ...], hits: list[list[float]], losses: list[float]) -> dict[str, Any]:
        loss = dict(zip(names, losses, strict=True))
        return {"lengths": list(lengths), "hits": hits, "accuracy": float(np.mean(hits)), "loss": loss}

    lengths, few = bench._LENGTHS, bench._OTHER_LENGTHS
    details = {
        "full bf16": side(lengths, [[1.0, 0.0]] * 8, [2.0, 1.0, 3.0]),
        "duo 50 %": side(lengths, [[1.0, 0.0]] * 8, [2.01, 1.004, 3.5]),
        "duo 50 % + KV4 + W8A8": side(lengths, [[1.0, 0.0]] * 7 + [[0.0, 0.0]], [2.02, 1.02, 3.0]),
        "duo 50 % + KV4 + W8A8, calibrated": side(lengths, [[1.0, 0.0]] * 8, [2.01, 1.01, 3.0]),
        "random 50 %": side(few, [[0.0, 0.0]] * 2, [2.1, 1.1, 3.0]),
        "inverted 50 %": side(few, [[1.0, 0.0]] * 2, [2.01, 1.01, 3.0]),
    }
    bars = [(bar.value, bar.holds) for bar in bench._bars(details)]
    assert bars == [
        (0.0, True),
        (pytest.approx(100 / 16), False),  # one of sixteen questions
        (0.0, True),
        (pytest.approx(100 * (math.exp(0.007) - 1), abs=1e-4), True),  # the manual is no part of the mean
        (pytest.approx(100 * (math.exp(0.1) - 1), abs=1e-4), True),
        (50.0, True),
        (pytest.approx(100 * (math.exp(0.01) - 1), abs=1e-4), False),
        (0.0, False),
    ]


def test_metrics_by_hand() -> None:
    # ours: {cat, sat, on, mat}; theirs: {cat, lay, on, mat, there}; 3 in common: 2 * 3 / (4 + 5)
    assert metrics.qa_f1("The cat sat on the mat.", "A cat lay on the mat there!") == pytest.approx(6 / 9)
    assert metrics.qa_f1("nothing", "else") == 0
    # longest common subsequences: (a b d) and (x); of 5 distinct words here and 6 there
    assert metrics.rouge_l("a b c d. x", "a b d e. x y.") == pytest.approx(2 * 4 / (5 + 6))
    assert metrics.rouge_l("", "a") == 0
    classes = ["Food", "Food and drink", "Sport"]
    assert metrics.classification("Food and drink", "Food and drink", classes) == 1  # "Food" lies within it
    assert metrics.classification("Sport or Food", "Food", classes) == 0.5
    assert metrics.classification("Sport", "Food", classes) == 0
    assert metrics.retrieval("Paragraph 12, or 3", "Paragraph 12") == 0.5
    assert metrics.count("There are 7.", "7") == 1
    assert metrics.count("many", "7") == 0
    # "return x" against "return y": 7 of 8 characters: 2 * 7 / 16 = 0.875, in whole percent
    assert metrics.code_similarity("# first\nreturn x\nmore", "return y") == pytest.approx(0.88)


def test_longbench_reads_its_format_and_averages(tmp_path: Path) -> None:
    rows = [
        {"input": "Who?", "context": "Ann came. " * 50, "answers": ["Ann", "Miss Ann"], "all_classes": None},
        {"input": "When?", "context": "At noon. " * 50, "answers": ["noon"], "all_classes": None},
    ]
    (tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = list(read_items(tmp_path, [], None))
    assert [item.key for item in items] == ["hotpotqa 1", "hotpotqa 2"]
    asked = examiner(FakeRunner(lambda prompt: "Ann", 2000, 4096))
    assert longbench(asked, items, Journal(tmp_path / "out.jsonl", {})) == {"hotpotqa": 50.0}
    assert list(read_items(tmp_path / "hotpotqa.jsonl", [], 1)) == items[:1]


def test_what_is_too_long_loses_its_middle() -> None:
    asked = examiner(FakeRunner(capacity=1000, chunk=4096))
    item = Item("qasper 1", "qasper", "begin " + "middle " * 500 + "end", "What?", ["x"], [])
    ids = prompt_of(asked, item)
    assert len(ids) == 1000 - 128 - 1
    text = TOKENIZER.decode(ids)
    assert "begin middle" in text and "middle end" in text and "Question: What?" in text
    code = Item("lcc 1", "lcc", "def f():\n", "", ["x"], [])
    assert TOKENIZER.decode(prompt_of(asked, code)) == "def f():\n"  # continued as it is
    with pytest.raises(UsageError, match="question alone"):
        prompt_of(asked, Item("qasper 2", "qasper", "", "What? " * 300, ["x"], []))


def test_first_line_and_best_reference() -> None:
    item = Item("triviaqa 1", "triviaqa", "", "", ["no", "yes"], [])
    assert score(item, "\nyes\nand more text that is not looked at") == 1
    assert score(Item("trec 1", "trec", "", "", ["Sport"], ["Sport", "Food"]), "Sport") == 1


@pytest.mark.parametrize(
    ("name", "content", "tasks", "message"),
    [
        ("qasper.jsonl", "{", [], "line 1 is not LongBench's"),
        ("qasper.jsonl", '{"context": "a"}', [], "line 1 is not LongBench's"),
        ("other.txt", "", [], "has none of"),
        ("qasper.jsonl", "", ["lcc"], "has no lcc.jsonl"),
        ("qasper.jsonl", "", ["dureader"], "dureader is not supported"),
        ("qasper.jsonl", "\n", [], "qasper.jsonl is empty"),
        ("qasper.jsonl", "\udcff", [], "line 1 is not LongBench's: it is not UTF-8"),
        ("qasper.jsonl", "\n" + "[" * 100_000, [], "line 2 is not LongBench's: it is nested too deeply"),
        ("qasper.jsonl", "3", [], "line 1 is not LongBench's: it must hold one JSON object"),
        *(
            ("qasper.jsonl", json.dumps({"context": "a", "input": "b", "answers": ["c"]} | {name: value}), [], told)
            for name, value, told in (
                ("context", [1], "line 1 is not LongBench's: context must be a text"),
                ("input", 5, "line 1 is not LongBench's: input must be a text"),
                ("answers", "Bob", "answers must be a list of one or more texts"),
                ("answers", [], "answers must be a list of one or more texts"),
                ("answers", [3], "answers must be a list of one or more texts"),
                ("all_classes", [1, 2], "all_classes must be a list of texts, or null"),
            )
        ),
        ("trec.jsonl", '{"context": "a", "input": "b", "answers": ["c"]}', [], "all_classes must be a list of texts"),
    ],
)
def test_damaged_data_is_refused(name: str, content: str, tasks: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message):
        list(read_items(tmp_path, tasks, None))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b'{"a": 1}\n{"score": 1}', "line 2 is damaged: key must be a text"),
        (b'{"a": 1}\n{"key": 5, "score": 1}', "line 2 is damaged: key must be a text"),
        (b'{"a": 1}\n{"key": "x", "score": 1}\n{"key": "y"}', "line 3 is damaged: score must be a number"),
        *(
            (b'{"a": 1}\n{"key": "x", "score": %s}' % score, "line 2 is damaged: score must be a number from 0 to 1")
            for score in (b'"1"', b"null", b"NaN", b"2")
        ),
        (b'{"a": 1}\n\xff', "line 2 is damaged: it is not UTF-8"),
        (b"\xff", "line 1 is damaged: it is not UTF-8"),
        (b"[1]", "line 1 is damaged: it must hold one JSON object"),
        (b"[" * 100_000, "line 1 is damaged: it is nested too deeply"),
    ],
)
def test_damaged_journals_are_refused_by_line(lines: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "needle.jsonl"
    file.write_bytes(lines + b"\n")
    with pytest.raises(UsageError, match=rf"needle\.jsonl, {told}.*Give another --out, or delete it\."):
        Journal(file, {"a": 1}, "score")
    assert file.read_bytes() == lines + b"\n"


def test_longbench_goes_on_in_the_context_that_it_began_in(tmp_path: Path) -> None:
    items = [Item("qasper 1", "qasper", "word " * 500, "What?", ["x"], [])]
    file = tmp_path / "out.jsonl"
    longbench(examiner(FakeRunner(capacity=1000)), items, Journal(file, {}, "score"))
    again = FakeRunner(capacity=1000)
    longbench(examiner(again), items, Journal(file, {}, "score"))
    assert again.starts == 0
    with pytest.raises(UsageError, match="another context than the 900 tokens"):
        longbench(examiner(FakeRunner(capacity=900)), items, Journal(file, {}, "score"))


def test_self_test_shows_where_the_model_is_blind(haystack: Haystack) -> None:
    test = SelfTest(examiner(FakeRunner(found, capacity=9000, chunk=4096)), TEXT, 5)
    seen = list(test)
    assert [one.found for one in seen] == [True, True, False, True, True]
    assert [one.depth for one in seen] == [0, 0.25, 0.5, 0.75, 1]
    assert test.tokens == test.of == len(haystack.ids)  # the whole text
    cut = SelfTest(examiner(FakeRunner(found, capacity=3000, chunk=4096)), TEXT, 5)
    assert 1000 < cut.tokens < 3000 and cut.of == test.of and len(list(cut)) == 5  # as much of its beginning as fits
    for count in (0, 51):
        with pytest.raises(UsageError, match="1 to 50"):
            SelfTest(examiner(FakeRunner(found, capacity=3000, chunk=4096)), TEXT, count)
    with pytest.raises(UsageError, match="do not fit"):
        SelfTest(examiner(FakeRunner(found, capacity=200, chunk=4096)), TEXT, 1)


def test_self_test_plants_one_fact_at_a_time_and_none_that_is_there_already() -> None:
    prompts: list[str] = []

    def answer(prompt: tuple[int, ...]) -> str:
        prompts.append(TOKENIZER.decode(prompt))
        return found(prompt)

    list(SelfTest(examiner(FakeRunner(answer, 9000, 4096)), TEXT, 4))
    assert [prompt.count("The pass code of") for prompt in prompts] == [1] * 4
    codes = [re.search(r"is (\d{5})\. Remember", prompt) for prompt in prompts]
    taken = codes[0][1]  # type: ignore[index]
    del prompts[:]
    list(SelfTest(examiner(FakeRunner(answer, 9000, 4096)), TEXT + f"Room {taken}. ", 4))
    assert not any(f"is {taken}. Remember" in prompt for prompt in prompts)


def test_a_self_test_asks_one_by_one_and_is_stopped_at_once() -> None:
    asked = examiner(FakeRunner(found, 9000, 4096))
    run, seen = iter(SelfTest(asked, TEXT, 5)), []
    for _ in range(2):
        seen.append(next(run))
        assert not asked._engine.busy  # nothing of the test is in line between two questions
    asked.stop()
    with pytest.raises(Stopped):
        next(run)
    assert len(seen) == 2 and not asked._engine.busy
    reading = threading.Event()

    def slow(step: str, slot: FakeSlot) -> None:
        reading.set()
        time.sleep(0.01)

    asked = examiner(FakeRunner(found, 9000, 16, hook=slow))
    threading.Thread(target=lambda: (reading.wait(10), asked.stop())).start()
    with pytest.raises(Stopped):
        list(SelfTest(asked, TEXT, 5))
    assert asked._engine.runner.read < 3000  # type: ignore[attr-defined]  # ended in the midst of reading


def test_haystacks(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Second text.")
    (tmp_path / "a.txt").write_text("First text.")
    assert read_haystack(tmp_path) == "First text.\n\nSecond text."
    assert len(read_haystack(None)) > 100_000
    with pytest.raises(UsageError, match="there is no"):
        read_haystack(tmp_path / "c")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["longbench", "--data", "/nowhere"], "there is no /nowhere"),
        (["needle", "--haystack", "/nowhere"], "there is no /nowhere"),
        (["ruler", "--samples", "0"], "--samples is 0"),
        (["ruler", "--task", "zz"], "common-words"),
        (["ruler", "--length", "99999"], "--length must be from 1,024 to 8,064"),
        (["ruler", "--length", "3000", "--context", "2048"], "--length must be from 1,024 to 1,920"),
        (["needle", "--length", "99999"], "the context holds 8,192"),
        (["needle", "--depths", "1000"], "4,000 needles; there are 736"),
    ],
)
def test_wrong_usage_is_told_before_the_model_is_loaded(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("app.model.open_model", opened)
    assert main(["eval", *flags, "--model", "embedded", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["needle", "ruler", "longbench"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "png"])
def test_a_directory_where_a_result_is_to_be_is_told(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{kind}.{suffix}").mkdir()
    data = ["--data", "/nowhere"] if kind == "longbench" else []
    assert main(["eval", kind, *data, "--model", "embedded", "--out", str(tmp_path)]) == 2
    assert f"{kind}.{suffix} is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("tasks", [[], ["qasper"]])
def test_a_directory_in_place_of_data_is_told(tasks: list[str], tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"qasper\.jsonl cannot be read \(Is a directory\)"):
        list(read_items(tmp_path, tasks, None))
    digest(tmp_path)  # of those that are files


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(TASKS) == RULER_TASKS
    with pytest.raises(SystemExit):
        main(["eval", "ruler", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"only this one of {', '.join(TASKS)}" in told
