"""Rope against transformers' own functions near the start, and against exact arithmetic far out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpmath import mp
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.config import ModelConfig, RopeConfig
from models.rope import EndlessRope, Rope

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 5e5,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e6},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}
HEAD_DIM = 48


def hf_config(kind: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=dict(KINDS[kind]),
        architectures=["LlamaForCausalLM"],
    )


def rope_of(kind: str) -> Rope:
    config = ModelConfig.from_hf(hf_config(kind).to_dict())
    return Rope(config.rope, config.head_dim, config.max_positions)


def reference(kind: str, length: int) -> torch.Tensor:
    """complex64 [length, head_dim / 2] as transformers computes it in one forward pass."""
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(hf_config(kind))(torch.zeros(1), positions[None])
    return torch.complex(cos[0], sin[0])[:, : HEAD_DIM // 2]


@pytest.mark.parametrize("length", [1, 100, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, length: int) -> None:
    table = rope_of(kind).table(torch.arange(length))
    assert table.dtype == torch.complex64
    torch.testing.assert_close(table, reference(kind, length), atol=1e-4, rtol=0)


def test_dynamic_equals_transformers_beyond_the_original_context() -> None:
    rope, length = rope_of("dynamic"), 1500
    assert rope.max_positions == 2048
    expected = reference("dynamic", length)
    torch.testing.assert_close(rope.table(torch.arange(length), seq_len=length), expected, atol=3e-4, rtol=0)
    own = rope.table(torch.arange(length))
    # The last position's own length is the whole length; those before it have shorter ones.
    torch.testing.assert_close(own[-1], expected[-1], atol=3e-4, rtol=0)
    assert (own[1000] - expected[1000]).abs().max() > 0.1


@pytest.mark.parametrize("chunk", [1, 7, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_make_no_difference(kind: str, chunk: int) -> None:
    rope, positions = rope_of(kind), torch.arange(512)
    if kind == "dynamic":
        positions = torch.arange(1500)
    parts = [rope.table(part) for part in positions.split(chunk)]
    assert torch.equal(torch.cat(parts), rope.table(positions))


@pytest.mark.parametrize("position", [1, 2**15, 1_000_000, 3_300_000, 4_194_303])
def test_far_positions_are_exact(position: int) -> None:
    theta, head_dim = 283_461_213, 128
    table = Rope(RopeConfig("default", theta), head_dim, 4_194_304).table(torch.tensor([position]))[0]
    with mp.workdps(50):
        phases = [position * mp.mpf(theta) ** (-mp.mpf(2 * pair) / head_dim) for pair in range(head_dim // 2)]
        exact = torch.tensor([complex(mp.expjpi(phase / mp.pi)) for phase in phases])
    assert (table - exact).abs().max() < 1e-6


def test_bf16_or_fp32_phases_would_be_seen() -> None:
    """The bound of the test above is tight enough to notice the fault that it is for."""
    inv_freq = 283_461_213 ** -(torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    rough = torch.polar(torch.ones(64), 3_300_000 * inv_freq)
    exact = Rope(RopeConfig("default", 283_461_213), 128, 4_194_304).table(torch.tensor([3_300_000]))[0]
    assert (rough - exact).abs().max() > 0.01


def test_only_yarn_changes_lengths() -> None:
    positions = torch.tensor([0, 5, 511])
    for kind in KINDS:
        rope = rope_of(kind)
        lengths = rope.table(positions).abs()
        torch.testing.assert_close(lengths, torch.full_like(lengths, rope.attention_factor))
        assert (rope.attention_factor == 1) == (not kind.startswith("yarn"))


def test_positions_outside_the_context_are_refused() -> None:
    rope = rope_of("default")
    rope.table(torch.tensor([511]))
    for position in (-1, 512):
        with pytest.raises(ValueError, match="context of 512"):
            rope.table(torch.tensor([position]))
    assert rope.table(torch.empty(0, dtype=torch.int64)).shape == (0, HEAD_DIM // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_endless_positions_equal_plain_ones_near_the_start(kind: str) -> None:
    rope = rope_of(kind)
    endless = EndlessRope(rope, 200)
    positions = torch.arange(200)
    plain = rope.table(positions, seq_len=200)
    torch.testing.assert_close(endless.table(positions), plain, rtol=0, atol=2e-7)
    torch.testing.assert_close(
        endless.table(positions[100:]) * endless.back(positions[:100]),
        plain[100:101].expand(100, -1),
        rtol=0,
        atol=4e-7,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [4_194_304, 10**9 + 7, 1 << 40, (1 << 62) - 9000])
def test_endless_distances_are_exact_however_far_out(kind: str, far: int) -> None:
    """Phases are integers: the angle between two positions is the same to the last bit wherever they lie."""
    endless = EndlessRope(rope_of(kind), 8192)
    near, distant = torch.arange(0, 8192, 7), torch.arange(0, 8192, 7) + far
    steps = endless._steps
    assert torch.equal(distant[:, None] * steps - (distant[:1] * steps), near[:, None] * steps - near[:1] * steps)
    here, there = endless.table(near), endless.table(distant)
    torch.testing.assert_close(there * there[:1].conj(), here * here[:1].conj(), rtol=0, atol=8e-7)


def test_endless_positions_are_right_far_out() -> None:
    """Against exact arithmetic at a million million tokens."""
    endless = EndlessRope(rope_of("default"), 8192)
    position = 10**12 + 3
    got = endless.table(torch.tensor([position]))[0].to(torch.complex128)
    with mp.workdps(60):
        for pair in range(len(got)):
            frequency = mp.mpf(endless._steps[pair].item()) / mp.mpf(2) ** 64 * 2 * mp.pi
            want = mp.expj(frequency * position)
            assert abs(complex(want) - complex(got[pair])) < 2e-7
