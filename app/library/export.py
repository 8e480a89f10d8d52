"""A saved chat as Markdown, for people."""

from __future__ import annotations

from datetime import UTC, datetime

from app.chat import Chat, Selection
from app.places import excerpt, parts_of, told


def markdown(chat: Chat) -> str:
    """The turns up to the one that is shown, each with its documents, passages and quotes, worded as on the page."""
    path = chat.path(chat.head)
    documents = {source.label: source.document for turn in path for source in turn.sources if source.document.pages}
    parts = [f"# {chat.title}", _time(chat.created)]
    for turn in path:
        parts.append("## " + " ".join(turn.question.split()))
        if "\n" in turn.question.strip():
            parts.append("> " + turn.question.strip().replace("\n", "\n> "))
        parts += [f"*Document: {source.document.name}, {_pages(source)}*" for source in turn.sources]
        varied = ", asked again, sampled" if turn.answered and turn.sampling is not None else ""
        parts.append(f"*{_time(turn.at)}{', answered by ' + turn.model if turn.model else ''}{varied}*")
        said = filter(None, (turn.answer.strip(), turn.error and f"*{turn.error}*"))
        parts += list(said) or ["*No answer.*"]
        places = [
            f"- {told(passage, documents.get(passage.document))} ({passage.strength:.0%}): {excerpt(passage)}"
            for passage in turn.passages
        ]
        if places:
            parts.append("Passages that it looked at most:\n\n" + "\n".join(places))
        quoted = [
            f"- \u201c{' '.join(quote.text.split())}\u201d: {told(quote, documents.get(quote.document or ''))}"
            for quote in turn.quotes
        ]
        if quoted:
            parts.append("Quotes:\n\n" + "\n".join(quoted))
    return "\n\n".join(parts) + "\n"


def _pages(source: Selection) -> str:
    first, last, part = source.first_page, source.last_page, parts_of(source.document)
    return f"{part} {first}" if first == last else f"{part}s {first} to {last}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
