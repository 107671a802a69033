"""Checkpoints behind a URL: the same bits, the same care, on every store."""

import itertools
import logging
import os
import secrets
import subprocess
import sys
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain import checkpoint, commit, storage
from localtrain.checkpoint import Checkpoints, find_checkpoint, restore_params
from localtrain.errors import BusyError, DataError, StorageError
from localtrain.stage import Stage
from localtrain.storage import clients, retry


def state(step):
    rng = np.random.default_rng(step)
    w = jnp.asarray(rng.standard_normal((64, 33)), jnp.float32)
    return {"params": {"w": w, "b": jnp.zeros((3,), jnp.bfloat16)}, "step": jnp.int32(step)}


TEMPLATE = jax.eval_shape(lambda: state(0))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def flip(url):
    data = bytearray(storage.read_bytes(url))
    data[len(data) // 2] ^= 8
    storage.write_atomic(url, bytes(data))


def copy(source, target):
    """What a user does with gsutil or aws s3 cp."""
    for name in storage.find_below(source):
        data = storage.read_bytes(storage.join(source, *name.split("/")))
        storage.write_atomic(storage.join(target, *name.split("/")), data)


@pytest.fixture(autouse=True)
def quick_and_private(monkeypatch, tmp_path):
    monkeypatch.setattr(retry, "BASE_S", 0.01)
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["memory", "s3", "gs"])
def url(request):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue(request.param).url}/{uuid.uuid4().hex}"


@pytest.fixture
def saved(url):
    """Steps 1, 2 and 3."""
    checkpoints = Checkpoints(url, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"n": step})
    checkpoints.close()
    return checkpoints


def test_what_is_restored_is_bitwise_what_was_saved(saved, tmp_path):
    reader = Checkpoints(saved.folder)
    assert reader.steps() == [1, 2, 3] and reader.latest() == 3
    restored, meta = reader.restore(None, TEMPLATE)
    assert bits(restored) == bits(state(3)) and meta["n"] == 3
    assert bits(reader.restore(1, TEMPLATE)[0]) == bits(state(1))
    params, _ = restore_params(saved.folder, TEMPLATE["params"], step=2)
    assert bits(params) == bits(state(2)["params"])
    found, step = find_checkpoint(storage.join(saved.folder, "2"))
    assert (found.folder, step) == (saved.folder, 2)
    assert os.listdir(tmp_path / "cache" / "localtrain" / "stage") == []  # nothing stays here


def test_parameters_alone_are_fetched_without_the_optimizer(s3):
    url = f"{s3.url}/{uuid.uuid4().hex}"
    full = {**state(1), "opt": {"mu": {"w": jnp.ones((64, 33))}}}
    Checkpoints(url).save(1, full, {}, block=True)
    s3.proxy.clear()
    params, _ = restore_params(url, TEMPLATE["params"])
    assert bits(params) == bits(state(1)["params"])
    read = [path for method, path in s3.proxy.requests if method == "GET"]
    assert any("params.w/0.0" in path for path in read)
    assert not any("opt.mu" in path for path in read)
    template = jax.eval_shape(lambda: full)
    assert bits(Checkpoints(url).restore(None, template)[0]) == bits(full)


def test_the_newest_are_kept_and_what_others_put_there_too(url):
    storage.write_atomic(storage.join(url, "notes.txt"), b"mine")
    storage.write_atomic(storage.join(url, "2", "notes.txt"), b"mine as well")
    checkpoints = Checkpoints(url, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state(step), {})
    checkpoints.close()
    assert checkpoints.steps() == [3, 4]
    left = {name for name in storage.find_below(url) if not name.startswith(("3/", "4/"))}
    assert left == {"notes.txt", "2/notes.txt"}


def test_a_tree_that_is_copied_from_store_to_store_opens(saved, tmp_path):
    here, back = tmp_path / "here", f"memory://{uuid.uuid4().hex}"
    copy(saved.folder, str(here))
    copy(str(here), back)
    for place in (str(here), back):
        reader = Checkpoints(place)
        assert reader.steps() == [1, 2, 3]
        assert bits(reader.restore(None, TEMPLATE)[0]) == bits(state(3))
    local = Checkpoints(tmp_path / "made-here")
    local.save(7, state(7), {}, block=True)
    copy(str(local.folder), storage.join(saved.folder, "up"))
    up = Checkpoints(storage.join(saved.folder, "up"), keep=1)
    assert bits(up.restore(None, TEMPLATE)[0]) == bits(state(7))
    up.save(8, state(8), {}, block=True)  # and can be pruned like our own
    assert {name.split("/")[0] for name in storage.find_below(up.folder)} == {"8"}


def test_a_checkpoint_copied_from_here_to_s3_to_gs_and_back_opens(s3, gs, tmp_path):
    local = Checkpoints(tmp_path / "made")
    local.save(7, state(7), {"n": 7}, block=True)
    places = [str(local.folder), *(f"{one.url}/{uuid.uuid4().hex}" for one in (s3, gs))]
    places.append(str(tmp_path / "back"))
    for source, target in itertools.pairwise(places):
        copy(source, target)
        restored, meta = Checkpoints(target).restore(None, TEMPLATE)
        assert bits(restored) == bits(state(7)) and meta["n"] == 7, target
    assert {n: storage.read_bytes(f"{places[0]}/{n}") for n in storage.find_below(places[0])} == {
        n: storage.read_bytes(f"{places[-1]}/{n}") for n in storage.find_below(places[-1])
    }


def test_what_cannot_be_read_is_called_by_its_url(url, monkeypatch):
    Checkpoints(url).save(1, state(1), {}, block=True)
    verify = commit.verify

    def spoil(folder, record, where=None):
        verify(folder, record, where)
        for path in folder.rglob(".zarray"):
            path.write_text("{}")

    monkeypatch.setattr(commit, "verify", spoil)
    with pytest.raises(DataError) as raised:
        Checkpoints(url).restore(1, TEMPLATE)
    assert f"{url}/1 passed its checksums" in str(raised.value)
    assert "stage" not in str(raised.value)


def test_a_damaged_one_is_named_and_the_one_before_is_used(saved, caplog):
    names = storage.find_below(storage.join(saved.folder, "3"))
    name = next(name for name in names if name.endswith("params.w/0.0"))
    flip(storage.join(saved.folder, "3", name))
    caplog.set_level(logging.WARNING, "localtrain")
    reader = Checkpoints(saved.folder)
    restored, meta = reader.restore(None, TEMPLATE)
    assert meta["step"] == 2 and bits(restored) == bits(state(2))
    assert f"{saved.folder}/3/{name} is damaged: its crc32c" in caplog.text
    with pytest.raises(DataError, match=r"/3/.* is damaged"):
        Checkpoints(saved.folder).restore(None, TEMPLATE, strict=True)
    reader.save(3, state(3), {}, block=True)  # trained again, saved again
    assert bits(Checkpoints(saved.folder).restore(3, TEMPLATE)[0]) == bits(state(3))


def test_a_missing_object_and_a_damaged_record_are_named(saved):
    listed = commit.decode_commit(
        storage.read_bytes(storage.join(saved.folder, "3", "commit.json")), "x"
    )
    storage.remove_all([storage.join(saved.folder, "3", max(listed["files"]))])
    with pytest.raises(DataError, match="is missing; the checkpoint"):
        Checkpoints(saved.folder).restore(3, TEMPLATE)
    flip(storage.join(saved.folder, "2", "commit.json"))
    assert Checkpoints(saved.folder).steps() == [1]


def test_half_uploads_of_dead_writers_are_not_believed_and_are_swept(saved):
    half = [
        storage.join(saved.folder, "4", secrets.token_hex(8), "manifest.ocdbt"),
        storage.join(saved.folder, "3", secrets.token_hex(8), "d", "x"),
    ]
    for name in half:
        storage.write_atomic(name, b"half")
    writer = Checkpoints(saved.folder, keep=5)
    assert writer.steps() == [1, 2, 3] and writer.latest() == 3
    assert all(map(storage.exists, half))  # reading changes nothing
    writer.save(5, state(5), {}, block=True)
    assert not any(map(storage.exists, half))
    assert writer.steps() == [1, 2, 3, 5]
    assert bits(writer.restore(3, TEMPLATE)[0]) == bits(state(3))
    only = f"{saved.folder}-only-half"
    storage.write_atomic(storage.join(only, "1", secrets.token_hex(8), "x"), b"half")
    assert Checkpoints(only).latest() is None  # a new run that was killed may start again


def test_parts_that_a_kill_left_of_an_upload_are_removed_by_the_next_writer(s3, caplog):
    caplog.set_level(logging.INFO, "localtrain")
    url, other = (f"{s3.url}/{uuid.uuid4().hex}" for _ in range(2))
    filesystem, _ = clients.open_client(url)

    def begun():
        return filesystem.call_s3("list_multipart_uploads", Bucket="bkt").get("Uploads") or []

    keys = [f"{place.removeprefix('s3://bkt/')}/1/{'ab' * 8}/big" for place in (url, other)]
    for key in keys:
        made = filesystem.call_s3("create_multipart_upload", Bucket="bkt", Key=key)
        names = {"Bucket": "bkt", "Key": key, "UploadId": made["UploadId"]}
        filesystem.call_s3("upload_part", PartNumber=1, Body=b"x", **names)
    assert {one["Key"] for one in begun()} >= set(keys)
    Checkpoints(url).save(1, state(1), {}, block=True)
    assert "the parts of 1 unfinished" in caplog.text
    assert keys[0] not in {one["Key"] for one in begun()}
    assert keys[1] in {one["Key"] for one in begun()}  # another run's
    s3.proxy.rule(("status", 403), "GET", r"\?uploads", times=99)
    Checkpoints(url).save(2, state(2), {}, block=True)
    assert "unfinished uploads, if any, stay" in caplog.text
    s3.proxy.clear()
    assert Checkpoints(url).steps() == [1, 2]
    for one in begun():
        filesystem.call_s3(
            "abort_multipart_upload", Bucket="bkt", **{k: one[k] for k in ("Key", "UploadId")}
        )


def test_a_writer_that_lost_the_lease_in_the_middle_commits_nothing(saved):
    calls = []

    def guard():
        calls.append(1)
        if len(calls) > 1:  # before the upload it was still ours
            raise BusyError("another process took over")

    stale = Checkpoints(saved.folder, guard=guard)
    stale.save(4, state(4), {})
    with pytest.raises(BusyError, match="took over"):
        stale.wait()
    assert Checkpoints(saved.folder).steps() == [1, 2, 3]


def test_a_lasting_failure_is_loud_and_leaves_the_previous_ones(s3, monkeypatch):
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    url = f"{s3.url}/{uuid.uuid4().hex}"
    writer = Checkpoints(url, keep=1)
    writer.save(1, state(1), {}, block=True)
    s3.proxy.rule(("status", 503), "PUT", times=10_000)
    writer.save(2, state(2), {})
    with pytest.raises(StorageError, match=r"step 2 .* failed twice.*503.*\[1\] are intact"):
        writer.wait()
    s3.proxy.clear()
    assert bits(Checkpoints(url).restore(None, TEMPLATE)[0]) == bits(state(1))


def test_a_fifth_of_all_requests_failing_loses_nothing(s3):
    url = f"{s3.url}/{uuid.uuid4().hex}"
    s3.proxy.chance(0.2, ("status", 503), ("status", 429))
    s3.proxy.chance(0.02, ("cut", 7))
    writer = Checkpoints(url, keep=2)
    for step in (1, 2, 3, 4):
        writer.save(step, state(step), {})
    writer.close()
    assert bits(Checkpoints(url).restore(None, TEMPLATE)[0]) == bits(state(4))
    assert s3.proxy.faults > 5
    s3.proxy.clear()
    assert Checkpoints(url).steps() == [3, 4]


def test_the_commit_is_the_last_object_written(s3):
    writer = Checkpoints(f"{s3.url}/{uuid.uuid4().hex}", keep=0)
    s3.proxy.clear()
    writer.save(1, state(1), {}, block=True)
    written = [path for method, path in s3.proxy.requests if method == "PUT"]
    assert written[-1].endswith("/1/commit.json") and len(written) > 5
    assert not any("commit.json" in path for path in written[:-1])


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


def test_a_full_local_disk_on_the_way_is_said_and_nothing_is_lost(small_disk, monkeypatch):
    url = f"memory://{uuid.uuid4().hex}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    writer = Checkpoints(url)
    writer.save(1, {"x": jnp.ones(1000)}, {}, block=True)
    writer.save(2, {"x": jnp.ones(1_000_000)}, {})
    with pytest.raises(StorageError, match=r"step 2 .*the disk is full.*\[1\] are intact"):
        writer.wait()
    assert Checkpoints(url).steps() == [1]
    assert os.listdir(small_disk / "localtrain" / "stage") == []
    big = Checkpoints(f"memory://{uuid.uuid4().hex}")
    monkeypatch.delenv("XDG_CACHE_HOME")
    big.save(3, {"x": jnp.ones(1_000_000)}, {}, block=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    with pytest.raises(StorageError, match=r"the disk is full: could not write .*stage"):
        Checkpoints(big.folder).restore(None, {"x": jnp.ones(1_000_000)})


@pytest.mark.parametrize("step", [None, 1])
def test_a_copy_is_removed_when_it_does_not_fit(tmp_path, step):
    folder = f"memory://{uuid.uuid4().hex}"
    Checkpoints(folder).save(1, state(1), {}, block=True)
    reader = Checkpoints(folder)
    with pytest.raises(DataError, match="does not fit"):
        reader.restore(step, {"x": jnp.ones(3)})
    assert os.listdir(tmp_path / "cache" / "localtrain" / "stage") == []


def test_a_look_at_the_newest_fetches_meta_alone_and_misses_no_file(tmp_path, monkeypatch, caplog):
    folder, fetched = f"memory://{uuid.uuid4().hex}", []
    writer = Checkpoints(folder)
    for step in (1, 2):
        writer.save(step, state(step), {}, block=True)
    download = storage.download_all
    monkeypatch.setattr(storage, "download_all", lambda all: (fetched.extend(all), download(all)))
    assert Checkpoints(folder).look() == 2
    assert [name.rsplit("/", 1)[1] for name in fetched] == ["meta.json"]
    assert os.listdir(tmp_path / "cache" / "localtrain" / "stage") == []
    victim = next(name for name in storage.find_below(f"{folder}/2") if "params.w/0" in name)
    storage.remove_all([f"{folder}/2/{victim}"])
    assert Checkpoints(folder).look() == 1
    assert victim in caplog.text and "Falling back to step 1" in caplog.text


def test_what_a_killed_process_left_on_the_disk_is_removed_by_the_next(tmp_path):
    code = (
        "import os, signal; from localtrain.stage import Stage; s = Stage(); "
        "(s.path / 'big').write_bytes(b'x'); print(s.path); "
        "import sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert os.path.isfile(os.path.join(left.strip(), "big"))
    in_use = Stage()
    (in_use.path / "mine").write_bytes(b"x")
    other = Stage()
    assert not os.path.exists(left.strip())
    assert (in_use.path / "mine").exists() and other.path != in_use.path
    in_use.close()
    other.close()
    assert os.listdir(tmp_path / "cache" / "localtrain" / "stage") == []
