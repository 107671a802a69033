"""A run of two processes whose directory is a URL: each uploads its parts, one commits."""

import json
import signal
import socket
import subprocess

import numpy as np
import pytest
from program import command, committed, events, place, rows, train, wait_for

from localtrain import storage

SGD = ("optim.name=sgd", "optim.lr=0.3", "optim.schedule=constant")


def start_two(folder, out, *more):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
