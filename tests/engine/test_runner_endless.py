"""The runner in endless mode with the embedded model: no end, reuse and forks, constant memory, what is refused."""

import pytest
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.runner import build_runner
from app.engine.sizing import fit, resolve_shape
from app.errors import UsageError
from benchmarks._llama_8b import LLAMA_8B
from models.cache.endless import EndlessCache
from models.cache.plan import SNAPSHOTS, workspace_bytes
from models.checkpoint import open_checkpoint
from models.config import ModelConfig
from models.errors import DoesNotFit
from tests.engine.test_runner import _ask_twice, _greedy, _read

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner():
    """The first 4 and the last 200 tokens; chunks that are no multiple of anything."""
    return build_runner(open_checkpoint(embedded_model_path()), None, Settings(mode="endless", recent=200, chunk=333))


def test_there_is_no_end_and_memory_stays_the_same(runner, prose_ids):
    assert runner.capacity is None
    slot = runner.start(prose_ids[:700])
    cache = slot._cache
    assert isinstance(cache, EndlessCache)
    held = runner.memory().streaming_kv_bytes
    assert held == runner.pool.shape.window_bytes == runner.plan.streaming_bytes // SNAPSHOTS
    _read(runner, slot, prose_ids[:700])
    _greedy(slot, 20)
    assert slot.length == 720
    assert runner.memory().streaming_kv_bytes == held
    assert runner.memory().retrieval_kv_bytes == 0
    assert cache.keys.untyped_storage().nbytes() + cache.values.untyped_storage().nbytes() == held
    slot.discard()


def test_a_prompt_beyond_the_models_window_is_not_refused(runner, prose_ids):
    """8,192 positions are what the model was made for; tests/models/test_endless.py reads on past them."""
    prompt = prose_ids[:8500]
    slot = runner.start(prompt)
    slot.prefill(prompt[: runner.chunk])
    assert slot._logits.isfinite().all()
    slot.discard()


def test_second_turn_reads_only_its_new_tokens_and_answers_as_a_fresh_run(runner, prose_ids):
    prompt = prose_ids[:700]
    slot = runner.start(prompt)
    _read(runner, slot, prompt)
    answer = _greedy(slot, 8)
    slot.publish("a")
    follow_up = prompt + answer + prose_ids[700:760]
    again = runner.start(follow_up)
    assert again.cached == 708
    _read(runner, again, follow_up)
    again.discard()
    while runner.prefixes.drop_oldest():
        pass
    fresh = runner.start(follow_up)
    assert fresh.cached == 0
    _read(runner, fresh, follow_up)
    fresh.discard()
    logits, reused = fresh._logits, again._logits
    assert torch.cosine_similarity(logits, reused, 0) > 0.99
    assert int(logits.argmax()) == int(reused.argmax())


def test_the_same_prompt_again_answers_the_same(runner, prose_ids):
    cached, first, second = _ask_twice(runner, prose_ids[1000:1650])
    assert 0 < 650 - cached <= 128
    assert second == first


def _shape(**changes):
    return resolve_shape(open_checkpoint(embedded_model_path()).config, None, Settings(mode="endless", **changes), CPU)


def test_windows_take_their_default_from_the_model():
    shape = _shape()[1]
    assert (shape.sink, shape.recent, shape.bytes_per_token, sum(shape.retrieval_heads)) == (4, 2044, 0, 0)
    assert (_shape(sink=0)[1].recent, _shape(sink=5000)[1].recent) == (2048, 1)
    assert _shape(sink=0, recent=1)[1].recent == 1
    assert _shape(recent=8188)[1].recent == 8188
    with pytest.raises(UsageError, match="--sink-tokens 4 and --recent 8,189 keep 8,193 tokens.*8,192"):
        _shape(recent=8189)


def test_windows_that_do_not_fit_are_refused_with_both_numbers():
    config, settings = open_checkpoint(embedded_model_path()).config, Settings(mode="endless")
    with pytest.raises(DoesNotFit, match=r"GiB; 0\.09 GiB are free.*--recent"):
        fit(config, _shape()[1], settings, CPU, 100 << 20)


def test_the_plan_for_a_gpu_counts_what_the_cache_takes_in_fp32():
    device, config = torch.device("cuda"), ModelConfig.from_hf(LLAMA_8B)
    shape = resolve_shape(config, None, Settings(mode="endless"), device)[1]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # The residual stream; q, k, v, the queries as the sinks see them, two outputs that are merged; queries in fp16.
    least = 4 * (config.hidden_size + q + 2 * kv + q + 2 * q) + 2 * 2 * q
    assert workspace_bytes(config, shape, 4096, device) > 4096 * least


def test_it_tells_what_it_keeps_and_which_kernels_serve(runner):
    told = runner.describe()
    assert (told["mode"], told["kv"], told["sink"], told["recent"]) == ("endless", "float16", 4, 200)
    assert "attention_window_step" in told["backends"]
    assert not {"attention_blocks", "attention_decode"} & told["backends"].keys()
