"""What every test shares."""

import pytest
import torch
from hypothesis import settings

# The same examples everywhere: a machine that is slow or lucky must not decide whether a change passes.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def poisoned():
    """Fresh memory is NaN (the largest integer for codes), so that a value nobody wrote shows up in the result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def prose() -> str:
    """Real text of several hundred KB that every Python carries: its own documentation strings' sources."""
    import pydoc_data.topics

    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


@pytest.fixture(scope="session")
def prose_ids(prose) -> list[int]:
    """`prose` in the embedded model's tokens, the first ten thousand."""
    from app.embedded import embedded_model_path
    from app.tokenizer import Tokenizer

    return Tokenizer(embedded_model_path()).encode_text(prose[:60_000])[:10_000]


@pytest.fixture(scope="session")
def reference_model():
    """transformers' own model with the embedded model's weights, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from app.embedded import embedded_model_path
    from models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(embedded_model_path())
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
    weights = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model
