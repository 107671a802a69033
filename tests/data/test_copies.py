"""Token shards behind a URL: copied where they fit, by ranges where not, damage named."""

import threading
import time
import uuid

import numpy as np
import pytest

from localtrain import storage
from localtrain.data import copies
from localtrain.data.build import build_dataset
from localtrain.data.dataset import Dataset
from localtrain.data.shards import ShardWriter
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url():
    """A dataset of three shards: document i holds i + 1 times the token i."""
    url = f"memory://{uuid.uuid4().hex}"
    writer = ShardWriter(url, 2, shard_tokens=300)
    for i in range(40):
        writer.add(np.full(i + 1, i), i)
    assert len(writer.finish("x").shards) == 3
    return url


def tokens(dataset):
    starts, lengths = dataset.starts, dataset.lengths.astype(np.int64)
    return dataset.read(starts, lengths).tolist()


EXPECTED = [i for i in range(40) for _ in range(i + 1)]


def test_a_small_dataset_is_copied_when_it_is_opened_and_needs_the_store_no_more(url):
    dataset = Dataset(url)
    storage.remove_tree(url)
    assert tokens(dataset) == EXPECTED


def test_a_large_one_is_read_by_ranges_until_its_copies_are_there(url, monkeypatch):
    monkeypatch.setattr(copies, "AT_ONCE_BYTES", 0)
    go, download = threading.Event(), storage.download_all
    monkeypatch.setattr(storage, "download_all", lambda files: (go.wait(20), download(files)))
    dataset = Dataset(url)
    assert tokens(dataset) == EXPECTED
    go.set()
    end = time.monotonic() + 20
    while dataset._copies.find(2) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    storage.remove_tree(url)
    assert tokens(dataset) == EXPECTED


@pytest.mark.parametrize("limit", ["COPY_BYTES", "DISK_SHARE"])
def test_one_that_does_not_fit_is_read_by_ranges(url, monkeypatch, tmp_path, limit):
    monkeypatch.setattr(copies, limit, 0)
    dataset = Dataset(url)
    assert tokens(dataset) == EXPECTED
    assert not list((tmp_path / "cache").rglob("*.tokens"))


def test_the_copies_go_with_the_dataset(url, tmp_path):
    dataset = Dataset(url)
    assert len(list((tmp_path / "cache").rglob("*.tokens"))) == 3
    del dataset
    assert not list((tmp_path / "cache").rglob("*.tokens"))


def test_a_flipped_bit_in_a_remote_shard_is_named(url):
    path = f"{url}/shard-00001.tokens"
    data = bytearray(storage.read_bytes(path))
    data[-3] ^= 4
    storage.write_atomic(path, bytes(data))
    with pytest.raises(DataError, match=r"memory://.*shard-00001\.tokens: damaged"):
        Dataset(url)


def test_remote_globs_are_built_into_a_remote_cache_and_found_again(monkeypatch):
    top = f"memory://{uuid.uuid4().hex}"
    for i in range(3):
        storage.write_atomic(f"{top}/in/{i}.jsonl", b'{"text": "a row of words"}\n' * 5)
    out = f"{top}/out"
    first = build_dataset(f"{top}/in/*.jsonl", load_tokenizer("byte"), out)
    assert first.documents == 15
    assert [name for name, _, _ in first.files] == [f"{top}/in/{i}.jsonl" for i in range(3)]
    again = build_dataset(f"{top}/in/*.jsonl", load_tokenizer("byte"), out)
    assert again.hash == first.hash
    assert Dataset(out).lengths.tolist() == [len(b"a row of words") + 2] * 15
