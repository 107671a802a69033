"""End to end with the installed program: train, kill -9 five times, resume, compare, generate.

Usage: python .ci/e2e.py FOLDER    (with the Python that has localtrain installed)

Five kills: two while a save is being written, three at random moments. After each, the same command
must resume from a step > 0; at the end the logged rows and every array of the last checkpoint must
equal those of the run that nobody touched.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from localtrain.checkpoint import Checkpoints
from localtrain.metrics import read_metrics

STEPS, EVERY = 60, 5
RATES = {"tokens_per_s", "step_time_s", "mfu", "flops_per_s", "data_wait_s", "time"}
PROGRAM = shutil.which("localtrain", path=str(Path(sys.executable).parent)) or "localtrain"


def command(out: Path) -> list[str]:
    keys = {
        "train.steps": STEPS,
        "train.batch_size": 8,
        "train.log_every": 1,
        "data.seq_len": 128,
        "eval.every": 10,
        "eval.batches": 2,
        "checkpoint.every": EVERY,
    }
    run = [PROGRAM, "train", "quickstart", "--backend", "cpu", "--out", str(out)]
    return run + [f"{key}={value}" for key, value in keys.items()]


def start(out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen, code: int) -> str:
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == code, f"exit {process.returncode}, not {code}:\n{stderr[-3000:]}"
    return stderr


def wait_until(process: subprocess.Popen, what, timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < end, "nothing happened for five minutes"
        time.sleep(0.005)


def saving(out: Path) -> bool:
    return any((out / "checkpoints").glob("tmp-*"))


def kill_and_resume(out: Path, seed: int) -> None:
    moments = random.Random(seed)
    for attempt in range(5):
        before = Checkpoints(out / "checkpoints").latest() or 0
        process = start(out)
        reached = lambda before=before: (  # noqa: E731
            (Checkpoints(out / "checkpoints").latest() or 0) > before
        )
        wait_until(process, reached)
        if attempt < 2:
            wait_until(process, lambda: saving(out))
        else:
            time.sleep(moments.uniform(0, 0.5))
        during = saving(out)
        process.kill()
        finish(process, -signal.SIGKILL)
        saved = Checkpoints(out / "checkpoints").latest()
        print(f"kill {attempt + 1}: at {saved} saved, {'during a save' if during else 'between'}")
        assert saved and saved > before
        assert saved < STEPS, "the run was over before it was killed"
        if attempt:
            resumed = [row["step"] for row in read_metrics(out) if row.get("event") == "resume"]
            assert resumed and resumed[-1] == before > 0, (resumed, before)
    finish(start(out), 0)
    resumed = [row["step"] for row in read_metrics(out) if row.get("event") == "resume"]
    assert resumed[-1] > 0, resumed


def rows(out: Path) -> list[dict]:
    kept = (row for row in read_metrics(out) if "event" not in row)
    return [{k: v for k, v in row.items() if k not in RATES} for row in kept]


def compare(a: Path, b: Path) -> None:
    import jax

    from localtrain import arrays

    assert rows(a) == rows(b), "the logged rows differ"
    found = []
    for out in (a, b):
        meta = Checkpoints(out / "checkpoints").read_meta(STEPS)[1]
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(shape), dtype)
            for name, (dtype, shape) in meta["arrays"].items()
        }
        read = arrays.read(out / "checkpoints" / str(STEPS), meta["arrays"], shapes)
        found.append({name: np.asarray(value) for name, value in read.items()})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)
    print(f"equal: {len(rows(a))} rows, {len(found[0])} arrays bit for bit")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    straight, killed = folder / "straight", folder / "killed"
    finish(start(straight), 0)
    logged = [row for row in rows(straight) if "loss" in row]
    assert logged[-1]["loss"] < logged[0]["loss"] - 1, (logged[0], logged[-1])
    kill_and_resume(killed, seed=len(str(folder)))
    compare(straight, killed)
    generate = [PROGRAM, "generate", str(killed), "--prompt", "def ", "--max-new-tokens", "40"]
    texts = [
        subprocess.run([*generate, "--json"], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert texts[0] == texts[1] and json.loads(texts[0]), "generation is not repeatable"
    print("generated:", texts[0].strip()[:200])


if __name__ == "__main__":
    main()
