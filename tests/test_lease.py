"""One writer behind a URL: who is turned away, who takes over, and who has lost."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid

import pytest

from localtrain import lease as module
from localtrain import storage
from localtrain.config import RunConfig
from localtrain.errors import BusyError
from localtrain.lease import Lease, is_gone, this_process
from localtrain.rundir import RunDirectory


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/run"


def held(url):
    return json.loads(storage.read_bytes(f"{url}/lease.json"))


def put(url, **changes):
    """A lease that someone else left."""
    owner = {**this_process(), "token": "0" * 16, "beat": 7, "every_s": 0.05, "started": "noon"}
    storage.write_atomic(f"{url}/lease.json", json.dumps({**owner, **changes}).encode())


def dead_process():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_an_owner_is_named_and_its_release_lets_the_next_one_in(url):
    first = Lease(url)
    assert held(url)["pid"] == os.getpid() and held(url)["token"] == first.token
    with pytest.raises(BusyError, match=rf"memory://.*/run is in use by process {os.getpid()} on"):
        Lease(url)
    first.check()
    first.release()
    first.release()
    assert not storage.exists(f"{url}/lease.json")
    second = Lease(url)
    assert second.token != first.token
    second.release()


def test_a_dead_process_of_this_machine_is_succeeded_at_once(url):
    put(url, pid=dead_process(), every_s=1e6)  # waiting for its beats would take for ever
    lease = Lease(url)
    assert held(url)["token"] == lease.token
    lease.release()


def test_a_process_number_that_was_given_to_another_one_is_gone():
    assert not is_gone(this_process())
    assert is_gone({**this_process(), "process": 1})


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "x"}, {"space": "pid:[1]"}])
def test_a_process_of_another_machine_or_container_is_never_judged_by_its_number(change):
    assert not is_gone({**this_process(), "pid": dead_process(), **change})


def test_a_lease_from_elsewhere_that_stands_still_is_taken_over(url):
    put(url, host="elsewhere", pid=1)
    lease = Lease(url)
    lease.check()
    assert held(url)["token"] == lease.token
    lease.release()


def test_a_lease_from_elsewhere_that_moves_is_in_use(url):
    stop = threading.Event()

    def beat():
        n = 0
        while not stop.wait(0.01):
            n += 1
            put(url, host="elsewhere", pid=1, beat=n, every_s=5)

    put(url, host="elsewhere", pid=1, every_s=5)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(BusyError, match="in use by process 1 on elsewhere since noon"):
            Lease(url)
    finally:
        stop.set()
        thread.join()


def test_the_owner_keeps_touching_it(url, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    lease = Lease(url)
    end = time.monotonic() + 20
    while held(url)["beat"] < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    lease.release()


def test_whoever_lost_it_may_not_write_and_does_not_take_it_away_again(url):
    lease = Lease(url)
    put(url, host="elsewhere", pid=5, token="f" * 16)
    with pytest.raises(BusyError, match="taken over by process 5 on elsewhere"):
        lease.check()
    with pytest.raises(BusyError):
        lease.check_known()
    lease.release()
    assert held(url)["token"] == "f" * 16


def test_an_owner_whose_successor_has_ended_does_not_come_back(url, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    lease = Lease(url)
    storage.remove_tree(f"{url}/lease.json")  # taken over while it slept, and given back
    lease._thread.join(20)
    with pytest.raises(BusyError, match="which has ended meanwhile"):
        lease.check()
    lease.release()
    assert not storage.exists(f"{url}/lease.json")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"token": 3}', b"\xff"])
def test_a_strange_lease_does_not_crash(url, text, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    storage.write_atomic(f"{url}/lease.json", text)
    lease = Lease(url)
    assert held(url)["token"] == lease.token
    lease.release()


def test_a_stale_owner_commits_nothing_and_overwrites_no_metrics(url):
    import jax.numpy as jnp

    values = {"model": {"preset": "qwen3-0.6b"}, "data": {"sources": ["a"]}, "name": "tiny"}
    run = RunConfig.model_validate(values)
    stale = RunDirectory.open(url, run)
    checkpoints = stale.checkpoints(keep=3)
    checkpoints.save(1, {"x": jnp.ones(3)}, {}, block=True)
    storage.remove_tree(f"{url}/lease.json")
    put(url, host="elsewhere", token="f" * 16)  # the stale one slept, another took over
    storage.write_atomic(f"{url}/metrics.jsonl", b"of the other\n")
    (stale.path / "metrics.jsonl").write_text("of the stale one\n")
    checkpoints.save(2, {"x": jnp.ones(3)}, {})
    with pytest.raises(BusyError, match="taken over"):
        checkpoints.wait()
    with pytest.raises(BusyError):
        stale.check()
    with pytest.raises(BusyError):
        stale.close()
    assert storage.read_bytes(f"{url}/metrics.jsonl") == b"of the other\n"
    assert checkpoints.steps() == [1]
    assert held(url)["token"] == "f" * 16
