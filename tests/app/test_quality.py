"""`quantize` and `eval` from the command line on a tiny model, and what the report says of it."""

import json
import re

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from app.__main__ import main
from app.calibration import sample_texts, sample_windows
from app.errors import UsageError
from app.evaluation import quality
from app.evaluation.quality import REFERENCE, Quality, Variant, variants
from app.tokenizer import Tokenizer
from models.checkpoint import open_checkpoint
from models.decoder import Decoder
from models.heads import HeadPattern
from quant.llm_int8 import missing as bitsandbytes_missing
from tests.models.tiny import HF, parameters, tiny_model

CPU = torch.device("cpu")
SYMBOLS = ["Ċ", "Ġ", *map(chr, range(0x21, 0x7F))]  # the 96 bytes of plain text, one token each


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    state = {}
    for key, tensor in parameters(tiny_model("llama")).items():
        state[key] = (tensor * (tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.1) + ("norm" in key)).bfloat16()
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors")
    HF["llama"].save_pretrained(folder)
    data = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(SYMBOLS)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"Line {i} says {i * i} and {i % 7}." for i in range(80)))
    return file


def test_a_full_disk_is_told_and_the_same_command_goes_on(model, tmp_path, capsys, monkeypatch):
    def full(tensors, file, metadata):
        if "00002" in file.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, file, metadata=metadata)

    command = ["quantize", str(model), str(tmp_path / "out"), "--calibration", "none"]
    with monkeypatch.context() as broken:
        broken.setattr("models.quantize.save_file", full)
        assert main(command) == 1
    told = "The disk is full: make room, then try again. The same command then goes on from what is"
    assert told in capsys.readouterr().err
    assert main(command) == 0


def test_a_stopped_run_is_not_continued_with_weights_that_differ_anywhere(model, tmp_path, monkeypatch):
    """Not even where they differ far from the file's beginning: what is written already would be of another model."""
    command = ["quantize", str(model), str(tmp_path / "out"), "--calibration", "none"]
    weights, long = load_file(model / "model.safetensors"), {"header": "of more than a MiB" * 100_000}
    save_file(weights, model / "model.safetensors", metadata=long)

    def full(tensors, file, metadata):
        if "00003" in file.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, file, metadata=metadata)

    with monkeypatch.context() as broken:
        broken.setattr("models.quantize.save_file", full)
        assert main(command) == 1
    first = tmp_path / "out.partial" / "model-00002-of-00004.safetensors"
    before = first.read_bytes()
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**weights, name: weights[name].flip(0)}, model / "model.safetensors", metadata=long)
    assert main(command) == 0
    assert (tmp_path / "out" / first.name).read_bytes() != before


def test_a_tokenizer_of_another_model_is_refused_before_any_work(model, tmp_path, capsys):
    spec = json.loads((model / "tokenizer.json").read_text())
    spec["added_tokens"].append({"id": 5000, "content": "<new>", "special": True})
    (model / "tokenizer.json").write_text(json.dumps(spec))
    assert main(["quantize", str(model), str(tmp_path / "out"), "--calibration", "none"]) == 1
    assert "they do not belong together" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_text_of_one_token_is_told_to_be_too_short(model, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a")
    assert main(["eval", "quality", "--model", str(model), "--text", str(tmp_path / "short.txt")]) == 2
    assert "is 1 token long" in capsys.readouterr().err


def test_quantise_then_compare(model, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ["quantize", str(model), str(out), "--calibration", str(text), "--calibration-tokens", "400", "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["tokens"] == 400 and told["calibration"]["text"] == "text.txt"
    assert told["source_revision"].startswith("fingerprint-") and told["peak_memory_bytes"] > 0
    assert (out / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err

    command = ["eval", "quality", "--model", str(out), "--reference", str(model), "--text", str(text)]
    some = ["--kv-bits", "7"]  # at head size 16 a head in four
    monkeypatch.setattr("app.status_line._EVERY_S", 0.0)
    assert main([*command, *some, "--tokens", "900", "--length", "300", "--length", "150", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    shares = [int(share) for share in re.findall(r"octavo: Comparing: .+ tokens (\d+)%", printed.err)]
    assert shares == sorted(shares) and len(set(shares)) > 9 and shares[-1] == 100 and "s left" in printed.err
    rows = {(row["setting"], row["length"]): row for row in report["scores"]}
    assert rows["bf16", 300]["kl"] == 0 and rows["bf16", 150]["top1_percent"] == 100
    assert rows["bf16", 300]["tokens"] == 3 * 299 and rows["kv4", 150]["tokens"] == 6 * 149
    assert ("llm.int8", 300) in rows or bitsandbytes_missing() is not None
    assert rows["kv8", 300]["kl"] < rows["kv4 at 7 bits", 300]["kl"] < rows["kv4", 300]["kl"]
    for setting in ("w8a8", "kv8", "kv4 without rotation", "kv4", "w8a8 + kv4"):
        assert 0 < rows[setting, 300]["kl"] < 0.02, setting
        assert abs(rows[setting, 300]["perplexity_above_percent"]) < 3
    short = text.with_name("short.txt")
    short.write_text(text.read_text()[:200])
    assert main(["eval", "quality", "--model", str(model), "--text", str(short), "--setting", "kv8", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert 2 <= scores[0]["length"] < 512  # all of it, where the usual windows are longer
    assert len(report["heads"]) == 4 and report["warning"] is None
    assert main([*command, "--tokens", "900", "--length", "300", "--setting", "kv8"]) == 0
    assert "Heads whose attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--length", "9999"], "this model's window is 512"),
        (["--length", "1"], "--length is 1; it must be a whole number from 2"),
        (["--tokens", "100", "--length", "300"], "too few for a window of 300"),
        (["--setting", "kv3"], "not one of: w8a8"),
        (["--text", "/nowhere"], "no such file"),
    ],
)
def test_wrong_usage_is_told(model, text, flags, told, capsys):
    base = ["eval", "quality", "--model", str(model), "--text", str(text)]
    assert main([*base, *flags]) == 2
    assert told in capsys.readouterr().err


def test_scores_are_those_of_transformers(model):
    ids = torch.randint(0, 96, (600,), generator=torch.Generator().manual_seed(3))
    bench = Quality(open_checkpoint(model), None, ids.tolist(), [300], CPU)
    peer = tiny_model("llama")
    state = {name: open_checkpoint(model).load_float(name).float() for name in open_checkpoint(model).names()}
    peer.load_state_dict(state)
    with torch.no_grad():
        loss = torch.stack([peer(w[None], labels=w[None]).loss for w in ids.split(300)]).mean()
    assert bench.scores[0].perplexity == pytest.approx(loss.exp().item(), rel=2e-3)
    assert bench.scores[0].variant == REFERENCE.name


def test_logits_of_a_long_text_are_computed_in_pieces(model, monkeypatch):
    rows, inner = [], Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: rows.append(len(hidden)) or inner(self, hidden))
    ids = torch.randint(0, 96, (500,), generator=torch.Generator().manual_seed(3)).tolist()
    whole = Quality(open_checkpoint(model), None, ids, [500], CPU).scores[0]
    assert max(rows) <= quality._ROWS
    rows.clear()
    monkeypatch.setattr(quality, "_ROWS", 64)
    pieces = Quality(open_checkpoint(model), None, ids, [500], CPU).scores[0]
    assert max(rows) == 64 and sum(rows) == 499
    assert pieces.perplexity == pytest.approx(whole.perplexity, rel=1e-6)


def test_streaming_heads_and_8_bits_rank_as_they_must(model):
    config = open_checkpoint(model).config
    pattern = HeadPattern(torch.arange(4).view(2, 2).double().numpy(), 4, 16, "test")
    assert pattern.scores.shape == (config.num_layers, config.num_kv_heads)
    ids = torch.randint(0, 96, (800,), generator=torch.Generator().manual_seed(3)).tolist()
    bench = Quality(open_checkpoint(model), pattern, ids, [400], CPU)
    kl = {variant.name: bench.measure(variant)[0].kl for variant in variants(pattern)}
    assert kl["kv8"] < kl["kv4"]
    assert kl["duo 75%"] < kl["duo 25%"]
    assert kl["w8a8 + kv4 + duo 50%"] > kl["w8a8"]
    assert bench.measure(Variant("again"))[0].kl == pytest.approx(0, abs=1e-9)


def test_a_large_channel_shows_up_in_its_heads_row(model):
    weights = open_checkpoint(model)
    ids = torch.randint(0, 96, (300,)).tolist()
    before = list(Quality(weights, None, ids, [300], CPU).head_errors.rows())
    name = "model.layers.1.self_attn.k_proj.weight"
    state = {key: weights.load_float(key).clone() for key in weights.names()}
    state[name][16 + 3] *= 30  # KV head 1
    save_file(state, model / "model.safetensors")
    after = list(Quality(open_checkpoint(model), None, ids, [300], CPU).head_errors.rows())
    assert after[3]["k_outlier"] > 1.3 * before[3]["k_outlier"]
    assert after[3]["score_error"] > 3 * before[3]["score_error"]
    assert after[:3] == before[:3]


def test_sample_texts_come_from_files_folders_and_the_built_in(tmp_path, text, model):
    texts, name = sample_texts(None)
    assert name == "built-in" and len(texts) == 3 and "When in the Course of human events" in "".join(texts)
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.txt").write_text("some words " * 50)
    (tmp_path / "many" / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "many" / "c.txt").write_text("other words " * 50)
    assert len(sample_texts(tmp_path / "many")[0]) == 2
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file in there"):
        sample_texts(tmp_path / "none")
    windows, about = sample_windows(Tokenizer(model), ["a" * 5000, "b" * 5000], 4500)
    assert about["tokens"] == 4500 == sum(map(len, windows))
    assert {int(window[0]) for window in windows} == {SYMBOLS.index("a"), SYMBOLS.index("b")}


def _other_weights(folder):
    file = folder / "model" / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)


def _other_template(folder):
    (folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")


def _other_pattern(folder):
    HeadPattern(torch.ones(2, 2).double().numpy(), 4, 16, "all alike").save(folder / "pattern")


def _other_text(folder):
    (folder / "text.txt").write_text("Other words are here. " * 100)


def _other_data(folder):
    row = {"context": "Ann.", "input": "Who?", "answers": ["Ann"]}
    (folder / "data" / "qasper.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("needle", _other_weights, "checkpoint"),
        ("needle", _other_template, "checkpoint"),
        ("needle", _other_pattern, "pattern"),
        ("needle", _other_text, "haystack"),
        ("longbench", _other_data, "data"),
    ],
)
def test_an_evaluation_goes_on_and_no_other_takes_its_results(model, text, tmp_path, capsys, kind, change, told):
    HeadPattern(torch.arange(4).view(2, 2).double().numpy(), 4, 16, "test").save(tmp_path / "pattern")
    (tmp_path / "data").mkdir()
    row = {"context": "Bob.", "input": "Who?", "answers": ["Bob"]}
    (tmp_path / "data" / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    asked = {
        "needle": ["--haystack", str(text), "--length", "300", "--depths", "2"],
        "longbench": ["--data", str(tmp_path / "data")],
    }[kind]
    command = ["eval", kind, "--model", str(model), "--pattern", str(tmp_path / "pattern"), *asked]
    command += ["--out", str(tmp_path / "out")]
    assert main(command) == 0
    journal = tmp_path / "out" / f"{kind}.jsonl"
    whole = journal.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    journal.write_bytes(whole[: -len(last) // 2])  # stopped in the midst of the last line
    assert main(command) == 0
    assert journal.read_bytes() == whole
    change(tmp_path)
    capsys.readouterr()
    assert main(command) == 2
    assert f"is of another evaluation: {told} differ" in capsys.readouterr().err
    assert journal.read_bytes() == whole
