"""LongBench's English and code tasks from its own jsonl files on disk, with its metrics; the instructions are ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from app.errors import UsageError
from app.evaluation import metrics
from app.evaluation.examiner import Examiner, Journal
from app.prompt import Encoded


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
    files = {source.stem.removesuffix("_e"): source} if source.is_file() else {t: source / f"{t}.jsonl" for t in TASKS}
    chosen = list(tasks) or [task for task, file in files.items() if file.exists()]
    if not chosen:
        raise UsageError(f"--data: {source} has none of {', '.join(TASKS)} as .jsonl.")
    for task in chosen:
        if task not in TASKS:
            raise UsageError(f"Task {task} is not supported. Supported: {', '.join(TASKS)}.")
        if task not in files or not files[task].exists():
            raise UsageError(f"--data: {source} has no {task}.jsonl.")
        lines = [line for line in files[task].read_text(encoding="utf-8").split("\n") if line.strip()]
        for number, line in enumerate(lines[:most], 1):
            try:
                row = json.loads(line)
                answers, classes = list(row["answers"]), list(row.get("all_classes") or [])
                yield Item(f"{task} {number}", task, str(row["context"]), str(row["input"]), answers, classes)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"{files[task]}, line {number} is not LongBench's: it needs input, context and answers ({error})."
                ) from error


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
        if item.key not in journal:
            answer = examiner.ask(prompt_of(examiner, item), TASKS[item.task].tokens)
            journal.add(item.key, task=item.task, answer=answer, score=score(item, answer))
        progress(done, len(items))
    rows = [journal.rows[item.key] for item in items]
    tasks = dict.fromkeys(item.task for item in items)
    return {task: 100 * mean(row["score"] for row in rows if row["task"] == task) for task in tasks}
