"""Page, command line and API over an independent server: `transformers serve` with the embedded model's weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from playwright.sync_api import Page

from tests.api.server import serving
from tests.browser.conftest import state

QUESTION = "What is the code word?"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the other server's API."""
    import torch
    from tokenizers import Tokenizer as Backend
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    from app.embedded import embedded_model_path
    from app.gguf_tokenizer import spec_from_gguf
    from benchmarks._peer import transformers_model
    from models.checkpoint import open_checkpoint

    folder, path = tmp_path_factory.mktemp("other") / "smollm", embedded_model_path()
    spec = spec_from_gguf(path)
    model = transformers_model(open_checkpoint(path)).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=sorted(spec.eos_ids))
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(spec.data)), **spec.special_texts)
    tokenizer.chat_template = spec.chat_template
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = Path(sys.executable).parent / "transformers"
    command = [serve, "serve", folder, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def url(other: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("cache"), "--engine", "openai", "--base-url", other) as url:
        yield url


def test_the_command_line(other: str, texts: Callable[..., Path]) -> None:
    document = texts("otters.txt", "OTTER", 1)
    command = [sys.executable, "-m", "app", "ask", "--engine", "openai", "--base-url", other, "--json"]
    command += ["--max-new-tokens", "16", "--document", str(document), QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert "OTTER" in told["answer"]
    assert told["usage"]["prompt_tokens"] > 190


@pytest.mark.browser
def test_the_page(url: str, open_page: Callable[..., Page], texts: Callable[..., Path]) -> None:
    page = open_page(url)
    state(page, "idle", seconds=120)
    page.set_input_files("#oc-picker", [str(texts("herons.txt", "HERON", 1))])
    page.wait_for_selector("#oc-shelf .oc-card:not(.oc-busy):has-text('herons.txt')", timeout=60_000)
    page.fill("#oc-question textarea", QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector("#oc-chat .bot:has-text('HERON')", timeout=120_000)
    page.wait_for_selector("#oc-strip [data-state=idle]", timeout=60_000)
    assert "need Octavo's own engine" in page.inner_text("#oc-status")  # what is missing is said
    assert "Memory" not in page.inner_text("#oc-status .oc-foot").splitlines()[0]
    page.click("#oc-heads > button")
    page.wait_for_selector('#oc-heads-about:has-text("own engine")')


def test_the_api_with_a_stored_document(url: str, texts: Callable[..., Path]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8, timeout=120)
    model = client.models.list().data[0].id
    file = client.files.create(file=texts("gulls.txt", "GULL", 1), purpose="user_data")
    content = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": QUESTION}]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "GULL" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 190
