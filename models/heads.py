"""Head patterns: how much each KV head needs the whole history (DuoAttention, arXiv 2410.10819); read, rank, fetch."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import kv_bits
from models.config import ModelConfig
from models.errors import BadPattern
from models.files import read_json, writing

_SCORES, _SETTINGS = "full_attention_heads.tsv", "config.json"
_DEFAULT_SINK, _DEFAULT_RECENT = 128, 256  # what the published patterns were trained with
_TIMEOUT_S = 30
_MAX_BYTES = 1 << 20  # the published files are below 30 KB


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """Scores float64 [layers, KV heads], higher needs history more; window of the other heads in tokens.

    kv_bits: of an element of a 4-bit history, mean over the retrieval heads, where the model is known to need more than
    4 in each of them; the published format has no such key.
    """

    scores: NDArray[np.float64]
    sink: int
    recent: int
    source: str
    kv_bits: float | None = None

    def __post_init__(self) -> None:
        scores = np.array(self.scores, dtype=np.float64)
        if scores.ndim != 2 or not scores.size:
            raise BadPattern(f"A head pattern is a table of layers by KV heads, not of shape {scores.shape}.")
        if not np.isfinite(scores).all():
            layer, head = np.argwhere(~np.isfinite(scores))[0]
            raise BadPattern(f"The score of layer {layer}, head {head} is {scores[layer, head]}: it must be finite.")
        for name, value, least in (("sink", self.sink, 0), ("recent", self.recent, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadPattern(
                    f"{name} = {value!r} in {self.source} must be a whole number of tokens, {least} or more."
                )
        bits = self.kv_bits
        number = isinstance(bits, int | float) and not isinstance(bits, bool)
        if bits is not None and not (number and kv_bits.LEAST <= bits <= kv_bits.MOST):
            raise BadPattern(
                f"kv_bits = {str(bits)[:40]!r} in {self.source} must be a number of bits, {kv_bits.LEAST} to "
                f"{kv_bits.MOST:g}."
            )
        scores.setflags(write=False)
        object.__setattr__(self, "scores", scores)

    @classmethod
    def load(cls, folder: Path) -> HeadPattern:
        """Read the published format: a table of scores, and a config.json with sink_size and recent_size."""
        try:
            lines = (folder / _SCORES).read_text(encoding="utf-8-sig").rstrip().splitlines()
            rows = [_scores(folder, number, line) for number, line in enumerate(lines, 1)]
            settings = read_json(folder / _SETTINGS)
        except FileNotFoundError as error:
            raise BadPattern(f"{folder} is not a head pattern: it needs {_SCORES} and {_SETTINGS}.") from error
        except (OSError, ValueError) as error:
            raise BadPattern(f"The head pattern in {folder} cannot be read: {error}.") from error
        for number, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise BadPattern(
                    f"{folder / _SCORES}, line {number} has {len(row)} scores, the first line {len(rows[0])}: every "
                    "layer has as many KV heads. Download it again, or identify the heads anew."
                )
        if not {"sink_size", "recent_size"} <= settings.keys():
            raise BadPattern(f"{folder / _SETTINGS} must name sink_size and recent_size.")
        source = str(settings.get("source") or settings.get("exp_name") or folder.name)
        shown = "".join(letter if letter.isprintable() else " " for letter in source)  # it goes to terminals
        return cls(np.array(rows), settings["sink_size"], settings["recent_size"], shown, settings.get("kv_bits"))

    def save(self, folder: Path) -> None:
        """Write the published format; `load` gives back the same pattern."""
        settings: dict[str, Any] = {"sink_size": self.sink, "recent_size": self.recent, "source": self.source}
        if self.kv_bits is not None:
            settings["kv_bits"] = self.kv_bits
        rows = ["\t".join(f"{score:.18e}" for score in row) for row in self.scores]
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _SCORES, ("\n".join(rows) + "\n").encode())
        _write(folder / _SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())

    @classmethod
    def all_retrieval(cls, config: ModelConfig) -> HeadPattern:
        """The pattern of a model without one: every head needs everything (use it at ratio 1)."""
        scores = np.ones((config.num_layers, config.num_kv_heads))
        return cls(scores, _DEFAULT_SINK, _DEFAULT_RECENT, "no pattern: every head keeps everything")

    def retrieval_mask(self, ratio: float) -> NDArray[np.bool_]:
        """bool [layers, KV heads] with exactly round(ratio * heads) true: the highest scores of the whole model.

        Among equal scores the earlier layer, then the earlier head, comes first: no random tie-break, no quantile
        (which drops heads when many share the highest score).
        """
        if not 0 <= ratio <= 1:
            raise BadPattern(f"retrieval ratio = {ratio} must be from 0 to 1.")
        return self.best(round(ratio * self.scores.size))

    def best(self, count: int) -> NDArray[np.bool_]:
        """As `retrieval_mask`, for a number of heads."""
        if not 0 <= count <= self.scores.size:
            raise BadPattern(f"{count} retrieval heads: it must be from 0 to {self.scores.size}.")
        order = np.argsort(-self.scores, axis=None, kind="stable")
        mask = np.zeros(self.scores.size, dtype=np.bool_)
        mask[order[:count]] = True
        return mask.reshape(self.scores.shape)

    def above(self, threshold: float) -> NDArray[np.bool_]:
        """bool [layers, KV heads], true where the score is `threshold` or more."""
        return self.scores >= threshold

    def hash(self) -> str:
        """sha256 of scores, shape, window and bits: equal for equal behaviour, wherever the pattern came from."""
        rest = (self.scores.shape, self.sink, self.recent)
        digest = hashlib.sha256(repr(rest if self.kv_bits is None else (*rest, self.kv_bits)).encode())
        digest.update((self.scores + 0.0).astype("<f8").tobytes())  # + 0.0 turns -0.0 into 0.0
        return digest.hexdigest()

    def check(self, config: ModelConfig) -> None:
        """Raise BadPattern unless the model has this many layers and KV heads."""
        if self.scores.shape != (config.num_layers, config.num_kv_heads):
            layers, heads = self.scores.shape
            raise BadPattern(
                f"The head pattern {self.source} is for {layers} layers of {heads} KV heads; the model has "
                f"{config.num_layers} layers of {config.num_kv_heads}. Choose the pattern of this model."
            )


@dataclass(frozen=True)
class PublishedPattern:
    """Where DuoAttention's authors publish a model's pattern, and what the two files must hash to."""

    url: str
    scores_sha256: str
    settings_sha256: str


_REPOSITORY = "https://raw.githubusercontent.com/mit-han-lab/duo-attention"
_REVISION = "03dca842639c64ed0d0daf9042da845cdea44637"
_REVISION_LLAMA31 = "53b606ce291c1036f9f940eac47849d7878f589a"


def _published(
    model: str, scores: str, settings: str, revision: str = _REVISION, longest: int = 32000
) -> PublishedPattern:
    folder = f"lr=0.02-reg=0.05-ctx=1000_{longest}-multi_passkey10"
    return PublishedPattern(f"{_REPOSITORY}/{revision}/attn_patterns/{model}/{folder}", scores, settings)


_LLAMA31 = _published(
    "Meta-Llama-3.1-8B-Instruct",
    "9e615b9aa11d7a2c21dfe3dfe51f1a282e10e69d9a48b83327ad5842049d5fcb",
    "b0babbb22b381c625cb17808a9d8bb567e9beed4a0f9cdb09e4ff7a86a922898",
    _REVISION_LLAMA31,
    128000,
)
_PUBLISHED: dict[str, PublishedPattern] = {
    "gradientai/Llama-3-8B-Instruct-Gradient-4194k": _published(
        "Llama-3-8B-Instruct-Gradient-4194k",
        "87c1937664540e64e5fd0dc5028bd82ccc5614709b64e26f68d8f8d41e256811",
        "5b08c4053a9d3b21026489c8d7ce0677014f90ade7e55c9155d0562a525cebfa",
    ),
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": _published(
        "Llama-3-8B-Instruct-Gradient-1048k",
        "107fac740f8d01fc35af8493401b243623828920dbb0207677d65c89caecb6db",
        "2ef5fc8c940b57effb145935d35b8beefb0442f143a4c66d6d0f2861ebed4830",
    ),
    "togethercomputer/Llama-2-7B-32K-Instruct": _published(
        "Llama-2-7B-32K-Instruct",
        "1823be67afda3d261c3d2648385e088ec5d2f8db00efa19c1ca9615cff60e55f",
        "803d1fd051a64fd29fe5efe105b340424424f7d8930a97889ab266ef877a70bd",
    ),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": _LLAMA31,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31,
    "mistralai/Mistral-7B-Instruct-v0.2": _published(
        "Mistral-7B-Instruct-v0.2",
        "f545ef5f73b668ec58a6f29b999214fe847600255366111ba1912a602f3c2a76",
        "3c3190fe5c38c93c8bc42f1f8a535ec20cf485d256272ac626534fa955c32944",
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": _published(
        "Mistral-7B-Instruct-v0.3",
        "244a0573952fd9fc2218922552f6ac358075aaf4170082988b9a395d5ce269fd",
        "87b3206b7cbb7d6db6b51ac6b0c5a84ea35714bf99feb239356f1ff052c08f98",
    ),
}


def default_pattern(hub_id: str) -> PublishedPattern | None:
    """The published pattern of a hub model, if there is one."""
    return _PUBLISHED.get(hub_id)


def fetch_pattern(hub_id: str, cache_dir: Path) -> HeadPattern:
    """The published pattern of a hub model: from the cache when its hashes are right, else downloaded and checked.

    Raises BadPattern when none is published, when the network or disk fails, and when a hash is wrong.
    """
    published = default_pattern(hub_id)
    if published is None:
        raise BadPattern(f"No head pattern is published for {hub_id}. There are for: {', '.join(_PUBLISHED)}.")
    folder = cache_dir / "patterns" / hub_id.replace("/", "--")
    for name, sha256 in ((_SCORES, published.scores_sha256), (_SETTINGS, published.settings_sha256)):
        if _sha256(folder / name) == sha256:
            continue
        url = f"{published.url}/{name}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                content: bytes = response.read(_MAX_BYTES)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise BadPattern(f"{url} is not the file that was published: its sha256 is not {sha256}.")
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / name, content)
        except (OSError, http.client.HTTPException) as error:
            raise BadPattern(
                f"The head pattern of {hub_id} could not be fetched from {url}: {error}. "
                f"Connect to the internet once, or give a pattern with --pattern DIR."
            ) from error
    return HeadPattern.load(folder)


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _scores(folder: Path, number: int, line: str) -> list[float]:
    try:
        return [float(score) for score in line.split("\t")]
    except ValueError as error:
        raise BadPattern(
            f"{folder / _SCORES}, line {number} is {line[:40]!r}: it must be a score a KV head, with tabs between. "
            "Download it again, or identify the heads anew."
        ) from error


def _write(path: Path, content: bytes) -> None:
    with writing(path) as file:
        file.write(content)
