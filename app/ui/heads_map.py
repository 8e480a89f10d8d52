"""The head pattern as a picture that follows the page's colours and width."""

from __future__ import annotations

from app.head_costs import Heads


def heads_map(heads: Heads) -> str:
    """A cell a KV head, layers from left to right: green where it keeps everything, stronger the higher its score."""
    pattern = heads.pattern
    if pattern is None:
        endless = heads.settings.mode == "endless"
        return "" if endless else "<p>This model has no head pattern: every head keeps everything.</p>"
    mask, scores = pattern.retrieval_mask(heads.settings.retrieval_ratio), pattern.scores
    low, high = float(scores.min()), float(scores.max())
    cells = []
    for head in range(scores.shape[1]):
        for layer in range(scores.shape[0]):
            share = (float(scores[layer, head]) - low) / ((high - low) or 1.0)
            kind, keeps = ("oc-full", "keeps everything") if mask[layer, head] else ("oc-part", "keeps two windows")
            cells.append(
                f'<i class="{kind}" style="--oc-score:{share:.2f}"'
                f' title="Layer {layer}, head {head}: {keeps}; score {scores[layer, head]:.2f}"></i>'
            )
    said = f"{int(mask.sum())} of {mask.size} heads keep everything"
    return (
        f'<figure class="oc-heads-map"><figcaption>{said} <span><i class="oc-full"></i> keeps everything</span>'
        f' <span><i class="oc-part"></i> keeps its windows</span></figcaption><div role="img" aria-label="{said}"'
        f' style="grid-template-columns:repeat({scores.shape[0]},1fr)">{"".join(cells)}</div><small>Layers from left'
        f" (0) to right ({scores.shape[0] - 1}), a row a KV head; the stronger the colour, the more it needs what is"
        " far back.</small></figure>"
    )
