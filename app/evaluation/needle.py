"""Needle in a haystack: pass codes at every depth of documents of every length, and which of them are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import UsageError
from app.evaluation.examiner import Examiner, Journal
from app.evaluation.haystack import MOST_NEEDLES, Haystack, make_needles
from app.evaluation.passkeys import PromptMaker

ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Grid:
    """What is asked: prompt lengths in tokens, evenly spread depths, trials of each, one needle a document or all."""

    lengths: tuple[int, ...]
    depths: int = 10
    trials: int = 1
    multi: bool = False
    seed: int = 0

    def check(self, capacity: int) -> None:
        """Raises UsageError for a grid that cannot be asked."""
        if not self.lengths or min(self.lengths) < 256:
            raise UsageError("--length must be 256 tokens or more: below that the question fills the prompt.")
        if max(self.lengths) + ANSWER_TOKENS > capacity:
            raise UsageError(
                f"--length {max(self.lengths):,} and an answer of {ANSWER_TOKENS} tokens do not fit: the context holds "
                f"{capacity:,}."
            )
        if self.depths < 1 or self.trials < 1:
            raise UsageError("--depths and --trials must be 1 or more.")
        asked = self.depths if self.multi else len(self.lengths) * self.depths
        if asked > MOST_NEEDLES:
            raise UsageError(
                f"These are {asked:,} needles; there are {MOST_NEEDLES} at most. Give fewer --depths or --length."
            )
        if self.multi and self.depths * 64 > min(self.lengths):
            raise UsageError(
                f"{self.depths} needles fill a document of {min(self.lengths)} tokens: give fewer --depths."
            )

    def at(self) -> list[float]:
        """The depths, from 0 (the beginning) to 1 (the end)."""
        return [i / (self.depths - 1) for i in range(self.depths)] if self.depths > 1 else [0.5]


@dataclass(frozen=True)
class _Cell:
    """One question: its prompt, what must be in the answer, and how much of the prompt others begin with too."""

    key: str
    length: int
    depth: int
    ids: Sequence[int]
    shared: int
    code: str


def needle(
    examiner: Examiner,
    haystack: Haystack,
    grid: Grid,
    journal: Journal,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Fills the grid; `hits` [lengths][depths] is the share of trials in which the code was in the answer."""
    grid.check(examiner.capacity)
    maker = PromptMaker(examiner.tokenizer, haystack)
    total = len(grid.lengths) * grid.depths * grid.trials
    hits = np.zeros((len(grid.lengths), grid.depths))
    for done, cell in enumerate(_multi(maker, grid) if grid.multi else _single(maker, grid)):
        if cell.key not in journal:
            text = examiner.ask(cell.ids, ANSWER_TOKENS, cell.shared)
            row = {"length": cell.length, "depth": cell.depth, "tokens": len(cell.ids)}
            journal.add(cell.key, **row, hit=cell.code in text, code=cell.code, answer=text)
        hits[grid.lengths.index(cell.length), cell.depth] += journal.rows[cell.key]["hit"] / grid.trials
        progress(done + 1, total)
    return {"lengths": list(grid.lengths), "depths": grid.at(), "hits": hits.tolist(), "accuracy": float(hits.mean())}


def _single(maker: PromptMaker, grid: Grid) -> Iterator[_Cell]:
    """One needle a document. All documents of a trial are one text, read up to each needle's place only once."""
    for trial in range(grid.trials):
        random_ = random.Random(f"{grid.seed} {trial}")
        start = random_.randrange(len(maker.haystack.ids))
        needles = make_needles(len(grid.lengths) * grid.depths, random_)
        cells = []
        for (length, depth), one in zip(
            ((length, depth) for length in grid.lengths for depth in range(grid.depths)), needles, strict=True
        ):
            ids, places = maker.prompt_at(length, [(grid.at()[depth], one)], one.question, start)
            cells.append(_Cell(f"{trial} {length} {depth}", length, depth, ids, places[0], one.answer))
        yield from sorted(cells, key=lambda cell: cell.shared)


def _multi(maker: PromptMaker, grid: Grid) -> Iterator[_Cell]:
    """A needle at every depth of one document, each asked for by itself; the document is read once."""
    for trial in range(grid.trials):
        for length in grid.lengths:
            random_ = random.Random(f"{grid.seed} {trial} {length}")
            start = random_.randrange(len(maker.haystack.ids))
            needles = make_needles(grid.depths, random_)
            planted = list(zip(grid.at(), needles, strict=True))
            for depth, one in enumerate(needles):
                ids, places = maker.prompt_at(length, planted, one.question, start)
                yield _Cell(f"{trial} {length} {depth}", length, depth, ids, places[-1], one.answer)


def heat_map(hits: NDArray[np.float64], lengths: Sequence[int], depths: Sequence[float], file: Path) -> None:
    """A PNG of hits [lengths, depths]: length to the right, depth downwards."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure((1.5 + 0.6 * len(lengths), 4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(hits.T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for (x, y), hit in np.ndenumerate(hits):
        axes.text(x, y, f"{hit:.0%}", ha="center", va="center", fontsize=7)
    axes.set(xlabel="tokens", ylabel="depth", title=f"found: {hits.mean():.1%}")
    figure.savefig(file, dpi=120)
