"""A saved chat as Markdown, for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def markdown(plain: dict[str, Any]) -> str:
    """The turns up to the one that is shown, each with its documents, passages and quotes."""
    turns = {turn["id"]: turn for turn in plain["turns"]}
    path, at = [], plain["head"]
    while at is not None:
        path.append(turns[at])
        at = turns[at]["parent"]
    parts = [f"# {plain['title']}", _time(plain["created"])]
    for turn in reversed(path):
        parts.append("## " + " ".join(turn["question"].split()))
        if "\n" in turn["question"].strip():
            parts.append("> " + turn["question"].strip().replace("\n", "\n> "))
        parts += [
            f"*Document: {source['name']}, {_pages(source['first_page'], source['last_page'])}*"
            for source in turn["sources"]
        ]
        parts.append(f"*{_time(turn['at'])}{', answered by ' + turn['model'] if turn.get('model') else ''}*")
        said = filter(None, (turn["answer"].strip(), turn["error"] and f"*{turn['error']}*"))
        parts += list(said) or ["*No answer.*"]
        places = [f"- {_where(p)} ({p['strength']:.0%}): {' '.join(p['excerpt'].split())}" for p in turn["passages"]]
        if places:
            parts.append("Passages that it looked at most:\n\n" + "\n".join(places))
        quoted = [f"- \u201c{' '.join(q['text'].split())}\u201d: {_where(q)}" for q in turn["quotes"]]
        if quoted:
            parts.append("Quotes:\n\n" + "\n".join(quoted))
    return "\n\n".join(parts) + "\n"


def _pages(first: int, last: int) -> str:
    return f"page {first}" if first == last else f"pages {first} to {last}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _where(place: dict[str, Any]) -> str:
    """The file and line of a passage or quote as it is saved."""
    if not place["name"]:
        return "not in the documents"
    return place["name"] + (f", line {place['line']}" if place.get("line") else "")
