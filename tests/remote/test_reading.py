"""Training from token shards behind a URL that are not copied: requests overlap, none is wasted."""

import uuid

import numpy as np
import pytest

from localtrain import storage
from localtrain.config import RunConfig
from localtrain.data import copies
from localtrain.data.loader import Prefetcher, prepare
from localtrain.data.shards import ShardWriter
from localtrain.data.tokenizer import load_tokenizer
from localtrain.storage import remote

ROWS, LENGTH, SHARDS = 4, 64, 5


@pytest.fixture
def corpus(s3, tmp_path, monkeypatch):
    """Five shards of long documents at s3://, to be read by ranges."""
    monkeypatch.setattr(copies, "COPY_BYTES", 0)
    monkeypatch.setattr(remote, "GAP", 0)  # the shards are small
    url, tokenizer = f"{s3.url}/{uuid.uuid4().hex}", load_tokenizer("byte")
    writer = ShardWriter(url, 2, shard_tokens=3000)
    for n in range(SHARDS * 10):
        writer.add(np.full(300, n % 256), n)
    assert len(writer.finish(tokenizer.hash).shards) == SHARDS
    data = {"sources": url, "seq_len": LENGTH, "eval_fraction": 0.0, "packing": "none"}
    run = {"model": {"preset": "qwen3-tiny"}, "data": data, "train": {"batch_size": ROWS}}
    return prepare(RunConfig.model_validate(run), tokenizer, str(tmp_path / "cache"))


def test_batches_are_read_ahead_with_one_request_a_row_and_many_at_once(s3, corpus):
    expected = [corpus.train.batch(t, ROWS) for t in range(20)]
    s3.proxy.clear()
    s3.proxy.rule(("delay", 0.05), "GET", r"\.tokens", times=10**6)
    with Prefetcher(corpus.train, ROWS, 0, 2) as feed:
        for t, batch in enumerate(expected):
            for name, array in feed.next(t)[0].items():
                np.testing.assert_array_equal(array, batch[name])
    asked = [path for method, path in s3.proxy.requests if method == "GET"]
    assert len(asked) == len(s3.proxy.requests)  # nothing but the tokens
    most_ahead = 8 + 2 + 1  # batches in the making, ready, and in hand
    assert len(asked) <= (len(expected) + most_ahead) * ROWS
    assert s3.proxy.most > 2 * ROWS  # several batches at once, each of all its shards at once


def test_ranges_that_lie_close_together_are_one_request(s3):
    urls = [f"{s3.url}/{uuid.uuid4().hex}/{n}" for n in range(2)]
    data = np.random.default_rng(0).bytes(300_000)
    for url in urls:
        storage.write_atomic(url, data)
    s3.proxy.clear()
    rng = np.random.default_rng(1)
    pieces = [(urls[i % 2], int(at), int(at) + 40) for i, at in enumerate(rng.integers(0, 9e4, 60))]
    pieces += [(urls[0], 299_000, 300_000), (urls[0], 5, 5)]
    assert storage.read_many(pieces) == [data[start:end] for _, start, end in pieces]
    assert len([1 for method, _ in s3.proxy.requests if method == "GET"]) == 3
    assert storage.read_many([]) == []
