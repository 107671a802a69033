"""Data alone: tokens per second of building (tokenize, write, pack) and of loading batches.

    python benchmarks/data.py [--seq-len 512] [--batch 8] [--latency MS] [--json]

The text is the standard library of the Python that runs this. Two tokenizers: bytes, and a
byte-level BPE of 8192 trained on the same text. "build" is everything from text to packed rows in
an empty cache; "open" finds them again; "load" makes shuffled batches one after another in this
thread, as a training step would consume them. With --latency, the byte tokens are then read through
`s3://` (needs s3fs) from a server on loopback whose every request takes that long, as in a first
epoch without local copies: by ranges, by the prefetcher of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from localtrain.config import RunConfig
from localtrain.data import copies
from localtrain.data.build import train_tokenizer
from localtrain.data.loader import Prefetcher, prepare
from localtrain.data.tokenizer import load_tokenizer

SOURCE = "python:stdlib"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("seq-len", 512), ("batch", 8), ("batches", 2000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--latency", type=float, help="milliseconds a request of a store takes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.seq_len, options.batch, options.batches)
        if options.latency:
            sizes = options.seq_len, options.batch, options.batches // 20
            found["bytes, s3"] = measure_store(Path(folder), options.latency, *sizes)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'tokenizer':12}{'tokens':>12}{'build tok/s':>14}{'open s':>9}{'load tok/s':>13}")
    for name, it in found.items():
        print(
            f"{name:12}{it['tokens']:12,}{it['build_tokens_per_s']:14,.0f}{it['open_s']:9.2f}"
            f"{it['load_tokens_per_s']:13,.0f}"
        )


def measure(folder: Path, seq_len: int, rows: int, batches: int) -> dict[str, dict]:
    bpe = folder / "tokenizer"
    train_tokenizer([SOURCE], 8192).save(str(bpe))
    found = {}
    for name, where in (("bytes", "byte"), ("bpe-8192", str(bpe))):
        data = {"sources": SOURCE, "tokenizer": where, "seq_len": seq_len}
        settings = {"model": {"preset": "qwen3-tiny"}, "data": data, "train": {"batch_size": rows}}
        run = RunConfig.model_validate(settings)
        tokenizer, cache = load_tokenizer(where), str(folder / name)
        seconds = []
        for _ in range(2):  # an empty cache, then the same again
            start = time.perf_counter()
            corpus = prepare(run, tokenizer, cache)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for t in range(batches):
            corpus.train.batch(t, rows)
        load = time.perf_counter() - start
        found[name] = {
            "tokens": corpus.tokens,
            "build_tokens_per_s": corpus.tokens / seconds[0],
            "open_s": seconds[1],
            "load_tokens_per_s": batches * rows * seq_len / load,
        }
    return found


def measure_store(folder: Path, latency: float, seq_len: int, rows: int, batches: int) -> dict:
    """The same from a store, without copies: `wait_s` is what a step would have waited for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).parent / "slow_store.py"
    server = subprocess.Popen([sys.executable, script, folder / "bytes", str(port), str(latency)])
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "x"}
    os.environ |= {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    copies.COPY_BYTES = 0
    built = next(path.name for path in (folder / "bytes").glob("tokens-*") if path.is_dir())
    data = {"sources": f"s3://bucket/{built}", "tokenizer": "byte", "seq_len": seq_len}
    settings = {"model": {"preset": "qwen3-tiny"}, "data": data, "train": {"batch_size": rows}}
    run = RunConfig.model_validate(settings)
    time.sleep(1)  # for the server
    try:
        start = time.perf_counter()
        corpus = prepare(run, load_tokenizer("byte"), str(folder / "rows"))
        opened = time.perf_counter() - start
        with Prefetcher(corpus.train, rows, 0, run.data.prefetch) as feed:
            feed.next(0)
            start = time.perf_counter()
            for t in range(1, batches):
                feed.next(t)
            load = time.perf_counter() - start
    finally:
        server.kill()
    rate = (batches - 1) * rows * seq_len / load
    counts = {"tokens": corpus.tokens, "build_tokens_per_s": 0.0}
    return {**counts, "open_s": opened, "load_tokens_per_s": rate}


if __name__ == "__main__":
    main()
