"""Data alone: tokens per second of building (tokenize, write, pack) and of loading batches.

    python benchmarks/data.py [--seq-len 512] [--batch 8] [--json]

The text is the standard library of the Python that runs this. Two tokenizers: bytes, and a
byte-level BPE of 8192 trained on the same text. "build" is everything from text to packed rows in
an empty cache; "open" finds them again; "load" makes shuffled batches one after another in this
thread, as a training step would consume them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from localtrain.config import RunConfig
from localtrain.data.build import train_tokenizer
from localtrain.data.loader import prepare
from localtrain.data.tokenizer import load_tokenizer

SOURCE = "python:stdlib"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("seq-len", 512), ("batch", 8), ("batches", 2000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.seq_len, options.batch, options.batches)
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


if __name__ == "__main__":
    main()
