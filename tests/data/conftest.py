"""Fixtures for the data tests: run settings, small corpora, the golden tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest

from localtrain.config import RunConfig
from localtrain.data.loader import prepare
from localtrain.data.tokenizer import load_tokenizer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden_folder():
    """The shared golden tokenizer where there is one, else the copy in this checkout."""
    shared = HERE.parents[2] / "shared" / "golden" / "tokenizer"
    return shared if shared.is_dir() else HERE / "tokenizer"


@pytest.fixture(scope="session")
def golden(golden_folder):
    return json.loads((golden_folder / "golden_tokenizer.json").read_text())


@pytest.fixture(scope="session")
def byte():
    return load_tokenizer("byte")


@pytest.fixture
def make_run():
    """make_run(sources, batch_size=2, seq_len=16, ...) -> RunConfig."""

    def make(sources, batch_size=2, seed=0, **data):
        data = {"seq_len": 16, "eval_fraction": 0.0, **data, "sources": sources}
        return RunConfig(
            name="t",
            seed=seed,
            model={"preset": "qwen3-tiny"},
            data=data,
            train={"batch_size": batch_size},
        )

    return make


@pytest.fixture
def corpus_of(make_run, byte, tmp_path):
    """corpus_of(sources, ...) -> Corpus, with a cache below tmp_path."""

    def make(sources, tokenizer=byte, **settings):
        return prepare(make_run(sources, **settings), tokenizer, str(tmp_path / "cache"))

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    """write_jsonl(name, texts) -> path of a jsonl file."""

    def write(name, texts):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    return write


@pytest.fixture
def documents_of():
    """documents_of(batch) -> the token lists of all segments, last label included."""

    def split(batch):
        found = []
        for row in range(len(batch["tokens"])):
            segments = batch["segments"][row]
            for number in range(1, int(segments.max()) + 1):
                at = np.flatnonzero(segments == number)
                tokens = batch["tokens"][row][at].tolist()
                found.append([*tokens, int(batch["labels"][row][at[-1]])])
        return found

    return split
