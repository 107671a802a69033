"""Stores that fail: what passes is tried again and told, what does not is said at once."""

import logging
import os
import re
import subprocess
import sys
import uuid

import pytest

from localtrain import storage
from localtrain.errors import StorageError
from localtrain.storage import retry


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.01)
    monkeypatch.setattr(retry, "_counts", type(retry._counts)())


@pytest.fixture
def top(remote):
    return f"{remote.url}/{uuid.uuid4().hex}"


def test_the_whole_interface_works_on_a_real_store(top, tmp_path):
    path = storage.join(top, "sub", "f")
    assert not storage.exists(path) and storage.list_dir(top) == []
    storage.write_atomic(path, b"0123456789")
    assert storage.exists(path) and storage.is_dir(storage.join(top, "sub"))
    assert storage.read_bytes(path) == b"0123456789"
    assert storage.read_range(path, 2, 5) == b"234"
    assert storage.read_ranges(path, [(0, 2), (9, 10)]) == [b"01", b"9"]
    assert storage.info(path).size == 10 and storage.info(path).stamp
    for data in (b"x\r", b"x\n", b"x\r\n", b""):
        storage.write_atomic(path, data)
        assert storage.read_bytes(path) == data
    storage.write_atomic(path, [b"ab", b"cd"])  # a newer one: nothing stale is read
    assert storage.info(path).size == 4
    with storage.open_file(path) as file:
        assert (file.read(3), file.seek(1), file.read()) == (b"abc", 1, b"bcd")
    big = os.urandom(11 << 20)
    (tmp_path / "big").write_bytes(big)
    storage.upload_all({str(tmp_path / "big"): storage.join(top, "big")})
    assert storage.find_below(top) == {"sub/f": 4, "big": len(big)}
    assert [one.path for one in storage.list_files(top)] == [storage.join(top, "big"), path]
    assert [one.path for one in storage.list_files(storage.join(top, "**", "f"))] == [path]
    storage.download_all({storage.join(top, "big"): (str(tmp_path / "back"), len(big))})
    assert (tmp_path / "back").read_bytes() == big
    storage.remove_all([path, path + "-that-is-not-there"])
    assert storage.list_dir(top) == ["big"]
    storage.remove_tree(top)
    storage.remove_tree(top)
    assert storage.find_below(top) == {}
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(path)


@pytest.mark.parametrize("action", [("status", 503), ("status", 429), ("reset",)])
def test_a_write_that_failed_twice_is_repeated_and_told(remote, top, action, caplog):
    caplog.set_level(logging.WARNING, "localtrain")
    remote.proxy.rule(action, "PUT|POST", times=2)
    storage.write_atomic(storage.join(top, "f"), b"kept")
    assert storage.read_bytes(storage.join(top, "f")) == b"kept"
    assert remote.proxy.faults == 2
    # aiohttp itself opens another connection, once, where one that it kept was closed
    least = 1 if action == ("reset",) else 2
    told = sum("again" in line for line in caplog.messages)
    assert told >= least
    assert f"{told} requests were repeated" in storage.retry_report()


def test_a_failing_list_is_never_taken_for_an_empty_one(remote, top, monkeypatch):
    for name in ("a.txt", "b.txt", "d/c.txt"):
        storage.write_atomic(storage.join(top, name), b"x")
    remote.proxy.chance(0.5, ("status", 503), ("status", 429))
    monkeypatch.setattr(retry, "ATTEMPTS", 40)
    for _ in range(10 if remote.kind == "s3" else 1):
        assert storage.exists(storage.join(top, "a.txt")) and storage.is_dir(top)
        assert len(storage.list_files(storage.join(top, "*.txt"))) == 2
        assert len(storage.list_files(storage.join(top, "*", "*.txt"))) == 1
        assert len(storage.list_files(storage.join(top, "**", "*.txt"))) == 3
        assert len(storage.list_files(top)) == 3
        assert storage.list_dir(top) == ["a.txt", "b.txt", "d"]
    remote.proxy.clear()
    monkeypatch.setattr(retry, "ATTEMPTS", 2)
    remote.proxy.rule(("status", 503), times=10_000)
    looks = (storage.exists, storage.is_dir, storage.list_files, storage.list_dir)
    for look in looks if remote.kind == "s3" else looks[:1]:
        with pytest.raises(StorageError, match="503"):
            look(storage.join(top, "d"))
    remote.proxy.clear()


def test_a_body_that_was_cut_is_read_again(remote, top):
    path = storage.join(top, "f")
    storage.write_atomic(path, bytes(range(256)) * 100)
    remote.proxy.rule(("cut", 1000), "GET", "f", times=1)
    assert storage.read_bytes(path) == bytes(range(256)) * 100
    remote.proxy.rule(("cut", 10), "GET", "f", times=1)
    assert storage.read_ranges(path, [(0, 256)]) == [bytes(range(256))]


def test_a_store_that_never_recovers_is_a_storage_error_after_a_bound(s3, monkeypatch):
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    s3.proxy.rule(("status", 503), path="/bkt/never", times=1000)
    with pytest.raises(StorageError, match=r"could not read s3://bkt/never/f: .*3 attempts in"):
        storage.read_bytes("s3://bkt/never/f")
    assert s3.proxy.faults == 3


def test_refusals_are_not_repeated_and_say_what_to_do(remote, top):
    storage.write_atomic(storage.join(top, "f"), b"x")
    remote.proxy.clear()
    remote.proxy.rule(("status", 403), times=1000)
    with pytest.raises(StorageError, match=r"(?i)forbidden.*[cC]redentials"):
        storage.read_bytes(storage.join(top, "f"))
    assert remote.proxy.faults == 1
    with pytest.raises(StorageError, match=r"could not write .*[cC]redentials"):
        storage.write_atomic(storage.join(top, "g"), b"x")
    remote.proxy.clear()


def test_a_bucket_that_is_not_there_is_named(remote):
    with pytest.raises(StorageError, match="no such bucket"):
        storage.write_atomic(f"{remote.kind}://no-such-bucket-{uuid.uuid4().hex}/f", b"x")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_without_credentials_or_network_one_paragraph_says_so(scheme, tmp_path):
    pytest.importorskip({"gs": "gcsfs", "s3": "s3fs"}[scheme])
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("a process without a network cannot be made here")
    place = f"{scheme}://bucket/run"
    command = [sys.executable, "-m", "localtrain", "train", "quickstart", "--out", place]
    done = subprocess.run(
        ["unshare", "-rn", *command],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    assert done.returncode == 6, done.stderr
    assert re.fullmatch(
        r"error: .* cannot be reached \(.*\)\. No .* credentials were .*\n", done.stderr
    )


def test_of_two_that_create_an_object_one_succeeds(s3):
    path = f"s3://bkt/{uuid.uuid4().hex}"
    assert storage.create(path, b"first") is True
    assert storage.create(path, b"second") is False
    assert storage.read_bytes(path) == b"first"


def test_a_fifth_of_all_requests_failing_loses_nothing(remote, top, tmp_path):
    failing = [("status", 503), ("status", 429)]
    remote.proxy.chance(0.2, *failing)
    remote.proxy.chance(0.02, ("cut", 7))
    files = {f"n{i:02d}": os.urandom(2000 + i) for i in range(40 if remote.kind == "s3" else 12)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    storage.upload_all({str(tmp_path / name): storage.join(top, name) for name in files})
    assert storage.find_below(top) == {name: len(data) for name, data in files.items()}
    wanted = {
        storage.join(top, name): (str(tmp_path / f"{name}.back"), len(data))
        for name, data in files.items()
    }
    storage.download_all(wanted)
    assert all((tmp_path / f"{name}.back").read_bytes() == data for name, data in files.items())
    assert remote.proxy.faults > 3
