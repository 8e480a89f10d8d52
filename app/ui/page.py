"""Changes of the page's parts on their way to the browser."""

from __future__ import annotations

from typing import Any

import gradio as gr


class Page(gr.Blocks):
    """The library's page, but that each change of a part's properties is sent whole.

    The library sends what differs from the change before, and its script edits that one in place: a busy browser that
    had not shown it yet lost what it said, and a button that should appear never did.
    """

    def handle_streaming_diffs(
        self,
        block_fn: Any,
        data: list[Any],
        session_hash: str | None,
        run: str | None,
        final: bool,
        simple_format: bool = False,
    ) -> list[Any]:
        """What is sent of `data`, a value or change for each part: edits from the second time on."""
        whole = list(data)
        first = session_hash is None or run is None or run not in self.pending_diff_streams[session_hash]
        sent: list[Any] = super().handle_streaming_diffs(block_fn, data, session_hash, run, final, simple_format)
        if first or final or simple_format:
            return sent
        return [
            [["replace", [], now]] if edits and isinstance(now, dict) else edits
            for now, edits in zip(whole, sent, strict=True)
        ]
