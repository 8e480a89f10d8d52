"""A model whose weights are constructed, not trained, so that it finds the token that followed a key.

Two layers of one head each. The first attends to the token before (a fixed function of distance, in the fast rotary
pairs) and notes which one it was; it needs a window of two tokens and is a streaming head. The second looks for the
place whose token before equals the current one (in the slow pairs, which hardly turn in millions of tokens) and says
what stands there; it needs the whole history and is the retrieval head. Each code is orthogonal to all others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine
from app.engine.runner import Runner
from app.engine.types import Done, GenerationRequest, SamplingParams
from models.heads import HeadPattern
from tests.fakes import FakeTokenizer

DEPTHS = (0, 1, *range(10, 101, 10))  # percent
TOKENS, HEAD_DIM, HIDDEN = 32, 128, 128
KEYS, VALUES, MARK, FILLERS = range(12), range(12, 24), 24, range(25, 32)
THETA = 45_845_420_000.0
WINDOW = 64


def write_checkpoint(folder: Path, context: int) -> Path:
    """config.json and model.safetensors of the model, in `folder`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(), folder / "model.safetensors")
    return folder


def _weights() -> dict[str, torch.Tensor]:
    # The residual stream: the token, the token before, the answer, and a constant.
    token, before, answer, constant = slice(0, 32), slice(32, 64), slice(64, 96), 96
    same = torch.eye(TOKENS)
    half = HEAD_DIM // 2
    slow = torch.cat((torch.arange(half - 16, half), torch.arange(HEAD_DIM - 16, HEAD_DIM)))
    fast = torch.arange(12)
    frequency = THETA ** -(fast / half)

    embedding = torch.zeros(TOKENS, HIDDEN)
    embedding[:, token], embedding[:, constant] = same, 1.0
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(2):
        q, k, v, o = torch.zeros(4, HEAD_DIM, HIDDEN)
        if layer == 0:
            # q = (1, 0) in each fast pair, k the same turned by one place: their product peaks one place back.
            strength = HEAD_DIM**0.25  # one place further off costs 56 in the exponent
            q[fast, constant] = strength
            k[fast, constant] = strength * torch.cos(frequency)
            k[fast + half, constant] = strength * torch.sin(frequency)
            v[:TOKENS, token] = same
            o[before, :TOKENS] = 1.5 * same
        else:
            strength = math.sqrt(5.0) * HEAD_DIM**0.25  # a match is worth 225 in the exponent; ln(4M) is 15
            q[slow, token] = strength * same
            k[slow, before] = strength * same
            v[:TOKENS, token] = same
            o[answer, :TOKENS] = same
        names = dict(zip(("q_proj", "k_proj", "v_proj", "o_proj"), (q, k, v, o), strict=True))
        weights |= {f"model.layers.{layer}.self_attn.{name}.weight": value for name, value in names.items()}
        mlp = {"gate_proj": (64, HIDDEN), "up_proj": (64, HIDDEN), "down_proj": (HIDDEN, 64)}
        weights |= {f"model.layers.{layer}.mlp.{name}.weight": torch.zeros(size) for name, size in mlp.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    head = torch.zeros(TOKENS, HIDDEN)
    head[:, answer] = same
    weights["lm_head.weight"] = head
    return {name: value.contiguous() for name, value in weights.items()}


def pattern(declared: bool = True) -> HeadPattern:
    """The second layer's head keeps everything; or, where it is not declared so, the first one's."""
    scores = np.array([[0.0], [1.0]]) if declared else np.array([[1.0], [0.0]])
    return HeadPattern(scores, 4, WINDOW, "constructed")


def haystack(length: int) -> list[int]:
    """Fillers with a needle (key, value, mark) at each depth, the first one right behind the first token.

    The first token of all has none before it and takes itself for that one, so it must not be a key.
    """
    ids = np.random.default_rng(0).choice(np.array(FILLERS), length)
    for number, depth in enumerate(DEPTHS):
        at = 1 + (length - 4) * depth // 100
        ids[at : at + 3] = KEYS[number], VALUES[number], MARK
    return [int(i) for i in ids]


def ask(runner: Runner, length: int, depths: Sequence[int] = DEPTHS) -> dict[int, bool]:
    """For each depth, whether the answer behind its key, in a context of `length` tokens, is its value and the mark.

    The value comes from the end of prefill, the mark from a decode step. One chat: the haystack is read once.
    """
    engine = Engine(runner, lambda stop: Detokenizer(FakeTokenizer(), stop))
    text = haystack(length - 3)
    found = {}
    try:
        for number, depth in enumerate(DEPTHS):
            if depth not in depths:
                continue
            request = GenerationRequest((*text, KEYS[number]), SamplingParams(max_new_tokens=2), chat_id="needles")
            done = engine.submit(request).result()
            assert isinstance(done, Done)
            assert not found or done.usage.cached_tokens > length - 300
            found[depth] = done.token_ids == (VALUES[number], MARK)
    finally:
        engine.close()
    return found
