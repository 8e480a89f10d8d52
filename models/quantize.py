"""A checkpoint in W8A8, layer by layer: norms and rotations folded in, scales and rounding chosen on a sample of text.

The result is a directory of safetensors with int8 weights (quant/formats.py), one file a layer. It grows in a working
directory beside it, which a run that was stopped continues, and is renamed when it is whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.build import Parts, make_layer
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint, open_checkpoint
from models.config import EMBEDDING, HEAD
from models.decoder import Decoder, Layer
from models.errors import OutputTaken, UnsupportedModel
from models.files import take
from models.measured import FILE as HEADS
from models.measured import MeasuredHeads, measure_layer
from models.turn import rotate_values, scale_gated, scale_values, turn_gated, turn_residual
from quant import kv4
from quant.calibrate import balance, gram, product_error, round_weight
from quant.formats import OWN, QuantizedWeight
from quant.w8a8 import DenseLinear, Rows, W8A8Linear, quantize_weight

_SAMPLE_ROWS = 2048  # tokens on which a scale's error is measured
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_JOB = "job.json"
_M_MMAP_THRESHOLD = -3  # of malloc.h
PARTIAL = ".partial"  # behind the name of a directory that is being made

Progress = Callable[[str, float], None]


def quantize_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    sample: Sequence[Tensor],
    described: Mapping[str, Any],
    device: torch.device,
    progress: Progress = lambda stage, done: None,
    finish: Callable[[Path], None] = lambda folder: None,
    int8_embedding: bool = False,
) -> None:
    """Writes `out`, a directory that must not exist yet; one layer at a time is in memory.

    sample: token ids, a tensor a text; without any, weights are rounded to the nearest. described: what the config
    says of the source (formats.metadata). `finish` adds files to the directory before it is renamed. `int8_embedding`
    stores the embedding, and the head, in int8 too.
    """
    if checkpoint.int8_format is not None:
        raise UnsupportedModel("weights", checkpoint.int8_format.title, "a checkpoint that is not quantised yet")
    _give_freed_memory_back()
    config = checkpoint.config
    read = hashlib.sha256(b"".join(ids.numpy().tobytes() + b"." for ids in sample)).hexdigest()
    with _work_folder(out, {**described, "sample": read, "int8_embedding": int8_embedding}) as work:
        names = [f"model-{i + 1:05}-of-{config.num_layers + 2:05}.safetensors" for i in range(config.num_layers + 2)]
        keep = _rounded_end if int8_embedding else _narrow_end
        _write(work / names[0], lambda: keep(EMBEDDING, checkpoint.load_float(EMBEDDING)))
        calibration = _Calibration(checkpoint, sample, device) if sample else None
        for index in range(config.num_layers):
            file, prefix = work / names[index + 1], f"model.layers.{index}."
            if file.exists() and calibration is not None:
                calibration.advance(_read_layer(file, prefix, device))
            elif not file.exists():
                parts = _float_layer(checkpoint, prefix, device)
                quantised = calibration.quantize(parts) if calibration else _nearest(parts)
                _write(file, lambda q=quantised, p=prefix: _stored(q, p))  # type: ignore[misc]
                del parts, quantised
            progress("Quantising", (index + 1) / (config.num_layers + 1))
        norm, head = "model.norm.weight", HEAD
        ends = {} if config.tied_embeddings else {head: keep}
        ends[norm] = _narrow_end
        _write(
            work / names[-1],
            lambda: {k: v for name, end in ends.items() for k, v in end(name, checkpoint.load_float(name)).items()},
        )
        _write_index(work, names)
        if calibration is not None:
            MeasuredHeads.join(calibration.heads).save(work / HEADS)
        section = {**config.to_hf(), "quantization_config": dict(described)}
        (work / "config.json").write_text(json.dumps(section, indent=2) + "\n")
        finish(work)
        open_checkpoint(work)  # complete, or it raises
        if os.path.lexists(out):
            raise OutputTaken(f"{out} exists by now. Move it away; the same command then ends at once.")
        work.rename(out)
        (out / _JOB).unlink()
        progress("Quantising", 1.0)


@contextmanager
def _work_folder(out: Path, job: dict[str, Any]) -> Iterator[Path]:
    """The directory to write into, held against other runs; it keeps only the whole shards of the same job."""
    work = out.with_name(out.name + PARTIAL)
    text = json.dumps(job, sort_keys=True).encode()
    work.mkdir(parents=True, exist_ok=True)
    mark = work / _JOB
    if any(work.iterdir()) and not mark.is_file():
        raise OutputTaken(f"{work} is not of a stopped run: it has no {_JOB}. Choose another OUT, or delete it.")
    with mark.open("a+b") as file:
        if not take(file) or not mark.exists():  # or that run has just ended
            raise OutputTaken(f"{work}: another run writes there. Wait for its end, or choose another OUT.")
        file.seek(0)
        same = file.read() == text
        if not same:
            file.truncate(0)
        for old in work.iterdir():
            if old == mark or (same and _is_whole(old)):
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
        if not same:
            file.write(text)
            file.flush()
        yield work


def _is_whole(file: Path) -> bool:
    """Whether it is a shard as long as its header says."""
    try:
        with safe_open(file, framework="pt"):
            return file.suffix == ".safetensors"
    except (SafetensorError, OSError):
        return False


def _give_freed_memory_back() -> None:
    """Has glibc map every large tensor by itself, which ends with it.

    Else it learns to take such from its heap, where what is freed stays: up to 2 GB of the 8B's shape (MALLOPT(3)).
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _write(file: Path, tensors: Callable[[], dict[str, Tensor]]) -> None:
    """Whole or not at all; a file that is there already stays."""
    if file.exists():
        return
    temporary = file.with_suffix(".tmp")
    try:
        save_file(tensors(), temporary, metadata={"format": "pt"})
    except SafetensorError as error:  # tells what the disk said only in its text
        if (told := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(file)) from error
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.chmod(0o644)  # safetensors makes it private
    temporary.replace(file)


def _write_index(work: Path, names: Sequence[str]) -> None:
    where: dict[str, str] = {}
    total = 0
    for name in names:
        with safe_open(work / name, framework="pt") as shard:
            where |= dict.fromkeys(shard.keys(), name)
        total += (work / name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _narrow(tensor: Tensor) -> Tensor:
    """What stays unquantised, in 16 bits; fp16 holds what is dequantised from narrower types better than bf16."""
    if tensor.dtype != torch.float32:
        return tensor.clone()
    return tensor.to(torch.float16 if tensor.abs().max() < 60000 else torch.bfloat16)


def _narrow_end(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: _narrow(weight)}


def _rounded_end(name: str, weight: Tensor) -> dict[str, Tensor]:
    """In int8, some rows at a time: the whole in fp32 would be the largest thing in memory."""
    rounded = [QuantizedWeight(*quantize_weight(rows)) for rows in weight.split(8192)]
    return _stored({name: QuantizedWeight.join(rounded)}, "")


def _float_layer(checkpoint: Checkpoint, prefix: str, device: torch.device) -> dict[str, Tensor]:
    """A layer's tensors by their names behind `prefix`, norms and rotations folded in."""
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    parts = {name.removeprefix(prefix): checkpoint.load_float(name).to(device) for name in names}
    rotate_values(checkpoint.config, parts)
    turn_residual(checkpoint.config, parts)
    return parts


def _nearest(parts: dict[str, Tensor]) -> Parts:
    done: Parts = {}
    for name in list(parts):
        tensor = parts.pop(name)
        done[name] = QuantizedWeight(*quantize_weight(tensor)) if _is_linear(name) else tensor
    return done


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in _LINEARS


def _stored(parts: Parts, prefix: str) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, QuantizedWeight):
            stored[prefix + name] = part.codes.cpu().contiguous()
            stored[prefix + name.removesuffix(".weight") + OWN.scale] = part.scale.cpu().contiguous()
        else:
            stored[prefix + name] = part.float().cpu().contiguous()
    return stored


def _read_layer(file: Path, prefix: str, device: torch.device) -> Parts:
    from safetensors.torch import load_file

    tensors = load_file(file, device=str(device))
    parts: Parts = {}
    for name, tensor in tensors.items():
        if name.endswith(OWN.scale):
            continue
        scale = tensors.get(name.removesuffix(".weight") + OWN.scale)
        parts[name.removeprefix(prefix)] = tensor if scale is None else QuantizedWeight(tensor, scale)
    return parts


class _Watched(DenseLinear):
    """A linear layer in fp32 that keeps what it reads."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.float(), bias)
        self.rows: list[Tensor] = []

    def _keep(self, rows: Rows) -> Rows:
        self.rows.append(rows.values.float())
        return rows

    def prepare(self, x: Tensor) -> Rows:
        return self._keep(super().prepare(x))

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        return self._keep(super().prepare_normed(x, weight, eps))

    def prepare_gated(self, product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Rows:
        return self._keep(super().prepare_gated(product, scale, turn))

    def seen(self) -> Tensor:
        """All rows [n, in], which are then forgotten."""
        rows = torch.cat(self.rows)
        self.rows = []
        return rows


class _Calibration:
    """Hidden states of the sample on their way through the layers that are quantised already."""

    def __init__(self, checkpoint: Checkpoint, sample: Sequence[Tensor], device: torch.device) -> None:
        self._config = replace(checkpoint.config, num_layers=1)
        self._device = device
        self._mask = np.ones(checkpoint.config.num_kv_heads, dtype=bool)
        kv = "fp32" if device.type == "cpu" else "bf16"
        self._shape = CacheShape.for_model(self._config, self._mask[None], kv, 1, 1, device)
        embedding = checkpoint.load_float(EMBEDDING)
        self._states = [embedding[ids].to(device).float() for ids in sample]
        self._turn = kv4.rotation(self._config.hidden_size).to(device)
        self.heads: list[MeasuredHeads] = []  # of each layer so far

    def quantize(self, parts: dict[str, Tensor]) -> Parts:
        """The layer in int8, its scales and rounding chosen; the sample then moves through it."""
        config, layer = self._config, make_layer(self._config, dict(parts), self._mask, _watch)
        self._run(layer)
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        attention, output, mlp, down = (linear.seen() for linear in linears if isinstance(linear, _Watched))
        del layer, linears
        size = config.intermediate_size
        factor = self._choose_gated(parts["mlp.down_proj.weight"], down)
        if factor is None:
            grams = gram(down)
        else:
            scale_gated(config, parts, factor)
            scale = factor
            grams = gram(down, lambda rows: turn_gated(turn_gated(rows, size, back=True) * scale, size))
        del down  # the widest: gone before the next is looked at
        done = _rounded(parts, ("mlp.down_proj",), grams)
        factor = self._choose(parts["self_attn.o_proj.weight"], output, config.num_kv_heads)
        if factor is not None:
            scale_values(config, parts, factor)
            output.mul_(factor.repeat_interleave(output.shape[1] // len(factor)))
        for names, rows in (
            (("self_attn.o_proj",), output),
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), attention),
            (("mlp.gate_proj", "mlp.up_proj"), mlp),
        ):
            done |= _rounded(parts, names, gram(rows))
        done |= parts
        self.advance(done)
        return done

    def _choose(self, weight: Tensor, rows: Tensor, groups: int) -> Tensor | None:
        """Factors for the groups of rows' channels if they lower the measured error, else None."""
        rows = rows[:: max(1, len(rows) // _SAMPLE_ROWS)]
        full = balance(weight, rows, groups)
        errors: dict[float, float] = {}
        for power in (0.0, 0.5, 1.0):
            columns = full.pow(power).repeat_interleave(rows.shape[1] // groups)
            errors[power] = product_error(weight / columns, rows * columns)
        best = min(errors, key=lambda power: errors[power])
        return full.pow(best) if best else None

    def _choose_gated(self, weight: Tensor, rows: Tensor) -> Tensor | None:
        """As `_choose`, for every channel in front of `down`, whose weight and rows are turned."""
        size = self._config.intermediate_size
        rows = turn_gated(rows[:: max(1, len(rows) // _SAMPLE_ROWS)], size, back=True)
        plain = turn_gated(weight, size, back=True)
        full = balance(plain, rows, size)
        errors: dict[float, float] = {}
        for power in (0.0, 0.5, 1.0):
            factor = full.pow(power)
            errors[power] = product_error(turn_gated(plain / factor, size), turn_gated(rows * factor, size))
        best = min(errors, key=lambda power: errors[power])
        return full.pow(best) if best else None

    def advance(self, parts: Parts) -> None:
        """Moves the sample through a quantised layer, and measures its heads on the longest text."""
        layer = make_layer(self._config, dict(parts), self._mask, W8A8Linear.from_float)
        longest = max(self._states, key=len)
        measured, _ = measure_layer(self._config, layer, longest, self._turn)
        self.heads.append(measured)
        self._states = self._run(layer)

    def _run(self, layer: Layer) -> list[Tensor]:
        """A decoder of this one layer whose embedding is the sample's hidden states, taken in order."""
        done = []
        for states in self._states:
            decoder = Decoder(
                self._config, states, [layer], torch.ones(states.shape[1]), DenseLinear(states), self._turn
            )
            blocks = -(-len(states) // self._shape.block)
            cache = DuoCache(BlockPool(self._shape, blocks, self._device))
            done.append(kv4.rotate(decoder.forward(torch.arange(len(states)), cache), back=True))
        return done


def _watch(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> _Watched:
    assert isinstance(weight, Tensor)
    return _Watched(weight, bias)


def _rounded(parts: dict[str, Tensor], names: Sequence[str], gram: Tensor) -> Parts:
    """Takes weights with one input out of `parts` and rounds them together."""
    weights = {f"{name}.weight": parts.pop(f"{name}.weight") for name in names}
    joined = round_weight(torch.cat(list(weights.values())), gram)
    done: Parts = {}
    start = 0
    for name, weight in weights.items():
        end = start + len(weight)
        done[name] = QuantizedWeight(joined.codes[start:end], joined.scale[start:end])
        start = end
    return done
