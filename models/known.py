"""What a config.json would say of models that Octavo names itself, so that planning for them asks nobody."""

from __future__ import annotations

from typing import Any

# Of the default model, at the hub: its shape and window. Weights are always read with their own config.json. The
# rotation's base is rounded as on the model's card; no plan depends on it.
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "gradientai/Llama-3-8B-Instruct-Gradient-4194k": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4_194_304,
        "rms_norm_eps": 1e-5,
        "rope_theta": 45.2e9,
        "tie_word_embeddings": False,
    }
}
