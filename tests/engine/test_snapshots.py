"""The runner with saved caches: opened again after a restart, shared, damaged, evicted, interrupted."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine import runner as runner_module
from app.engine import slot as slot_module
from app.engine.runner import build_runner
from app.engine.sizing import resolve_shape
from app.engine.snapshots import LEAST_TOKENS, SnapshotStore
from app.engine.types import Mark, SamplingParams
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.cache.snapshot import write_snapshot
from models.checkpoint import open_checkpoint
from models.fingerprint import fingerprint
from models.heads import HeadPattern
from models.measured import MeasuredHeads


@cache
def _checkpoint():
    return open_checkpoint(embedded_model_path())


@cache
def _decoder():
    """Loaded once: what is tested is what stands around it."""
    settings = Settings()
    mask, shape = resolve_shape(_checkpoint().config, _pattern(), settings, torch.device("cpu"))
    return load_decoder(_checkpoint(), mask, settings.weights, shape, torch.device("cpu"))


def _pattern():
    config = _checkpoint().config
    scores = np.random.default_rng(0).random((config.num_layers, config.num_kv_heads))
    return HeadPattern(scores, 16, 64, "random, for tests")


def _build(folder, measured=None, **settings):
    runner_module.load_decoder = lambda *_: _decoder()
    try:
        wanted = replace(Settings(context=2048, chunk=300, cache_dir=folder), **settings)
        return build_runner(_checkpoint(), _pattern(), wanted, measured=measured)
    finally:
        runner_module.load_decoder = load_decoder


def _ask(runner, prompt, marks=(), steps=6, chat="a"):
    """(tokens that were not read again, greedy answer)"""
    told = []
    slot = runner.start(prompt, marks, told.append)
    while slot.length < len(prompt):
        slot.prefill(prompt[slot.length : slot.length + runner.chunk])
    ids = list(slot.answer(SamplingParams(), steps))
    slot.publish(chat)
    assert all(0 < tokens <= slot.cached for tokens in told)
    return slot.cached, ids


@pytest.fixture(scope="module")
def read_once(tmp_path_factory, prose_ids):
    """A folder in which documents A (900 tokens) and B (600) were read and asked about, one behind the other."""
    folder = tmp_path_factory.mktemp("saved")
    a, b = prose_ids[:900], prose_ids[3000:3600]
    runner = _build(folder)
    marks = (Mark(900, "A"), Mark(1500, "B"))
    cached, answer = _ask(runner, a + b + prose_ids[5000:5020], marks)
    assert cached == 0
    runner.close()
    return folder, a, b, answer


def test_after_a_restart_nothing_is_read_again_and_the_answer_is_the_same(read_once, prose_ids):
    folder, a, b, answer = read_once
    runner = _build(folder)
    assert runner.snapshots.labels() == {"A", "B"}
    question = prose_ids[5000:5020]
    assert runner.known(a + b + question) == (0, 1500)
    cached, again = _ask(runner, a + b + question)
    assert (cached, again) == (1500, answer)
    # A alone, with another question: only A's part of the same files; and it equals a fresh run.
    other = prose_ids[6000:6030]
    cached, opened = _ask(runner, a + other, chat="b")
    assert cached == 900
    runner.close()
    fresh = _build(folder, library_quota=0)
    assert fresh.snapshots is None
    assert _ask(fresh, a + other) == (0, opened)


def test_two_chats_over_one_document_hold_its_blocks_once(read_once, prose_ids):
    folder, a, b, _ = read_once
    runner = _build(folder)
    _ask(runner, a + b + prose_ids[5000:5300], chat="one", steps=1)
    used = runner.pool.blocks - runner.pool.free
    for chat in ("two", "three"):
        cached, _ = _ask(runner, a + prose_ids[7000:7010], chat=chat, steps=1)
        assert cached == 900
    assert runner.pool.blocks - runner.pool.free <= used + 2  # a new block or two for the questions, none for A
    runner.close()


def test_a_document_is_kept_at_its_end_whatever_the_questions_length(prose_ids, tmp_path):
    runner = _build(tmp_path, library_quota=0)
    document = prose_ids[:700]
    _ask(runner, document + prose_ids[4000:4400], (Mark(700, "A"),), steps=1)
    assert _ask(runner, document + prose_ids[5000:5400], steps=1, chat="b")[0] == 700
    runner.close()


def test_other_formats_and_heads_do_not_meet(read_once, prose_ids):
    folder, a, _, _ = read_once
    for change in ({"kv": "kv8"}, {"retrieval_ratio": 0.25}, {"recent": 32}, {"weights": "bf16"}):
        runner = _build(folder, **change)
        assert runner.known([*a, 1]) == (0, 0), change
        assert runner.snapshots.labels() == frozenset()
        runner.close()


def test_keys_in_another_form_do_not_meet(tmp_path):
    """Nothing but a wrong answer would tell one from the other."""
    config = _checkpoint().config
    layers, heads, d = config.num_layers, config.num_kv_heads, config.head_dim
    plain = MeasuredHeads(torch.zeros(layers, heads), torch.zeros(layers, heads, d), torch.ones(layers, heads, d // 2))
    moved, scaled = replace(plain, key_means=plain.key_means + 1), replace(plain, key_scales=plain.key_scales * 2)
    kinds = []
    for form in (None, plain, moved, scaled, replace(plain)):
        runner = _build(tmp_path, form)
        kinds.append(runner.snapshots.kind)
        runner.close()
    assert len(set(kinds)) == 4
    assert kinds[1] == kinds[4]


def test_a_damaged_file_is_dropped_with_what_builds_on_it_and_the_document_is_read_again(
    read_once, prose_ids, tmp_path
):
    folder, a, b, answer = read_once
    for file in (folder / "library" / "snapshots").iterdir():
        (tmp_path / "library" / "snapshots").mkdir(parents=True, exist_ok=True)
        (tmp_path / "library" / "snapshots" / file.name).write_bytes(file.read_bytes())
    runner = _build(tmp_path)
    question = prose_ids[5000:5020]
    first = runner.snapshots.find(np.array(a + b + question))[0][0]
    data = bytearray(first.read_bytes())
    data[5000] ^= 255
    first.write_bytes(data)
    marks = (Mark(900, "A"), Mark(1500, "B"))
    assert _ask(runner, a + b + question, marks) == (0, answer)
    assert "damaged" in runner.snapshots.notes[0]
    runner.snapshots.flush()
    assert runner.snapshots.labels() == {"A", "B"}  # written anew
    runner.close()
    # Cut short: found when the folder is looked through.
    first.write_bytes(bytes(data[:100_000]))
    runner = _build(tmp_path)
    assert runner.known(a + b + question) == (0, 0)
    assert not first.exists()
    runner.close()


def test_a_prefill_that_was_killed_goes_on_at_its_last_chunk(tmp_path, prose_ids):
    script = f"""
        import json, os, sys
        from tests.engine.test_snapshots import _build
        from pathlib import Path
        from app.engine import slot as module
        module.CHECKPOINT_S = 0.0
        prompt = json.loads(sys.stdin.read())
        runner = _build(Path({str(tmp_path)!r}))
        slot = runner.start(prompt)
        for _ in range(3):
            slot.prefill(prompt[slot.length : slot.length + 300])
            runner.snapshots.flush()
        slot.prefill(prompt[900:1200])
        os._exit(9)  # no farewell
    """
    prompt = prose_ids[:1800]
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], input=json.dumps(prompt), text=True, check=False
    )
    assert killed.returncode == 9
    runner = _build(tmp_path)
    resumed, answer = _ask(runner, prompt)
    assert resumed in (600, 900, 1200)  # 600 where a stretch of 300 is too short to be written
    runner.close()
    assert not list((tmp_path / "library" / "snapshots").glob("*.part"))
    fresh = _build(tmp_path, library_quota=0)
    assert _ask(fresh, prompt) == (0, answer)


def test_a_stopped_prefill_is_saved_too(tmp_path, prose_ids):
    runner = _build(tmp_path)
    prompt = prose_ids[:1800]
    slot = runner.start(prompt)
    for _ in range(3):
        slot.prefill(prompt[slot.length : slot.length + 300])
    slot.publish("a")
    runner.close()
    runner = _build(tmp_path)
    assert runner.known(prompt) == (0, 900)
    runner.close()


def _stopped(runner, prompt, marks, tokens):
    """Read so many tokens of a prompt, then stop."""
    slot = runner.start(prompt, marks)
    while slot.length < tokens:
        slot.prefill(prompt[slot.length : min(tokens, slot.length + 300)])
    slot.publish("api a")
    runner.snapshots.flush()


def test_what_was_read_of_a_document_before_a_stop_goes_with_it(tmp_path, prose_ids):
    runner = _build(tmp_path)
    prompt, marks = prose_ids[:1800], (Mark(700, "A"), Mark(1700, "B"))
    _stopped(runner, prompt, marks, 600)
    assert runner.known(prompt) == (600, 600)
    assert runner.snapshots.labels() == frozenset() and runner.snapshots.bytes_of("A") > 0
    runner.snapshots.forget("B", {"A"})
    assert runner.known(prompt)[1] == 600
    runner.snapshots.expect(["B"])
    _stopped(runner, prompt, marks, 1500)
    assert runner.snapshots.bytes_of("B") > 0
    runner.snapshots.forget("B", {"A"})
    assert _lengths(runner.snapshots) == [600, 700]  # as far as A needs it
    runner.snapshots.forget("A", {"B"})
    assert runner.snapshots.bytes_of() == 0
    runner.close()


def test_what_is_still_read_of_a_forgotten_document_is_not_written(tmp_path, prose_ids):
    runner = _build(tmp_path)
    prompt, marks = prose_ids[:1800], (Mark(700, "A"), Mark(1700, "B"))
    slot = runner.start(prompt, marks)
    while slot.length < 1500:
        slot.prefill(prompt[slot.length : slot.length + 300])
    runner.snapshots.forget("B", {"A"})
    slot.publish("api a")
    runner.snapshots.flush()
    assert _lengths(runner.snapshots) == [700]
    runner.snapshots.expect(["B"])
    _stopped(runner, prompt, marks, 1650)
    assert _lengths(runner.snapshots) == [700, 1650]
    runner.close()


def test_an_answer_goes_with_its_document_though_the_documents_end_is_not_on_disk(tmp_path, prose_ids):
    runner = _build(tmp_path)
    document, marks = prose_ids[:700], (Mark(700, "A"),)
    _ask(runner, document + prose_ids[4000:4100], marks, steps=1)
    runner.snapshots.flush()
    runner.snapshots.drop(lambda snapshot: True)  # for others, which needed the room
    assert _ask(runner, document + prose_ids[5000:5600], marks, steps=1)[0] == 700
    runner.snapshots.flush()
    assert _lengths(runner.snapshots) == [1300 + 1]
    runner.snapshots.forget("A", set())
    assert _lengths(runner.snapshots) == []
    runner.close()


def test_a_deleted_chat_takes_along_where_it_was_stopped_amid_a_document(tmp_path, prose_ids):
    runner = _build(tmp_path)
    prompt = prose_ids[:1800]
    _stopped(runner, prompt, (Mark(1700, "A"),), 900)
    runner.snapshots.forget_paths([prompt], [], {"A"})
    assert runner.snapshots.bytes_of() == 0
    runner.close()


def test_a_full_pool_takes_back_what_waits_to_be_written(tmp_path, prose_ids, monkeypatch):
    runner = _build(tmp_path)
    monkeypatch.setattr(slot_module, "CHECKPOINT_S", 0.0)
    hold = runner.pool.allocate(runner.pool.free - 768 // runner.pool.shape.block)
    for i in range(3):
        _ask(runner, [i, *prose_ids[:650]], (Mark(560, "A"),), steps=1, chat=f"chat {i}")
    runner.pool.release(hold)
    runner.close()
    while runner.prefixes.drop_oldest():
        pass
    assert runner.pool.free == runner.pool.blocks


# ---- the store alone

SHAPE = CacheShape((1,), (1,), 1, 16, 4, 8, 4, torch.float16, torch.float32)


def _cache(pool, ids):
    cache = DuoCache(pool)
    cache.begin(len(ids))
    for layer in range(1):
        cache.attend(layer, *torch.randn(3, len(ids), 2, 16))
    cache.commit()
    return cache


def _save(store, pool, ids, *labels):
    ids = np.asarray(ids)
    store.save(ids, _cache(pool, ids), labels, wait=True)
    store.flush()


@pytest.fixture
def pool():
    pool = BlockPool(SHAPE, 400, torch.device("cpu"))
    yield pool
    assert pool.free == pool.blocks


def test_the_least_recently_used_goes_first_and_pinned_ones_stay(tmp_path, pool):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    texts = {name: np.arange(1000) + 10_000 * place for place, name in enumerate("abc", 1)}
    for name, ids in texts.items():
        _save(store, pool, ids, name)
    size = store.bytes_of("a")
    assert store.bytes_of() == 3 * size
    store.quota = 3 * size + 100
    store.pinned = lambda: frozenset("b")
    chain = store.find(np.append(texts["a"], 0))
    store.read(chain, pool, (), lambda tokens: None).release()  # a was used last
    _save(store, pool, np.arange(1000) + 50_000, "d")
    assert store.labels() == {"a", "b", "d"}
    store.pinned = lambda: frozenset("abd")
    _save(store, pool, np.arange(1000) + 60_000, "e")
    assert store.labels() == {"a", "b", "d"}
    assert "full" in store.notes[-1]
    assert len(list(tmp_path.glob("*.kv"))) == 3
    store.close()
    again = SnapshotStore(tmp_path, "kind", 1 << 40)
    assert again.labels() == {"a", "b", "d"}
    assert SnapshotStore(tmp_path, "other", 1 << 40).labels() == frozenset()
    again.drop(lambda snapshot: "a" in snapshot.labels)
    assert again.find(np.append(texts["a"], 0)) == []


def test_a_stretch_is_stored_once_and_ends_are_evicted_before_what_they_build_on(tmp_path, pool):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    ids = np.arange(3000)
    _save(store, pool, ids[:1000], "a")
    one = store.bytes_of()
    _save(store, pool, ids[:1000], "a")
    _save(store, pool, ids[: 1000 + LEAST_TOKENS - 1])  # too little to be worth its windows
    assert store.bytes_of() == one
    _save(store, pool, ids[:2000], "b")
    _save(store, pool, np.append(ids[:1000], ids[2000:] + 7), "c")
    assert store.bytes_of("a") == one  # what others build on counts once
    assert store.bytes_of() == sum(map(store.bytes_of, "abc"))
    assert store.bytes_of("c") < one * 1.2  # c adds its own thousand tokens to a's
    assert [s.length for _, s in store.find(ids)] == [1000, 2000]
    assert [s.length for _, s in store.find(ids[:2000])] == [1000]  # a token is left to read
    assert store.find(ids, beyond=2000) == []
    store.quota = store.bytes_of() + 10
    _save(store, pool, np.append(ids[:2000], ids[:700]), "d")
    assert store.labels() == {"a", "b", "d"}  # c was the oldest end; a carries the others
    store.close()


def test_a_disk_that_fails_costs_the_saving_only(tmp_path, pool, monkeypatch):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.engine.snapshots.write_snapshot", fail)
    _save(store, pool, np.arange(1000), "a")
    assert "No space left" in store.notes[-1]
    assert store.labels() == frozenset()
    store.close()


def test_fingerprint_follows_the_content(tmp_path):
    model, memo = tmp_path / "m.gguf", tmp_path / "memo.json"
    model.write_bytes(b"weights")
    first = fingerprint(model, memo)
    assert fingerprint(model, memo) == first
    for odd in ("[]", "null", '"text"', "[" * 100_000, "{"):
        memo.write_text(odd)
        assert fingerprint(model, memo) == first
    model.write_bytes(b"Weights and more")
    assert fingerprint(model, memo) != first
    memo.write_text("{")
    model.write_bytes(b"weights")
    assert fingerprint(model, memo) == first


def _branches(store, pool):
    """Document a with checkpoints on the way, b behind it, and two chats' answers behind a."""
    a = np.arange(3000)
    _save(store, pool, a[:1000])  # on the way
    _save(store, pool, a[:2000], "a")
    one, two = np.append(a[:2000], np.arange(700) + 9000), np.append(a[:2000], np.arange(700) + 8000)
    _save(store, pool, one)
    _save(store, pool, two)
    _save(store, pool, a, "b")
    return a, one, two


def _lengths(store):
    return sorted(saved.snapshot.length for saved in store._tree.saved.values())


def test_a_forgotten_document_takes_along_what_nothing_else_needs(tmp_path, pool):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    a, *_ = _branches(store, pool)
    assert _lengths(store) == [1000, 2000, 2700, 2700, 3000]
    assert store.bytes_of("a") + store.bytes_of("b") == store.bytes_of()
    store.forget("a", {"b"})  # b builds on it
    assert _lengths(store) == [1000, 2000, 3000]
    assert store.find(np.append(a, 1))[-1][1].labels == ("b",)
    store.forget("b", {"a"})
    assert _lengths(store) == [1000, 2000]
    store.forget("a", set())
    assert _lengths(store) == [] and list(tmp_path.iterdir()) == []
    store.close()


def test_a_deleted_chat_takes_along_what_it_alone_has_read(tmp_path, pool):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    other = SnapshotStore(tmp_path, "another kind", 1 << 40)
    _, one, two = _branches(store, pool)
    _save(other, pool, one)  # the same chat with other settings
    store._tree.look()
    assert _lengths(store) == [1000, 2000, 2700, 2700, 2700, 3000]
    store.forget_paths([one], [two], {"a", "b"})
    assert _lengths(store) == [1000, 2000, 2700, 3000]
    assert store.find(np.append(two, 1))[-1][1].length == 2700
    store.forget_paths([two], [two[:2500], np.append(two, 5)], {"a", "b"})  # a twin goes on from its end
    assert _lengths(store) == [1000, 2000, 2700, 3000]
    store.forget_paths([two], [], {"b"})
    assert _lengths(store) == [1000, 2000, 3000]
    store.close()
    other.close()


def test_what_waits_to_be_written_for_a_deleted_chat_is_not(tmp_path, pool, monkeypatch):
    import threading

    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    go_on, write, begun = threading.Event(), SnapshotStore._write, threading.Event()

    def slowly(self, job):
        begun.set()
        go_on.wait()
        write(self, job)

    monkeypatch.setattr(SnapshotStore, "_write", slowly)
    ids = np.arange(1200)
    store.save(ids, _cache(pool, ids), (), wait=True)
    begun.wait()
    more = np.arange(2400)
    store.save(more, _cache(pool, more), (), wait=True)
    threading.Timer(0.2, go_on.set).start()
    store.forget_paths([more], [], set())
    store.flush()
    assert _lengths(store) == []
    store.close()


def test_two_documents_of_the_same_tokens_are_stored_once_and_each_keeps_them(tmp_path, pool):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    ids = np.arange(2000)
    _save(store, pool, ids[:1000], "a")
    _save(store, pool, ids, "c")
    size, chain = store.bytes_of(), store.find(np.append(ids, 0))
    _save(store, pool, ids[:1000], "b")
    assert store.labels() == {"a", "b", "c"} and store.bytes_of() == size
    store.read(chain, pool, (), lambda tokens: None).release()  # as it was found before: the data is the same
    store.forget("c", {"a", "b"})
    store.forget("a", {"b"})
    store.close()
    again = SnapshotStore(tmp_path, "kind", 1 << 40)
    assert _lengths(again) == [1000] and "b" in again.labels()
    again.forget("b", {"a"})  # which is on a list again
    assert _lengths(again) == [1000]
    again.forget("b", set())
    assert list(tmp_path.iterdir()) == []
    again.close()


def test_what_is_written_while_its_parent_is_forgotten_goes_too(tmp_path, pool, monkeypatch):
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    ids = np.arange(4000)
    _save(store, pool, ids[:2000], "a")

    def meanwhile(*args):
        store.forget("a", set())
        return write_snapshot(*args)

    monkeypatch.setattr("app.engine.snapshots.write_snapshot", meanwhile)
    _save(store, pool, ids)
    assert _lengths(store) == [] and list(tmp_path.iterdir()) == []
    store.close()


def test_another_server_over_the_same_folder_shares_the_quota(tmp_path, pool):
    one, two = (SnapshotStore(tmp_path, "kind", 1 << 40) for _ in range(2))
    _save(one, pool, np.arange(1000), "a")
    size = one.bytes_of("a")
    two.quota = 2 * size + 100
    _save(two, pool, np.arange(1000) + 5000, "b")
    _save(two, pool, np.arange(1000) + 9000, "c")  # makes room among all that is there
    assert two.bytes_of() == 2 * size == sum(two.bytes_of(label) for label in "bc")
    chain = one.find(np.arange(1001))
    assert chain  # it does not know yet
    assert one.read(chain, pool, (), lambda tokens: None) is None
    assert one.labels() == frozenset() and not one.notes  # no damage: the text is read again
    for store in (one, two):
        store.close()


class _Once:
    def __init__(self, inner):
        self.inner, self.times = inner, 0

    def keep(self, ids, cache, chat_id):
        self.times += 1
        if self.times == self.fails:
            try:
                raise MemoryError
            finally:
                cache.release()
        self.inner.keep(ids, cache, chat_id)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("fails", [1, 2])
def test_keeping_that_fails_gives_everything_back_once(tmp_path, prose_ids, fails):
    runner = _build(tmp_path, library_quota=0)
    prefixes = runner.prefixes = _Once(runner.prefixes)
    prefixes.fails = fails
    prompt = prose_ids[:500]
    slot = runner.start(prompt)
    slot.prefill(prompt[:300])
    slot.prefill(prompt[300:])
    with pytest.raises(MemoryError):
        slot.publish("a")
    slot.discard()  # as the engine does after an error
    while prefixes.drop_oldest():
        pass
    assert runner.pool.free == runner.pool.blocks  # one release too many would be an assertion
    runner.close()
