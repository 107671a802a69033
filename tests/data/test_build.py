"""Building: once, by one process, and never half believed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from localtrain.data.build import build_dataset, cached_dataset, dataset_key, train_tokenizer
from localtrain.data.build_lock import build_lock
from localtrain.data.dataset import Dataset
from localtrain.data.shards import is_dataset, read_index
from localtrain.data.sources import Source
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import DataError, Stopped

# A process that builds slowly: one document every 20 ms, and says when it began.
SLOW = """
import sys, time
from localtrain.data import build, readers
from localtrain.data.sources import Source
from localtrain.data.tokenizer import ByteTokenizer
from localtrain.data.shards import ShardWriter
readers.BATCH_DOCUMENTS = 1
class Slow(ByteTokenizer):
    def encode_documents(self, texts):
        print("began", flush=True)
        time.sleep(0.02)
        return super().encode_documents(texts)
first = build.ShardWriter.__init__
def small(self, *args):
    first(self, *args)
    self.shard_tokens = 40
build.ShardWriter.__init__ = small
folder = build.cached_dataset(Source(sys.argv[1]), Slow(), sys.argv[2])
print("built", folder, flush=True)
"""


def slow_build(source, cache):
    command = [sys.executable, "-c", SLOW, source, cache]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def source(write_jsonl):
    return write_jsonl("a.jsonl", [f"this is document number {n}" for n in range(40)])


@pytest.mark.parametrize("after", [1, 5, 30])
def test_a_killed_build_leaves_nothing_that_is_believed(source, byte, tmp_path, after):
    cache = str(tmp_path / "cache")
    process = slow_build(source, cache)
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = os.listdir(cache)
    assert any(".tmp-" in name for name in left) or after == 1  # killed before its first shard
    assert not any(is_dataset(os.path.join(cache, name)) for name in left)
    folder = cached_dataset(Source(source), byte, cache)
    assert Dataset(folder).index.documents == 40
    assert os.listdir(cache) == [os.path.basename(folder)]


def test_two_processes_build_once(source, tmp_path):
    cache = str(tmp_path / "cache")
    processes = [slow_build(source, cache) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(output.count("began") for output in outputs) == [0, 40]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]


def test_waiting_for_another_builder_ends_at_a_stop(tmp_path):
    path, stop, told = str(tmp_path / "x.lock"), threading.Event(), []
    with build_lock(path, None, None):
        threading.Timer(0.2, stop.set).start()
        begin = time.monotonic()
        with (
            pytest.raises(Stopped),
            build_lock(path, lambda stage, done, total: told.append(stage), stop),
        ):
            pass
        assert time.monotonic() - begin < 5
    assert told == ["waiting for another process that builds the same data"]
    with build_lock(path, None, stop):
        pass


def test_the_lock_is_exclusive_while_its_file_comes_and_goes(tmp_path):
    path, inside, most = str(tmp_path / "x.lock"), [], []

    def work():
        for _ in range(5):
            with build_lock(path, None, None):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert max(most) == 1 and len(most) == 20 and os.listdir(tmp_path) == []


def test_a_stop_while_building_keeps_nothing(source, byte, tmp_path, monkeypatch):
    from localtrain.data import readers

    monkeypatch.setattr(readers, "BATCH_DOCUMENTS", 4)
    stop = threading.Event()
    progress = []

    def report(stage, done, total):
        progress.append((stage, done, total))
        stop.set()

    cache = tmp_path / "cache"
    with pytest.raises(Stopped, match="while building the data"):
        cached_dataset(Source(source), byte, str(cache), progress=report, stop=stop)
    assert os.listdir(cache) == []
    assert progress[0][0] == f"tokenizing {source}" and progress[0][2] == os.path.getsize(source)


def test_a_second_call_reads_nothing_again(source, byte, tmp_path):
    cache = str(tmp_path / "cache")
    folder = cached_dataset(Source(source), byte, cache)
    before = os.stat(os.path.join(folder, "index.json")).st_mtime_ns
    assert cached_dataset(Source(source), byte, cache) == folder
    assert os.stat(os.path.join(folder, "index.json")).st_mtime_ns == before


def test_the_cache_key_follows_file_tokenizer_and_field(source, byte, golden_folder, tmp_path):
    golden = load_tokenizer(str(golden_folder))
    keys = [
        dataset_key([Source(source)], byte),
        dataset_key([Source(source, field="body")], byte),
        dataset_key([Source(source)], golden),
    ]
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    keys.append(dataset_key([Source(source)], byte))
    os.utime(source, ns=(1, 1))
    keys.append(dataset_key([Source(source)], byte))
    assert len({json.dumps(key) for key in keys}) == 5
    assert dataset_key([Source(source, weight=3)], byte) == keys[-1]


def test_a_file_that_changes_while_it_is_read_is_an_error(source, byte, tmp_path, monkeypatch):
    from localtrain.data import readers

    monkeypatch.setattr(readers, "BATCH_DOCUMENTS", 4)

    def grow(stage, done, total):
        with open(source, "a") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was being read"):
        cached_dataset(Source(source), byte, str(tmp_path / "cache"), progress=grow)


def test_bad_rows_are_an_error_even_when_the_data_were_built_before(byte, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": ""}\n')
    cache = str(tmp_path / "cache")
    folder = cached_dataset(Source(str(path)), byte, cache, "skip")
    assert read_index(folder).skipped == {"empty": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:2: the text is empty"):
        cached_dataset(Source(str(path)), byte, cache, "error")


def test_nothing_usable_says_why_and_where(byte, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "one"}\n{"content": "two"}\n')
    with pytest.raises(DataError) as caught:
        cached_dataset(Source(str(path)), byte, str(tmp_path / "cache"))
    message = str(caught.value)
    assert "not one usable document: 2 x missing_field" in message
    assert f"first at {path}:1 (field 'text'; it has content)" in message
    assert "Set the `field` of the source" in message
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"1 x bad_utf8.*Convert the files to UTF-8") as caught:
        cached_dataset(Source(str(path)), byte, str(tmp_path / "cache"))
    assert "field" not in str(caught.value)
    path.write_text("")
    with pytest.raises(DataError, match="there is no text in it"):
        cached_dataset(Source(str(path)), byte, str(tmp_path / "cache"))


@pytest.mark.parametrize("where", ["local", "memory"])
def test_data_build_writes_once_and_refuses_another_dataset(source, byte, tmp_path, where):
    import fsspec

    fsspec.filesystem("memory").store.clear()
    out = str(tmp_path / "out") if where == "local" else "memory://bucket/out"
    if where == "local":
        os.mkdir(out)  # an empty folder is fine
    index = build_dataset([source], byte, out)
    assert build_dataset([source], byte, out) == index
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(DataError, match="already holds another dataset"):
        build_dataset([source], byte, out)


def test_data_build_does_not_touch_a_folder_of_something_else(source, byte, tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="is not a dataset"):
        build_dataset([source], byte, str(out))
    assert os.listdir(out) == ["thesis.tex"]


def test_building_twice_gives_the_same_bytes(source, byte, tmp_path):
    a, b = (build_dataset(source, byte, str(tmp_path / name)) for name in "ab")
    assert a.hash == b.hash and a.shards == b.shards and a.files == b.files


def test_a_long_text_file_begins_and_ends_once(byte, tmp_path, monkeypatch):
    from localtrain.data import readers

    monkeypatch.setattr(readers, "SECTION_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    folder = cached_dataset(Source(str(path)), byte, str(tmp_path / "cache"))
    dataset = Dataset(folder)
    assert dataset.index.documents > 5
    tokens = dataset.read(dataset.starts, dataset.lengths.astype("int64"))
    assert [i for i, token in enumerate(tokens) if token == byte.eos_id] == [0, len(tokens) - 1]
    assert byte.decode(tokens[1:-1]) == path.read_text()


def test_synthetic_data_are_the_same_every_time_and_misspelt_options_are_named(byte, tmp_path):
    from localtrain.errors import ConfigError

    first = cached_dataset(Source("synthetic:documents=20,length=30"), byte, str(tmp_path / "a"))
    again = cached_dataset(Source("synthetic:documents=20,length=30"), byte, str(tmp_path / "b"))
    assert read_index(first).hash == read_index(again).hash
    assert read_index(first).documents == 20
    assert len(set(Dataset(first).hashes.tolist())) == 20
    with pytest.raises(ConfigError, match="did you mean length"):
        cached_dataset(Source("synthetic:lenght=3"), byte, str(tmp_path / "c"))


def test_a_trained_tokenizer_is_deterministic_and_encodes_anything(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat, the dog ran to the door. 1234567\n" * 50)
    one = train_tokenizer(str(path), 300, str(tmp_path / "tok"))
    two = train_tokenizer(str(path), 300)
    assert one.hash == two.hash and 259 < one.size <= 300
    loaded = load_tokenizer(str(tmp_path / "tok"))
    assert loaded.hash == one.hash and loaded.eos_id == 0 and loaded.bos_id is None
    for text in ("the cat", "\U0001f642 \x00\xff \u4f60", "  a  "):
        assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded.encode("the cat")) < 7
    assert loaded.encode_document("the")[-1] == 0


def test_a_tokenizer_needs_room_for_the_bytes_and_some_text(tmp_path):
    from localtrain.errors import ConfigError

    path = tmp_path / "a.txt"
    path.write_text("")
    with pytest.raises(ConfigError, match="at least 259 ids"):
        train_tokenizer(str(path), 100)
    with pytest.raises(DataError, match="no usable document"):
        train_tokenizer(str(path), 300)
