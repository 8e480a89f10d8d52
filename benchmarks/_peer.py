"""transformers' own Llama with the weights of a checkpoint: what the decoder is compared with, also in the tests."""

from __future__ import annotations

from typing import Any

from models.checkpoint import Checkpoint


def transformers_model(checkpoint: Checkpoint) -> Any:
    """The model in fp32; raises ValueError when a weight found no place, since a comparison would mean nothing then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tied_embeddings,
    )
    model = LlamaForCausalLM(config).eval()
    weights = {name: checkpoint.load_float(name).float() for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(f"weights do not fit transformers' model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model
