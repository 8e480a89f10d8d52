"""Tokenizers: equal to transformers, linear in time, and deaf to control tokens in text."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

import app.tokenizer
from app.embedded import embedded_model_path
from app.engine.detokenize import Detokenizer
from app.errors import Cancelled
from app.gguf_tokenizer import _LLAMA3, _QWEN2, _TEKKEN
from app.tokenizer import Tokenizer
from models.errors import BadCheckpoint, UnsupportedModel

SAMPLE = """The harbour master wrote: "It's raining, isn't it?"  She'd counted 1,234 ships (and 56 more)...

    def count(ships):\n\treturn len(ships) ** 2  # naïve façade
Größe über alles; Ελλάδα, Россия и мир. 汉字和标点。日本語のテキスト。
हिन्दी में लिखा है। ภาษาไทย 😀👩‍👩‍👧 e\u0301\u0323
\n\n\n1. First\n\n2. Second \t\t tab\r\nA line_with_underscores___and-dashes--- https://example.org/a?b=c&d=[1,2]{3}<tag/>
"""
TEXTS = [
    SAMPLE,
    "",
    " ",
    "\n",
    "  two spaces",
    "a  1",
    "\n\n1. x",
    "don't DON'T 'tis",
    "   \n  \n x",
    "ﬁﬃ½²Ⅷ",
    "\u00a0x\u2003y",
]
SPECIAL = ["<|begin|>", "<|im_end|>", "<|eot_id|>", "</s>"]
mixed = st.lists(
    st.one_of(st.sampled_from(SAMPLE.split(" ")), st.text(max_size=4), st.sampled_from(list(" \n\t.,'1")))
).map("".join)


def byte_level(folder: Path, pattern: str | None, normalizer: Any = None) -> Path:
    """A tokenizer.json trained on the sample, as Llama-3, Qwen2 and Tekken ones are made."""
    backend = Backend(models.BPE(ignore_merges=pattern == _LLAMA3))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else [pre_tokenizers.Digits(True)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([SAMPLE] * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["<think>"])
    begin = ("<|begin|>", backend.token_to_id("<|begin|>"))
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [begin])
    return saved(backend, folder, {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}})


def sentencepiece(folder: Path, legacy: bool) -> Path:
    """A tokenizer.json as Llama-2 (`legacy`) and Mistral have: no pre-tokenizer, merges over the whole text."""
    alphabet = [chr(code) for code in range(33, 127)] + ["▁"]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)
    learner = Backend(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()  # learns within words; used without
    learner.train_from_iterator([SAMPLE] * 3, trainer)
    learned = json.loads(learner.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"], "▁▁", "▁▁▁▁"]
    merges = [*map(tuple, learned["merges"]), ("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {text: at for at, text in enumerate(dict.fromkeys(tokens))}
    model = models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return saved(backend, folder, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


def saved(backend: Backend, folder: Path, config: dict[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


KINDS = {
    "llama3": lambda folder: byte_level(folder, _LLAMA3),
    "qwen2": lambda folder: byte_level(folder, _QWEN2, normalizers.NFC()),
    "tekken": lambda folder: byte_level(folder, _TEKKEN),
    "gpt2": lambda folder: byte_level(folder, None),
    "llama2": lambda folder: sentencepiece(folder, legacy=True),
    "mistral": lambda folder: sentencepiece(folder, legacy=False),
}


@pytest.fixture(scope="session", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Backend]:
    """Ours, and `tokenizers` on the same file."""
    folder = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    return Tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    return Tokenizer(embedded_model_path())


@pytest.fixture(scope="session")
def reference() -> Any:
    path = embedded_model_path()
    return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)


def test_embedded_is_built_fast_and_knows_its_ends() -> None:
    began = time.perf_counter()
    tokenizer = Tokenizer(embedded_model_path())
    assert time.perf_counter() - began < 5  # about 0.4 s; other processes may share the cores
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, {2}, False)
    assert tokenizer.special_ids["<|im_start|>"] == 1
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template


def test_embedded_equals_transformers(embedded: Tokenizer, reference: Any) -> None:
    # transformers leaves out that this model's tokenizer splits off digits; its own tokenizer.json says so.
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert embedded.encode_text("a  1") != reference.encode("a  1", add_special_tokens=False)
    assert embedded.encode_text("A 1, b 23.") == reference.encode("A 1, b 23.", add_special_tokens=False)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain])
    for text in [*TEXTS, SAMPLE * 50]:
        ids = embedded.encode_text(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert embedded.decode(ids) == text == reference.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_backends(made: tuple[Tokenizer, Backend], text: str) -> None:
    ours, backend = made
    assert ours.encode_text(text) == backend.encode(text, add_special_tokens=False).ids


def test_decoding_gives_the_text_back(made: tuple[Tokenizer, Backend]) -> None:
    ours, backend = made
    for text in ("Hello world, 1 2  3\n", SAMPLE):
        ids = ours.encode_text(text)
        assert ours.decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_control_tokens_in_text_are_text(made: tuple[Tokenizer, Backend], embedded: Tokenizer) -> None:
    for tokenizer in (made[0], embedded):
        control = set(tokenizer.special_ids.values())
        assert control
        for name in [*tokenizer.special_ids, "</s>", "<think>"]:
            for text in (name, f"a{name}b", f"{name} {name}\n{name}"):
                ids = tokenizer.encode_text(text)
                assert not control & set(ids)
                assert tokenizer.decode(ids) == text


def test_control_tokens_decode_to_nothing_unless_asked_for(embedded: Tokenizer) -> None:
    ids = [1, *embedded.encode_text("Hi"), 2]
    assert embedded.decode(ids) == "Hi"
    assert embedded.decode(ids, skip_special=False) == "<|im_start|>Hi<|im_end|>"
    assert embedded.token_bytes(10**6) == b""


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=mixed)
def test_cutting_a_text_changes_no_id(
    made: tuple[Tokenizer, Backend], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    ours, backend = made
    monkeypatch.setattr(app.tokenizer, "_PIECE_CHARS", 1)  # cut wherever it is allowed
    assert ours.encode_text(text) == backend.encode(text, add_special_tokens=False).ids


def test_cuts_are_found_in_all_kinds_of_text(
    made: tuple[Tokenizer, Backend], embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.tokenizer, "_PIECE_CHARS", 20)
    for tokenizer in (made[0], embedded):
        for text in (
            "Plain English words, one by one. " * 20,
            "汉字和标点。日本語のテキスト、" * 20,
            "Ελλάδα Россия " * 20,
        ):
            pieces = [piece for group in tokenizer._groups(text) for piece in group]
            assert "".join(pieces) == text
            assert max(map(len, pieces)) < 60


@pytest.mark.parametrize("text", ["x" * 500_000, "_" * 50_000, " " * 500_000, "word " * 200_000, "汉" * 150_000])
def test_long_texts_take_linear_time(embedded: Tokenizer, text: str) -> None:
    def seconds(part: str) -> float:
        began = time.process_time()
        embedded.encode_text(part)
        return time.process_time() - began

    embedded.encode_text(text[:1000])
    assert seconds(text) < 6 * max(seconds(text[: len(text) // 2]), 0.05)  # four times would be quadratic with no noise
    assert embedded.decode(embedded.encode_text(text)) == text


@pytest.mark.parametrize("text", ["x" * 100_000, "_" * 50_000, "\n" * 50_000], ids=["letters", "underscores", "lines"])
def test_one_long_word_takes_linear_time_in_every_kind(made: tuple[Tokenizer, Backend], text: str) -> None:
    ours, _ = made

    def seconds(part: str) -> float:
        began = time.process_time()
        ours.encode_text(part)
        return time.process_time() - began

    ours.encode_text(text[:1000])
    assert seconds(text) < 6 * max(seconds(text[: len(text) // 2]), 0.05)
    assert ours.decode(ours.encode_text(text)) == text


def test_token_by_token_the_text_is_the_same_as_at_once(made: tuple[Tokenizer, Backend], embedded: Tokenizer) -> None:
    """Spaces stay, also where tokens carry a mark for them, and no character is shown before all of it is there."""
    for tokenizer in (made[0], embedded):
        for text in (SAMPLE, "Hello  world,   and 😀 汉字 again"):
            ids, detokenizer = tokenizer.encode_text(text), Detokenizer(tokenizer)
            parts = [*map(detokenizer.push, ids), detokenizer.flush()]
            assert "".join(parts) == tokenizer.decode(ids)
            assert unicodedata.normalize("NFC", "".join(parts)) == unicodedata.normalize("NFC", text)
            assert not any("\ufffd" in part for part in parts)


def test_a_run_without_any_safe_cut_is_cut_all_the_same(embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.tokenizer, "_PIECE_CHARS", 100)
    monkeypatch.setattr(app.tokenizer, "_LONGEST_PIECE", 1000)
    text = "x" * 10_500
    assert [len(piece) for group in embedded._groups(text) for piece in group] == [1000] * 10 + [500]
    assert embedded.decode(embedded.encode_text(text)) == text


def test_progress_and_cancel(embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.tokenizer, "_PIECE_CHARS", 100)
    told: list[float] = []
    ids = embedded.encode_text("some words " * 2000, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 5
    assert ids == embedded.encode_text("some words " * 2000)
    done: list[float] = []
    with pytest.raises(Cancelled):
        embedded.encode_text("some words " * 2000, progress=done.append, cancelled=lambda: len(done) >= 2)
    assert len(done) == 2


def test_lone_surrogates_are_replaced(embedded: Tokenizer) -> None:
    assert embedded.decode(embedded.encode_text("a\ud800b")) == "a\ufffdb"


def test_the_space_before_a_first_word(tmp_path: Path) -> None:
    for kind, each in (("llama2", True), ("mistral", False)):
        folder = tmp_path / kind
        folder.mkdir()
        tokenizer = Tokenizer(KINDS[kind](folder))
        assert tokenizer.space_after_special is each
        assert tokenizer.decode(tokenizer.encode_text("Hi")) == "Hi"
        assert tokenizer.encode_text("Hi", start=False) != tokenizer.encode_text("Hi")
        assert tokenizer.encode_text("", start=True) == []
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, {2}, True)


def test_what_stands_beside_tokenizer_json(tmp_path: Path) -> None:
    byte_level(tmp_path, _LLAMA3)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [601, 602]}')
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_template == "D"
    assert tokenizer.eos_ids == {601, 602, tokenizer.special_ids["<|im_end|>"]}
    assert tokenizer.add_bos  # its post-processor adds one
    assert tokenizer.template_variables == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer(tmp_path).chat_template == "from the file"


def write_gguf(path: Path, model: str, pre: str | None, data: dict[str, Any], types: list[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = sorted(data["vocab"], key=data["vocab"].__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in data["merges"]])
    else:
        writer.add_token_scores(more["scores"])
    writer.add_bos_token_id(more["bos"])
    writer.add_eos_token_id(more["eos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_of_llama3_and_qwen2_equal_their_tokenizer_json(tmp_path: Path) -> None:
    for pre, kind in (("llama-bpe", "llama3"), ("qwen2", "qwen2"), ("tekken", "tekken")):
        folder = tmp_path / kind
        folder.mkdir()
        KINDS[kind](folder)
        data = json.loads((folder / "tokenizer.json").read_text())
        model = data["model"]
        model["vocab"] |= {token["content"]: token["id"] for token in data["added_tokens"]}
        first = len(model["vocab"]) - 5
        types = [1] * first + [3] * 4 + [4]
        ends = {"bos": first, "eos": first + 1}
        from_gguf = Tokenizer(write_gguf(folder / "m.gguf", "gpt2", pre, model, types, **ends))
        from_json = Tokenizer(folder)
        assert from_gguf.special_ids == from_json.special_ids
        for text in TEXTS:
            assert from_gguf.encode_text(text) == from_json.encode_text(text)


def test_gguf_of_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    sentencepiece(tmp_path, legacy=False)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    count = len(model["vocab"])
    types = [2, 3, 3] + [6] * 256 + [1] * (count - 259)
    # In sentencepiece's way: scores fall with the order in which tokens were learned.
    scores = [0.0] * 259 + [-float(at) for at in range(count - 259)]
    path = write_gguf(tmp_path / "m.gguf", "llama", None, model, types, scores=scores, bos=1, eos=2)
    ours = Tokenizer(path)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file=path.name, local_files_only=True)
    for text in TEXTS:
        assert ours.encode_text(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.add_bos
    assert ours.decode(ours.encode_text(SAMPLE)) == SAMPLE
    assert not {0, 1, 2} & set(ours.encode_text("<s></s><unk>"))


def written(path: Path, **changes: Any) -> Path:
    """A GGUF file with a tokenizer of 4 tokens and these fields changed; None leaves one out."""
    fields: dict[str, Any] = {
        "ggml_model": "llama",
        "ggml_tokens": ["<unk>", "a", "b", "ab"],
        "ggml_token_type": [2, 1, 1, 1],
        "ggml_scores": [0.0, -1.0, -2.0, -3.0],
        "ggml_unknown_token_id": 0,
        "ggml_bos_token_id": 1,
        "ggml_eos_token_id": 2,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = "tokenizer." + name.replace("ggml_", "ggml.")
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_int64(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"ggml_{role}_token_id", 999999) for role in ("bos", "eos", "unknown", "padding", "eot", "eom")),
        *(("ggml_eos_token_id", value) for value in (4, -1, 1.0, True, "2", [2])),
        *(("ggml_tokens", value) for value in (None, 4, [1, 2, 3, 4], [b"a", b"\xff", b"b", b"c"])),
        *(("ggml_token_type", value) for value in (1, [1], [1.0] * 4, ["1"] * 4)),
        *(("ggml_scores", value) for value in (None, 1.0, [0.0], ["0"] * 4)),
        *(("ggml_merges", value) for value in (1, [1, 2])),
        *(("chat_template", value) for value in (1, ["x"])),
        ("ggml_model", 5),
    ],
)
def test_a_gguf_that_lies_is_refused_by_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    assert Tokenizer(written(tmp_path / "good.gguf")).encode_text("ab", start=False) == [3]
    with pytest.raises(BadCheckpoint, match="m\\.gguf .*tokenizer." + field.replace("ggml_", "ggml.")):
        Tokenizer(written(tmp_path / "m.gguf", **{field: value}))


@pytest.mark.parametrize("merges", [["a b c"], ["ab"], ["a z"]])
def test_merges_that_are_none_are_refused_by_file(tmp_path: Path, merges: list[str]) -> None:
    with pytest.raises(BadCheckpoint, match=r"m\.gguf cannot be used"):
        Tokenizer(written(tmp_path / "m.gguf", ggml_merges=merges))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", value) for value in (None, [], "BPE")),
        *(("model.vocab", value) for value in (None, [], {}, {"a": "1"}, {"a": -1}, {"a": 10**9}, {"a": True})),
        *(("model.merges", value) for value in (None, {}, [["a"]], [1], [["a", 1]])),
        ("model.unk_token", []),
        *(("model.continuing_subword_prefix", value) for value in ("x", "##", [1])),
        ("model.end_of_word_suffix", "</w>"),
        *((f"{key}.type", value) for key in ("normalizer", "decoder") for value in ([], {}, 1)),
        *(("added_tokens", value) for value in ({}, ["a"], [{}], [{"id": -1, "content": "x", "special": True}])),
        *((key, "x") for key in ("normalizer", "pre_tokenizer", "decoder", "post_processor")),
        ("normalizer.normalizers", [{}]),
        ("pre_tokenizer.pretokenizers", 1),
        ("decoder.decoders", ["x"]),
        ("post_processor.processors", {}),
        ("post_processor.single", [1]),
        ("post_processor.single", [{"SpecialToken": {}}]),
    ],
)
def test_a_tokenizer_json_that_lies_is_refused_by_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    byte_level(tmp_path, None)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    outer, _, inner = field.partition(".")
    changed = {**(data[outer] or {}), inner: value} if inner else value
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | {outer: changed}))
    with pytest.raises(BadCheckpoint, match=rf"tokenizer\.json is damaged: {field} must be"):
        Tokenizer(tmp_path)


def test_a_panic_of_the_library_is_told_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PanicException = type("PanicException", (BaseException,), {})  # as the library's, which cannot be imported

    class Panicking:
        def from_str(self, text: str) -> None:
            raise PanicException("byte index 2 is not a char boundary")

    byte_level(tmp_path, None)
    monkeypatch.setattr("app.tokenizer.Backend", Panicking())
    with pytest.raises(BadCheckpoint, match="cannot be used"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is damaged: model must be an object"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json is damaged: eos_token must be"),
        ("tokenizer_config.json", '{"bos_token": {}}', None),
        ("tokenizer_config.json", '{"bos_token": {"id": 1}}', "tokenizer_config.json is damaged: bos_token must be"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json is damaged: chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', None),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json is damaged: eos_token_id must be"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', "generation_config.json is damaged: eos_token_id"),
        ("chat_template.jinja", "\udcff", "chat_template.jinja cannot be read"),
    ],
)
def test_what_stands_beside_is_refused_by_file_and_field(
    tmp_path: Path, name: str, content: str, told: str | None
) -> None:
    byte_level(tmp_path, None)
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    if told is None:
        Tokenizer(tmp_path)
        return
    with pytest.raises(BadCheckpoint, match=told):
        Tokenizer(tmp_path)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="damaged"):
        Tokenizer(tmp_path)
    saved(Backend(models.Unigram([("a", 0.0)])), tmp_path, {})
    with pytest.raises(UnsupportedModel, match="Unigram"):
        Tokenizer(tmp_path)
    data = {"vocab": {"a": 0, "b": 1}, "merges": []}
    with pytest.raises(UnsupportedModel, match="mystery"):
        Tokenizer(write_gguf(tmp_path / "a.gguf", "gpt2", "mystery", data, [1, 1], bos=0, eos=1))
    with pytest.raises(UnsupportedModel, match="bert"):
        Tokenizer(write_gguf(tmp_path / "b.gguf", "bert", None, data, [1, 1], scores=[0.0, 0.0], bos=0, eos=1))
