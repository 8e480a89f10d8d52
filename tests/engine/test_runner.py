"""The runner with the embedded model: reuse, cancel, limits and the plan."""

import gc
import weakref
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.runner import build_runner
from app.engine.sizing import fit, resolve_shape
from app.engine.slot import EARLY, WATCHED
from app.engine.types import SamplingParams
from app.errors import ContextTooLong, UsageError
from benchmarks._llama_8b import LLAMA_8B
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.plan import plan_memory
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.config import ModelConfig
from models.errors import BadPattern, DoesNotFit
from models.heads import HeadPattern
from tests import needle

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner():
    """Half of the heads stream, with small windows, so that every kind of head is at work."""
    checkpoint = open_checkpoint(embedded_model_path())
    scores = np.random.default_rng(0).random((checkpoint.config.num_layers, checkpoint.config.num_kv_heads))
    pattern = HeadPattern(scores, 16, 64, "random, for tests")
    return build_runner(checkpoint, pattern, Settings(context=2048, chunk=300))


def _greedy(slot, steps):
    """The first tokens of the greedy answer, all of them in the cache."""
    return list(islice(slot.answer(SamplingParams(), steps + 1), steps + 1))[:steps]


def _read(runner, slot, prompt):
    while slot.length < len(prompt):
        slot.prefill(prompt[slot.length : slot.length + runner.chunk])


def _ask_twice(runner, prompt):
    """The same prompt, asked again in the same chat: tokens that needed no reading then, and both greedy answers."""
    cached, answers = 0, []
    for _ in range(2):
        slot = runner.start(prompt)
        cached = slot.cached
        _read(runner, slot, prompt)
        answers.append(_greedy(slot, 8))
        slot.publish("b")
    return cached, *answers


def test_second_turn_reads_only_its_new_tokens(runner, prose_ids):
    prompt = prose_ids[:700]
    slot = runner.start(prompt)
    assert slot.cached == 0
    _read(runner, slot, prompt)
    answer = _greedy(slot, 5)
    slot.publish("a")
    follow_up = prompt + answer + prose_ids[700:750]
    again = runner.start(follow_up)
    assert again.cached == 705
    _read(runner, again, follow_up)
    again.discard()


def test_the_same_prompt_again_reads_its_last_block_only_and_answers_the_same(runner, prose_ids):
    cached, first, second = _ask_twice(runner, prose_ids[1000:1650])
    assert cached == 649 // EARLY * EARLY
    assert second == first


@pytest.mark.parametrize("length", [301, 385, 600, 129])
def test_asking_again_reads_at_most_a_block_or_the_last_chunk(runner, prose_ids, length):
    """Whatever the prompt's length over the chunk of 300, also where its last chunk lies inside one block."""
    prompt = prose_ids[4000 + length : 4000 + 2 * length]
    slot = runner.start(prompt)
    _read(runner, slot, prompt)
    slot.publish("d")
    again = runner.start(prompt)
    assert length - again.cached <= EARLY
    again.discard()


def test_a_stopped_prefill_goes_on_where_it_was(runner, prose_ids):
    prompt = prose_ids[2000:2900]
    slot = runner.start(prompt)
    slot.prefill(prompt[:300])
    slot.publish("c")
    again = runner.start(prompt)
    assert again.cached == 300
    again.discard()


def test_logits_are_computed_for_the_last_position_alone(runner, prose_ids, monkeypatch):
    rows, inner = [], runner.decoder.logits
    monkeypatch.setattr(runner.decoder, "logits", lambda hidden: rows.append(len(hidden)) or inner(hidden))
    prompt = prose_ids[7000:7700]
    slot = runner.start(prompt)
    _read(runner, slot, prompt)
    _greedy(slot, 3)
    slot.discard()
    assert len(rows) > 6 and set(rows) == {1}


@pytest.mark.parametrize("at", [2, 4])  # in prefill, and in the answer
def test_running_out_of_memory_frees_everything_and_what_fits_then_works(runner, prose_ids, monkeypatch, at):
    kept, prompt = prose_ids[7000:7400], prose_ids[8000:8700]
    slot = runner.start(kept)
    _read(runner, slot, kept)
    slot.publish("kept")
    steps, inner = [], runner.decoder.forward

    def forward(tokens, cache):
        steps.append(len(tokens))
        if len(steps) == at + 1:
            raise torch.OutOfMemoryError("no more")
        return inner(tokens, cache)

    monkeypatch.setattr(runner.decoder, "forward", forward)
    slot = runner.start(prompt)
    if at == 4:
        _read(runner, slot, prompt)
    with pytest.raises(torch.OutOfMemoryError):
        _read(runner, slot, prompt) if at == 2 else _greedy(slot, 3)
    assert (steps[-1] == 1) == (at == 4)
    slot.discard()
    assert runner.pool.free == runner.pool.blocks
    monkeypatch.undo()
    slot = runner.start(prompt[:500])
    assert slot.cached == 0
    _read(runner, slot, prompt[:500])
    assert len(_greedy(slot, 3)) == 3
    slot.discard()


class _Peak(TorchDispatchMode):
    """Counts the bytes of tensors that live at once, of those that are made inside it."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            at = x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0
            if at and at not in given and at not in self.sizes:
                self.sizes[at] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.sizes.pop, at)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


def test_the_planned_workspace_holds_a_chunk_behind_a_full_cache(runner, prose_ids):
    """The dearest place there is, not a short prompt: what is alive at once there is within what was planned."""
    while runner.prefixes.drop_oldest():
        pass
    cache, peak = DuoCache.empty(runner.pool, runner.capacity - runner.chunk), _Peak()
    with peak:
        hidden = runner.decoder.forward(torch.tensor(prose_ids[: runner.chunk]), cache)
        runner.decoder.logits(hidden[-1:])
    assert cache.length == runner.capacity
    cache.release()
    assert runner.chunk * runner.decoder.config.hidden_size * 8 < peak.most <= runner.plan.workspace_bytes


def test_everything_is_given_back(runner, prose_ids):
    slot = runner.start(prose_ids[3000:4000])
    slot.prefill(prose_ids[3000:3300])
    slot.discard()
    while runner.prefixes.drop_oldest():
        pass
    assert runner.pool.free == runner.pool.blocks


def test_a_stopped_prefill_keeps_no_more_blocks_than_it_filled(runner, prose_ids):
    while runner.prefixes.drop_oldest():
        pass
    prompt = prose_ids[5000:6900]
    slot = runner.start(prompt)
    slot.prefill(prompt[:300])
    slot.publish("e")
    assert runner.pool.blocks - runner.pool.free == runner.pool.shape.packed_blocks(300)
    again = runner.start(prompt)
    _read(runner, again, prompt)
    again.discard()


def test_old_prefixes_make_room_for_new_prompts(runner, prose_ids):
    prompts = [[i, *prose_ids[:1900]] for i in range(6)]
    for i, prompt in enumerate(prompts):
        slot = runner.start(prompt)
        _read(runner, slot, prompt)
        slot.publish(f"chat {i}")
    assert runner.prefixes.length(np.array([*prompts[-1], 0])) == 1901
    assert runner.prefixes.length(np.array([*prompts[0], 0])) == 0


@pytest.mark.parametrize(("length", "fits"), [(2046, True), (2047, True), (2048, False), (2049, False)])
def test_context_limit_is_exact(runner, prose_ids, length, fits):
    prompt = (prose_ids * 2)[:length]
    if fits:
        runner.start(prompt).discard()
        return
    with pytest.raises(ContextTooLong, match=f"{length + 1:,}.*2,048"):
        runner.start(prompt)


def test_weights_take_the_planned_bytes(runner):
    assert runner.memory().weights_bytes == pytest.approx(runner.plan.weights_bytes, rel=0.002)


@pytest.mark.parametrize("weights", ["w8a8", "bf16"])
def test_planned_weights_are_what_a_decoder_holds(weights):
    checkpoint = open_checkpoint(embedded_model_path())
    settings = Settings(weights=weights)
    mask, shape = resolve_shape(checkpoint.config, None, settings, CPU)
    decoder = load_decoder(checkpoint, mask, weights, shape, CPU)
    plan = plan_memory(checkpoint.config, shape, weights, 1024, 512, CPU)
    assert decoder.nbytes == pytest.approx(plan.weights_bytes, rel=0.002)


def _plan_8b(context, ratio=0.5, limit=None):
    config = ModelConfig.from_hf(LLAMA_8B)
    scores = np.arange(256.0).reshape(32, 8)
    mask = HeadPattern(scores, 128, 256, "test").retrieval_mask(ratio)
    shape = CacheShape.for_model(config, mask, "kv4", 128, 256, torch.device("cuda"))
    if limit:
        return fit(config, shape, Settings(context=context), torch.device("cuda"), limit)[0]
    return plan_memory(config, shape, "w8a8", context, 8192, torch.device("cuda"))


def test_plan_of_the_main_model_at_its_whole_window_fits_80_gb():
    plan = _plan_8b(4_194_304)
    assert plan.bytes_per_token == 17_408
    assert 8.4 < plan.weights_bytes / 2**30 < 8.6
    card = int(79.15 * 2**30)
    assert _plan_8b(None, limit=card).context == 4_194_304
    assert _plan_8b(4_194_304, ratio=1.0).total_bytes > 130 * 2**30


def test_what_does_not_fit_is_refused_with_both_numbers_and_what_fits():
    with pytest.raises(DoesNotFit, match=r"4,194,304 tokens.* 7\d\.\d\d GiB; 47\.52 GiB are free.*--context") as info:
        _plan_8b(4_194_304, limit=48 << 30)
    assert _plan_8b(info.value.longest, limit=48 << 30).context == info.value.longest
    with pytest.raises(DoesNotFit, match="smaller model"):
        _plan_8b(1000, limit=4 << 30)


def test_a_context_beyond_the_models_own_window_is_refused_and_is_never_the_default():
    config = open_checkpoint(embedded_model_path()).config
    shape = resolve_shape(config, None, Settings(), CPU)[1]
    with pytest.raises(UsageError, match="--context is 8,193; this model's window is 8,192 tokens"):
        fit(config, shape, Settings(context=8193), CPU, 1 << 40)
    for context in (None, 8192):
        assert fit(config, shape, Settings(context=context), CPU, 1 << 40)[0].context == 8192


def test_a_pattern_for_another_model_is_refused():
    config = open_checkpoint(embedded_model_path()).config
    with pytest.raises(BadPattern):
        resolve_shape(config, HeadPattern(np.zeros((2, 2)), 1, 1, "other"), replace(Settings(), context=128), CPU)


def _looked(runner, prompt, question, answer=3):
    """Where a question, from a token of a prompt on, and its answer looked; tokens that were known before."""
    slot = runner.start(prompt)
    slot.watch(question, question)
    _read(runner, slot, prompt)
    _greedy(slot, answer)
    looked, cached = slot.looked(), slot.cached
    slot.publish("looks")
    return looked, cached


@pytest.fixture
def watching(runner, monkeypatch):
    layer = next(at for at, kept in enumerate(runner.pool.shape.retrieval_heads) if kept)
    monkeypatch.setattr(runner, "evidence_heads", [(layer, 0)])
    return runner


def test_question_and_answer_tell_where_they_looked(watching, prose_ids):
    prompt = prose_ids[:700]
    looked, _ = _looked(watching, prompt, 690)
    assert np.array_equal(looked.positions, np.arange(700))
    assert looked.masses.sum() == pytest.approx(1, abs=1e-3) and (looked.masses >= 0).all()
    alone, _ = _looked(watching, prompt, 699)  # the answer's half
    assert (2 * looked.masses >= alone.masses - 1e-3).all() and abs(looked.masses - alone.masses).sum() > 0.1


def test_who_does_not_ask_is_not_told(watching, prose_ids):
    slot = watching.start(prose_ids[:700])
    _read(watching, slot, prose_ids[:700])
    assert slot.looked() is None
    slot.discard()


def test_a_question_that_is_not_read_to_its_end_has_looked_nowhere(watching, prose_ids):
    slot = watching.start(prose_ids[6000:6700])
    slot.watch(500, 500)
    slot.prefill(prose_ids[6000:6650])
    assert slot.looked() is None
    slot.discard()


# Within one block and chunk; over a block's end; over a chunk's end (300), with an earlier block; a long one.
@pytest.mark.parametrize(("length", "question"), [(701, 650), (650, 630), (605, 590), (612, 250)])
def test_a_question_asked_again_looks_where_it_did(watching, prose_ids, length, question):
    prompt = prose_ids[4000 + length : 4000 + 2 * length]
    first, cached = _looked(watching, prompt, question)
    again, kept = _looked(watching, prompt, question)
    assert cached == 0 < length - EARLY - WATCHED <= kept
    np.testing.assert_allclose(again.masses, first.masses, atol=1e-6)


@pytest.mark.parametrize("read", [580, 599])  # tokens: chunks that end within the question
def test_a_question_that_was_stopped_looks_where_it_would_have(watching, prose_ids, read):
    prompt = prose_ids[9000:9640]
    slot = watching.start(prompt)
    slot.watch(570, 570)
    slot.prefill(prompt[:300])
    slot.prefill(prompt[300:read])
    slot.publish("stopped")
    again, kept = _looked(watching, prompt, 570)
    assert kept == 512
    while watching.prefixes.drop_oldest():
        pass
    fresh, _ = _looked(watching, prompt, 570)
    np.testing.assert_allclose(again.masses, fresh.masses, atol=1e-6)


def test_a_released_model_leaves_nothing_though_the_collector_passes_it_over(tmp_path):
    checkpoint = open_checkpoint(needle.write_checkpoint(tmp_path, 2000))
    runner = build_runner(checkpoint, needle.pattern(), Settings(context=2000, cache_dir=tmp_path, library_quota=0))
    store = weakref.ref(runner.pool.stores[0])
    assert store().history  # each knows the other
    gc.freeze()
    runner.release()
    assert store() is None
