"""From the command to the first finished step, and what the loop adds to a bare step.

    python benchmarks/start.py [--json]

`localtrain train` in processes of its own, with the small shape of train_step.py on the standard
library as text: once with an empty compile cache and no token shards ("cold"), then again with
both ("warm"). The clock starts before the process and stops when the row of step 1 is in
metrics.jsonl. The loop's step is the median of the rows that the run itself wrote; the bare step is
the same compiled program on one batch in a process beside it (train_step.py). They take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import train_step

STEPS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"first finished step: {found['cold_s']:.1f} s cold, {found['warm_s']:.1f} s warm")
    print(
        f"step in the loop {found['loop_step_s']:.3f} s, bare {found['bare_step_s']:.3f} s: "
        f"{found['overhead']:+.1%}"
    )


def measure(folder: Path, rounds: int) -> dict[str, float]:
    (folder / "config.json").write_text(json.dumps(train_step.SMALL))
    rows, length, _ = train_step.SHAPES["small"]
    run = folder / "run.yaml"
    run.write_text(
        f"model: {{path: {folder / 'config.json'}}}\n"
        f"data: {{sources: python:stdlib, seq_len: {length}, cache: {folder / 'data'}}}\n"
        f"train: {{steps: {STEPS}, batch_size: {rows}, log_every: 1}}\n"
        "eval: {batches: 1}\ncheckpoint: {every: 1000}\n"
    )
    cold, warm, loop, bare = [], [], [], []
    for _ in range(rounds):
        for name in ("cache", "data"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for times in (cold, warm):
            seconds, steps = train(folder, run)
            times.append(seconds)
            loop += steps
            bare += train_step.in_a_process("localtrain", "small", STEPS)["step_s"]
    loop_s, bare_s = statistics.median(loop), statistics.median(bare)
    return {
        "cold_s": min(cold),
        "warm_s": min(warm),
        "loop_step_s": loop_s,
        "bare_step_s": bare_s,
        "overhead": loop_s / bare_s - 1,
    }


def train(folder: Path, run: Path) -> tuple[float, list[float]]:
    """(seconds to the first finished step, seconds of each later step) of one run."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "localtrain", "train", str(run), "--out", str(out)]
    command += ["--backend", "cpu"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    start = time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        first = None
        while process.poll() is None and first is None:
            time.sleep(0.02)
            if any("loss" in row for row in rows_of(out)):
                first = time.perf_counter() - start
        if process.wait() or first is None:
            raise SystemExit((folder / "log.txt").read_text())
    return first, [
        row["step_time_s"] for row in rows_of(out) if row.get("step", 0) > 1 and "loss" in row
    ]


def rows_of(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


if __name__ == "__main__":
    main()
