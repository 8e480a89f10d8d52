"""Every state of the page, wide and narrow, light and dark: nothing sticks out, lacks a name, or is hard to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Site
from tests.browser.scripted import Script
from tests.browser.states import SIZES, walk, walk_endless, write

pytestmark = pytest.mark.browser

# Controls without a name, and texts with less contrast than WCAG AA asks for (4.5, large ones 3).
LOOK = """() => {
  const found = [];
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const named = (e) => e.ariaLabel || e.textContent.trim() || e.title || e.labels?.[0]?.textContent.trim();
  for (const e of document.querySelectorAll("button, input, textarea, summary, [role=button], [role=dialog]"))
    if (visible(e) && !named(e)) found.push("no name: " + e.outerHTML.slice(0, 120));
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (colours) => {  // what is seen of colours that lie over one another, the lowest first
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const e = text.parentElement;
    const apart = "script, style, :disabled, .oc-unseen, .oc-busy, [data-forgotten]";
    if (!text.data.trim() || e.closest(apart) || !visible(e)) continue;
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(e);
    const [a, b] = [layers, [...layers, style.color]].map(over).map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5))
      found.push(`contrast ${ratio.toFixed(1)}: ${e.className} ${text.data.trim().slice(0, 60)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_states(
    start_site: Callable[[Script], Site], open_page: Callable[..., Page], tmp_path: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    document = write(tmp_path)
    wrong: list[str] = []
    endless = Script(capacity=None, recent=250, token_s=0.002)
    for script, states in ((Script(patterned=True), walk), (endless, walk_endless)):
        site = start_site(script)
        page = open_page(site.url, viewport={"width": width, "height": height}, color_scheme=scheme)
        for name in states(page, site, document):
            page.screenshot(path=tmp_path / f"{name}.png")
            wrong += [f"{name}: {what}" for what in page.evaluate(LOOK)]
            wrong += [f"{name}: {toast.inner_text()}" for toast in page.query_selector_all(".toast-body")]
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{name}: wider than the window")
    assert sorted(set(wrong)) == []
