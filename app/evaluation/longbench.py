"""LongBench's English and code tasks from its own jsonl files on disk, with its metrics; the instructions are ours."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from app.errors import UsageError
from app.evaluation import metrics
from app.evaluation.examiner import Examiner, Journal
from app.prompt import Encoded
from models.files import json_object


@dataclass(frozen=True)
class _Kind:
    """How a task is asked and scored: words before and behind the context, tokens of the answer, and the metric."""

    before: str
    behind: str
    tokens: int
    metric: Callable[..., float]
    first_line: bool = False  # only the answer's first line counts
    chat: bool = True  # false: the text is to be continued, without a chat template


_SHORT = "Question: {input}\nAnswer from the text above, in as few words as possible, with no explanation."
_QA = _Kind("Read this text.\n\n", "\n\n" + _SHORT, 32, metrics.qa_f1)
_QA_LONG = _Kind("Read this text.\n\n", "\n\nQuestion: {input}\nAnswer from the text above.", 128, metrics.qa_f1)
_SUMMARY = _Kind("Read this text.\n\n", "\n\nWrite a summary of the text above.", 512, metrics.rouge_l)
_EXAMPLES = "Here are examples of a task.\n\n"

TASKS: dict[str, _Kind] = {
    "narrativeqa": _QA_LONG,
    "qasper": _QA_LONG,
    "multifieldqa_en": _Kind(_QA.before, _QA.behind, 64, metrics.qa_f1),
    "hotpotqa": _QA,
    "2wikimqa": _QA,
    "musique": _QA,
    "gov_report": _SUMMARY,
    "qmsum": _Kind("Read this transcript.\n\n", "\n\nQuery: {input}\nAnswer in some sentences.", 512, metrics.rouge_l),
    "multi_news": _SUMMARY,
    "trec": _Kind(_EXAMPLES, "\n{input}", 64, metrics.classification, first_line=True, chat=False),
    "triviaqa": _Kind(_EXAMPLES, "\n\n{input}", 32, metrics.qa_f1, first_line=True, chat=False),
    "samsum": _Kind(_EXAMPLES, "\n\n{input}", 128, metrics.rouge_l, first_line=True, chat=False),
    "passage_count": _Kind(
        "These paragraphs may repeat.\n\n",
        "\n\nHow many different paragraphs are there? Answer with the number alone.",
        32,
        metrics.count,
    ),
    "passage_retrieval_en": _Kind(
        "Here are numbered paragraphs, and a summary of one.\n\n",
        '\n\nSummary: {input}\n\nWhich paragraph is it? Answer "Paragraph" and its number.',
        32,
        metrics.retrieval,
    ),
    "lcc": _Kind("", "", 64, metrics.code_similarity, chat=False),
    "repobench-p": _Kind("", "{input}", 64, metrics.code_similarity, chat=False),
}


@dataclass(frozen=True)
class Item:
    """One line of a task's file."""

    key: str
    task: str
    context: str
    input: str
    answers: Sequence[str]
    classes: Sequence[str]


def read_items(source: Path, tasks: Sequence[str], most: int | None) -> Iterator[Item]:
    """The first `most` items of each task, from NAME.jsonl in a directory, or from one file."""
    if not source.exists():
        raise UsageError(
            f"--data: there is no {source}. Give a directory with LongBench's jsonl files, or one of them."
        )
    files = _files(source)
    chosen = list(tasks) or [task for task, file in files.items() if file.exists()]
    if not chosen:
        raise UsageError(f"--data: {source} has none of {', '.join(TASKS)} as .jsonl.")
    for task in chosen:
        if task not in TASKS:
            raise UsageError(f"Task {task} is not supported. Supported: {', '.join(TASKS)}.")
        if task not in files or not files[task].exists():
            raise UsageError(f"--data: {source} has no {task}.jsonl.")
        try:
            lines = enumerate(files[task].read_bytes().split(b"\n"), 1)
        except OSError as error:
            raise UsageError(f"--data: {files[task]} cannot be read ({error.strerror or error}).") from error
        told = [(number, line) for number, line in lines if line.strip()]
        if not told:
            raise UsageError(f"--data: {files[task]} is empty. Download it again, or choose another --task.")
        for count, (number, line) in enumerate(told[:most], 1):
            try:
                yield _item(f"{task} {count}", task, json_object(line))
            except ValueError as error:
                raise UsageError(
                    f"{files[task]}, line {number} is not LongBench's: {error}. Download it again, or mend the line."
                ) from error


def digest(source: Path) -> str:
    """sha256 of the tasks' files, whichever of them are asked."""
    whole = hashlib.sha256()
    for task, file in _files(source).items():
        if file.is_file():
            with file.open("rb") as data:
                whole.update(f"{task} {hashlib.file_digest(data, 'sha256').hexdigest()} ".encode())
    return whole.hexdigest()


def _files(source: Path) -> dict[str, Path]:
    if source.is_file():
        return {source.stem.removesuffix("_e"): source}
    return {task: source / f"{task}.jsonl" for task in TASKS}


def _item(key: str, task: str, row: dict[str, Any]) -> Item:
    """Raises ValueError naming the field that is not as it must be."""
    for name in ("context", "input"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} must be a text")
    answers, classes = row.get("answers"), row.get("all_classes")
    if not _are_texts(answers) or not answers:
        raise ValueError("answers must be a list of one or more texts")
    classified = TASKS[task].metric is metrics.classification
    if not (_are_texts(classes) and classes) if classified else not (classes is None or _are_texts(classes)):
        raise ValueError(f"all_classes must be a list of texts{'' if classified else ', or null'}")
    return Item(key, task, row["context"], row["input"], answers, classes or [])


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def score(item: Item, answer: str) -> float:
    """The best score of an answer over the references."""
    kind = TASKS[item.task]
    text = answer.lstrip("\n").split("\n")[0] if kind.first_line else answer
    more = (item.classes,) if kind.metric is metrics.classification else ()
    return max((kind.metric(text, reference, *more) for reference in item.answers), default=0.0)


def prompt_of(examiner: Examiner, item: Item) -> list[int]:
    """Token ids of a prompt that fits: of a context that is too long the middle is left out, as LongBench does."""
    kind, encode = TASKS[item.task], examiner.tokenizer.encode_text
    behind = kind.behind.replace("{input}", item.input)
    context = encode(item.context, start=not kind.chat and not kind.before)

    def render(ids: list[int]) -> list[int]:
        if kind.chat:
            return examiner.prompts.first([kind.before, Encoded(ids), behind])
        return [*encode(kind.before), *ids, *encode(behind, start=False)]

    room = examiner.capacity - kind.tokens - len(render([])) - 1
    if room < 1:
        raise UsageError(f"{item.key} does not fit: its question alone is longer than the context of the model.")
    if len(context) > room:
        context = context[: room // 2] + context[len(context) - (room - room // 2) :]
    return render(context)


def longbench(
    examiner: Examiner,
    items: Sequence[Item],
    journal: Journal,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """The mean score of each task, from 0 to 100."""
    for done, item in enumerate(items, 1):
        prompt = prompt_of(examiner, item)
        asked = hashlib.sha256(repr(prompt).encode()).hexdigest()
        if item.key not in journal:
            answer = examiner.ask(prompt, TASKS[item.task].tokens)
            journal.add(item.key, task=item.task, answer=answer, score=score(item, answer), prompt=asked)
        elif journal.rows[item.key].get("prompt") != asked:  # the file is the same: it was cut to another length
            raise UsageError(
                f"{item.key} was asked in another context than the {examiner.capacity:,} tokens of now. Give the "
                "--context that it was, or another --out."
            )
        progress(done, len(items))
    tasks = dict.fromkeys(item.task for item in items)
    scored = [(item.task, journal.rows[item.key]["score"]) for item in items]
    return {task: 100 * mean(score for its, score in scored if its == task) for task in tasks}
