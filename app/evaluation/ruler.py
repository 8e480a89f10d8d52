"""Tasks in the shapes of RULER (arXiv 2404.06654), generated here: many keys, many values, variables, common words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from app.errors import UsageError
from app.evaluation.examiner import Examiner, Journal
from app.evaluation.haystack import Needle, make_needles
from app.evaluation.passkeys import PromptMaker

_KEYS = 16
_VALUES = 4
_HOPS = 4
_COMMON, _OFTEN, _RARELY = 10, 30, 3  # words asked for, how often each of them comes, and each of the others
_COMMON_TOKENS_A_WORD = 4  # at least, with its number
ANSWER_TOKENS = 128


@dataclass(frozen=True)
class Task:
    """A prompt and all that its answer must name."""

    ids: list[int]
    expected: Sequence[str]


def found_share(answer: str, expected: Sequence[str]) -> float:
    """RULER's score: the share of what was expected that the answer names, whatever else it says; case is ignored."""
    text = answer.lower()
    return mean(bool(re.search(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text)) for word in expected)


def multi_key(maker: PromptMaker, tokens: int, random_: random.Random) -> Task:
    """Many pass codes of different things, one of them asked for."""
    needles = make_needles(_KEYS, random_)
    return _planted(maker, tokens, needles, needles[0].question, [needles[0].answer], random_)


def multi_value(maker: PromptMaker, tokens: int, random_: random.Random) -> Task:
    """Several pass codes of one thing, all of them asked for."""
    name = make_needles(1, random_)[0].name
    codes = [str(code) for code in random_.sample(range(10000, 100000), _VALUES)]
    needles = [Needle(name, f" One of the pass codes of the {name} is {code}.", "", "", code) for code in codes]
    return _planted(maker, tokens, needles, f"What are all {_VALUES} pass codes of the {name}?", codes, random_)


def variables(maker: PromptMaker, tokens: int, random_: random.Random) -> Task:
    """A value handed from variable to variable; all variables that hold it are asked for."""
    names = ["".join(random_.choices("BCDFGHJKLMNPQRSTVWXZ", k=5)) for _ in range(_HOPS + 1)]
    value = str(random_.randrange(10000, 100000))
    lines = [f" VAR {names[0]} = {value}."]
    lines += [f" VAR {after} = VAR {before}." for before, after in pairwise(names)]
    depths = sorted(random_.random() for _ in lines)
    needles = [(depth, Needle(line, line, "", "", "")) for depth, line in zip(depths, lines, strict=True)]
    question = f"Which variables have the value {value}, directly or through other variables? Name all {len(names)}."
    return Task(maker.prompt_at(tokens, needles, question, _start(maker, random_))[0], names)


def common_words(maker: PromptMaker, tokens: int, random_: random.Random) -> Task:
    """A numbered list in which some words come far more often than others; those are asked for."""
    vocabulary = sorted(set(re.findall(r"\b[a-z]{4,9}\b", maker.haystack.text)))
    random_.shuffle(vocabulary)
    if len(vocabulary) < _COMMON + 1:
        raise UsageError("The haystack has too few different words for a list of common ones: give a longer text.")
    common, others = vocabulary[:_COMMON], vocabulary[_COMMON:]
    question = f"What are the {_COMMON} most common words in the list above?"
    room = tokens - len(maker.render([], question))
    often = min(_OFTEN, max(_RARELY + 1, room // (3 * _COMMON * _COMMON_TOKENS_A_WORD)))
    words = common * often
    low, high = 0, max(0, room)
    while low < high:  # the most other words that fit, each as often as the rare ones
        middle = (low + high + 1) // 2
        if len(_listed(maker, words + _repeat(others, middle))) <= room:
            low = middle
        else:
            high = middle - 1
    words += _repeat(others, low)
    random_.shuffle(words)
    return Task(maker.render(_listed(maker, words)[: max(room, 0)], question), common)


TASKS: dict[str, Callable[[PromptMaker, int, random.Random], Task]] = {
    "multi-key": multi_key,
    "multi-value": multi_value,
    "variables": variables,
    "common-words": common_words,
}


def check(tasks: Sequence[str], lengths: Sequence[int], capacity: int) -> None:
    """Raises UsageError for what cannot be asked of a context of so many tokens."""
    if unknown := sorted(set(tasks) - TASKS.keys()):
        raise UsageError(f"There is no task {', '.join(unknown)}. Choose of: {', '.join(TASKS)}.")
    if not lengths or min(lengths) < 1024 or max(lengths) + ANSWER_TOKENS > capacity:
        raise UsageError(
            f"--length must be from 1,024 to {capacity - ANSWER_TOKENS:,} tokens: an answer of {ANSWER_TOKENS} must "
            "fit behind it."
        )


def ruler(
    examiner: Examiner,
    maker: PromptMaker,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    journal: Journal,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The mean share of what was expected, by task and length in tokens."""
    check(tasks, lengths, examiner.capacity)
    scores: dict[str, dict[str, float]] = {name: {} for name in tasks}
    total, done = len(tasks) * len(lengths) * samples, 0
    for name in tasks:
        for length in lengths:
            keys = [f"{name} {length} {sample}" for sample in range(samples)]
            for key in keys:
                if key not in journal:
                    task = TASKS[name](maker, length, random.Random(f"{seed} {key}"))
                    answer = examiner.ask(task.ids, ANSWER_TOKENS)
                    score = found_share(answer, task.expected)
                    row = {"task": name, "length": length, "tokens": len(task.ids), "answer": answer}
                    journal.add(key, **row, expected=list(task.expected), score=score)
                done += 1
                progress(done, total)
            scores[name][str(length)] = mean(journal.rows[key]["score"] for key in keys)
    return scores


def _planted(
    maker: PromptMaker,
    tokens: int,
    needles: Sequence[Needle],
    question: str,
    expected: Sequence[str],
    random_: random.Random,
) -> Task:
    depths = [(random_.random(), needle) for needle in needles]
    return Task(maker.prompt_at(tokens, depths, question, _start(maker, random_))[0], expected)


def _start(maker: PromptMaker, random_: random.Random) -> int:
    return random_.randrange(len(maker.haystack.ids))


def _repeat(words: Sequence[str], count: int) -> list[str]:
    """`count` entries from `words`, each word _RARELY times before the next, round and round."""
    return [words[i // _RARELY % len(words)] for i in range(count)]


def _listed(maker: PromptMaker, words: Sequence[str]) -> list[int]:
    text = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    return maker.tokenizer.encode_text(text, start=False)
