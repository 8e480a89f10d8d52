"""What models and documents may say on the page, and who may open it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.api.server import serving
from tests.browser.conftest import Site, add, ask, state
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

HOSTILE = r"""Start.

![pixel](https://example.org/pixel.png?secret)
<img src="https://example.org/a.png" srcset="https://example.org/b.png 2x">
<img src=x onerror="document.title='taken'">
<svg onload="document.title='taken'"><script>document.title='taken'</script></svg>
<iframe src="https://example.org/"></iframe> <iframe srcdoc="<script>parent.document.title='taken'</script>"></iframe>
<object data="https://example.org/x"></object> <embed src="https://example.org/x">
<form action="https://example.org/"><input name="q"><button>Send</button></form>
<style>@import url(https://example.org/x.css); body { display: none }</style>
<link rel="stylesheet" href="https://example.org/x.css"> <base href="https://example.org/">
<meta http-equiv="refresh" content="0;url=https://example.org/">
<a href="javascript:document.title='taken'" id="bad-link">press</a> [press](javascript:document.title='taken')
<a href="data:text/html,<script>parent.document.title='taken'</script>">data</a>
<video src="https://example.org/v.mp4" autoplay></video> <audio src="https://example.org/a.mp3"></audio>
<div style="background: url(https://example.org/bg.png)">styled</div>
\( \href{javascript:document.title='taken'}{x} \) $$\url{javascript:document.title='taken'}$$

```html
<script>document.title='taken'</script>
```

- ```
  ls
  ```
Behind a list <form action="https://example.org/"><input name="q"><button>Send</button></form>

\`<u id=zz>an escaped mark</u>\`

```mermaid
<form action="https://example.org/"><button>Draw</button></form>
```

The end of it."""

# Everything in the conversation that could act or call out, as text.
LOOK = """() => {
  const found = [];
  for (const el of document.querySelectorAll('#oc-chat .bot .prose *')) {
    const tag = el.tagName.toLowerCase();
    const bad = 'script iframe object embed form style link base meta u input';
    if (bad.split(' ').includes(tag)) found.push(tag);
    for (const { name, value } of el.attributes) {
      if (name.startsWith('on')) found.push(`${tag} ${name}`);
      if (/^\\s*(javascript|vbscript|data:text)/i.test(value)) found.push(`${tag} ${name}=${value}`);
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def hostile(start_site: Callable[[Script], Site]) -> Site:
    return start_site(Script(chunk_s=0.01, token_s=0.001, answer=HOSTILE))


def test_hostile_answers_are_only_text(hostile: Site, open_page: Callable[..., Page]) -> None:
    page = open_page(hostile.url)
    asked: list[str] = []
    page.on("response", lambda response: asked.append(response.url))
    state(page, "idle")
    ask(page, "What does it say?")
    page.wait_for_selector("#oc-chat .bot:has-text('The end of it.')", timeout=90_000)
    state(page, "idle", seconds=90)
    time.sleep(0.5)
    assert page.evaluate(LOOK) == []
    assert page.title() == "Octavo"
    assert [url for url in asked if "example.org" in url] == []
    assert "<script>document.title='taken'</script>" in page.inner_text("#oc-chat .bot code")  # shown, not run
    assert "Behind a list <form action=" in page.inner_text("#oc-chat .bot")
    assert page.is_visible("#oc-question textarea")


def test_hostile_documents_are_only_text(hostile: Site, open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(hostile.url)
    state(page, "idle")
    name = "<img src=x onerror=document.title='taken'>.txt"
    (tmp_path / name).write_text("<script>document.title='taken'</script> words \x00\x1b[31m" * 20)
    page.set_input_files("#oc-picker", [str(tmp_path / name)])
    state(page, "plan", seconds=60)
    assert page.inner_text("#oc-shelf .oc-name") == name
    assert page.evaluate("document.querySelectorAll('#oc-shelf img').length") == 0
    ask(page, "<b onmouseover=alert(1)>What?</b>")
    page.wait_for_selector("#oc-chat .bot:has-text('The end of it.')", timeout=90_000)
    state(page, "idle", seconds=90)
    assert page.inner_text("#oc-chat .user").count("<b onmouseover=alert(1)>What?</b>") == 1
    assert page.title() == "Octavo"


def test_half_a_character_breaks_no_page(hostile: Site, open_page: Callable[..., Page]) -> None:
    page = open_page(hostile.url)
    state(page, "idle")
    page.fill("#oc-question textarea", "Half a bird:")
    # As text boxes of some systems do it, which delete half an emoji.
    page.evaluate(
        "() => { const box = document.querySelector('#oc-question textarea'); box.value += '\\ud83d';"
        " box.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.press("#oc-question textarea", "Enter")
    page.wait_for_selector("#oc-chat .bot:has-text('The end of it.')", timeout=90_000)
    state(page, "idle", seconds=90)
    page.reload()
    page.wait_for_selector("#oc-chats .oc-open:has-text('Half a bird:\ufffd')")
    page.fill(".oc-search", "bird")
    page.evaluate(
        "() => { const box = document.querySelector('.oc-search'); box.value = '\\ud83d';"
        " box.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.wait_for_timeout(500)
    page.fill(".oc-search", "stork")
    page.wait_for_selector("#oc-chats .oc-none:has-text('No chat has these words.')")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--model", "embedded", "--auth", "ann:pass", "--auth", "bob:word")
    with serving(tmp_path_factory.mktemp("cache"), *flags) as url:
        yield url


def test_a_password_opens_the_page(guarded: str, browser: Browser, texts: Callable[..., Path]) -> None:
    for path in ("/", "/config", "/gradio_api/info", "/theme.css", "/v1/models", "/metrics"):
        assert httpx.get(guarded + path).status_code == 401, path
    assert httpx.put(f"{guarded}/uploads", content=b"x", headers={"x-file-name": "a"}).status_code == 401
    context = browser.new_context(http_credentials={"username": "ann", "password": "pass"})
    page = context.new_page()
    page.goto(guarded)
    page.wait_for_selector("#oc-question textarea")
    add(page, texts("auth.txt", "AUTH", 1))
    page.wait_for_selector("#oc-shelf .oc-card:has-text('auth.txt')")
    context.close()
