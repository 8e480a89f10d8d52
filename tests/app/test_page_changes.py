"""Changes on their way to the browser edit none that was sent before."""

from __future__ import annotations

from types import SimpleNamespace

from app.ui.page import Page


def test_a_change_is_sent_whole_and_a_text_by_what_it_adds() -> None:
    page, event = Page(), SimpleNamespace(outputs=[0, 1])
    hidden, nothing = {"__type__": "update", "visible": False}, {"__type__": "update"}

    def sent(*data: object) -> list[object]:
        return page.handle_streaming_diffs(event, list(data), "session", "run", final=False)

    assert sent(hidden, "On") == [hidden, "On"]
    assert sent(nothing, "One") == [[["replace", [], nothing]], [["append", [], "e"]]]
    assert sent(nothing, "One") == [[], []]
    assert page.handle_streaming_diffs(event, [None, None], "session", "run", final=True) == [nothing, "One"]
