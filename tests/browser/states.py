"""Every state of the page, one after another, with a picture of each: `python -m tests.browser.states docs/page`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, Route

from app.errors import UsageError
from tests.browser.conftest import Site, add, ask, chromium, starting, state, until
from tests.browser.scripted import Script

SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
SCHEMES = ("light", "dark")
KEPT = ("empty", "reading", "evidence", "library", "settings")  # in docs/

HARBOUR = (
    "The harbour office recorded the arrival of every ship, its cargo and its master. What was lost was written down as"
    " well, with the names of those who had seen it go and the price that the insurer paid.\n\n"
)
FACT = "On the ninth of March the clerk noted: Remember: the code word is {word}. Nobody was told.\n\n"
ANSWER = """The clerk's note gives it: "Remember: the code word is {word}."

| where | what |
|---|---|
| page 4 | the code word, **{word}** |

The book does not say who chose it; that "the harbour master chose it himself" is nowhere in it."""


def write(folder: Path) -> Path:
    """A document of some pages with a fact in it."""
    path = folder / "Harbour book 1887.txt"
    path.write_text(HARBOUR * 38 + FACT.format(word="heliotrope") + HARBOUR * 12, encoding="utf-8")
    return path


def walk(page: Page, site: Site, document: Path) -> Iterator[str]:
    """Bring the page into each state and give its name."""
    script = site.script
    script.chunk_s, script.token_s, script.answer = 0.02, 0.02, ANSWER
    state(page, "idle")
    yield "empty"
    held: list[Route] = []

    def hold(route: Route) -> None:  # the file stays on its way
        held.append(route)

    page.route("**/uploads", hold)
    page.set_input_files("#oc-picker", str(document))
    page.wait_for_selector("#oc-arriving .oc-card")
    yield "uploading"
    for route in held:
        route.continue_()
    page.unroute("**/uploads")
    page.wait_for_selector("#oc-shelf .oc-card:not(.oc-busy)")
    state(page, "plan")
    yield "plan"
    script.chunk_s = 0.6
    ask(page, "What is the code word, and who chose it?")
    state(page, "reading")
    until(lambda: "left" in page.inner_text("#oc-strip"))
    yield "reading"
    script.chunk_s = 0.01
    state(page, "answering")
    until(lambda: "| where" not in page.inner_text("#oc-chat .bot") and page.locator("#oc-chat .bot table").count() > 0)
    yield "answering"
    state(page, "idle")
    page.wait_for_selector("#oc-chat .oc-quote")
    yield "answered"
    page.click(".oc-evidence summary")
    page.wait_for_selector(".oc-excerpt", state="visible")
    yield "evidence"
    page.click(".oc-passage")
    page.wait_for_selector("#oc-source:popover-open mark")
    yield "source"
    page.keyboard.press("Escape")
    page.wait_for_selector("#oc-source:popover-open", state="detached")
    page.click("[data-do=options]")
    page.wait_for_selector("#oc-options:popover-open")
    yield "settings"
    page.click("#oc-options summary")
    yield "numbers"
    page.keyboard.press("Escape")
    page.click("[popovertarget=oc-engine]")
    page.wait_for_selector("#oc-engine:popover-open")
    yield "engine"
    page.keyboard.press("Escape")
    page.click("#oc-heads > button")
    page.wait_for_selector("#oc-heads-picture .oc-heads-map")
    yield "heads"
    page.click("#oc-heads > button")
    script.fail_decode = UsageError("The device is out of memory: 80.0 GB are there. Ask with fewer pages.")
    ask(page, "And what does it cost?")
    page.wait_for_selector("#oc-chat .oc-failed")
    script.fail_decode = None
    state(page, "idle")
    yield "error"
    narrow = page.evaluate("document.body.dataset.side") != "beside"
    if narrow:
        page.click("#oc-header [data-do=side]")
        page.wait_for_selector("#oc-library .oc-item", state="visible")
    yield "library"
    if narrow:
        page.keyboard.press("Escape")


def walk_endless(page: Page, site: Site, document: Path) -> Iterator[str]:
    """The state of a chat whose beginning is forgotten."""
    state(page, "idle")
    add(page, document)
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "answering", "reading")
    state(page, "idle")
    page.wait_for_selector(".oc-memory")
    yield "endless"


def main(argv: list[str] | None = None) -> None:
    """Write the pictures that the documents show, or with --all those of every state."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.states")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every state, width and scheme")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser, starting() as start, tempfile.TemporaryDirectory() as folder:
        document = write(Path(folder))
        for size, (width, height) in SIZES.items():
            for scheme in SCHEMES:
                shown = (size, scheme) in (("wide", "light"), ("narrow", "dark"))
                if not (args.all or shown):
                    continue
                endless = Script(capacity=None, recent=250, token_s=0.002)
                for script, states in ((Script(patterned=True), walk), (endless, walk_endless)):
                    site = start(script)
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    page.goto(site.url)
                    for name in states(page, site, document):
                        if args.all or name in KEPT:
                            picture(page, args.folder / f"{name}-{size}-{scheme}.png")
                    page.close()


def picture(page: Page, path: Path) -> None:
    """A small PNG of the window."""
    page.wait_for_timeout(200)  # transitions
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
