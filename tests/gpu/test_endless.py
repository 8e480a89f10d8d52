"""The endless cache on a GPU, through prefill and decode, against its definition in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.engine.graph import DecodeGraph
from kernels.norm_rope.ref import apply_rope
from models.build import Build, build_decoder
from models.cache.endless import EndlessCache
from models.cache.kernels import kernel_report
from models.cache.live_endless import LiveEndless
from models.cache.shape import CacheShape
from models.config import ModelConfig, RopeConfig
from models.rope import EndlessRope, Rope
from quant.w8a8 import DenseLinear
from tests.cache import endless_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
@pytest.mark.parametrize(("sink", "recent"), [(4, 60), (0, 200), (3, 1)])
@pytest.mark.parametrize("sizes", [[400], [130] + [1] * 100 + [170]])
def test_equals_its_definition(poisoned, head_dim, group, sink, recent, sizes):
    shape = CacheShape((0, 0), (3, 3), group, head_dim, sink, recent, 16, torch.float16, torch.float16)
    q = torch.randn(2, 400, 3 * group, head_dim) * 2
    k, v = torch.randn(2, 2, 400, 3, head_dim)
    rope = Rope(RopeConfig(), head_dim, 4096)
    device = torch.device("cuda")
    cache = EndlessCache(shape, EndlessRope(rope, sink + recent), device)
    outs, start = [], 0
    for size in sizes:
        table = cache.rope.table(torch.arange(start, start + size), device)
        cache.begin(size)
        layers = []
        for layer in range(2):
            part = [x[layer, start : start + size].cuda() for x in (q, k, v)]
            for heads in part[:2]:
                apply_rope(heads, table)
            layers.append(cache.attend(layer, *part))
        cache.commit()
        outs.append(torch.stack(layers))
        start += size
    out = torch.cat(outs, 1).double().cpu()
    want = torch.stack([endless_dense.attend(shape, rope.table, q[i], k[i], v[i]) for i in range(2)])
    assert {row["kernel"]: row["chosen"] for row in kernel_report(device, shape, endless=True)}[
        "attention_window_step"
    ] == "triton_split"
    assert (out - want).norm() <= 2e-3 * want.norm()


def test_one_captured_step_serves_every_length(poisoned):
    """The graph's logits beside those of steps that the host drives, through filling and sliding; then a turn more."""
    shape, rope, decoder = _decoder(sink=4, recent=60)
    device = torch.device("cuda")
    graph, cache = DecodeGraph(decoder, LiveEndless(shape, rope, device)), EndlessCache(shape, rope, device)
    ids = torch.randint(0, 96, (200,))
    decoder.forward(ids[:40], cache)
    twin = cache.fork()
    graph.live.take(twin)
    for token in ids[40:140]:
        want = decoder.logits(decoder.forward(token[None], cache))[0]
        got = graph.replay(token[None].cuda())
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    graph.live.give(twin, 140)
    want, got = (decoder.forward(ids[140:], each)[-1] for each in (cache, twin))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def _decoder(sink, recent):
    """A tiny Llama with unquantised random weights in endless mode."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
        }
    )
    device, mask = torch.device("cuda"), np.zeros((2, 2), dtype=bool)
    shape = replace(CacheShape.for_model(config, mask, "kv4", sink, recent, device), bits=16)
    tensors = ((name, 0.1 * torch.randn(size, device=device)) for name, size in config.tensor_shapes().items())
    how = Build(mask, DenseLinear, DenseLinear, lambda t: t.to(torch.bfloat16), False, False, device)
    decoder = build_decoder(config, tensors, how)
    decoder.rope = rope = EndlessRope(Rope(config.rope, config.head_dim, config.max_positions), sink + recent)
    return shape, rope, decoder
