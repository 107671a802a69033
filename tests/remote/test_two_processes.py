"""A run of two processes whose directory is a URL: each uploads its parts, one commits."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from fault_proxy import FaultProxy
from program import command, committed, events, place, rows, train, wait_for

from localtrain import storage

SGD = ("optim.name=sgd", "optim.lr=0.3", "optim.schedule=constant")


# Steps 1 and 2 of a state of which each of `count` processes holds its part; or it is restored.
STATE = """
import logging, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from localtrain import processes
from localtrain.checkpoint import Checkpoints
from localtrain.errors import LocaltrainError

logging.basicConfig(level=logging.WARNING)
jax.config.update("jax_platforms", "cpu")
count, index, address, how, *urls = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    processes.join(address, count, index)
mesh = jax.make_mesh((count,), ("x",))
places = {"w": P("x"), "opt": {"mu": P("x"), "nu": P(None, "x")}, "all": P(), "step": P()}

def values(step):
    random = np.random.default_rng(step)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    return {"w": draw(64, 33), "opt": {"mu": draw(64, 33).astype(jnp.bfloat16),
            "nu": draw(3, 32)}, "all": draw(7), "step": np.int32(step)}

def place(value, spec):
    value, at = np.asarray(value), NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, at, lambda index: value[index])

state = {step: jax.tree.map(place, values(step), places) for step in (1, 2)}
checkpoints = Checkpoints(urls[index] if len(urls) > 1 else urls[0])
if how == "save":
    for step in state:
        checkpoints.save(step, state[step], {}, block=True)
else:
    try:
        found, meta = checkpoints.restore(None, state[1], strict=how == "strict")
    except LocaltrainError as error:
        processes.leave()
        sys.exit(f"{type(error).__name__}: {error}")
    for got, made in zip(jax.tree.leaves(found), jax.tree.leaves(state[meta["step"]])):
        for a, b in zip(got.addressable_shards, made.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    print("equal to step", meta["step"])
processes.leave()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_state(count, how, *urls, proxies=()):
    """(exit code, stdout, stderr) of each process; each asks the store through a proxy of its own,
    if there are some."""
    address, pipes = f"127.0.0.1:{free_port()}", {"stdout": subprocess.PIPE, "text": True}
    more = [{"AWS_ENDPOINT_URL": proxy.url} for proxy in proxies] or [{}] * count
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STATE, str(count), str(i), address, how, *map(str, urls)],
            stderr=subprocess.PIPE,
            env=os.environ | more[i],
            **pipes,
        )
        for i in range(count)
    ]
    ends = [process.communicate(timeout=240) for process in started]
    return [(one.returncode, *end) for one, end in zip(started, ends, strict=True)]


@pytest.fixture
def two_proxies(s3):
    proxies = [FaultProxy(s3.proxy.port_behind) for _ in range(2)]
    yield proxies
    for proxy in proxies:
        proxy.close()


def flip_first(path):
    data = storage.read_bytes(path)
    storage.write_atomic(path, bytes([data[0] ^ 1]) + data[1:])
    return data


def test_each_process_fetches_what_its_devices_hold(s3, two_proxies):
    """Whole objects by name: its half of what is split, all of what both have."""
    url = place(s3)
    assert [code for code, _, _ in run_state(2, "save", url)] == [0, 0]
    step = storage.join(url, "2")
    record = json.loads(storage.read_bytes(storage.join(step, "commit.json")))
    sizes = {name.split("/", 1)[1]: entry["size"] for name, entry in record["files"].items()}
    for code, out, err in run_state(2, "restore", url, proxies=two_proxies):
        assert code == 0 and "equal to step 2" in out, err
    described = {"meta.json", *(name for name in sizes if name.endswith("/.zarray"))}
    for index, proxy in enumerate(two_proxies):
        asked = [path for method, path in proxy.requests if method == "GET"]
        fetched = [
            found[1] for path in asked if (found := re.search(r"/2/[0-9a-f]{16}/(.+)", path))
        ]
        own = {f"w/{index}.0", f"opt.mu/{index}.0", f"opt.nu/0.{index}", "all/0", "step/0"}
        assert sorted(fetched) == sorted(described | own)
        lists = [path for path in asked if "list-type" in path]
        assert bool(lists) == (index == 0)  # one of them looks whether all is there
    split = [name for name in sizes if re.match(r"(w|opt\.\w+)/\d", name)]
    mine = [name for name in split if name in own]
    assert 2 * sum(sizes[name] for name in mine) == sum(sizes[name] for name in split)
    ((code, out, err),) = run_state(1, "restore", url)
    assert code == 0 and "equal to step 2" in out, err


def test_what_one_process_finds_damaged_none_of_them_uses(s3):
    url = place(s3)
    assert [code for code, _, _ in run_state(2, "save", url)] == [0, 0]
    record = json.loads(storage.read_bytes(storage.join(url, "2/commit.json")))
    path = storage.join(url, "2", record["folder"], "w/1.0")  # of process 1 alone
    intact = flip_first(path)
    for code, out, err in run_state(2, "restore", url):
        assert code == 0 and "equal to step 1" in out, err
        assert f"{path} is damaged" in err and "Falling back to step 1" in err
    for code, _, err in run_state(2, "strict", url):
        assert code == 1 and f"Damaged: {path} is damaged" in err
    storage.write_atomic(path, intact)
    storage.remove_all([storage.join(url, "2", record["folder"], "opt.nu/0.1")])
    for code, out, err in run_state(2, "restore", url):
        assert code == 0 and "equal to step 1" in out and "opt.nu/0.1 is missing" in err


def test_a_folder_that_is_not_the_same_for_all_is_an_error_and_no_damage(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    assert [code for code, _, _ in run_state(2, "save", here)] == [0, 0]
    for code, _, err in run_state(2, "restore", here, there):
        assert code == 1 and "StorageError" in err
        assert "but process 1 finds no commit.json" in err and "Falling back" not in err


def start_two(folder, out, *more):
    port = free_port()
    group = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([*command(folder, out, *more), *group, str(i)], **pipes) for i in (0, 1)
    ]


def finish(pair):
    said = [process.communicate(timeout=240)[1] for process in pair]
    return [process.returncode for process in pair], said


@pytest.mark.slow
def test_two_processes_at_a_url_are_killed_and_go_on(folder, s3, tmp_path):
    out = place(s3)
    pair = start_two(folder, out, *SGD)
    wait_for(lambda: 5 in committed(out), pair[0])
    pair[1].kill()
    codes, said = finish(pair)
    assert codes == [7, -signal.SIGKILL], said
    assert "process 1 of 2" in said[0]
    saved = committed(out)[-1]
    record = json.loads(storage.read_bytes(storage.join(out, f"checkpoints/{saved}/commit.json")))
    assert any(name.endswith("/0.1") for name in record["files"])  # of the other process
    codes, said = finish(start_two(folder, out, *SGD))
    assert codes == [0, 0], said
    assert [row["step"] for row in events(out, "resume")] == [saved]
    train(folder, tmp_path / "alone", *SGD)
    pairs = list(zip(rows(out), rows(tmp_path / "alone"), strict=True))
    assert saved < 10
    for a, b in (pair for pair in pairs if pair[0]["step"] <= 10):  # rounding adds up
        for key in a.keys() & {"loss", "eval_loss", "trained_tokens"}:
            np.testing.assert_allclose(a[key], b[key], rtol=1e-5)
    train(folder, out, *SGD, "train.steps=22")  # and opens in one
