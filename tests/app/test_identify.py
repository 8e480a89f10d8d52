"""`python -m app identify` on the real embedded model, with a context short enough for a test."""

import json
from pathlib import Path

import pytest

from app.__main__ import main
from app.embedded import embedded_model_path
from app.evaluation.haystack import Haystack, make_needles
from app.evaluation.passkeys import PromptMaker
from app.tokenizer import Tokenizer
from models.checkpoint import open_checkpoint
from models.heads import HeadPattern


@pytest.fixture(scope="module")
def maker(prose: str) -> PromptMaker:
    tokenizer = Tokenizer(embedded_model_path())
    return PromptMaker(tokenizer, Haystack.of(prose[:60_000], tokenizer))


def test_needles_lie_at_their_depths_and_the_length_is_right(maker: PromptMaker) -> None:
    import random

    needles = make_needles(3, random.Random(0))
    for start in (0, 5000):
        ids, places = maker.document(2000, list(zip((0.9, 0.0, 0.5), needles, strict=True)), start)
        assert len(ids) == places[-1] == 2000
        assert maker.tokenizer.decode(ids[places[0] :]).startswith(needles[1].sentence)
        text = maker.tokenizer.decode(ids)
        at = [text.index(needle.sentence) / len(text) for needle in needles]
        assert at == pytest.approx([0.9, 0.0, 0.5], abs=0.05)
    ids, (place, end) = maker.prompt_at(1000, [(0.5, needles[0])], needles[0].question, 0)
    assert abs(len(ids) - 1000) < 10
    assert maker.tokenizer.decode(ids[place:end]).startswith(needles[0].sentence)
    assert maker.tokenizer.decode(ids[end:]).startswith("\n\nAnswer")


def test_the_samples_end_in_what_is_scored(maker: PromptMaker) -> None:
    import random

    sample = maker.passkeys(1500, random.Random(1))
    answer = maker.tokenizer.decode(sample.tokens[-sample.answer :].tolist())
    codes = [line.rsplit(" ", 1)[1].rstrip(".") for line in answer.splitlines()]
    document = maker.tokenizer.decode(sample.tokens[: -sample.answer].tolist())
    assert len(codes) == 10 and all(code in document for code in codes)
    copied = maker.copying(300, random.Random(2))
    assert (copied.tokens[-copied.answer :] == copied.tokens[1 : 1 + copied.answer]).all()
    assert len({tuple(maker.passkeys(1500, random.Random(3)).tokens.tolist()) for _ in range(2)}) == 1


def test_training_free(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.status_line._EVERY_S", 0.0)
    command = ["identify", "--model", "embedded", "--out", str(tmp_path), "--training-free"]
    assert main([*command, "--sink", "4", "--recent", "32", "--context", "300"]) == 0
    pattern = HeadPattern.load(tmp_path)
    pattern.check(open_checkpoint(embedded_model_path()).config)
    assert (pattern.sink, pattern.recent) == (4, 32)
    assert json.loads((tmp_path / "identify.json").read_text())["training_free_s"] > 0
    told = capsys.readouterr()
    assert "attention beyond the window" in told.out
    assert "Reading the weights 100%" in told.err
    assert "Copying texts 50%, " in told.err and "Copying texts 100%" in told.err


def test_gates_of_one_run_are_not_taken_for_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["identify", "--model", "embedded", "--out", str(tmp_path), "--steps", "1", "--sink", "4"]
    command += ["--recent", "32", "--context", "100"]
    assert main(command) == 0
    found = (tmp_path / "identify.json").read_text()
    for other in (["--seed", "5"], ["--context", "99"], ["--haystack", __file__]):
        assert main([*command, *other]) == 1
        assert "training.pt is of another model, text, length, seed or recipe" in capsys.readouterr().err
        assert (tmp_path / "identify.json").read_text() == found
    assert main(command) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--refine", "-1"], "--refine is -1"),
        (["--retrieval-ratio", "1"], "between 0 and 1"),
        (["--haystack", "/nowhere"], "there is no /nowhere"),
        (["--context", "500"], "hardly leave the window"),
    ],
)
def test_wrong_usage(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identify", "--model", "embedded", "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
