"""`ask` on the embedded model, as a person runs it: a long real text, a fact in it, the answer quotes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

ROOT = Path(__file__).parents[2]


def language_reference(chars: int) -> str:
    """Chapters of Python's own reference, which every Python carries."""
    chapters = ("exceptions", "execmodel", "naming", "import", "compound", "objects")
    return "\n\n".join(topics[name].strip() for name in chapters)[:chars]


def test_a_fact_in_six_thousand_tokens_is_quoted(tmp_path: Path) -> None:
    text = language_reference(26_000)
    middle = text.index("\n\n", len(text) // 2)
    fact = "\n\nThe magic number is 48213. Remember it. 48213 is the magic number."
    document = tmp_path / "reference.txt"
    document.write_text(text[:middle] + fact + text[middle:], encoding="utf-8")
    command = [sys.executable, "-m", "app", "ask", "--model", "embedded", "--document", str(document), "--json"]
    command += ["--max-new-tokens", "24", "What is the magic number?"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["usage"]["prompt_tokens"] >= 6000
    assert result["settings"]["weights"] == "w8a8"
    assert result["settings"]["kv"] == "kv4"
    assert "48213" in result["answer"]
    assert any("The magic number is 48213." in card["excerpt"] for card in result["evidence"][:2])
    assert result["evidence"][0]["name"] == "reference.txt"
