"""Which legacy encoding a text that is not UTF-8 is in.

Every candidate decodes the text's lines that are not ASCII, and each character that comes out is weighed by how often
real text of that encoding has it there. General detectors take a lone accent or curly quote in English for Chinese.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

# Lead byte ranges of what a language uses daily, with a weight for each. Anything else in the encoding weighs RARE.
# cp932 and gb18030 contain Shift-JIS and GBK. EUC-KR's Hangul lie where half of GB2312's daily characters do: it has
# to hold for several characters before it wins (see _weigh_wide).
_WIDE: dict[str, tuple[tuple[int, int, float], ...]] = {
    "cp932": ((0x81, 0x81, 0.8), (0x82, 0x83, 1.0), (0x88, 0x97, 0.7)),
    "gb18030": ((0xA1, 0xA1, 0.8), (0xA3, 0xA3, 0.8), (0xB0, 0xD7, 0.8), (0xD8, 0xF7, -0.2)),
    "euc_jp": ((0xA1, 0xA1, 0.8), (0xA4, 0xA5, 1.0), (0xB0, 0xCF, 0.7)),
    "euc_kr": ((0xA1, 0xA1, 0.8), (0xB0, 0xC8, 0.85)),
    "big5": ((0xA1, 0xA1, 0.8), (0xA4, 0xC6, 0.7), (0xC9, 0xF9, -0.4)),
}
_RARE = -0.7
_WRONG = -2.0
_EVIDENCE = 64 << 10

_WESTERN_MARKS = frozenset("‘’“”–—…•")
_WESTERN_SIGNS = frozenset("€£§°©®±²³¹ºª«»¿¡·½¼¾µ™¢„\xa0")


def guess_encoding(data: bytes) -> str:
    """The likeliest encoding of bytes that are not UTF-8; looks at lines from all over the file."""
    lines = [line for line in data.splitlines(keepends=True) if not line.isascii()]
    step = max(1, sum(map(len, lines)) // _EVIDENCE)
    sample = b"".join(lines[::step])
    sample = sample if len(sample) <= 4 * _EVIDENCE else sample[: 4 * _EVIDENCE]  # one enormous line
    return max(_SCORES, key=lambda encoding: _mean(_SCORES[encoding](sample, encoding)))


def _mean(weights: Iterable[float]) -> float:
    total = number = 0.0
    for weight in weights:
        total += weight
        number += 1
    return total / number if number else _WRONG


def _weigh_wide(sample: bytes, encoding: str) -> list[float]:
    ranges = _WIDE[encoding]
    gb = encoding == "gb18030"
    weights: list[float] = []
    for character in re.sub("[\0-\x7f]+", "", sample.decode(encoding, errors="replace")):
        code = b"" if character == "\ufffd" else character.encode(encoding)
        if not code:
            weights.append(_WRONG)
        elif len(code) != 2 or (gb and code[1] < 0xA1):  # half-width kana, GBK's additions
            weights.append(_RARE)
        else:
            weights.append(next((w for low, high, w in ranges if low <= code[0] <= high), _RARE))
    if encoding == "euc_kr" and len(weights) < 8:
        weights.append(0.0)
    return weights


def _weigh_western(sample: bytes, encoding: str) -> list[float]:
    """Accented letters stand alone or in twos between ASCII ones; signs and quotes stand at a word's edge."""
    text = sample.decode(encoding, errors="replace")
    weights: list[float] = []
    for run in re.finditer(r"[^\x00-\x7f]+", text):
        before, after = text[run.start() - 1 : run.start()], text[run.end() : run.end() + 1]
        letters = sum(c.isalpha() for c in run[0])
        for character in run[0]:
            if character == "\ufffd":
                weights.append(_WRONG)
            elif character in _WESTERN_MARKS:
                weights.append(1.0 if len(run[0]) <= 3 and letters <= 1 else -0.2)
            elif character in _WESTERN_SIGNS:
                inside = before.isalpha() and after.isalpha() and len(run[0]) == 1
                weights.append(-0.5 if inside and character != "·" else 0.6 if letters <= 1 else -0.2)
            elif not character.isalpha() or character in "ƒˆªº":
                weights.append(-0.5)
            elif character.isupper() and before.islower():
                weights.append(-1.0)
            else:
                weights.append(1.0 if letters == 1 else 0.4 if letters == 2 else -0.5)
    return weights


def _weigh_cyrillic(sample: bytes, encoding: str) -> list[float]:
    """Words of Cyrillic letters alone, capitals at their beginning only or throughout."""
    text = sample.decode(encoding, errors="replace")
    weights: list[float] = []
    for word in re.findall(r"[^\W\d_]*[^\x00-\x7f]+[^\W\d_]*", text):
        cased = 0.9 if word.islower() or word[1:].islower() else 0.6 if word.isupper() else _RARE
        for character in word:
            if "а" <= character.lower() <= "я":
                weights.append(cased)
            elif not character.isascii():
                weights.append(0.4 if character in "«»—–№“”„…ЁёіїєґўІЇЄҐЎђјљњћџЂЈЉЊЋЏ" else _RARE)
            elif character.isalpha():  # a word of two alphabets
                weights.append(_RARE)
    return weights


_SCORES: dict[str, Callable[[bytes, str], list[float]]] = {
    "cp1252": _weigh_western,
    "cp932": _weigh_wide,
    "gb18030": _weigh_wide,
    "cp1251": _weigh_cyrillic,
    "koi8_r": _weigh_cyrillic,
    "big5": _weigh_wide,
    "euc_jp": _weigh_wide,
    "euc_kr": _weigh_wide,
}
