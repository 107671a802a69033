"""kill -9 at random moments: while a run starts, between its steps, in the middle of an upload.

Each run is killed again and again until it comes to its end, and must then equal, bit by bit and
row by row, the run that nobody touched.
"""

import os
import random
import re
import signal
import subprocess
import time

import pytest
from program import arrays, command, committed, events, place, rows, train

from localtrain.goodput import goodput
from localtrain.metrics import read_metrics

STEPS = 60
MORE = (f"train.steps={STEPS}", "eval.every=20", "eval.sample_length=0", "checkpoint.keep=3")
UPLOAD = re.compile(r"checkpoints|^/upload/")
MOMENTS = ("starting", "stepping", "saving", "saving")


@pytest.fixture(scope="module")
def untouched(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("untouched") / "out"
    train(folder, out, *MORE)
    return rows(out), arrays(out, STEPS)


def reach(moment, out, said, process, server):
    """Until a process is where it is to be killed (or has ended)."""
    before = len(server.proxy.requests) if server else 0

    def is_saving():
        if server is None:
            return any((out / "checkpoints").glob("tmp-*"))
        if not re.search(rb"step \d*[05]/", said.read_bytes()):  # gs:// has no names in its paths
            return False
        new = server.proxy.requests[before:]
        return any(method in ("PUT", "POST") and UPLOAD.search(path) for method, path in new)

    there = {
        "starting": lambda: True,
        "stepping": lambda: re.search(rb"step \d+/", said.read_bytes()),
        "saving": is_saving,
    }[moment]
    end = time.monotonic() + 240
    while process.poll() is None and not there():
        assert time.monotonic() < end, f"not {moment} after four minutes"
        time.sleep(0.005)


def kill_at_random(folder, out, said, server, moments):
    """Start the run and kill it; True if it had come to its end before."""
    saved = max(committed(out), default=0)
    starts = [row["step"] for row in events(out, "start")]
    with open(said, "wb") as stderr:
        process = subprocess.Popen(
            command(folder, out, *MORE), stdout=subprocess.DEVNULL, stderr=stderr
        )
    moment = moments.choice(MOMENTS)
    reach(moment, out, said, process, server)
    time.sleep(moments.uniform(0, {"starting": 2.5, "stepping": 0.5, "saving": 0.3}[moment]))
    process.kill()
    code = process.wait()
    assert code in (0, -signal.SIGKILL), said.read_text()[-3000:]
    later = [row["step"] for row in events(out, "start")][len(starts) :]
    assert all(step >= saved for step in later), (saved, later)  # it went on, not anew
    return code == 0


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("s3", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("", 17), ("s3", 17), ("gs", 16))),
    ],
)
def test_runs_that_are_killed_at_random_moments_equal_the_untouched_one(
    folder, untouched, tmp_path, request, kind, kills
):
    server = request.getfixturevalue(kind) if kind else None
    moments, left, said = random.Random(kills + len(kind)), kills, tmp_path / "said"
    while left:
        out = place(server) if server else tmp_path / f"out-{left}"
        killed = 0
        while left and not kill_at_random(folder, out, said, server, moments):
            left, killed = left - 1, killed + 1
        train(folder, out, *MORE)  # to its end, or nothing is left to do
        assert rows(out) == untouched[0]
        assert arrays(out, STEPS) == untouched[1]
        found = goodput(read_metrics(out))
        assert 1 <= found["attempts"] <= killed + 1
