"""From what --model names to a model that runs: its files, head pattern, runner and tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from app.config import DEFAULT_HUB_MODEL, EMBEDDED_MODEL, Settings
from app.embedded import embedded_model_path, shipped
from app.engine import engine
from app.engine.runner import build_runner
from app.engine.sizing import CHUNKS, fit, free_bytes, resolve_shape
from app.engine.snapshots import SnapshotStore
from app.errors import OctavoError, UsageError
from app.head_costs import Heads
from app.measured_heads import measured_heads
from app.tokenizer import TextTokenizer, Tokenizer
from models.cache.plan import MemoryPlan, plan_memory
from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint, open_checkpoint
from models.config import ModelConfig
from models.errors import BadPattern
from models.files import read_json
from models.heads import HeadPattern, default_pattern, fetch_pattern
from models.keys import key_warning
from models.known import KNOWN_CONFIGS
from models.measured import MeasuredHeads

LoadProgress = Callable[[str, float], None]
"""Told the stage and how far loading is, from 0 to 1."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = "config.json generation_config.json *.safetensors model.safetensors.index.json".split()
_HUB_FILES += "tokenizer.json tokenizer_config.json chat_template.jinja".split()
_HUB_EXCLUDED = ["*/*", "consolidated*"]  # the weights once more in another layout
_HUB_PATIENCE_S = 5.0
_HUB_LEAST_BYTES = 11 << 30  # the 8B model at 8 bits, its embedding and head at 16, and a context worth having
_SMALL = (
    "A small model of 135 million parameters answers here: it finds facts, and is often wrong otherwise. With an NVIDIA"
    " GPU of 12 GB or more one of 8 billion does; --model takes any other."
)
PATTERN_FOLDER = "pattern"  # inside a checkpoint of our own


class Runner(engine.Runner, Protocol):
    """A runner that also tells its settings and backends and what it saves, and can make room for another."""

    @property
    def snapshots(self) -> SnapshotStore | None: ...
    def describe(self) -> dict[str, Any]: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class OpenModel:
    """A model that is ready to run, and what people are told about it.

    `bytes_for(context)` is the memory for weights and a context of so many tokens. `quadratic_cost` is how much of
    the cost of reading grows with the square of the length, see CostModel.
    """

    name: str
    runner: Runner
    tokenizer: TextTokenizer
    eos_ids: frozenset[int]
    bytes_for: Callable[[int], int]
    quadratic_cost: float = 0.0
    note: str = ""
    pattern_note: str = ""
    heads: Heads | None = None  # None for another server's model
    path: Path | None = None  # its directory or file; None for another server's model


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files lie; `hub_id` where they came from the hub, `note` what people should know."""

    name: str
    path: Path
    hub_id: str | None = None
    note: str = ""


def open_model(settings: Settings, progress: LoadProgress) -> OpenModel:
    """Find, read and prepare the model that the settings name. Slow."""
    progress("Finding the model", 0.0)
    files = find_model(settings)
    progress("Reading the tokenizer", 0.05)
    checkpoint = open_checkpoint(files.path)
    tokenizer = Tokenizer.of(checkpoint)
    settings = _as_stored(settings, checkpoint)
    config = checkpoint.config
    pattern, pattern_note = choose_pattern(files, settings)
    if pattern is not None:
        pattern.check(config)
    note = files.note
    if settings.mode == "duo" and settings.kv == "kv4" and (warning := key_warning(checkpoint)):
        note = f"{note} {warning}".strip()
    measured = _measured(checkpoint, tokenizer, pattern, settings, progress)
    reading = lambda done: progress("Reading the weights", 0.1 + 0.8 * done)  # noqa: E731
    runner = build_runner(checkpoint, pattern, settings, reading, measured)
    progress("Preparing the kernels", 0.92)
    try:
        runner.warm_up()
    except BaseException:
        runner.release()
        raise
    plan = runner.plan
    return OpenModel(
        name=files.name,
        runner=runner,
        tokenizer=tokenizer,
        eos_ids=frozenset(config.eos_ids),
        bytes_for=lambda context: plan.fixed_bytes + context * plan.bytes_per_token,
        quadratic_cost=_quadratic_cost(config, runner.describe()["retrieval_ratio"]),
        note=note,
        pattern_note=pattern_note,
        heads=Heads(config, pattern, settings, runner.decoder.device),
        path=files.path,
    )


def _measured(
    checkpoint: Checkpoint,
    tokenizer: TextTokenizer,
    pattern: HeadPattern | None,
    settings: Settings,
    progress: LoadProgress,
) -> MeasuredHeads | None:
    """The heads where their keys are rounded, else None."""
    config, device = checkpoint.config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, shape = resolve_shape(config, pattern, settings, device)
    if not (shape.rotated and any(shape.retrieval_heads)):
        return None

    def ready() -> None:
        """What does not fit is told before the minutes that measuring may take."""
        fit(config, shape, settings, device, free_bytes(device))
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    measuring = lambda done: progress("Measuring the heads' keys, once", 0.05 + 0.05 * done)  # noqa: E731
    return measured_heads(checkpoint, tokenizer, settings.cache_dir, device, measuring, ready)


def find_model(settings: Settings) -> ModelFiles:
    """The files that --model names, fetched from the hub where needed.

    Without --model: the default hub model where a GPU can hold it, else the embedded one.
    """
    model = settings.model
    if model == EMBEDDED_MODEL:
        return _embedded()
    if model is None:
        if not torch.cuda.is_available():
            return _embedded()
        gpu = torch.cuda.get_device_properties(0)
        if gpu.total_memory < _HUB_LEAST_BYTES or gpu.major < 8:
            why = f"{DEFAULT_HUB_MODEL} needs 12 GB and compute capability 8.0"
            return _embedded(f"{why}; {gpu.name} has less, so the small embedded model answers.")
        try:
            return ModelFiles(DEFAULT_HUB_MODEL, _from_hub(DEFAULT_HUB_MODEL), DEFAULT_HUB_MODEL)
        except OctavoError as error:
            return _embedded(f"{error} Until then the small embedded model answers.")
    check_model(model)
    path = Path(model).expanduser()
    if path.exists():
        return ModelFiles(path.resolve().name, path)
    return ModelFiles(model, _from_hub(model), model)


def check_model(model: str | None) -> None:
    """Raises UsageError for a --model that is no file or model directory here and cannot be a hub id either."""
    if model in (None, EMBEDDED_MODEL):
        return
    path = Path(model).expanduser()
    if os.path.isdir(path):  # os.path: no error where a name is too long to be one
        if not (path / "config.json").is_file():
            raise UsageError(
                f"--model {model}: the directory holds no model: config.json is missing. Name one with config.json, "
                "tokenizer.json and safetensors, or a .gguf file in it."
            )
        return
    if os.path.isfile(path):
        return
    if os.path.exists(path):
        raise UsageError(
            f"--model {model}: this is a device, a pipe or a socket and holds no model. Give a hub id (owner/name), a"
            " directory of safetensors or a .gguf file."
        )
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        raise UsageError(
            f"--model {model}: there is no such file or directory. Give a hub id (owner/name), a directory of "
            "safetensors or a .gguf file."
        )


def choose_pattern(files: ModelFiles, settings: Settings) -> tuple[HeadPattern | None, str]:
    """The head pattern to use and what to say about it; None when all heads are of one kind."""
    if settings.mode == "endless":
        return None, "Endless: every head keeps the first and the last tokens, and forgets what lies between."
    if settings.pattern is not None:
        return _told(HeadPattern.load(settings.pattern), settings)
    if files.hub_id is not None and default_pattern(files.hub_id) is not None:
        try:
            return _told(fetch_pattern(files.hub_id, settings.cache_dir), settings)
        except BadPattern as error:
            return None, f"Every head keeps everything. {error}"
    for folder in (files.path / PATTERN_FOLDER, shipped(files.path)):
        if (folder / "config.json").is_file():
            return _told(HeadPattern.load(folder), settings)
    return None, "No head pattern for this model: every head keeps everything, whatever the retrieval ratio."


def plan_context(
    settings: Settings, context: int | None, config_file: Path | None = None, gpu: bool = True
) -> tuple[MemoryPlan, ModelConfig, CacheShape]:
    """The memory that `context` tokens need on a GPU or CPU, without weights and without a GPU; model and cache.

    `context` is None in endless mode, where the windows are all there is.
    The model is what the settings name, or a Hugging Face config.json. Where its head pattern is not at hand, as many
    heads as --retrieval-ratio says keep everything.
    """
    if context is not None and context < 1:
        raise UsageError(f"--context is {context}; it must be at least 1 token.")
    device = torch.device("cuda" if gpu else "cpu")
    config, pattern, settings = _plan_inputs(settings, config_file)
    _, shape = resolve_shape(config, pattern, settings, device)
    chunk = settings.chunk or CHUNKS[device.type][-1]
    if context is None:
        context = shape.sink + shape.recent
    plan = plan_memory(config, shape, settings.weights, context, chunk, device, settings.embedding)
    return plan, config, shape


def _as_stored(settings: Settings, checkpoint: Checkpoint) -> Settings:
    """The settings as the weights on disk have them: an embedding that is in int8 there stays so."""
    return replace(settings, embedding="int8") if checkpoint.int8_embedding else settings


def _plan_inputs(settings: Settings, config_file: Path | None) -> tuple[ModelConfig, HeadPattern | None, Settings]:
    model = settings.model or (DEFAULT_HUB_MODEL if torch.cuda.is_available() else EMBEDDED_MODEL)
    on_disk = model == EMBEDDED_MODEL or os.path.exists(Path(model).expanduser())
    if config_file is None and on_disk:
        files = find_model(replace(settings, model=model))
        checkpoint = open_checkpoint(files.path)
        return checkpoint.config, choose_pattern(files, settings)[0], _as_stored(settings, checkpoint)
    if config_file is None and model in KNOWN_CONFIGS:
        data = KNOWN_CONFIGS[model]
    else:
        file = config_file or _config_from_hub(model)
        try:
            data = read_json(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read as a config.json: {error}.") from error
    config = ModelConfig.from_hf(data)
    if settings.pattern is not None:
        return config, HeadPattern.load(settings.pattern), settings
    if config_file is None and default_pattern(model) is None:
        return config, None, settings
    # Only how many heads keep everything counts for memory, not which: these are spread evenly over the layers.
    scores = np.arange(config.num_layers * config.num_kv_heads, dtype=np.float64).reshape(config.num_kv_heads, -1).T
    return config, replace(HeadPattern.all_retrieval(config), scores=scores), settings


def _told(pattern: HeadPattern, settings: Settings) -> tuple[HeadPattern, str]:
    kept = pattern.retrieval_mask(settings.retrieval_ratio)
    return pattern, f"{int(kept.sum())} of {kept.size} heads keep everything ({pattern.source})."


def _embedded(why: str = "") -> ModelFiles:
    path = embedded_model_path()
    return ModelFiles(path.name.split(".")[0], path, note=f"{why} {_SMALL}".strip())


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        _fetch(
            hub_id,
            lambda local: snapshot_download(
                hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_EXCLUDED, local_files_only=local
            ),
        )
    )


def _config_from_hub(hub_id: str) -> Path:
    if not _HUB_ID.fullmatch(hub_id):
        raise UsageError(f"--model {hub_id}: there is no such file or directory, and it is no hub id (owner/name).")
    from huggingface_hub import hf_hub_download

    return Path(_fetch(hub_id, lambda local: hf_hub_download(hub_id, "config.json", local_files_only=local)))


def _hub_answers() -> bool:
    """Whether the hub can be reached: asked once, where its client tries each file for half a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_PATIENCE_S)
    except Exception:  # its client's errors have no common base
        return False
    return True


def _fetch(hub_id: str, download: Callable[[bool], str]) -> str:
    """What `download` gives, which is told whether only files on this machine are to be taken."""
    from huggingface_hub import constants, errors

    try:
        return download(not _hub_answers())
    except errors.GatedRepoError as error:
        raise OctavoError(
            f"{hub_id} asks for its licence to be accepted on its page; then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise OctavoError(f"The hub has no public model {hub_id}. Check the name.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise OctavoError(
            f"{hub_id} is not on this machine, and {why}. Connect to the internet once, or give --model a directory "
            "or .gguf file."
        ) from error
    except Exception as error:  # network, disk or hub: its client has many errors without a common base
        raise OctavoError(f"{hub_id} could not be fetched: {error}. What came so far is kept; try again.") from error


def _quadratic_cost(config: ModelConfig, retrieval_ratio: float) -> float:
    """Arithmetic of attention over that of the weights, per token of context."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    return q * retrieval_ratio / weights
