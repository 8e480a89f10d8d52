"""What every test shares."""

import os

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


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory):
    """Nothing that a test reads or saves touches the person's own library."""
    os.environ["OCTAVO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


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
    from app.embedded import embedded_model_path
    from benchmarks._peer import transformers_model
    from models.checkpoint import open_checkpoint

    return transformers_model(open_checkpoint(embedded_model_path()))
