"""Evidence: is the passage with a planted fact among the first two shown, and what does showing it cost a token?

Facts that no model knows are planted into Python's own documentation; the embedded model (or --model) is asked for
each through the service, as a person would. A hit is a card that holds the fact's sentence word for word.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import random
import re
import time

import torch

from app.config import EMBEDDED_MODEL, Settings
from app.documents import Document
from app.documents.document import lay_out, paginate
from app.engine.generation import Generation
from app.engine.types import Done, SamplingParams, Token
from app.local import LocalService
from benchmarks._report import at_least, at_most, finish, parser_for

_FIRST = "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Louis Marta Nils Olga Paul Rosa Simon".split()
_LAST = "Adler Brandt Castell Dorn Engel Falk Gruber Hansen Iversen Janson Keller Lund Moser Novak Olsen Petrov".split()
_TOWNS = "Trieste Bergen Porto Bruges Toledo Riga Genoa Cork Aarhus Leiden Turku Ghent Basel Lyon Graz".split()
_KINDS = (  # (fact, question, values)
    ("The locker number of {who} is {value}.", "What is the locker number of {who}?", range(1000, 9999)),
    ("{who} was born in {value}.", "In which town was {who} born?", _TOWNS),
    ("The boat of {who} is called {value}.", "What is the boat of {who} called?", "Heron Comet Juniper Walrus".split()),
    ("{who} works as a {value}.", "What does {who} work as?", "baker tailor clockmaker botanist sailor".split()),
    (
        "The favourite dish of {who} is {value} soup.",
        "What is the favourite dish of {who}?",
        "onion carrot leek".split(),
    ),
    (
        "The door of {who}'s house is painted {value}.",
        "Which colour has the door of {who}'s house?",
        "red blue".split(),
    ),
)


def _document(chooser: random.Random, number: int, words: int) -> tuple[Document, list[tuple[str, str, str]]]:
    """A document of about `words` words, and its facts as (sentence, question, value)."""
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    paragraphs = [p.strip() for p in topics.split("\n\n") if 120 < len(p) < 900]
    at = chooser.randrange(len(paragraphs))
    body: list[str] = []
    while sum(len(p.split()) for p in body) < words:
        body.append(paragraphs[(at + len(body)) % len(paragraphs)])
    facts = []
    names = chooser.sample([f"{first} {last}" for first in _FIRST for last in _LAST], len(_KINDS))
    for place, who, (fact, question, values) in zip(
        chooser.sample(range(len(body)), len(_KINDS)), names, _KINDS, strict=True
    ):
        value = str(chooser.choice(values))
        sentence = fact.format(who=who, value=value)
        sentences = re.split(r"(?<=\.) ", body[place])
        sentences.insert(chooser.randrange(len(sentences) + 1), sentence)
        body[place] = " ".join(sentences)
        facts.append((sentence, question.format(who=who), value))
    text, pages = lay_out(paginate("\n\n".join(body) + "\n"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Document(f"notes-{number}.txt", "text", text, pages, (), len(text.encode()), digest), facts


def _seconds(generation: Generation) -> float:
    """From the first token to the end."""
    begun = 0.0
    for event in generation:
        if isinstance(event, Token) and not begun:
            begun = time.perf_counter()
        if isinstance(event, Done):
            return time.perf_counter() - begun
    raise RuntimeError("The answer did not end.")


def _cost(service: LocalService, document: Document, rounds: int) -> tuple[float, float]:
    """Seconds of an answer of 64 tokens without evidence and with it, the best of interleaved rounds."""
    sampling = SamplingParams(max_new_tokens=64)
    question = "Write a long summary of everything in it."
    best = [float("inf")] * 2
    loaded = service._need()
    heads = loaded.model.runner.evidence_heads  # type: ignore[attr-defined]
    for _ in range(rounds):
        for kind, watched in enumerate(([], heads)):
            loaded.model.runner.evidence_heads = watched  # type: ignore[attr-defined]
            best[kind] = min(best[kind], _seconds(service.ask(service.new_chat(), question, [document], sampling)))
    return best[0], best[1]


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 when a bar is missed."""
    parser = parser_for("evidence", __doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    service = LocalService(Settings(model=args.model, library_quota=0.0))  # nothing of it is kept, or written beside it
    service.load()
    if service.load_error is not None:
        raise service.load_error
    chooser = random.Random(args.seed)
    asked = first = either = right = right_either = 0
    misses: list[str] = []
    for number in range(args.documents):
        document, facts = _document(chooser, number, args.words)
        for sentence, question, value in facts:
            chat = service.new_chat()
            done = service.ask(chat, question, [document], SamplingParams(max_new_tokens=40)).result()
            cards = [" ".join(passage.excerpt.split()) for passage in chat.turns[-1].passages]
            rank = next((at for at, card in enumerate(cards) if sentence in card), None)
            correct = value.lower() in done.text.lower()
            asked += 1
            first += rank == 0
            either += rank in (0, 1)
            right += correct
            right_either += correct and rank in (0, 1)
            if rank not in (0, 1):
                misses.append(f"{question} {done.text!r} (right: {value}; rank {rank})")
        print(f"{asked} asked, {either} with the fact in the first two cards, {right} answered right", flush=True)
    without, with_evidence = _cost(service, document, args.rounds)
    service.close()
    bars = [
        at_least("fact's passage first or second", either / asked, "of questions", 0.95),
        at_most("cost of evidence a token", with_evidence / without - 1, "of decode", 0.03),
    ]
    details = {
        "questions": asked,
        "first": first / asked,
        "answered_right": right / asked,
        "of_those_first_or_second": right_either / max(right, 1),
        "ms_of_64_tokens": [without * 1000, with_evidence * 1000],
        "misses": misses,
    }
    finish("evidence", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main([]))
