"""The program as users start it, and what it left behind, here or at a URL."""

import json
import subprocess
import sys
import time
import uuid

from localtrain import storage
from localtrain.checkpoint import Checkpoints
from localtrain.metrics import read_metrics

RATES = {"tokens_per_s", "step_time_s", "mfu", "flops_per_s", "data_wait_s", "time"}


def command(folder, out, *more):
    base = [sys.executable, "-m", "localtrain", "train", str(folder / "tiny.yaml")]
    return [*base, "--backend", "cpu", "--out", str(out), *more]


def cli(*arguments, code=0, **options):
    done = subprocess.run(
        [sys.executable, "-m", "localtrain", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def train(folder, out, *more, code=0, **options):
    return cli(*command(folder, out, *more)[3:], code=code, **options)


def start(folder, out, *more):
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(folder, out, *more), **pipes)


def all_rows(out):
    text = storage.read_text(storage.join(str(out), "metrics.jsonl"))
    return [json.loads(line) for line in text.splitlines()]


def events(out, name):
    return [row for row in read_metrics(out) if row.get("event") == name]


def rows(out):
    return [
        {k: v for k, v in row.items() if k not in RATES}
        for row in all_rows(out)
        if "event" not in row
    ]


def arrays(out, step):
    """Every array of a checkpoint, as bytes, by name."""
    import jax
    import numpy as np

    from localtrain import arrays as codec

    reader = Checkpoints(storage.join(str(out), "checkpoints"))
    meta = reader.read_meta(step)[1]
    template = {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype)
        for name, (dtype, shape) in meta["arrays"].items()
    }
    read = codec.read(reader.local(step), meta["arrays"], template)
    return {name: np.asarray(value).tobytes() for name, value in read.items()}


def place(remote):
    return f"{remote.url}/{uuid.uuid4().hex}"


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def committed(out):
    return Checkpoints(storage.join(str(out), "checkpoints")).steps()
