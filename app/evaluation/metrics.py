"""The metrics of LongBench (arXiv 2308.14508), each of one answer against one reference, from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")


def qa_f1(answer: str, reference: str) -> float:
    """F1 of the words in common, counted; lower case, without punctuation and articles (as in SQuAD)."""
    ours, theirs = (_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split() for text in (answer, reference))
    return _f1(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of ROUGE-L over sentences: distinct words in any longest common subsequence of two sentences (Lin, 2004)."""
    ours, theirs = ([part.split() for part in text.split(".") if part.split()] for text in (answer, reference))
    common: set[str] = set()
    for reference_sentence in theirs:
        for sentence in ours:
            common |= _common_words(reference_sentence, sentence)
    return _f1(len(common), len({word for part in ours for word in part}), len({w for part in theirs for w in part}))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n where the answer names n classes and the right one is among them; a class within the right one's name
    does not count."""
    named = [name for name in classes if name in answer and not (name in reference and name != reference)]
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are the paragraph's."""
    wanted = _NUMBER.findall(reference)[:1]
    return _share(answer, wanted[0]) if wanted else 0.0


def count(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are the right one."""
    return _share(answer, reference.strip())


def code_similarity(answer: str, reference: str) -> float:
    """How alike the first line of code is, in whole percent; comments and fences are no code."""
    lines = answer.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, first, reference).ratio()) / 100


def _share(answer: str, wanted: str) -> float:
    numbers = _NUMBER.findall(answer)
    return sum(number == wanted for number in numbers) / len(numbers) if numbers else 0.0


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0


def _common_words(a: Sequence[str], b: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    words: set[str] = set()
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.add(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
