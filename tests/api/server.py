"""A real server process, and one in this process over a scripted model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(cache: Path, *flags: str, **environment: str) -> Iterator[str]:
    """`python -m app` with these flags on a free port; gives its address. Its log is shown when it does not come up."""
    command = [sys.executable, "-m", "app", "--port", "0", *flags]
    env = {**os.environ, "OCTAVO_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command, env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        url = ""
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                url = found[0]
                break
        assert url, "".join(lines)
        threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
        yield url
    finally:
        process.terminate()
        process.wait(20)
    assert not [line for line in lines if "Traceback" in line], "".join(lines)
