"""What comes from outside runs no code and leaves no folder, and no secret is written down."""

import json
import logging
import os
import pickle
import struct
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import localtrain
from localtrain import commit, storage
from localtrain.checkpoint import Checkpoints
from localtrain.config import load_run
from localtrain.data.build import build_dataset
from localtrain.data.dataset import Dataset
from localtrain.data.shards import read_index
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import ConfigError, DataError, LocaltrainError
from localtrain.metrics import read_metrics
from localtrain.models.files import HubFiles, read_header

SECRET = "hunter2hunter2"
TINY = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


# ---- secrets


def test_a_password_in_a_url_is_written_nowhere(tmp_path, capfd, monkeypatch):
    source = f"memory://user:{SECRET}@{uuid.uuid4().hex}/text"
    for i in range(20):
        storage.write_atomic(f"{source}/{i}.txt", f"Document {i} says many words. ".encode() * 9)
    storage.write_atomic(f"{source}/empty.txt", b" ")  # skipped, and its first place is noted
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    run = {
        "name": "secret",
        "model": {"path": str(tmp_path)},
        "data": {"sources": [f"{source}/*.txt"], "seq_len": 16},
        "train": {"steps": 2, "batch_size": 2},
        "eval": {"batches": 1},
    }
    out = tmp_path / "out"
    localtrain.train(localtrain.RunConfig.model_validate(run), backend="cpu", out=str(out))
    localtrain.train(localtrain.RunConfig.model_validate(run), backend="cpu", out=str(out))
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    shown = capfd.readouterr()
    assert "tokenized memory://***@" in shown.err
    assert SECRET not in shown.out + shown.err


def test_errors_of_storage_hide_it_too(capfd):
    from localtrain.cli import run

    assert run(["generate", f"memory://user:{SECRET}@nowhere/run", "--prompt", "x"]) == 3
    assert SECRET not in capfd.readouterr().err


# ---- no code, no way out of a folder


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "weights.npz"])
def test_pickled_weights_are_refused_unopened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(DataError, match=r"can run code|neither"):
        HubFiles(str(tmp_path))
    assert not (tmp_path / "touched").exists()


def test_a_run_file_makes_no_python_objects(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'touched'}']\n")
    with pytest.raises(ConfigError):
        load_run(str(path))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "d/../../../x"])
def test_a_checkpoint_record_cannot_name_files_outside(tmp_path, name):
    import jax.numpy as jnp

    saved = Checkpoints(tmp_path / "c")
    saved.save(1, {"x": jnp.ones(3)}, {}, block=True)
    path = tmp_path / "c" / "1" / "commit.json"
    for change in ({"files": {name: {"size": 1, "crc32c": 1}}}, {"folder": name}):
        record = {**json.loads(path.read_bytes()), **change}
        record["checksum"] = commit._own_checksum(record)
        path.write_bytes(commit.encode_json(record))
        with pytest.raises(DataError, match=r"commit\.json is damaged"):
            Checkpoints(tmp_path / "c").restore(1, {"x": np.ones(3, np.float32)})


@pytest.mark.parametrize("name", ["../w.safetensors", "/w.safetensors", "a/w.safetensors"])
def test_a_weight_index_cannot_name_files_outside(tmp_path, name):
    index = {"weight_map": {"x": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="plain file names"):
        HubFiles(str(tmp_path))


@pytest.mark.parametrize("name", ["../s.tokens", "/s.tokens", "a/s.tokens"])
def test_a_token_index_cannot_name_files_outside(dataset, name):
    index = json.loads((dataset / "index.json").read_bytes())
    index["shards"][0]["name"] = name
    del index["checksum"]  # whoever can write the file can write that, too
    (dataset / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="not a plain file name"):
        read_index(str(dataset))


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tgz", "a.tar"])
def test_archives_are_never_unpacked(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match="archives are not read"):
        build_dataset(str(tmp_path / name), load_tokenizer("byte"), str(tmp_path / "out"))


# ---- any bytes: an error of ours, never a crash


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 50)
    out = tmp_path / "set"
    build_dataset(str(tmp_path / "a.txt"), load_tokenizer("byte"), str(out))
    return out


def changed(data, position, value, cut):
    """The bytes with one changed, or an end cut off."""
    position %= len(data)
    return data[:position] if cut else data[:position] + bytes([value]) + data[position + 1 :]


positions = st.integers(0, 1 << 20), st.integers(0, 255), st.booleans()
quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A dataset, a safetensors file and a checkpoint, to be damaged in copies."""
    import jax.numpy as jnp

    top = tmp_path_factory.mktemp("pristine")
    (top / "a.txt").write_text("some words " * 50)
    build_dataset(str(top / "a.txt"), load_tokenizer("byte"), str(top / "set"))
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (top / "w").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    Checkpoints(top / "c").save(1, {"x": jnp.ones(3)}, {"a": [1, {"b": 2}]}, block=True)
    return top


@quick
@given(*positions)
def test_damaged_token_shards(pristine, position, value, cut):
    for name in ("index.json", "shard-00000.tokens"):
        path = pristine / "set" / name
        good = path.read_bytes()
        bad = changed(good, position, value, cut)
        path.write_bytes(bad)
        try:
            Dataset(str(pristine / "set"))
            # white space of the index may differ, what it says may not
            assert bad == good or json.loads(bad) == json.loads(good)
        except LocaltrainError as error:
            assert str(pristine / "set") in str(error)
        finally:
            path.write_bytes(good)


@quick
@given(*positions)
def test_damaged_safetensors_headers(pristine, position, value, cut):
    good = (pristine / "w").read_bytes()
    path = pristine / "bad"
    path.write_bytes(changed(good, position, value, cut))
    try:
        for stored in read_header(str(path)).values():
            assert 0 <= stored.start <= stored.end <= len(good)
    except DataError as error:
        assert str(path) in str(error)


@quick
@given(*positions)
def test_damaged_checkpoint_metadata(pristine, position, value, cut):
    for name in ("commit.json", "meta.json", "_METADATA"):
        path = pristine / "c" / "1" / name
        good = path.read_bytes()
        bad = changed(good, position, value, cut)
        path.write_bytes(bad)
        try:
            Checkpoints(pristine / "c").read_meta(1)
            assert bad == good
        except DataError as error:
            assert str(pristine / "c") in str(error)
        finally:
            path.write_bytes(good)


@quick
@given(st.binary(max_size=200))
def test_any_bytes_as_a_run_file(pristine, data):
    path = pristine / "run.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load_run(str(path))


@quick
@given(st.binary(max_size=300))
def test_any_bytes_as_metrics_and_as_jsonl(pristine, data):
    (pristine / "metrics.jsonl").write_bytes(data)
    assert all(isinstance(row["step"], int) for row in read_metrics(pristine))
    (pristine / "b.jsonl").write_bytes(data)
    out = pristine / uuid.uuid4().hex
    logging.disable(logging.WARNING)
    try:
        build_dataset(str(pristine / "b.jsonl"), load_tokenizer("byte"), str(out))
    except DataError as error:
        assert "b.jsonl" in str(error)
    finally:
        logging.disable(logging.NOTSET)
