"""What question and answer looked at, against attention computed in full over the tokens as the cache holds them."""

import numpy as np
import pytest
import torch

from models import evidence
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.evidence import Watch, weigh
from quant import kv4

D, LAYERS, GROUP = 16, 2, 2
HEADS = [(0, 1), (1, 0), (1, 3), (1, 2)]  # of two and of one KV head


def _answered(n, asked, question, prompt, bits, block=128, front=128):
    """A cache of n tokens whose queries from `asked` on were watched, with q and k [layers, n, heads, d]."""
    exact = torch.float32 if bits == 16 else torch.float16
    shape = CacheShape((2, 2), (0, 0), GROUP, D, 0, 1, bits, exact, torch.float32, block=block, front=front)
    cache = DuoCache(BlockPool(shape, -(-n // block), torch.device("cpu")))
    q = torch.randn(LAYERS, n, 2 * GROUP, D) * 3
    k, v = torch.randn(2, LAYERS, n, 2, D)
    at, watch = 0, Watch(HEADS, question=question)
    for size in [prompt, *[1] * (n - prompt)]:
        cache.watch, watch.rows = watch, at + size - asked
        cache.begin(size)
        for layer in range(LAYERS):
            cache.attend(layer, *(x[layer, at : at + size] for x in (q, k, v)))
        cache.commit()
        at += size
    return cache, q, k


def _truth(q, k, n, asked, question, prompt, bits, block=128, front=128):
    k = k.double() if bits == 16 else k.half().double()
    if bits < 16:  # the first tokens and the newest block are as they came
        codes, scale = kv4.quantize(k.float(), bits)
        packed = (codes.double() - 8) * scale[..., :1].double() + scale[..., 1:].double()
        packed = kv4.join(packed) if bits == 8 else packed
        whole = front + max(n - front, 0) // block * block
        k = torch.cat((k[:, :front], packed[:, front:whole], k[:, whole:]), 1)
    rows = []
    for layer, head in HEADS:
        scores = q[layer, asked:, head].double() @ k[layer, :prompt, head // GROUP].T / D**0.5
        later = torch.arange(prompt) > torch.arange(asked, n)[:, None]
        lengths = (question - asked, prompt - 1 - question, n - prompt + 1)
        framing, *given = scores.masked_fill(later, -torch.inf).softmax(-1).split(lengths)
        rows.append(torch.stack([part.mean(0) for part in given if len(part)]).mean(0))
        if len(framing):
            rows[-1] -= framing.mean(0)
    return torch.stack(rows).mean(0).numpy()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("prompt", "answer"), [(5, 1), (128, 1), (129, 3), (300, 90), (511, 2)])
@pytest.mark.parametrize("form", [(128, 128), (64, 16)])
@pytest.mark.parametrize(("tokens", "framing"), [(1, 0), (2, 3), (5, 0)])
def test_every_token_of_a_short_prompt_is_weighed(poisoned, prompt, answer, bits, form, tokens, framing):
    """Question and answer count the same, whatever their lengths; where only its last token is read, the answer."""
    n, question = prompt + answer - 1, prompt - tokens
    asked = question - framing
    cache, q, k = _answered(n, asked, question, prompt, bits, *form)
    looked = weigh(cache, cache.watch, prompt)
    assert np.array_equal(looked.positions, np.arange(prompt))
    np.testing.assert_allclose(looked.masses, _truth(q, k, n, asked, question, prompt, bits, *form), atol=2e-5)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(("block", "front"), [(128, 128), (64, 16)])
def test_a_long_prompt_is_weighed_where_it_counts(poisoned, monkeypatch, bits, block, front):
    monkeypatch.setattr(evidence, "_SHARP", 3 * block)
    prompt, n = front + 5 * block + 7, front + 5 * block + 40
    asked, question = prompt - 20, prompt - 12  # within the block before the newest
    cache, q, k = _answered(n, asked, question, prompt, bits, block, front)
    looked = weigh(cache, cache.watch, prompt)
    truth = _truth(q, k, n, asked, question, prompt, bits, block, front)
    starts = [0, *range(front, prompt, block)]
    sums = np.add.reduceat(truth, starts)
    best = sorted(np.argsort(-sums)[:3])
    assert sorted(set(np.searchsorted(starts, looked.positions, "right") - 1)) == best
    np.testing.assert_allclose(looked.masses, truth[looked.positions], atol=2e-5)
