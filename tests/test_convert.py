"""Hugging Face to ours and back: nothing is lost, nothing is half done, misfits are refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from localtrain import api, cli, convert, hubdir, parity, storage
from localtrain.errors import ConfigError, DataError, StorageError
from localtrain.models import rules_from, spec_from, weights
from localtrain.models.files import DTYPES, HubFiles, read_header, write_tensors
from localtrain.nn.decoder import build
from localtrain.source import CheckpointSource, HubSource, open_source

ROOT = Path(__file__).resolve().parent.parent
FULL, SMALL = ROOT.parent / "shared" / "golden", ROOT / "tests" / "golden_small"
FAMILIES = ["llama2", "llama3_1", "mistral", "qwen2_5", "qwen3", "gemma3_text", "gemma3_mm"]


def golden(family: str) -> Path:
    folder = FULL / family if (FULL / family).is_dir() else SMALL / family
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoint of {family} in this checkout")
    return folder


def tensors(folder) -> dict[str, np.ndarray]:
    files = HubFiles(str(folder))
    return {name: files.read(name) for name in files.tensors}


def assert_same_tensors(a, b):
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        np.testing.assert_array_equal(
            left[name].view(np.uint8), right[name].view(np.uint8), err_msg=name
        )


def rewrite(folder: Path, change, **options) -> None:
    """The weights of a folder again, after `change` on the dict of them."""
    held = {name: array.copy() for name, array in tensors(folder).items()}
    change(held)
    for file in folder.glob("model*"):
        file.unlink()
    plan = {name: (array.shape, array.dtype) for name, array in held.items()}
    write_tensors(str(folder), plan, held.items(), **options)


def set_config(folder: Path, **changes) -> None:
    hf = json.loads((folder / "config.json").read_text())
    hf = {key: value for key, value in (hf | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.fixture
def hub(tmp_path):
    """A writable copy of a golden folder: config and weights."""

    def copy(family: str = "qwen3", **changes) -> Path:
        folder = tmp_path / "hub"
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((golden(family) / name).read_bytes())
        set_config(folder, **changes)
        return folder

    return copy


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Imported golden folders, each made once: (folder, report)."""
    made = {}

    def get(family: str = "qwen3"):
        if family not in made:
            out = tmp_path_factory.mktemp("imported") / family
            made[family] = out, convert.import_hub(str(golden(family)), str(out))
        return made[family]

    return get


# there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_an_import_is_the_original_bit_for_bit(family, imported, tmp_path):
    folder, report = imported(family)
    assert report.max_difference == 0
    back = convert.export_hub(str(folder), str(tmp_path / "back"))
    assert back.max_difference == 0 and back.written.bytes == report.source.bytes
    assert_same_tensors(golden(family), tmp_path / "back")
    before = json.loads((golden(family) / "config.json").read_text())
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert spec_from(after) == spec_from(before)
    assert before.items() <= after.items()


TEXT = [family for family in FAMILIES if family != "gemma3_mm"]  # its outputs are of images


@pytest.mark.parametrize(
    "family", [f if f == "llama3_1" else pytest.param(f, marks=pytest.mark.slow) for f in TEXT]
)
def test_golden_outputs_hold_after_import_and_export(family, imported, tmp_path):
    from safetensors.numpy import load_file

    expected = load_file(golden(family) / "golden.safetensors")
    facts = json.loads((golden(family) / "golden.json").read_text())
    convert.export_hub(str(imported(family)[0]), str(tmp_path / "back"))
    model = api.load(str(tmp_path / "back"))
    ids, mask = expected["input_ids"], expected["attention_mask"]
    difference = np.abs(np.asarray(model.logits(ids, mask)) - expected["logits"])
    assert difference[mask.astype(bool)].max() <= facts["suggested_atol"]
    loss, grads = model.loss_and_grads(ids, expected["labels"], mask)
    assert loss == pytest.approx(float(expected["loss"][0]), rel=1e-5)
    assert grads.keys() == facts["grad_norms"].keys()
    for name, norm in facts["grad_norms"].items():
        assert np.linalg.norm(grads[name]) == pytest.approx(norm, rel=1e-3, abs=1e-6), name
    tokens = expected["greedy_tokens"].tolist()
    new = model.generate(expected["prompt.input_ids"], max_new_tokens=len(tokens))
    assert new.tolist() == [tokens]


def test_the_imported_folder_loads_like_the_original(imported):
    folder, _ = imported()
    ids = np.arange(12)[None]
    logits = [np.asarray(api.load(str(f)).logits(ids)) for f in (golden("qwen3"), folder)]
    np.testing.assert_array_equal(*logits)
    assert isinstance(open_source(str(folder / "checkpoints" / "0")), CheckpointSource)


def test_half_precision_comes_back_bit_for_bit_and_mixed_types_too(hub, tmp_path):
    folder = hub()

    def mix(held):
        for number, name in enumerate(sorted(held)):
            kind = (np.float16, ml_dtypes.bfloat16, np.float32)[number % 3]
            held[name] = held[name].astype(kind)

    rewrite(folder, mix)
    report = convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert set(report.source.dtypes) == {"F16", "BF16", "F32"} and report.max_difference == 0
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert_same_tensors(folder, tmp_path / "back")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_export_casts_every_weight_when_asked(dtype, imported, tmp_path):
    report = convert.export_hub(str(imported()[0]), str(tmp_path / "out"), dtype=dtype)
    kinds = {array.dtype for array in tensors(tmp_path / "out").values()}
    assert kinds == {DTYPES[convert.HUB_TYPES[dtype]]}
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hf["torch_dtype"] == dtype
    assert (report.max_difference == 0) == (dtype == "float32")


def test_the_config_of_transformers_5_is_read_and_its_dtype_key_updated(hub, tmp_path):
    folder = hub("llama3_1")
    new = (golden("llama3_1") / "config.transformers5.json").read_text()
    (folder / "config.json").write_text(new)
    convert.import_hub(str(folder), str(tmp_path / "ours"))
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"), dtype="bfloat16")
    hf = json.loads((tmp_path / "back" / "config.json").read_text())
    assert hf["torch_dtype"] == "bfloat16" and hf.get("dtype", "bfloat16") == "bfloat16"
    assert hf["rope_parameters"] == json.loads(new)["rope_parameters"]


def test_shards_are_cut_at_the_limit_listed_in_an_index_and_read_again(imported, tmp_path):
    out = tmp_path / "out"
    convert.export_hub(str(imported()[0]), str(out), shard_bytes=60_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors(out).values())
    for file in files:
        held = read_header(str(out / file))
        size = sum(one.end - one.start for one in held.values())
        assert size <= 60_000 or len(held) == 1
    assert_same_tensors(golden("qwen3"), out)


def test_padded_vocabularies_keep_their_size(imported, tmp_path):
    folder, _ = imported()
    source = open_source(str(folder))
    assert source.leaves[("embed_VD",)][0][0] == 256


# tied embeddings -------------------------------------------------------------------------------


def test_tied_embeddings_are_one_tensor_and_the_flag_is_written_out(hub, tmp_path):
    folder = hub("gemma3_text", tie_word_embeddings=...)  # tied by the default of the family
    convert.import_hub(str(folder), str(tmp_path / "ours"))
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert "lm_head.weight" not in tensors(tmp_path / "back")
    hf = json.loads((tmp_path / "back" / "config.json").read_text())
    assert hf["tie_word_embeddings"] is True


def test_a_second_copy_of_tied_embeddings_is_dropped_with_a_note(hub, tmp_path):
    folder = hub()
    rewrite(folder, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"]}))
    report = convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert any("lm_head.weight is a copy" in note for note in report.notes)
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert_same_tensors(golden("qwen3"), tmp_path / "back")


def test_another_head_under_tied_embeddings_is_an_error_with_both_ways_out(hub, tmp_path):
    folder = hub()
    head = {"lm_head.weight": tensors(folder)["model.embed_tokens.weight"] + 1}
    rewrite(folder, lambda held: held.update(head))
    with pytest.raises(DataError, match=r"tie_word_embeddings: true.*lm_head\.weight.*differs"):
        convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert os.listdir(tmp_path) == ["hub"]


# what lies beside the weights ------------------------------------------------------------------


def test_tokenizer_template_and_other_files_survive_byte_for_byte(hub, tmp_path):
    folder = hub()
    beside = {
        "tokenizer.json": b'{"not": "parsed here"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": "{{ messages }} \u00e9\r\n".encode(),
        "generation_config.json": b'{"eos_token_id": [3, 4], "top_p": 0.9}',
        "preprocessor_config.json": b"{ }",
        "LICENSE": b"text",
    }
    for name, data in beside.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text("the card of another model")
    convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert (tmp_path / "ours/tokenizer/chat_template.jinja").read_bytes() == beside[
        "chat_template.jinja"
    ]
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    for name, data in beside.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    assert not (tmp_path / "back" / "README.md").exists()


def test_carried_tensors_are_copied_byte_for_byte_and_never_trained(imported, tmp_path):
    folder, report = imported("gemma3_mm")
    names = [n for n in tensors(golden("gemma3_mm")) if n.startswith(("vision", "multi_modal"))]
    assert sorted(tensors(folder / "carried")) == sorted(names)
    assert report.source.carried == report.written.carried == len(names)
    assert not any("vision" in "/".join(leaf) for leaf in open_source(str(folder)).leaves)


def test_stored_rotary_frequencies_are_carried(hub, tmp_path):
    folder = hub("llama2")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda held: held.update({name: np.ones(8, np.float32)}))
    convert.import_hub(str(folder), str(tmp_path / "ours"))
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert_same_tensors(folder, tmp_path / "back")


def test_remote_code_is_neither_run_nor_copied(hub, tmp_path):
    folder = hub(auto_map={"AutoModelForCausalLM": "bomb.Model"})
    (folder / "bomb.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    report = convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert any("auto_map" in note and "not run" in note for note in report.notes)
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back" / "bomb.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_only_files_that_the_index_names_are_opened(hub, tmp_path):
    folder = hub()
    rewrite(folder, lambda held: None, shard_bytes=60_000)
    (folder / "model-00099-of-00099.safetensors").write_bytes(b"never read")
    (folder / "consolidated.safetensors").write_bytes(b"never read")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    os.mkfifo(folder / "training_args.bin")
    convert.import_hub(str(folder), str(tmp_path / "ours"))
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_byte_tokenizer_leaves_as_files_that_give_the_same_ids():
    from localtrain.data.byte_files import byte_tokenizer_files
    from localtrain.data.hub_tokenizer import HubTokenizer
    from localtrain.data.tokenizer import ByteTokenizer

    files = byte_tokenizer_files()
    made = HubTokenizer("byte", files.pop("tokenizer.json").decode(), files)
    ours = ByteTokenizer()
    assert (made.size, made.bos_id, made.eos_id) == (ours.size, ours.bos_id, ours.eos_id)
    assert made.stop_ids == ours.stop_ids and made.special == ours.special
    text = "".join(map(chr, range(1, 400))) + "\n\r\n  caf\u00e9 \u4f60 \U0001f600<|im_end|>"
    np.testing.assert_array_equal(made.encode(text), ours.encode(text))
    assert made.decode(made.encode(text)) == text


# refused, and nothing written ------------------------------------------------------------------


def cut_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder):
    (folder / "model.safetensors").write_bytes(b"\x10")


def shard(folder):
    rewrite(folder, lambda held: None, shard_bytes=60_000)
    return sorted(folder.glob("model-*.safetensors"))


def lose_shards(folder):
    for file in shard(folder)[1:3]:
        file.unlink()


def lose_tensors(folder):
    rewrite(folder, lambda held: [held.pop(n) for n in list(held) if "down_proj" in n])


def add_tensor(folder):
    rewrite(folder, lambda held: held.update({"model.extra.weight": np.ones(3, np.float32)}))


def reshape_tensor(folder):
    rewrite(folder, lambda held: held.update({"model.norm.weight": np.ones(50, np.float32)}))


def forget_head(folder):
    set_config(folder, tie_word_embeddings=False)


def edit_header(folder, old: bytes, new: bytes):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    path.write_bytes(data.replace(old, new, 1))


def object_dtype(folder):
    edit_header(folder, b'"dtype":"F32"', b'"dtype":"O8 "')


def integer_weights(folder):
    edit_header(folder, b'"dtype":"F32"', b'"dtype":"I32"')


def not_finite(folder):
    rewrite(folder, lambda held: held["model.norm.weight"].__setitem__(3, np.nan))


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def dangling_link(folder):
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to("../../blobs/abcdef")


def dangling_shard(folder):
    path = shard(folder)[1]
    path.unlink()
    path.symlink_to("../../blobs/abcdef")


def index_elsewhere(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    path.write_text(json.dumps(index))


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def unknown_rope(folder):
    set_config(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0})


def unknown_activation(folder):
    set_config(folder, hidden_act="xielu")


def unknown_family(folder):
    set_config(folder, model_type="qwen33")


DAMAGE = [
    (cut_file, 3, ["model.safetensors", "cut off", "Fetch"]),
    (cut_header, 3, ["model.safetensors", "damaged"]),
    (lose_shards, 3, ["2 of the", "model-00002-of", "model-00003-of", "complete"]),
    (lose_tensors, 3, ["2 missing", "model.layers.0.mlp.down_proj.weight"]),
    (add_tensor, 3, ["1 not known", "model.extra.weight"]),
    (reshape_tensor, 3, ["1 of another shape", "model.norm.weight is [50]", "[48]"]),
    (forget_head, 3, ["tie_word_embeddings: false", "lm_head.weight"]),
    (object_dtype, 3, ["unknown type 'O8 '"]),
    (integer_weights, 3, ["type I32", "F32, BF16 or F16"]),
    (not_finite, 3, ["model.norm.weight", "not finite"]),
    (only_pickles, 3, ["pytorch_model.bin", "run code"]),
    (dangling_link, 3, ["model.safetensors", "../../blobs/abcdef", "cp -rL"]),
    (dangling_shard, 3, ["model-00002-of", "../../blobs/abcdef"]),
    (index_elsewhere, 3, ["weight_map", "plain file names"]),
    (no_config, 3, ["config.json"]),
    (broken_config, 2, ["config.json", "JSON"]),
    (unknown_rope, 2, ["rope_type", "spiral", "llama3"]),
    (unknown_activation, 2, ["hidden_act", "xielu", "silu"]),
    (unknown_family, 2, ["qwen33", "qwen3"]),
]


@pytest.mark.parametrize(
    ("damage", "code", "words"), DAMAGE, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_does_not_fit_is_one_paragraph_and_writes_nothing(
    damage, code, words, hub, tmp_path, capfd
):
    folder = hub()
    damage(folder)
    capfd.readouterr()
    assert cli.run(["import", str(folder), str(tmp_path / "ours")]) == code
    captured = capfd.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in captured.err and captured.out == ""
    assert os.listdir(tmp_path) == ["hub"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_folder_that_holds_anything_is_refused(command, imported, tmp_path, capfd):
    source = golden("qwen3") if command == "import" else imported()[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    assert cli.run([command, str(source), str(tmp_path / "out")]) == 2
    assert "not empty" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["mine.txt"]


def test_an_empty_folder_is_filled(imported, tmp_path):
    (tmp_path / "out").mkdir()
    convert.export_hub(str(imported()[0]), str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_failure_in_the_middle_leaves_nothing(imported, tmp_path, monkeypatch):
    def fail(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr(hubdir, "copy_files", fail)
    for go in (
        lambda: convert.import_hub(str(golden("qwen3")), str(tmp_path / "ours")),
        lambda: convert.export_hub(str(imported()[0]), str(tmp_path / "back")),
    ):
        with pytest.raises(StorageError, match="disk is full"):
            go()
    assert os.listdir(tmp_path) == []


def test_what_was_written_wrongly_is_not_kept(imported, tmp_path, monkeypatch):
    write = write_tensors

    def flip(folder, *arguments):
        names = write(folder, *arguments)
        path = Path(folder, names[0])
        data = bytearray(path.read_bytes())
        data[-2] ^= 64
        path.write_bytes(data)
        return names

    monkeypatch.setattr(hubdir, "write_tensors", flip)
    with pytest.raises(StorageError, match="gives other logits than the source"):
        convert.export_hub(str(imported()[0]), str(tmp_path / "back"))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_noticed_before_anything_is_written(imported, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(hubdir.shutil, "disk_usage", lambda path: usage)
    for go in (
        lambda: convert.import_hub(str(golden("qwen3")), str(tmp_path / "ours")),
        lambda: convert.export_hub(str(imported()[0]), str(tmp_path / "back")),
    ):
        with pytest.raises(StorageError, match="disk is full"):
            go()
    assert os.listdir(tmp_path) == []


def test_a_signal_in_the_middle_leaves_nothing(tmp_path):
    script = f"""
import os, signal
from localtrain import cli, convert
convert.keep_beside = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(cli.run(["import", {str(golden("qwen3"))!r}, {str(tmp_path / "ours")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 75 and "same command" in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []


def test_weights_that_lay_there_before_do_not_mix_with_new_ones(hub):
    folder = hub()
    rewrite(folder, lambda held: None, shard_bytes=60_000)
    model = api.load(str(folder))
    model.save_hub(str(folder))
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert_same_tensors(golden("qwen3"), folder)


def test_a_damaged_checkpoint_is_not_exported(imported, tmp_path):
    import shutil

    folder = tmp_path / "ours"
    shutil.copytree(imported()[0], folder)
    victim = max((folder / "checkpoints/0").rglob("*"), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(DataError, match=victim.name):
        convert.export_hub(str(folder), str(tmp_path / "back"))
    assert os.listdir(tmp_path) == ["ours"]


def test_importing_what_is_ours_already_is_refused(imported, tmp_path):
    with pytest.raises(ConfigError, match="already"):
        convert.import_hub(str(imported()[0]), str(tmp_path / "again"))


def test_check_without_transformers_says_how_to_get_it(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch transformers"):
        convert.export_hub(str(imported()[0]), str(tmp_path / "back"), check=True)
    assert os.listdir(tmp_path) == []


# URLs, caches, Hub ids -------------------------------------------------------------------------


@pytest.fixture
def memory():
    import fsspec

    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()


def test_export_to_a_url_writes_config_last_and_imports_again(imported, tmp_path, memory):
    order = []
    write = storage.write_atomic

    def note(path, data):
        order.append(storage.name_of(path))
        write(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_atomic", note)
        convert.export_hub(str(imported()[0]), "memory://bucket/model", shard_bytes=60_000)
    assert order[-1] == "config.json" and order[0].startswith("model-00001-of-")
    convert.import_hub("memory://bucket/model", str(tmp_path / "ours"))
    convert.export_hub(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert_same_tensors(golden("qwen3"), tmp_path / "back")
    with pytest.raises(ConfigError, match="not empty"):
        convert.export_hub(str(imported()[0]), "memory://bucket/model")


def test_an_upload_that_breaks_off_leaves_no_model(imported, memory, monkeypatch):
    def break_off(entries, read):
        yield from list(weights_export(entries, read))[:10]
        raise StorageError("the connection is gone")

    weights_export = weights.export_tensors
    monkeypatch.setattr(weights, "export_tensors", break_off)
    with pytest.raises(StorageError, match="connection is gone"):
        convert.export_hub(str(imported()[0]), "memory://bucket/model")
    assert not memory.exists("/bucket/model/config.json")
    assert not memory.exists("/bucket/model/model.safetensors")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The Hub's cache with one model in it, as huggingface_hub lays it out; no network."""
    from huggingface_hub import constants

    top = tmp_path / "cache" / "models--org--tiny"
    snapshot = top / "snapshots" / ("a" * 40)
    for folder in (top / "blobs", snapshot, top / "refs"):
        folder.mkdir(parents=True)
    (top / "refs" / "main").write_text("a" * 40)
    for number, name in enumerate(("config.json", "model.safetensors")):
        blob = top / "blobs" / f"{number:040x}"
        blob.write_bytes((golden("qwen3") / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return top


def test_a_hub_id_is_read_from_the_local_cache_without_a_network(cache, tmp_path):
    for name in ("org/tiny", str(cache), str(cache / "snapshots" / ("a" * 40))):
        source = open_source(name)
        assert isinstance(source, HubSource) and source.network.spec.vocab == 256
    report = convert.import_hub("org/tiny", str(tmp_path / "ours"))
    assert report.max_difference == 0


def test_a_hub_id_that_is_not_in_the_cache_is_one_paragraph(cache):
    with pytest.raises(DataError, match=r"org/other.*cache.*HF_HUB_OFFLINE.*hf download org/other"):
        open_source("org/other")
    (cache / "blobs" / f"{1:040x}").unlink()
    with pytest.raises(DataError, match=r"org/tiny.*lacks files"):
        open_source("org/tiny")


def test_without_a_network_a_hub_id_fails_soon_and_says_so(cache, monkeypatch):
    import huggingface_hub as hf
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_, local_files_only, **__):
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(hf, "snapshot_download", unreachable)
    with pytest.raises(DataError, match=r"org/other.*could not be fetched.*no route\. Check"):
        open_source("org/other")


def test_a_local_folder_is_never_taken_for_a_hub_id(cache, tmp_path, monkeypatch):
    import huggingface_hub as hf

    monkeypatch.setattr(hf, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((golden("qwen3") / name).read_bytes())
    assert open_source("org/tiny").folder.endswith(os.path.join("org", "tiny"))
    for missing in ("./org/none", "/org/none", "none"):
        with pytest.raises(DataError, match="no such folder"):
            open_source(missing)


# the printed proof -----------------------------------------------------------------------------


def test_the_fingerprint_is_what_the_model_computes(imported):
    _, report = imported()
    logits = np.asarray(api.load(str(golden("qwen3"))).logits([report.tokens]))[0]
    seen = report.written.logits
    assert seen["mean"] == pytest.approx(logits.mean(), abs=1e-5)
    assert seen["std"] == pytest.approx(logits.std(), abs=1e-5)
    assert seen["best"] == int(logits[-1].argmax())


def test_commands_end_with_a_table_or_with_json(tmp_path, capfd):
    assert cli.run(["import", str(golden("qwen3")), str(tmp_path / "ours")]) == 0
    table = capfd.readouterr().out
    for word in ("tensors", "54,064", "F32", "216,256", "largest difference of logits: 0"):
        assert word in table
    assert cli.run(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["written"]["tensors"] == facts["source"]["tensors"] + 11 == 24
    assert facts["max_difference"] == 0 and len(facts["tokens"]) == 16


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(tmp_path):
    text = (ROOT / "docs" / "hub.md").read_text()
    commands = text.split("<!-- runs: hub -->")[1].split("```sh\n")[1].split("```")[0]
    assert "localtrain import" in commands and "model.init_from" in commands
    program = f'localtrain() {{ {sys.executable} -m localtrain "$@"; }}\nset -e\n'
    done = subprocess.run(
        ["bash", "-c", program + commands], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("largest difference of logits: 0 ") == 3
    assert_same_tensors(tmp_path / "small-hf", tmp_path / "small-again")


# memory ----------------------------------------------------------------------------------------


PEAK = """
import resource, sys
from localtrain import cli
code = cli.run(sys.argv[1:]) if sys.argv[1:] else __import__("jax").devices() and 0
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def peak_bytes(*arguments) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split("peak ")[1].split()[0])


def write_random(folder: Path, megabytes: int, **changes) -> int:
    """A random bfloat16 Qwen3 of about that size; returns its bytes."""
    hf = json.loads((golden("qwen3") / "config.json").read_text())
    hf |= {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 16, "vocab_size": 32768}
    hf |= {"num_key_value_heads": 8, "intermediate_size": 3072} | changes
    hf["num_hidden_layers"] = max(1, round((megabytes - 67) / 31.5))
    entries = weights.expand(rules_from(hf), build(spec_from(hf))).values()
    plan = {e.name: (e.shape, np.dtype(ml_dtypes.bfloat16)) for e in entries}
    random = np.random.default_rng(0).integers(0, 0x3C00, 1 << 20, np.uint16)
    folder.mkdir()
    stream = ((name, np.resize(random, shape).view(dtype)) for name, (shape, dtype) in plan.items())
    write_tensors(str(folder), plan, stream, shard_bytes=500_000_000)
    (folder / "config.json").write_text(json.dumps(hf))
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_the_peak_of_memory_is_the_stored_size_and_little_more(tmp_path):
    """Above what the conversion of a tiny model needs, at most 1.3 times the size."""
    size = write_random(tmp_path / "hf", 300)
    tiny = peak_bytes("import", golden("qwen3"), tmp_path / "tiny")
    assert peak_bytes("import", tmp_path / "hf", tmp_path / "ours") - tiny <= 1.3 * size


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_the_peak_of_memory_of_a_large_import_is_that_of_the_interpreter_and_1_3_times_its_size(
    tmp_path,
):
    size = write_random(tmp_path / "hf", 1500)
    interpreter = peak_bytes()
    assert peak_bytes("import", tmp_path / "hf", tmp_path / "ours") <= interpreter + 1.3 * size
    assert peak_bytes("export", tmp_path / "ours", tmp_path / "back") <= interpreter + 1.3 * size


def test_two_conversions_at_the_same_time_do_not_disturb_each_other(imported, tmp_path):
    folder, failures = imported()[0], []

    def go(number):
        try:
            convert.export_hub(str(folder), str(tmp_path / f"out{number}"))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=go, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert_same_tensors(tmp_path / "out0", tmp_path / "out1")
