"""Tiny random models of each family, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HF: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}
State = dict[str, torch.Tensor]


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HF[name])
    for parameter in model.parameters():  # biases and norms are constants until trained
        torch.nn.init.normal_(parameter)
    return model.to(dtype)


def parameters(model: Any) -> State:
    """Name -> tensor without the tied lm_head."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
