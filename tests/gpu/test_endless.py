"""The endless cache on a GPU, through prefill and decode, against its definition in float64."""

from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch

from app.config import Settings
from app.engine.runner import Runner
from app.engine.sizing import resolve_shape
from app.engine.types import SamplingParams
from kernels.norm_rope.ref import apply_rope
from models.build import Build, build_decoder
from models.cache.endless import EndlessCache
from models.cache.kernels import kernel_report
from models.cache.live_endless import LiveEndless
from models.cache.plan import MemoryPlan
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.config import ModelConfig, RopeConfig
from models.rope import EndlessRope, Rope
from quant.w8a8 import DenseLinear, W8A8Linear
from tests.cache import endless_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
@pytest.mark.parametrize(("sink", "recent"), [(4, 60), (0, 200), (3, 1)])
@pytest.mark.parametrize("sizes", [[400], [130] + [1] * 100 + [170]])
def test_equals_its_definition(poisoned, head_dim, group, sink, recent, sizes):
    shape = CacheShape((0, 0), (3, 3), group, head_dim, sink, recent, 16, torch.float16, torch.float16)
    q = torch.randn(2, 400, 3 * group, head_dim) * 2
    k, v = torch.randn(2, 2, 400, 3, head_dim)
    rope = Rope(RopeConfig(), head_dim, 4096)
    cache = EndlessCache(shape, EndlessRope(rope, sink + recent), CUDA)
    outs, start = [], 0
    for size in sizes:
        table = cache.rope.table(torch.arange(start, start + size), CUDA)
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
    assert {row["kernel"]: row["chosen"] for row in kernel_report(CUDA, shape, endless=True)}[
        "attention_window_step"
    ] == "triton_split"
    assert (out - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
@pytest.mark.parametrize(("sink", "recent"), [(4, 60), (0, 77), (3, 1)])
def test_the_captured_step_equals_its_definition(poisoned, head_dim, group, sink, recent):
    """Every token by one graph, from the first one on, through filling and sliding."""
    shape = CacheShape((0, 0), (3, 3), group, head_dim, sink, recent, 16, torch.float16, torch.float16)
    tokens = torch.randn(2, 200, 3 * group, head_dim) * 2, *torch.randn(2, 2, 200, 3, head_dim)
    rope = Rope(RopeConfig(), head_dim, 4096)
    live = LiveEndless(shape, EndlessRope(rope, sink + recent), CUDA)
    assert live.serves(shape, CUDA)
    now = [torch.zeros(2, 1, x.shape[2], head_dim, device=CUDA) for x in tokens]

    def step():
        table = live.rope.table(live.begin(1), CUDA)
        outs = []
        for layer in range(2):
            q, k, v = (x[layer].clone() for x in now)
            apply_rope(q, table)
            apply_rope(k, table)
            outs.append(live.attend(layer, q, k, v))
        live.commit()
        return torch.stack(outs)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    live.take(EndlessCache(shape, live.rope, CUDA))
    outs = []
    for at in range(200):
        for held, x in zip(now, tokens, strict=True):
            held.copy_(x[:, at : at + 1])
        graph.replay()
        outs.append(out.clone())
    got = torch.cat(outs, 1).double().cpu()
    want = torch.stack([endless_dense.attend(shape, rope.table, *(x[i] for x in tokens)) for i in range(2)])
    assert int(live.position) == 200
    assert (got - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("sink", "recent"), [(4, 60), (0, 64), (2, 1)])
@pytest.mark.parametrize("length", [1, 40, 90])
def test_an_answer_by_the_captured_step(poisoned, packed, sink, recent, length):
    """The runner captures it. Its logits beside those of steps that the host drives, through filling and sliding, and
    of a further turn; the step behind the last token is taken back."""
    shape, decoder = _decoder(sink, recent, packed)
    runner = Runner(decoder, BlockPool(shape, 0, CUDA), MemoryPlan(sink + recent, 0, 0, 0, 0, 0, 128), 64, {})
    graph = runner.graph
    assert graph is not None and isinstance(graph.live, LiveEndless) and runner.capacity is None
    prompt = torch.randint(0, 96, (length,)).tolist()
    slot = runner.start(prompt)
    slot.prefill(prompt)
    plain = slot._cache.fork()
    seen, inner = [], graph.replay
    graph.replay = lambda token: seen.append(inner(token).clone()) or seen[-1]
    with closing(slot.answer(SamplingParams(), None)) as answer:
        tokens = list(islice(answer, 120))
    want = [decoder.logits(decoder.forward(torch.tensor([token]), plain))[0] for token in tokens]
    _close(torch.stack(seen), torch.stack(want))
    assert slot.length == length + 119 == plain.length - 1
    slot._read(tokens[-1:])
    slot._read(prompt)
    want = decoder.logits(decoder.forward(torch.tensor(prompt), plain)[-1:])[0]
    _close(slot._logits, want)
    slot.discard()


def _close(got, want):
    assert got.shape == want.shape
    assert (got - want).norm() <= 1e-2 * want.norm()  # an int8 code at a rounding edge may fall to either side


def _decoder(sink, recent, packed):
    """A tiny Llama with random weights in endless mode, unquantised or W8A8."""
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
    mask = np.zeros((2, 2), dtype=bool)
    shape = resolve_shape(config, None, Settings(mode="endless", sink=sink, recent=recent), CUDA)[1]
    tensors = ((name, 0.1 * torch.randn(size, device=CUDA)) for name, size in config.tensor_shapes().items())
    make = W8A8Linear.from_float if packed else lambda weight, bias: DenseLinear(weight.to(torch.bfloat16), bias)
    decoder = build_decoder(
        config, tensors, Build(mask, make, DenseLinear, lambda t: t.to(torch.bfloat16), packed, packed, CUDA)
    )
    decoder.rope = EndlessRope(Rope(config.rope, config.head_dim, config.max_positions), sink + recent)
    return shape, decoder
