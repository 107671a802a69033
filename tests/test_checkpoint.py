"""Checkpoints survive kills, full disks and flipped bits, and come back bit for bit."""

import errno
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from localtrain import arrays, checkpoint, commit, shelf
from localtrain.checkpoint import Checkpoints, find_checkpoint, restore_params
from localtrain.errors import DataError, StorageError

META = {"data": {"position": 17}, "rng": [1, 2], "run": {"name": "x"}, "stack": [["a", 2]]}


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    odd = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 3.0], np.float32)
    odd.view(np.uint32)[2] = 0x7FC12345  # a NaN with a payload
    return {
        "params": {
            "embed": jnp.asarray(rng.standard_normal((7, 8)), jnp.float32),
            "layers": {"w": jnp.asarray(rng.standard_normal((2, 8, 3)), jnp.bfloat16), "none": {}},
            "odd": jnp.asarray(odd),
        },
        "opt": {"mu": {"embed": jnp.zeros((7, 8), jnp.bfloat16)}, "count": jnp.int32(seed + 5)},
        "key": jax.random.key_data(jax.random.key(seed)),
        "empty": jnp.zeros((0, 3), jnp.float32),
        "step": jnp.int32(seed),
    }


def template(state):
    return jax.eval_shape(lambda tree: tree, state)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    """Steps 1, 2 and 3 on disk."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), META)
    checkpoints.close()
    return checkpoints


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def flip_middle(path):
    flip(path, path.stat().st_size // 2, 3)


# ---- round trip


def test_a_restored_state_is_bitwise_what_was_saved(saved):
    state, meta = Checkpoints(saved.folder).restore(None, template(make_state()))
    assert_same_bits(state, make_state(3))
    assert meta["step"] == 3
    assert {key: meta[key] for key in META} == META
    assert meta["versions"]["jax"] == jax.__version__


def test_a_given_step_is_restored(saved):
    state, meta = saved.restore(1, template(make_state()))
    assert_same_bits(state, make_state(1))
    assert meta["step"] == 1


def test_a_missing_step_is_a_data_error_that_lists_the_others(saved):
    with pytest.raises(DataError, match=r"no checkpoint of step 9.*1, 2, 3"):
        saved.restore(9, template(make_state()))


def test_a_save_has_copied_the_arrays_before_it_returns(tmp_path, monkeypatch):
    write, go = arrays.write, threading.Event()
    monkeypatch.setattr(arrays, "write", lambda *args: (go.wait(20), write(*args)))
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = make_state(4)
    expected = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state, {})
    spoiled = jax.block_until_ready(spoil(state))  # reuses the very buffers
    assert state["params"]["embed"].is_deleted()
    assert checkpoints.busy
    assert checkpoints.steps() == []
    go.set()
    checkpoints.close()
    assert_same_bits(checkpoints.restore(4, template(expected))[0], expected)
    del spoiled


def test_a_save_blocks_only_for_the_copy(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(arrays, "write", lambda *args: go.wait(20))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(1, make_state(), {}) < 1.0
    assert checkpoints.wait(timeout=0.01) is False
    go.set()
    assert checkpoints.wait() is True


def test_saving_a_step_twice_does_nothing(saved):
    before = (saved.folder / "3" / "commit.json").read_bytes()
    saved.save(3, make_state(9), META, block=True)
    assert (saved.folder / "3" / "commit.json").read_bytes() == before


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 16):
        checkpoints.save(step, {"x": jnp.ones(3)}, {})
    checkpoints.close()
    assert checkpoints.steps() == [15, 16]
    assert sorted(os.listdir(tmp_path)) == ["15", "16"]


def test_only_parameters_are_restored_and_cast_on_request(saved):
    want = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), template(make_state())["params"]
    )
    for path in (saved.folder.parent, saved.folder, saved.folder / "3"):
        params, meta = restore_params(path, want)
        assert meta["step"] == 3
        assert params["embed"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            params["embed"], make_state(3)["params"]["embed"].astype(jnp.bfloat16)
        )
    assert restore_params(saved.folder / "1", want)[1]["step"] == 1
    assert restore_params(saved.folder, want, step=2)[1]["step"] == 2


def test_a_damaged_optimizer_does_not_matter_to_who_reads_the_parameters_alone(saved):
    flip_middle(saved.folder / "3" / "opt.mu.embed" / "0.0")
    params, meta = restore_params(saved.folder, template(make_state())["params"])
    assert meta["step"] == 3
    assert_same_bits(params, make_state(3)["params"])
    flip_middle(saved.folder / "3" / "params.embed" / "0.0")
    assert restore_params(saved.folder, template(make_state())["params"])[1]["step"] == 2


def test_checkpoints_that_keep_all_arrays_in_one_database_open(tmp_path, monkeypatch):
    """As versions before this one wrote them."""

    class Database(ocp.PyTreeCheckpointHandler):
        def __init__(self, use_ocdbt, **more):
            super().__init__(use_ocdbt=True, **more)

        def save(self, directory, args):
            super().save(directory, args=args)
            self.finalize(directory)

    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", Database)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, make_state(3), META, block=True)
    assert (tmp_path / "3" / "manifest.ocdbt").exists()
    assert_same_bits(checkpoints.restore(3, template(make_state()))[0], make_state(3))
    params, _ = restore_params(tmp_path, template(make_state())["params"])
    assert_same_bits(params, make_state(3)["params"])


def test_a_folder_without_checkpoints_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(DataError, match="no checkpoint"):
        Checkpoints(tmp_path / "absent").restore(None, {})
    assert Checkpoints(tmp_path / "absent").latest() is None


def test_a_relative_folder_still_works_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("here")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    checkpoints.save(1, {"x": jnp.ones(3)}, {}, block=True)
    assert Checkpoints(tmp_path / "here").steps() == [1]


# ---- another tree, other devices


def test_leaves_that_differ_are_named(saved):
    other = template(make_state())
    other["params"]["new"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    other["params"]["embed"] = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    other["opt"]["mu"]["embed"] = jax.ShapeDtypeStruct((7, 8), jnp.float32)
    del other["key"]
    with pytest.raises(DataError) as raised:
        saved.restore(None, other)
    message = str(raised.value)
    assert "missing from the checkpoint: params/new" in message
    assert "unknown to this run: key" in message
    assert "params/embed (7, 8) instead of (8, 8)" in message
    assert "opt/mu/embed bfloat16 instead of float32" in message


def test_a_mismatch_is_not_damage_and_does_not_fall_back(saved, caplog):
    with pytest.raises(DataError, match="does not fit"):
        saved.restore(None, {"x": jax.ShapeDtypeStruct((), jnp.int32)})
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_only_what_all_processes_find_together_is_marked_as_known_to_all(tmp_path):
    with pytest.raises(DataError, match="no checkpoint") as together:
        Checkpoints(tmp_path).restore(None, template(make_state()))
    with pytest.raises(DataError, match="no checkpoint") as alone:
        Checkpoints(tmp_path).read_meta()
    assert together.value.in_all and not hasattr(alone.value, "in_all")


OTHER_DEVICES = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from localtrain.checkpoint import Checkpoints
folder = sys.argv[1]
split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
x = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
def shape(sharding=None):
    return {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)}
c = Checkpoints(folder)
one, _ = c.restore(1, shape(split))                     # saved on one device, opened on two
assert one["x"].sharding == split and (one["x"] == x).all()
c.save(2, {"x": jax.device_put(x, split)}, {}, block=True)
two, _ = c.restore(2, shape(SingleDeviceSharding(jax.devices()[1])))
assert (two["x"] == x).all() and two["x"].devices() == {jax.devices()[1]}
"""


def test_a_checkpoint_opens_on_another_device_count(tmp_path):
    x = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
    Checkpoints(tmp_path).save(1, {"x": x}, {}, block=True)
    subprocess.run([sys.executable, "-c", OTHER_DEVICES, str(tmp_path)], check=True)
    state, _ = Checkpoints(tmp_path).restore(2, template({"x": x}))
    assert_same_bits(state, {"x": x})
    names = [str(device).encode() for device in jax.devices()]
    for path in files_of(tmp_path):
        assert not any(name in path.read_bytes() for name in names)


# ---- damage


def test_every_flipped_bit_in_every_file_is_named(saved):
    rng = random.Random(0)
    folder = saved.folder / "3"
    paths = files_of(folder)
    assert {"commit.json", "meta.json", ".zarray", "0.0"} <= {path.name for path in paths}
    for path in paths:
        intact = path.read_bytes()
        size = len(intact)
        for position in {0, size - 1, *rng.sample(range(size), min(size, 20))}:
            flip(path, position, rng.randrange(8))
            with pytest.raises(DataError, match=re.escape(str(path))):
                saved.read_meta(3)
            path.write_bytes(intact)
    saved.read_meta(3)


@pytest.mark.parametrize("harm", ["truncate", "grow", "remove", "empty"])
def test_files_that_are_short_long_or_gone_are_named(saved, harm):
    folder = saved.folder / "3"
    for path in files_of(folder):
        intact = path.read_bytes()
        if harm == "remove":
            path.unlink()
        else:
            path.write_bytes({"truncate": intact[:-1], "grow": intact + b"\0", "empty": b""}[harm])
        assert saved.steps() == [1, 2], path
        with pytest.raises(DataError, match=re.escape(path.name)):
            saved.read_meta(3)
        path.write_bytes(intact)
    assert saved.steps() == [1, 2, 3]


def test_a_damaged_newest_falls_back_and_names_the_file(saved, caplog):
    path = saved.folder / "3" / "params.embed" / "0.0"
    flip_middle(path)
    with caplog.at_level(logging.WARNING, "localtrain"):
        state, meta = Checkpoints(saved.folder).restore(None, template(make_state()))
    assert meta["step"] == 2
    assert_same_bits(state, make_state(2))
    assert str(path) in caplog.text
    assert "Falling back to step 2" in caplog.text


def test_strict_refuses_a_damaged_newest(saved):
    flip_middle(saved.folder / "3" / "meta.json")
    with pytest.raises(DataError, match=r"meta\.json is damaged"):
        saved.restore(None, template(make_state()), strict=True)


def test_all_damaged_is_a_data_error_and_never_a_fresh_start(saved):
    for step in (1, 2, 3):
        flip_middle(saved.folder / str(step) / "commit.json")
    reader = Checkpoints(saved.folder)
    for attempt in (reader.latest, lambda: reader.restore(None, template(make_state()))):
        with pytest.raises(DataError, match=r"No checkpoint in .* can be used.*3/commit\.json"):
            attempt()


def test_after_a_fall_back_the_damaged_step_can_be_saved_again(saved):
    flip_middle(saved.folder / "3" / "meta.json")
    again = Checkpoints(saved.folder, keep=2)
    again.restore(None, template(make_state()))
    again.save(3, make_state(3), META, block=True)
    assert again.steps() == [2, 3]
    assert_same_bits(again.restore(3, template(make_state()))[0], make_state(3))
    aside = [name for name in os.listdir(saved.folder) if name.startswith("damaged-3-")]
    assert len(aside) == 1


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(saved):
    flip_middle(saved.folder / "3" / "meta.json")
    flip_middle(saved.folder / "2" / "meta.json")
    again = Checkpoints(saved.folder, keep=2)
    assert again.restore(None, template(make_state()))[1]["step"] == 1
    again.save(2, make_state(2), META, block=True)
    assert 1 in again.steps()


def test_no_pickle_is_ever_read(saved, tmp_path):
    touched = tmp_path / "touched"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(touched),)

    bomb = pickle.dumps(Bomb())
    for path in files_of(saved.folder / "3"):
        intact = path.read_bytes()
        path.write_bytes(bomb)
        with pytest.raises(DataError):
            saved.restore(3, template(make_state()))
        path.write_bytes(intact)
    for name in ("meta.json", "params.embed/.zarray"):  # even with a valid record
        copy = saved.folder / "4"
        shutil.copytree(saved.folder / "3", copy)
        (copy / name).write_bytes(bomb)
        (copy / "commit.json").unlink()
        commit.write_commit(copy, {"step": 4, "token": "0" * 16})
        with pytest.raises(DataError):
            saved.restore(4, template(make_state()))
        shutil.rmtree(copy)
    assert not touched.exists()


STRANGE = ["", "{", "[]", "null", "3", '"x"', "{}", "[" * 9999, "\x00"]
STRANGE += [json.dumps({"arrays": x}) for x in (1, {"x": 1}, {"x": ["float32", 3]}, {"x": []})]


@pytest.mark.parametrize("text", STRANGE)
def test_strange_metadata_is_a_data_error(saved, text):
    folder = saved.folder / "3"
    (folder / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta\.json"):
        saved.restore(3, template(make_state()))
    (folder / "commit.json").unlink()
    commit.write_commit(folder, {"step": 3, "token": "0" * 16})
    with pytest.raises(DataError, match=r"meta\.json|does not fit"):
        saved.restore(3, template(make_state()))


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"/etc/passwd": {"size": 1, "crc32c": 1}}},
        {"files": {"../2/meta.json": {"size": 1, "crc32c": 1}}},
        {"files": {"meta.json": {"size": "1", "crc32c": 1}}},
        {"files": {"meta.json": 3}},
        {"files": []},
        {"format": 99},
        {"step": 4},
    ],
)
def test_a_strange_record_is_a_data_error_even_with_a_valid_checksum(saved, change):
    path = saved.folder / "3" / "commit.json"
    record = json.loads(path.read_bytes()) | change
    record["checksum"] = commit._own_checksum(record)
    path.write_bytes(commit.encode_json(record))
    with pytest.raises(DataError, match=r"commit\.json|holds step 4"):
        saved.restore(3, template(make_state()))


def test_random_bytes_in_the_record_never_crash_a_reader(saved):
    rng = random.Random(1)
    path = saved.folder / "3" / "commit.json"
    intact = path.read_bytes()
    for _ in range(300):
        data = bytearray(intact)
        start = rng.randrange(len(data))
        data[start : start + rng.randrange(20)] = rng.randbytes(rng.randrange(1, 20))
        path.write_bytes(bytes(data))
        assert saved.steps() in ([1, 2], [1, 2, 3])
        if bytes(data) != intact:
            with pytest.raises(DataError):
                saved.read_meta(3)


@pytest.mark.parametrize("limit, at_once", [(1, 1), (4000, 1), (8000, 2), (1 << 30, 4)])
@pytest.mark.parametrize("wanted", [np.float32, jnp.bfloat16])
def test_what_is_read_ahead_is_counted_in_whole_chunks(
    tmp_path, monkeypatch, limit, at_once, wanted
):
    """A process that needs one row of each array still reads the chunks of 4000 bytes it is in."""
    import tensorstore

    written = {name: np.random.default_rng(0).random((100, 10), np.float32) for name in "abcd"}
    arrays.write(tmp_path, written)
    under_way, most = [], 0

    class Watched:
        def __init__(self, store):
            self.store, self.shape, self.size = store, store.shape, store.size

        def __getitem__(self, index):
            return Watched(self.store[index])

        def read(self):
            nonlocal most
            under_way.append(self)
            most = max(most, len(under_way))
            return self.store.read()

    cast, assemble = tensorstore.cast, arrays._assemble
    monkeypatch.setattr(tensorstore, "cast", lambda *args: Watched(cast(*args)))
    monkeypatch.setattr(arrays, "_assemble", lambda *args: (under_way.pop(), assemble(*args))[1])
    monkeypatch.setattr(arrays, "_parts", lambda leaf: [((3, 4), (0, 10))])
    monkeypatch.setattr(arrays, "_IN_FLIGHT", limit)
    leaves = {name: np.zeros((100, 10), wanted) for name in written}
    found = arrays.read(tmp_path, arrays.describe(written), leaves)
    assert most == at_once
    for name, row in found.items():
        assert row.tobytes() == written[name][3:4].astype(wanted).tobytes()


# ---- a storage that fails says nothing about the checkpoint


@pytest.fixture
def refuse(monkeypatch):
    """Let every opening, or every look, at some files fail with an error number."""
    opens, looks, scans = io.open, os.stat, os.scandir

    def failing(call, chosen, code):
        def fails(path, *args, **kwargs):
            if not isinstance(path, int) and chosen(str(path)):
                raise OSError(code, os.strerror(code), str(path))
            return call(path, *args, **kwargs)

        return fails

    def refuse(call, chosen, code):
        if call == "open":
            monkeypatch.setattr(io, "open", failing(opens, chosen, code))
            monkeypatch.setattr("builtins.open", failing(opens, chosen, code))
        elif call == "stat":
            monkeypatch.setattr(os, "stat", failing(looks, chosen, code))
        else:
            monkeypatch.setattr(os, "scandir", failing(scans, chosen, code))

    return refuse


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize(
    "call, name",
    [
        ("open", "commit.json"),
        ("open", "meta.json"),
        ("open", "params.embed/0.0"),
        ("stat", "params.embed/0.0"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_storage_error_and_not_damage(
    saved, refuse, monkeypatch, call, name, code
):
    path, before = str(saved.folder / "3" / name), sorted(os.listdir(saved.folder))
    refuse(call, lambda at: at == path, code)
    writer = Checkpoints(saved.folder)
    told = re.escape(f"could not read {path}: {os.strerror(code)}")
    for read in (writer.read_meta, lambda: writer.restore(None, template(make_state()))):
        with pytest.raises(StorageError, match=told) as error:
            read()
        assert error.value.exit_code == 6
    monkeypatch.undo()
    writer.save(3, make_state(3), META, block=True)  # it is there
    assert sorted(os.listdir(saved.folder)) == before
    assert writer.restore(None, template(make_state()))[1]["step"] == 3


def test_meta_that_cannot_be_read_after_its_check_is_a_storage_error(saved, refuse):
    path, opened = str(saved.folder / "3" / "meta.json"), []

    def second(at):
        opened.extend([at] if at == path else [])
        return at == path and len(opened) == 2

    refuse("open", second, errno.EIO)
    with pytest.raises(StorageError, match=r"could not read .*3/meta\.json: Input/output error"):
        saved.read_meta()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_a_storage_error(saved, refuse, code):
    refuse("scandir", lambda at: at == str(saved.folder), code)
    told = re.escape(f"could not list {saved.folder}: {os.strerror(code)}")
    for read in (saved.steps, saved.latest, saved.read_meta):
        with pytest.raises(StorageError, match=told):
            read()


def test_a_step_that_cannot_be_listed_is_a_storage_error(tmp_path, monkeypatch):
    (tmp_path / "3").mkdir()

    def fail(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(checkpoint.Path, "iterdir", fail)
    with pytest.raises(StorageError, match=r"could not list .*3: Stale"):
        Checkpoints(tmp_path).latest()


@pytest.mark.parametrize("name", ["commit.json", "meta.json", "params.embed/0.0"])
def test_a_folder_in_the_place_of_a_file_is_damage(saved, name):
    path = saved.folder / "3" / name
    path.unlink()
    path.mkdir()
    reader = Checkpoints(saved.folder)
    assert reader.restore(None, template(make_state()))[1]["step"] == 2
    with pytest.raises(DataError, match=re.escape(str(path))):
        reader.read_meta(3)


# ---- leftovers and strangers


def test_leftovers_of_dead_writers_are_swept_and_nothing_else(saved):
    stale = saved.folder / "tmp-4-0123456789abcdef"
    stale.mkdir()
    (stale / "half").write_bytes(b"x")
    mine = ["tmp-4-old", "tmp-notes", "4.orbax-checkpoint-tmp", "notes", "7x", "-3", "04"]
    for name in mine:
        (saved.folder / name).mkdir()
    (saved.folder / "tmp-5-0123456789abcdef").write_text("a file, not a folder of ours")
    (saved.folder / "6").write_text("a file with a number for a name")
    writer = Checkpoints(saved.folder, keep=1)
    assert stale.exists()  # reading and opening change nothing
    assert writer.steps() == [1, 2, 3]
    writer.save(4, make_state(4), META, block=True)
    assert not stale.exists()
    assert set(os.listdir(saved.folder)) == {*mine, "tmp-5-0123456789abcdef", "6", "4"}


def test_a_folder_in_the_way_is_put_aside_with_its_content(tmp_path):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "thesis.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(DataError, match=r"5 has no commit\.json"):
        checkpoints.latest()
    checkpoints.save(5, {"x": jnp.ones(3)}, {}, block=True)
    assert checkpoints.steps() == [5]
    assert [path.read_text() for path in tmp_path.glob("damaged-5-*/thesis.txt")] == ["mine"]


def test_an_uncommitted_folder_is_not_believed(saved):
    (saved.folder / "3" / "commit.json").unlink()
    reader = Checkpoints(saved.folder)
    assert reader.steps() == [1, 2]
    assert reader.restore(None, template(make_state()))[1]["step"] == 2


# ---- failures of a save


def test_a_passing_failure_is_retried(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)
    write, calls = arrays.write, []

    def flaky(*args):
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        write(*args)

    monkeypatch.setattr(arrays, "write", flaky)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3)}, {}, block=True)
    assert checkpoints.steps() == [1]
    assert os.listdir(tmp_path) == ["1"]
    assert "trying once more" in caplog.text


@pytest.mark.parametrize("where", ["arrays.write", "commit.write_commit", "Path.rename"])
def test_a_lasting_failure_is_loud_and_leaves_the_previous_ones(saved, monkeypatch, where):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    owner, name = where.split(".")
    monkeypatch.setattr(
        {"arrays": arrays, "commit": commit, "Path": checkpoint.Path}[owner], name, fail
    )
    writer = Checkpoints(saved.folder, keep=1)
    writer.save(4, make_state(4), META)
    writer._thread.join()
    for call in (writer.check, writer.wait, writer.close, lambda: writer.save(5, {}, {})):
        with pytest.raises(StorageError, match=r"step 4 .*Input/output.*\[1, 2, 3\] are intact"):
            call()
    monkeypatch.undo()
    assert sorted(os.listdir(saved.folder)) == ["1", "2", "3"]
    assert_same_bits(writer.restore(None, template(make_state()))[0], make_state(3))


def test_a_failure_after_the_commit_leaves_what_was_committed(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)
    rename = checkpoint.Path.rename

    def late(path, target):
        rename(path, target)  # done, but its answer was lost
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint.Path, "rename", late)
    writer = Checkpoints(saved.folder, keep=0)
    writer.save(5, make_state(5), META, block=True)
    assert sorted(os.listdir(saved.folder)) == ["1", "2", "3", "5"]
    assert_same_bits(writer.restore(None, template(make_state()))[0], make_state(5))


def test_a_failure_says_of_earlier_checkpoints_only_what_is_known(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    def told(folder):
        writer = Checkpoints(folder)
        with pytest.raises(StorageError, match="step 4") as error:
            writer.save(4, make_state(4), META, block=True)
        return str(error.value)

    monkeypatch.setattr(shelf.Shelf, "sweep", fail)
    assert "the checkpoints of steps [1, 2, 3] are intact" in told(saved.folder)
    assert "none was saved yet" in told(tmp_path / "new")
    monkeypatch.setattr(os, "scandir", fail)
    unknown = told(saved.folder)
    assert "intact" not in unknown and "none was saved" not in unknown


def test_a_failed_deletion_of_an_old_one_does_not_fail_the_save(saved, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise PermissionError("no")

    monkeypatch.setattr(shelf.shutil, "rmtree", fail)
    writer = Checkpoints(saved.folder, keep=1)
    writer.save(4, make_state(4), META, block=True)
    assert 4 in writer.steps()
    assert "not deleted" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(StorageError, match="Not a directory"):
        checkpoints.save(1, {"x": jnp.ones(3)}, {}, block=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("foresee", [True, False])
def test_a_full_disk_says_so_and_the_previous_ones_are_intact(small_disk, monkeypatch, foresee):
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)
    if not foresee:  # space that goes away while we write
        usage = shutil.disk_usage(small_disk)._replace(free=2**40)
        monkeypatch.setattr(shelf.shutil, "disk_usage", lambda path: usage)
    state = {"x": jnp.arange(200_000, dtype=jnp.float32)}
    checkpoints = Checkpoints(small_disk, keep=5)
    checkpoints.save(1, state, {})
    checkpoints.save(2, state, {})
    checkpoints.save(3, state, {})
    with pytest.raises(
        StorageError, match=r"the disk is full.*\[1, 2\] are intact.*keep"
    ) as raised:
        checkpoints.wait()
    assert "\n" not in str(raised.value)
    assert sorted(os.listdir(small_disk)) == ["1", "2"]
    assert_same_bits(checkpoints.restore(None, template(state))[0], state)


# ---- kills

KILLED = """
import os, signal, sys
folder, where = sys.argv[1], sys.argv[2]
import jax.numpy as jnp
from localtrain import arrays, checkpoint, commit, shelf
from localtrain.checkpoint import Checkpoints
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def after(function):
    def wrapped(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return wrapped
def state(step):
    return {"x": jnp.full((50_000,), step, jnp.float32), "step": jnp.int32(step)}
c = Checkpoints(folder, keep=2)
for step in (1, 2):
    c.save(step, state(step), {"n": step}, block=True)
if where == "arrays": arrays.write = die
if where == "after arrays": arrays.write = after(arrays.write)
if where == "commit": commit.write_commit = die
if where == "record": commit.encode_json = lambda value: die() if "files" in value else b"{}"
if where == "rename": shelf.Path.rename = die
if where == "published": shelf.Shelf.publish = after(shelf.Shelf.publish)
if where == "deleting": shelf.shutil.rmtree = die
print("ready", flush=True)
step = 3
while True:
    c.save(step, state(step), {"n": step})
    if where != "any": c.wait()
    step += 1
"""


def start_killed(folder, where, stdout=subprocess.DEVNULL):
    return subprocess.Popen([sys.executable, "-c", KILLED, str(folder), where], stdout=stdout)


def check_after_kill(folder):
    """Every committed step is right, and a new writer goes on."""
    want = template({"x": jnp.zeros(50_000), "step": jnp.int32(0)})
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() >= 2
    for step in checkpoints.steps():
        state, meta = checkpoints.restore(step, want, strict=True)
        assert meta["n"] == meta["step"] == int(state["step"]) == step
        assert (state["x"] == step).all()
    newest = checkpoints.latest() + 1
    checkpoints.save(newest, {"x": jnp.zeros(50_000), "step": jnp.int32(newest)}, {}, block=True)
    assert sorted(os.listdir(folder), key=int) == [str(newest - 1), str(newest)]


def test_a_kill_at_any_point_of_a_save_leaves_whole_checkpoints(tmp_path):
    points = ["arrays", "after arrays", "record", "rename", "published", "deleting"]
    for pair in (points[:2], points[2:4], points[4:]):  # two at a time
        processes = [start_killed(tmp_path / point, point) for point in pair]
        for process in processes:
            assert process.wait(timeout=60) == -signal.SIGKILL
    for point in points:
        check_after_kill(tmp_path / point)


@pytest.mark.parametrize("trials", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_whole_checkpoints(tmp_path, trials):
    rng = random.Random(trials)
    for trial in range(trials):
        folder = tmp_path / str(trial)
        process = start_killed(folder, "any", stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        check_after_kill(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio's
def test_a_reader_keeps_up_with_a_writer_that_deletes_old_checkpoints(tmp_path):
    want = template({"x": jnp.zeros(1000)})
    writer, reader = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path)
    writer.save(1, {"x": jnp.full(1000, 1.0)}, {}, block=True)
    done = threading.Event()

    def write():
        for step in range(2, 25):
            writer.save(step, {"x": jnp.full(1000, float(step))}, {}, block=True)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while not done.is_set():
        state, meta = reader.restore(None, want)
        assert (state["x"] == meta["step"]).all()
        seen.append(meta["step"])
    thread.join()
    assert seen == sorted(seen) and len(set(seen)) > 2
