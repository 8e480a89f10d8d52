"""GGUF files: what converters write comes back as transformers has it; damage and unknown things are named."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from app.embedded import embedded_model_path
from models.checkpoint import _GGUF_NAMES, open_checkpoint
from models.errors import BadCheckpoint, ModelError, UnsupportedModel
from models.gguf import SUPPORTED_TYPES, read_gguf
from tests.models.tiny import HF, State, parameters, tiny_model


def as_converters_store(name: str, tensor: torch.Tensor, hf: PreTrainedConfig) -> torch.Tensor:
    """As converters reorder q and k of Llama and Mistral: row 2i is the old row i, row 2i + 1 the old row i + d/2."""
    if hf.model_type not in ("llama", "mistral") or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    head_dim = head_dim_of(hf)
    rows = [
        head * head_dim + pair + half * head_dim // 2
        for head in range(tensor.shape[0] // head_dim)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return tensor[rows]


def head_dim_of(hf: PreTrainedConfig) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def gguf_name(name: str) -> str:
    stem, _, kind = name.removeprefix("model.layers.").rpartition(".")
    layer, _, inner = stem.partition(".") if name.startswith("model.layers.") else ("", "", stem)
    own = {hf: short for short, hf in _GGUF_NAMES.items()}[inner]
    return f"blk.{layer}.{own}.{kind}" if layer else f"{own}.{kind}"


def write_gguf(
    path: Path, name: str, changes: dict[str, Any] | None = None, kind: str = "F32", extra: dict[str, Any] | None = None
) -> State:
    """A small GGUF of a tiny model, as a converter would write it; gives the tensors that must come back."""
    hf = HF[name]
    model = tiny_model(name)
    writer = GGUFWriter(path, hf.model_type)
    head_dim = head_dim_of(hf)
    keys: dict[str, Any] = {
        "block_count": hf.num_hidden_layers,
        "context_length": hf.max_position_embeddings,
        "embedding_length": hf.hidden_size,
        "feed_forward_length": hf.intermediate_size,
        "attention.head_count": hf.num_attention_heads,
        "attention.head_count_kv": hf.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 1e4,
        **(changes or {}),
    }
    for key, value in keys.items():
        if value is None:
            continue
        put: dict[type, Callable[[str, Any], None]]
        put = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        put[type(value)](f"{hf.model_type}.{key}", value)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_bos_token_id(1)
    writer.add_token_list([f"t{index}" for index in range(hf.vocab_size)])
    expected: State = {}
    for full, tensor in parameters(model).items():
        stored = as_converters_store(full, tensor, hf).numpy()
        if kind == "F32" or stored.ndim == 1:
            writer.add_tensor(gguf_name(full), stored)
            expected[full] = tensor
        else:
            quantised = GGMLQuantizationType[kind]
            data = quantize(stored, quantised)
            writer.add_tensor(gguf_name(full), data, raw_dtype=quantised)
            expected[full] = torch.from_numpy(dequantize(quantize(tensor.numpy(), quantised), quantised))
    for full, value in (extra or {}).items():
        writer.add_tensor(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", HF)
def test_gguf(name: str, kind: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", name, kind=kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert sorted(checkpoint.names()) == sorted(expected)
    for tensor_name, tensor in checkpoint.tensors():
        assert torch.equal(tensor.float(), expected[tensor_name]), tensor_name
    config, hf = checkpoint.config, HF[name]
    assert (config.family, config.head_dim, config.max_positions) == (hf.model_type, head_dim_of(hf), 512)
    assert config.tied_embeddings == hf.tie_word_embeddings
    assert (config.eos_ids, config.bos_id, config.vocab_size) == ((2, 5), 1, 96)
    assert kind in checkpoint.source


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "default"),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear"),
        ({"rope.scaling.factor": 4.0}, "linear"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            "yarn",
        ),
    ],
)
def test_gguf_rope(changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3", changes)
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert rope.kind == kind
    if kind != "default":
        assert rope["factor"] == 4
    if kind == "yarn":
        assert (rope["original_max_positions"], rope["beta_fast"]) == (128, 16)


def llama3_divisors(low: float = 1.0) -> np.ndarray[Any, Any]:
    """`rope_freqs` as converters write it for Llama 3.1, head_dim 32, theta 5e5, factor 8."""
    divisors = []
    for pair in range(16):
        wavelength = 2 * np.pi * 500_000.0 ** (2 * pair / 32)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - low) / (4 - low)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(divisors, dtype=np.float32)


def test_gguf_of_llama31_gives_its_rope(tmp_path: Path) -> None:
    changes, divisors = {"rope.freq_base": 5e5}, llama3_divisors()
    assert 1 < sorted(set(divisors.tolist()))[1] < 8  # one pair at least is blended
    write_gguf(tmp_path / "m.gguf", "llama-tied", changes, extra={"rope_freqs.weight": divisors})
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert (rope.kind, rope.theta, rope["factor"], rope["low_freq_factor"]) == ("llama3", 5e5, 8, 1)
    for wrong in (llama3_divisors(2.0), divisors[:4], divisors * np.nan):
        write_gguf(tmp_path / "w.gguf", "llama-tied", changes, extra={"rope_freqs.weight": wrong})
        with pytest.raises(UnsupportedModel, match="rope_freqs"):
            open_checkpoint(tmp_path / "w.gguf")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_count": 8}, UnsupportedModel, "num_local_experts = 8"),
        ({"logit_scale": 0.5}, UnsupportedModel, "llama.logit_scale = 0.5"),
        ({"attention.sliding_window": 128}, UnsupportedModel, "sliding_window = 128"),
        ({"rope.dimension_count": 8}, UnsupportedModel, "partial_rotary_factor = 0.5"),
        ({"attention.value_length": 8}, UnsupportedModel, "value_length = 8"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, UnsupportedModel, "longrope"),
        ({"attention.head_count_kv": [2, 1]}, BadCheckpoint, r"num_key_value_heads = \[2, 1\]"),
        ({"attention.head_count": [4, 4]}, BadCheckpoint, r"llama.attention.head_count = \[4, 4\]"),
        ({"block_count": None}, BadCheckpoint, "no num_hidden_layers"),
        ({"block_count": 3}, BadCheckpoint, r"lacks tensors: model\.layers\.2.* and 13 more"),
        ({"block_count": 1}, BadCheckpoint, r"unknown tensors: model\.layers\.1"),
        ({"feed_forward_length": 48}, BadCheckpoint, r"has shape \(96, 64\); its config asks for \(48, 64\)"),
    ],
)
def test_gguf_that_does_not_fit_is_refused(changes: dict[str, Any], error: Any, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", changes)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def raw_gguf(path: Path, architecture: str, kind: int = 0, version: int = 3, pairs: tuple[bytes, ...] = ()) -> Path:
    """The smallest file: one tensor of one block-row, written byte by byte."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    body = text("general.architecture") + struct.pack("<I", 8) + text(architecture) + b"".join(pairs)
    tensor = text("token_embd.weight") + struct.pack("<IQIQ", 1, 256, kind, 0)
    header = b"GGUF" + struct.pack("<IQQ", version, 1, 1 + len(pairs)) + body + tensor
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(2048))
    return path


def test_gguf_refusals_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"general\.architecture = 'gemma3'"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "gemma3"))
    with pytest.raises(UnsupportedModel, match=r"general\.architecture = 'gpt-oss'.*learned sink logits"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "gpt-oss"))
    with pytest.raises(UnsupportedModel, match=r"type of token_embd\.weight = 'Q8_1'"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "llama", kind=9))
    with pytest.raises(UnsupportedModel, match=r"type of token_embd\.weight = 250"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "llama", kind=250))
    with pytest.raises(UnsupportedModel, match="GGUF version = 1"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "llama", version=1))
    split = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 2)
    with pytest.raises(UnsupportedModel, match=r"split\.count = 2"):
        open_checkpoint(raw_gguf(tmp_path / "m.gguf", "llama", pairs=(split,)))
    for content in (b"", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(BadCheckpoint, match=r"m\.gguf"):
            open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_every_type_named_as_supported_can_be_read(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    path = raw_gguf(tmp_path / "m.gguf", "llama", kind=kind.value)
    file = read_gguf(path)
    info = file.tensors["token_embd.weight"]
    content = np.random.default_rng(0).integers(0, 60, info.nbytes, dtype=np.uint8)
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + info.nbytes] = content.tobytes()
    path.write_bytes(data)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    assert info.nbytes == 256 // block * block_bytes
    tensor = read_gguf(path).load("token_embd.weight")
    if name == "BF16":
        expected = torch.frombuffer(bytearray(content.tobytes()), dtype=torch.bfloat16)
    else:
        expected = torch.from_numpy(dequantize(content, kind).copy())
    assert tensor.shape == (256,)
    assert torch.equal(tensor.float(), expected.float())


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, "llama", kind="Q8_0")
    return path.read_bytes()


def header_size(data: bytes) -> int:
    return data.index(b"ffn_down.bias") + 64


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_gguf_cut_anywhere_is_refused(
    small_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, header_size(small_gguf)) | st.integers(0, len(small_gguf) - 33))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(small_gguf[:length])
    with pytest.raises(BadCheckpoint, match="cut short: the file ends too early|is cut short: |is empty") as refused:
        open_checkpoint(path)
    assert "buffer" not in str(refused.value)


@pytest.mark.parametrize("length", [0, 3, 4, 10, 30, 60])
def test_where_a_gguf_ends_too_early_is_told(small_gguf: bytes, tmp_path: Path, length: int) -> None:
    (tmp_path / "m.gguf").write_bytes(small_gguf[:length])
    told = rf"the file ends too early, at byte {length}; it needs \d+ or more" if length else r"m\.gguf is empty"
    with pytest.raises(BadCheckpoint, match=told):
        open_checkpoint(tmp_path / "m.gguf")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_gguf_gives_a_model_error_or_loads(
    small_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_size(small_gguf)))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        with np.errstate(all="ignore"):  # a damaged scale may be NaN
            dict(open_checkpoint(path).tensors())
    except ModelError:
        return


@pytest.fixture(scope="module")
def embedded() -> Path:
    return embedded_model_path()


def test_the_embedded_model_opens_at_once(embedded: Path) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        checkpoint = open_checkpoint(embedded)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2
    config = checkpoint.config
    assert (config.family, config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (
        *("llama", 30, 576, 9, 3),
    )
    assert (config.head_dim, config.max_positions, config.rope.theta, config.tied_embeddings) == (64, 8192, 1e5, True)


def test_the_embedded_model_equals_the_reference_reader(embedded: Path) -> None:
    reader = GGUFReader(embedded)
    raw = {tensor.name: tensor for tensor in reader.tensors}
    checkpoint = open_checkpoint(embedded)
    assert len(checkpoint.names()) == len(raw) == 272
    rows = torch.arange(64).view(2, 32).T.flatten()  # row 2i of the file is row i, row 2i + 1 is row i + 32
    for name, tensor in checkpoint.tensors():
        stored = raw[gguf_name(name)]
        expected = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, 64))[:, rows].flatten(0, 1)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected), name
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    metadata = read_gguf(embedded).metadata
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata.count("tokenizer.ggml.merges") == len(metadata["tokenizer.ggml.merges"]) == 48_900
    assert metadata["tokenizer.ggml.token_type"][:3] == [3, 3, 3]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"].startswith("{% for message in messages %}")


def test_streaming_never_holds_the_model(embedded: Path) -> None:
    """At most the largest tensor in float32 (113 MB) and a little to work with, not the model's 0.5 GB."""
    checkpoint = open_checkpoint(embedded)
    largest = total = 0
    tracemalloc.start()
    for _, tensor in checkpoint.tensors():
        largest = max(largest, tensor.nbytes)
        total += tensor.nbytes
    peak = tracemalloc.get_traced_memory()[1]  # numpy reports its buffers to it
    tracemalloc.stop()
    assert largest < peak < 1.4 * largest < total / 3
