"""model.init_from: training begins with the given weights and tokenizer and keeps what it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import localtrain
from localtrain import api, cli, convert
from localtrain.checkpoint import Checkpoints
from localtrain.config import RunConfig
from localtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from localtrain.errors import ConfigError, DataError
from localtrain.metrics import read_metrics
from localtrain.models.files import HubFiles
from localtrain.train import train
from localtrain.warmstart import find_start

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
}
TIED = {**SHAPE, "model_type": "qwen3", "tie_word_embeddings": True}
UNTIED = {**SHAPE, "model_type": "llama", "tie_word_embeddings": False}


def write_model(folder: Path, hf: dict, dtype: str = "float32") -> Path:
    """A random model with a tokenizer.json beside it."""
    from localtrain.data.byte_files import byte_tokenizer_files

    config = folder.parent / f"{folder.name}.json"
    config.write_text(json.dumps(hf))
    api.load(str(config), seed=7).save_hub(str(folder), dtype)
    for name, data in byte_tokenizer_files().items():
        (folder / name).write_bytes(data)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    write_model(top / "tied", TIED, "bfloat16")
    write_model(top / "untied", UNTIED)
    convert.import_hub(str(top / "tied"), str(top / "imported"))
    return top


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    return folder


@pytest.fixture
def make(text, tmp_path):
    """A run of a few steps from the given weights."""

    def run(init_from, **changes) -> RunConfig:
        values = {
            "model": {"init_from": str(init_from)},
            "data": {"sources": str(text / "*.txt"), "seq_len": 32, "eval_fraction": 0.1},
            "train": {"steps": 2, "batch_size": 4, "log_every": 1},
            "optim": {"warmup": 0},
            "checkpoint": {"every": 1},
        }
        for key, value in changes.items():
            section, _, name = key.partition("_")
            values[section] = {**values.get(section, {}), name: value}
        return RunConfig(**values)

    return run


def losses(out) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if "loss" in row]


def tensors(folder) -> dict[str, np.ndarray]:
    files = HubFiles(str(folder))
    return {name: files.read(name) for name in files.tensors}


@pytest.fixture(scope="module")
def trained(models, text, tmp_path_factory):
    """One run from the tied folder, used by many tests."""
    out = tmp_path_factory.mktemp("runs") / "first"
    run = RunConfig(
        model={"init_from": str(models / "tied")},
        data={"sources": str(text / "*.txt"), "seq_len": 32, "eval_fraction": 0.1},
        train={"steps": 2, "batch_size": 4, "log_every": 1},
        optim={"warmup": 0},
        checkpoint={"every": 1},
    )
    train(run, backend="cpu", out=str(out))
    return out


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_step_0_has_exactly_the_given_weights(name, models, make, tmp_path):
    """An update too small for float32 changes nothing, so what is saved is what was loaded."""
    run = make(models / name, train_steps=1, optim_lr=1e-30)
    train(run, backend="cpu", out=str(tmp_path / "run"))
    convert.export_hub(str(tmp_path / "run"), str(tmp_path / "back"))
    before, after = tensors(models / name), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key].astype(np.float32), after[key], err_msg=key)
    assert ("lm_head.weight" in after) == (name == "untied")


def test_a_hub_folder_an_import_and_a_checkpoint_start_alike(models, trained, make, tmp_path):
    train(make(models / "imported"), backend="cpu", out=str(tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(trained)
    newest = find_start(make(trained), None).source
    first = find_start(make(trained / "checkpoints" / "1"), None).source
    assert (first.step, newest.step) == (1, 2)
    leaf = ("stack_0", "layer_0", "mixer", "wq_DNH")
    assert newest.leaves[leaf][1] == np.float32
    assert not np.array_equal(first.read(leaf), newest.read(leaf))


def test_the_tokenizer_beside_the_weights_is_the_default_and_is_kept(models, trained, make):
    start = find_start(make(models / "tied"), None)
    assert start.own_tokenizer and start.tokenizer.hash == load_tokenizer(str(models / "tied")).hash
    kept = trained / "tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (kept / name).read_bytes() == (models / "tied" / name).read_bytes()
    assert load_tokenizer(str(kept)).hash == start.tokenizer.hash
    again = find_start(make(trained), None)
    assert again.own_tokenizer and again.tokenizer.hash == start.tokenizer.hash


def test_another_tokenizer_is_used_when_named_and_a_note_says_so(models, make):
    start = find_start(make(models / "tied", data_tokenizer="byte"), None)
    assert isinstance(start.tokenizer, ByteTokenizer) and not start.own_tokenizer
    assert any("not the tokenizer of" in note for note in start.notes)


def test_without_a_tokenizer_beside_the_weights_one_must_be_named(models, make, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(models / "tied", bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no tokenizer\.json.*data\.tokenizer"):
        find_start(make(bare), None)
    assert find_start(make(bare, data_tokenizer="byte"), None).source is not None


def test_a_tokenizer_larger_than_the_embedding_is_an_error_with_the_remedy(make, tmp_path):
    small = write_model(tmp_path / "small", {**TIED, "vocab_size": 100, "eos_token_id": 1})
    with pytest.raises(ConfigError, match=r"264 tokens.*vocabulary of 100.*vocab_size 264"):
        find_start(make(small), None)
    with pytest.raises(ConfigError, match=r"'byte' has 264.*100.*leave data\.tokenizer out"):
        find_start(make(small, data_tokenizer="byte"), None)


def test_resuming_needs_the_source_no_more(models, make, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models / "tied", source)
    out = str(tmp_path / "run")
    train(make(source), backend="cpu", out=out)
    shutil.rmtree(source)
    result = train(make(source, train_steps=4), backend="cpu", out=out)
    assert result.step == 4 and len(losses(out)) == 4
    assert (tmp_path / "run" / "tokenizer" / "chat_template.jinja").is_file()
    with pytest.raises(DataError, match="no such folder"):
        train(make(source), backend="cpu", out=str(tmp_path / "other"))


def test_other_weights_are_another_run(models, trained, make):
    with pytest.raises(ConfigError, match=r"differs.*model\.init_from"):
        train(make(models / "untied"), backend="cpu", out=str(trained))


def test_a_misfit_stops_before_anything_is_written(models, make, tmp_path, capfd):
    folder = tmp_path / "cut"
    shutil.copytree(models / "tied", folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    (tmp_path / "run.yaml").write_text(make(folder).to_yaml())
    arguments = ["train", str(tmp_path / "run.yaml"), "--backend", "cpu", "--out", "never"]
    assert cli.run(arguments) == 3
    assert "model.safetensors" in capfd.readouterr().err and not Path("never").exists()


def test_what_training_wrote_can_be_exported_and_loaded(trained, models, tmp_path):
    report = convert.export_hub(str(trained), str(tmp_path / "out"))
    assert report.max_difference == 0 and report.written.dtypes == {"F32": 24}
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hf["torch_dtype"] == "float32" and hf["tie_word_embeddings"] is True
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (models / "tied" / name).read_bytes()
    ids = np.arange(10)[None]
    ours, theirs = (np.asarray(api.load(str(f)).logits(ids)) for f in (trained, tmp_path / "out"))
    np.testing.assert_array_equal(ours, theirs)
    for step in Checkpoints(trained / "checkpoints").steps():
        convert.export_hub(str(trained / "checkpoints" / str(step)), str(tmp_path / f"{step}"))


def test_a_run_from_scratch_exports_with_the_tokenizer_it_was_trained_with(text, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**TIED, "eos_token_id": 9, "pad_token_id": 999})
    )
    data = {"sources": str(text / "*.txt"), "seq_len": 32, "eval_fraction": 0}
    run = RunConfig(model={"path": str(tmp_path)}, data=data, train={"steps": 1, "batch_size": 2})
    localtrain.train(run, backend="cpu", out=str(tmp_path / "run"))
    convert.export_hub(str(tmp_path / "run"), str(tmp_path / "out"))
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hf["eos_token_id"] == hf["bos_token_id"] == 256 and "pad_token_id" not in hf
    made = load_tokenizer(str(tmp_path / "out"))
    np.testing.assert_array_equal(made.encode("caf\u00e9"), ByteTokenizer().encode("caf\u00e9"))


@pytest.mark.slow
def test_carried_parts_follow_a_run_to_its_export(make, tmp_path):
    golden = Path(__file__).resolve().parents[2] / "shared" / "golden" / "gemma3_mm"
    if not golden.is_dir():
        pytest.skip("no golden checkpoint of gemma3_mm in this checkout")
    words = write_model(tmp_path / "words", TIED)
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / name, folder)
    (folder / "preprocessor_config.json").write_text("{}")
    vocab = json.loads((golden / "config.json").read_text())["text_config"]["vocab_size"]
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    tokenizer["post_processor"] = None
    assert len(tokenizer["model"]["vocab"]) <= vocab
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = make(folder, train_steps=1, train_batch_size=2)
    train(run, backend="cpu", out=str(tmp_path / "run"))
    shutil.rmtree(folder)
    report = convert.export_hub(str(tmp_path / "run"), str(tmp_path / "out"))
    assert report.written.carried > 0
    before, after = tensors(golden), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    vision = [name for name in before if name.startswith(("vision", "multi_modal"))]
    assert all(before[name].tobytes() == after[name].tobytes() for name in vision)
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"


def test_two_devices_start_from_the_same_weights(models, trained, text, tmp_path):
    arguments = [
        *("train", "pretrain", "--backend", "cpu", "--devices", "2", "--out", tmp_path / "two"),
        *(f"model.init_from={models / 'tied'}", f"data.sources={text / '*.txt'}"),
        *("data.seq_len=32", "data.eval_fraction=0.1", "train.steps=1", "train.batch_size=4"),
        *("train.remat=none", "optim.warmup=0", "train.log_every=1"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "localtrain", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "weights from" in done.stderr and "bfloat16" in done.stderr
    assert losses(tmp_path / "two")[0] == pytest.approx(losses(trained)[0], rel=1e-5)
