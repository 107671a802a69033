"""The loss on text: every token once, whatever the batch; bits per byte of text."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from localtrain import api
from localtrain.cli import run
from localtrain.data.tokenizer import load_tokenizer
from localtrain.evaluate import evaluate
from localtrain.models import spec_from
from localtrain.nn.decoder import build

TESTS = Path(__file__).parent
TOKENIZER = TESTS / "data" / "tokenizer"
TEXTS = [
    "The capital of France is Paris, and it has been for a long time.",
    "na\u00efve caf\u00e9 \U0001f642 <|im_end|> 1234567890",
    "short",
    "x = [i ** 2 for i in range(10)]\nprint(x)\n" * 4,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """model/: a random Hub model with the golden tokenizer; a, b, ...: one document each."""
    folder = tmp_path_factory.mktemp("eval")
    hf = json.loads((TESTS / "golden_small" / "qwen3" / "config.json").read_text())
    network = build(spec_from(hf | {"vocab_size": 520}))
    params = jax.jit(network.init)(jax.random.key(1))
    params["embed_VD"] *= 20  # far from uniform, so that the losses of tokens differ
    model = api.LanguageModel(hf | {"vocab_size": 520}, network, params)
    model.save_hub(str(folder / "model"))
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder / "model")
    for name, text in zip("abcd", TEXTS, strict=True):
        (folder / f"{name}.txt").write_text(text, newline="")
    return folder


def by_hand(place: Path, tokenizer, seq_len: int) -> tuple[float, int, float, int]:
    """(nll, tokens, nll of text, bytes of text) one document after the other, without batches."""
    model = api.load(str(place / "model"))
    totals = np.zeros(4)
    for text in TEXTS:
        ids = tokenizer.encode_document(text)
        for start in range(0, len(ids) - 1, seq_len):
            piece = ids[start : start + seq_len + 1]
            logits = np.asarray(model.logits(piece[None, :-1]), np.float64)[0]
            logits -= logits.max(axis=-1, keepdims=True)
            logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            for label, row in zip(piece[1:], logp, strict=True):
                size = len(tokenizer.decode_stream(skip_special=True)._bytes_of(int(label), True))
                totals += [-row[label], 1, -row[label] * (size > 0), size]
    return tuple(totals)


@pytest.mark.parametrize("name", ["byte", None], ids=["byte", "bpe"])
def test_the_numbers_are_those_of_one_document_at_a_time(place, name):
    tokenizer = load_tokenizer(name or str(place / "model"))
    nll, tokens, text_nll, size = by_hand(place, tokenizer, 24)
    facts = evaluate(
        str(place / "model"), [str(place / "*.txt")], tokenizer=name, seq_len=24, batch_size=3
    )
    assert facts["tokens"] == tokens and facts["documents"] == len(TEXTS)
    assert facts["loss"] == pytest.approx(nll / tokens, rel=1e-6)
    assert facts["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert facts["bytes"] == size
    assert facts["bits_per_byte"] == pytest.approx(text_nll / size / math.log(2), rel=1e-6)
    if name == "byte":  # a document begins with a control token, so every byte is predicted
        control = len("<|im_end|>")
        assert facts["bytes"] == sum(len(text.encode()) for text in TEXTS) - control


def test_batch_size_changes_nothing_and_a_limit_counts_rows(place):
    source, data = str(place / "model"), [str(place / "*.txt")]
    every = [evaluate(source, data, seq_len=16, batch_size=size) for size in (1, 3, 8, 100)]
    for facts in every[1:]:
        assert facts["tokens"] == every[0]["tokens"] and facts["rows"] == every[0]["rows"]
        assert facts["loss"] == pytest.approx(every[0]["loss"], rel=1e-6)
    few = [evaluate(source, data, seq_len=16, batch_size=size, limit=5) for size in (2, 5)]
    assert few[0]["rows"] == few[1]["rows"] == 5
    assert few[0]["tokens"] == few[1]["tokens"] < every[0]["tokens"]
    assert few[0]["loss"] == pytest.approx(few[1]["loss"], rel=1e-6)


def test_byte_lengths_add_up_to_the_text():
    text = TEXTS[0] + TEXTS[3] + "\u4f60\u597d"
    for name in ("byte", str(TOKENIZER)):
        tokenizer = load_tokenizer(name)
        sizes = tokenizer.byte_lengths()
        assert len(sizes) == tokenizer.size
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
        assert sizes[list(tokenizer.special.values())].tolist() == [0] * len(tokenizer.special)


def test_a_run_is_evaluated_on_what_it_held_out(place, monkeypatch, capsys):
    """And gives the number that the run itself logged."""
    monkeypatch.chdir(place)
    for part in range(40):
        (place / f"part{part}.md").write_text(f"document {part}: " + "more of it. " * (part + 9))
    (place / "tiny.yaml").write_text(
        "model: {path: model}\n"
        "data: {sources: '*.md', seq_len: 32, eval_fraction: 0.2, tokenizer: model}\n"
        "train: {steps: 2, batch_size: 2, log_every: 1}\n"
        "eval: {batches: null}\noptim: {warmup: 1}\n"
    )
    command = [sys.executable, "-m", "localtrain"]
    done = subprocess.run(
        [*command, "train", "tiny.yaml", "--out", "out", "--backend", "cpu"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    logged = [
        json.loads(line)
        for line in (place / "out" / "metrics.jsonl").read_text().split("\n")
        if line
    ]
    (expected,) = [row["eval_loss"] for row in logged if "eval_loss" in row]
    done = subprocess.run([*command, "eval", "out", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["loss"] == pytest.approx(expected, rel=1e-5)
    assert facts["seq_len"] == 32 and facts["data"] == "held out by the run"
    assert run(["eval", "out/checkpoints/2", "--data", "a.txt", "--seq-len", "16"]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_jsonl_with_another_key(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    rows = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS)
    (place / "rows.jsonl").write_text(rows)
    options = ["--seq-len", "24", "--json"]
    assert run(["eval", "model", "--data", "rows.jsonl", "--field", "body", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == len(TEXTS)
    files = evaluate("model", ["*.txt"], seq_len=24)
    assert facts["loss"] == pytest.approx(files["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["model"], 2, "name documents with --data"),
        (["model", "--data", "missing.txt"], 3, "missing.txt: no file matches"),
        (["nowhere", "--data", "a.txt"], 3, "nowhere: there is no such folder"),
        (["model", "--data", "a.txt", "--seq-len", "1"], 2, "--seq-len"),
        (["model", "--data", "rows.jsonl"], 3, "field"),
    ],
)
def test_what_is_wrong_is_said_in_one_paragraph(
    place, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(place)
    (place / "rows.jsonl").write_text('{"body": "text"}\n')
    assert run(["eval", *arguments]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]
