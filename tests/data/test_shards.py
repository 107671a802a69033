"""Shards: what is written is what is read, and damage is named."""

import json
import os
import threading

import numpy as np
import pytest

from localtrain import storage
from localtrain.data.build import build_dataset
from localtrain.data.dataset import Dataset
from localtrain.data.shards import HEADER, INDEX, ShardWriter, is_dataset, read_index
from localtrain.errors import DataError


def write(folder, documents, token_bytes=2, shard_tokens=50):
    writer = ShardWriter(folder, token_bytes, shard_tokens)
    for number, tokens in enumerate(documents):
        writer.add(np.array(tokens, np.int32), number)
    return writer.finish("hash")


@pytest.fixture
def documents():
    random = np.random.default_rng(0)
    return [random.integers(0, 60_000, n).tolist() for n in (3, 40, 1, 100, 7, 7, 49, 2)]


@pytest.mark.parametrize("token_bytes", [2, 4])
@pytest.mark.parametrize("where", ["local", "memory"])
def test_documents_come_back_by_ranges(tmp_path, documents, token_bytes, where):
    folder = str(tmp_path / "d") if where == "local" else "memory://shards/d"
    if token_bytes == 4:
        documents[1][5] = 200_000
    index = write(folder, documents, token_bytes)
    assert len(index.shards) > 2 and index.documents == 8
    dataset = Dataset(folder)
    assert dataset.index == index and dataset.index.hash == index.hash
    assert dataset.lengths.tolist() == [len(d) for d in documents]
    assert dataset.hashes.tolist() == list(range(8))
    order = np.array([5, 0, 7, 3, 1])
    tokens = dataset.read(dataset.starts[order], dataset.lengths[order].astype(np.int64))
    assert tokens.tolist() == [token for i in order for token in documents[i]]
    inside = dataset.read(dataset.starts[3:4] + 10, np.array([5]))
    assert inside.tolist() == documents[3][10:15]
    assert dataset.read(np.zeros(0, np.int64), np.zeros(0, np.int64)).size == 0
    storage.remove_tree(folder)


def test_threads_do_not_corrupt_each_others_records(tmp_path, documents):
    write(str(tmp_path / "d"), documents * 20)
    dataset = Dataset(str(tmp_path / "d"))
    dataset.MAX_OPEN = 2  # so that handles are closed while others read
    wrong = []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(200):
            order = random.integers(0, 160, 4)
            tokens = dataset.read(dataset.starts[order], dataset.lengths[order].astype(np.int64))
            if tokens.tolist() != [token for i in order for token in documents[i % 8]]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_folder_without_an_index_is_not_believed(tmp_path):
    writer = ShardWriter(str(tmp_path), 2, 10)
    writer.add(np.arange(20), 0)
    assert os.listdir(tmp_path) and not is_dataset(str(tmp_path))
    with pytest.raises(DataError, match="this is not a finished token dataset"):
        Dataset(str(tmp_path))


def test_a_damaged_shard_is_a_data_error_that_names_the_file(tmp_path, documents):
    folder = tmp_path / "d"
    write(str(folder), documents)
    shard = folder / "shard-00001.tokens"
    good = shard.read_bytes()
    random = np.random.default_rng(1)
    for _ in range(60):
        bad = bytearray(good)
        kind = random.integers(4)
        if kind == 0:
            bad[random.integers(len(bad))] ^= 1 << random.integers(8)
        elif kind == 1:
            del bad[random.integers(len(bad)) :]
        elif kind == 2:
            bad += b"x"
        else:
            bad[: HEADER.size] = random.bytes(HEADER.size)
        shard.write_bytes(bad)
        with pytest.raises(DataError, match=r"shard-00001\.tokens: .*start the command again"):
            Dataset(str(folder))
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.tokens: missing"):
        Dataset(str(folder))
    shard.write_bytes(good)
    Dataset(str(folder))


def test_a_shard_that_is_cut_while_in_use_is_named(tmp_path, documents):
    folder = tmp_path / "d"
    write(str(folder), documents)
    dataset = Dataset(str(folder))
    shard = folder / "shard-00001.tokens"
    os.truncate(shard, shard.stat().st_size - 20)
    with pytest.raises(DataError, match=r"shard-00001\.tokens: cut short while in use"):
        dataset.read(dataset.starts, dataset.lengths.astype(np.int64))


def test_without_the_checksum_the_tables_are_still_checked(tmp_path, documents, monkeypatch):
    """Datasets above VERIFY_BYTES: header, sizes and lengths must hold."""
    from localtrain.data import dataset

    monkeypatch.setattr(dataset, "VERIFY_BYTES", 0)
    folder = tmp_path / "d"
    write(str(folder), documents)
    shard = folder / "shard-00001.tokens"
    good = shard.read_bytes()
    for at in (0, 8, 12, 16, 24, HEADER.size):
        bad = bytearray(good)
        bad[at] ^= 1
        shard.write_bytes(bad)
        with pytest.raises(DataError, match=r"shard-00001\.tokens"):
            Dataset(str(folder))


def mutations():
    """Index files that are wrong in some way."""
    yield b""
    yield b"{"
    yield b"\xff\xfe"
    yield b"[" * 100_000
    for value in (None, 5, [], "x", {}):
        yield json.dumps(value).encode()


def test_a_damaged_index_is_a_data_error_that_names_the_file(tmp_path, documents):
    folder = tmp_path / "d"
    write(str(folder), documents)
    index = folder / INDEX
    good = json.loads(index.read_text())
    for bad in mutations():
        index.write_bytes(bad)
        with pytest.raises(DataError, match=r"index\.json"):
            read_index(str(folder))
    wrong_values = [None, -1, "x", 1.5, [], {}, True, 2**70, "../shard", "/etc/passwd"]
    for key in ("shards", "token_bytes", "tokenizer", "version"):
        for value in wrong_values:
            if (key == "tokenizer" and isinstance(value, str)) or (key, value) == ("shards", []):
                continue
            index.write_text(json.dumps({**good, key: value}))
            with pytest.raises(DataError, match=r"index\.json"):
                read_index(str(folder))
    for key in good["shards"][0]:
        for value in wrong_values:
            shards = [{**good["shards"][0], key: value}, *good["shards"][1:]]
            index.write_text(json.dumps({**good, "shards": shards}))
            with pytest.raises(DataError):
                Dataset(str(folder))
    index.write_text(json.dumps({**good, "version": 99}))
    with pytest.raises(DataError, match=r"format version 99; this program reads version 1"):
        read_index(str(folder))


def test_a_built_dataset_is_a_source_of_its_own(tmp_path, byte, corpus_of, write_jsonl):
    path = write_jsonl("a.jsonl", [f"document {n}" for n in range(20)])
    out = str(tmp_path / "built")
    index = build_dataset(path, byte, out)
    assert index.documents == 20
    direct, through = corpus_of(path), corpus_of(out)
    for t in range(3):
        for name, array in direct.train.batch(t, 2).items():
            assert np.array_equal(array, through.train.batch(t, 2)[name])


def test_shards_of_another_tokenizer_are_refused(tmp_path, byte, corpus_of, write_jsonl):
    path = write_jsonl("a.jsonl", ["one two three"] * 9)
    out = str(tmp_path / "built")
    build_dataset(path, byte, out)
    index = json.loads((tmp_path / "built" / INDEX).read_text())
    del index["checksum"]  # as in files of older versions
    (tmp_path / "built" / INDEX).write_text(json.dumps({**index, "tokenizer": "other"}))
    with pytest.raises(DataError, match="made with another tokenizer"):
        corpus_of(out)
