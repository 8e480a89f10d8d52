"""Text from tokens, piece by piece: whole characters, and stop strings cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.detokenize import Detokenizer


class Pieces:
    """A tokenizer whose token i stands for `pieces[i]`."""

    def __init__(self, pieces: Sequence[bytes], strip_leading_space: bool = False) -> None:
        self.pieces = pieces
        self.strip_leading_space = strip_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def parts(pieces: Sequence[bytes], stop: Sequence[str] = (), strip: bool = False) -> list[str]:
    detokenizer = Detokenizer(Pieces(pieces, strip), stop)
    return [*map(detokenizer.push, range(len(pieces))), detokenizer.flush()]


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_parts_are_whole_characters_and_join_to_the_text(text: str, places: list[int]) -> None:
    got = parts(cut(text.encode(), places))
    assert "".join(got) == text
    assert all(part.encode() in text.encode() for part in got)


def test_emoji_and_cjk_over_several_tokens_come_when_complete() -> None:
    data = "😀字".encode()
    assert parts([data[i : i + 1] for i in range(len(data))]) == ["", "", "", "😀", "", "", "字", ""]


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert parts([b"a", "字".encode()[:2]]) == ["a", "", ""]


def test_bytes_that_are_no_text_become_replacement_characters_like_in_the_whole() -> None:
    data = b"a\xff\xfeb\xe5\xadc"
    assert "".join(parts([data[i : i + 1] for i in range(len(data))])) == data.decode("utf-8", "replace")


def test_only_the_first_space_of_the_answer_is_stripped_and_only_on_demand() -> None:
    pieces = [b"", b" Hello", b" world", b"  !"]
    assert "".join(parts(pieces, strip=True)) == "Hello world  !"
    assert "".join(parts(pieces)) == " Hello world  !"


def test_text_that_may_begin_a_stop_string_waits() -> None:
    assert parts([b"a<", b"/", b"b", b"</", b"end>", b"never"], ["</end>"]) == ["a", "", "</b", "", "", "", ""]
    assert parts([b"a</e"], ["</end>"]) == ["a", "</e"]


def test_stopped_is_set_and_the_earliest_stop_string_counts() -> None:
    detokenizer = Detokenizer(Pieces([b"one two three"]), ["three", "two"])
    assert detokenizer.push(0) == "one "
    assert detokenizer.stopped
    assert (detokenizer.push(0), detokenizer.flush()) == ("", "")


@given(
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 40)),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_the_same_wherever_tokens_end(text: str, places: list[int], stop: list[str]) -> None:
    # The stop string that is complete first ends the answer; of several in one token the one that begins first.
    pieces = cut(text.encode(), places)
    expected, seen = text, ""
    for piece in pieces:
        seen += piece.decode()
        begun = [seen.find(s) for s in stop if s in seen]
        if begun:
            expected = seen[: min(begun)]
            break
    assert "".join(parts(pieces, stop)) == expected


def test_without_stop_strings_nothing_is_held() -> None:
    assert parts([b"x", b"y"]) == ["x", "y", ""]


@pytest.mark.parametrize("stop", [("\n\n",), ("\n\n", "User:")])
def test_stop_over_many_tokens(stop: tuple[str, ...]) -> None:
    assert "".join(parts([b"Hi.", b"\n", b"\n", b"User:", b" more"], stop)) == "Hi."
