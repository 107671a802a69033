"""Sources: which files, which documents, and what becomes of rows that are none."""

import gzip
import json
import os

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localtrain.config import RunConfig
from localtrain.data import readers, tally
from localtrain.data.build import build_dataset
from localtrain.data.compressed import checksum
from localtrain.data.readers import FileReader
from localtrain.data.sources import Source, as_source, as_sources, find_files
from localtrain.data.tally import Tally
from localtrain.errors import ConfigError, DataError


def read(path, field="text", format=None, error=False):
    """(texts, origins, tally) of a source."""
    rows = Tally(error)
    documents = []
    for file in find_files(Source(str(path), field=field, format=format))[0]:
        documents += list(FileReader(file, field, rows))
    return [d.text for d in documents], [d.origin for d in documents], rows


BAD_ROWS = [
    (b'{"text": ""}', "empty"),
    (b'{"text": "   \\n\\t"}', "blank"),
    (b'{"text": "\\u2028\\u00a0"}', "blank"),
    (b'{"text": null}', "null"),
    (b'{"other": "x"}', "missing_field"),
    (b"{}", "missing_field"),
    (b'{"text": 5}', "not_text"),
    (b'{"text": ["a"]}', "not_text"),
    (b'["text"]', "not_an_object"),
    (b'"text"', "not_an_object"),
    (b"null", "not_an_object"),
    (b'{"text": "a"', "bad_json"),
    (b"nonsense", "bad_json"),
    (b"[" * 100_000, "bad_json"),
    (b'{"text": ' + b"9" * 5000 + b"}", "bad_json"),
    (b'{"text": "\xff"}', "bad_utf8"),
    (b'{"text": "\\ud83d"}', "bad_unicode"),
    (b"", "empty"),
    (b'{"text": "' + b"x" * (20 << 20) + b'"}', "huge"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=lambda v: str(v)[:24])
def test_a_bad_row_is_counted_or_named_with_its_line(tmp_path, row, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + row + b'\n{"text": "two"}\n')
    texts, origins, rows = read(path)
    assert texts == ["one", "two"] and origins == [f"{path}:1", f"{path}:3"]
    assert rows.skipped == {reason: 1} and rows.first[reason].startswith(f"{path}:2")
    with pytest.raises(DataError) as caught:
        read(path, error=True)
    assert str(caught.value).startswith(f"{path}:2: {tally.REASONS[reason]}")


def test_a_huge_last_line_without_an_end_is_counted_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "' + b"x" * (17 << 20))
    texts, _, rows = read(path)
    assert texts == ["one"] and rows.skipped == {"huge": 1}


def test_rows_end_at_newlines_only(tmp_path):
    inside = "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg"
    path = tmp_path / "a.jsonl"
    rows = [{"text": inside}, {"text": "two\r\nlines"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    texts, origins, skipped = read(path)
    assert texts == [inside, "two\r\nlines"] and origins[1].endswith(":2")
    assert not skipped.skipped


def test_crlf_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n{"text": "three"}')
    texts, _, rows = read(path, error=True)
    assert texts == ["one", "two", "three"] and rows.notes == {"byte_order_marks": 1}
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    texts, _, rows = read(path, error=True)
    assert texts == ["one\ntwo\rthree\n"]
    assert rows.notes == {"byte_order_marks": 1, "crlf_files": 1}


def test_a_file_of_text_markdown_or_code_is_one_document(tmp_path):
    for name, text in (("a.txt", "one"), ("b.md", "# two"), ("c.py", "x = 3\n"), ("d.zig", "4")):
        (tmp_path / name).write_text(text)
    texts, origins, _ = read(tmp_path / "*")
    assert texts == ["one", "# two", "x = 3\n", "4"]
    assert origins[0] == f"{tmp_path / 'a.txt'}:1"


def test_a_folder_is_searched_for_known_endings_and_the_others_are_reported(tmp_path):
    for name in ("a.txt", "b.bin", ".hidden.txt", "sub/c.md", ".git/d.txt", "e.zip"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    files, passed = find_files(Source(str(tmp_path)))
    assert [os.path.relpath(file.path, tmp_path) for file in files] == [
        "a.txt",
        os.path.join("sub", "c.md"),
    ]
    assert len(passed) == 4


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
def test_a_link_to_nowhere_and_a_pipe_are_passed_over_and_named(tmp_path, caplog):
    os.symlink("nowhere", tmp_path / "b.txt")
    os.mkfifo(tmp_path / "c.txt")
    for pattern in (tmp_path, tmp_path / "*", tmp_path / "b.txt"):
        with pytest.raises(DataError, match=r"b\.txt, a link to nowhere, which does not exist"):
            find_files(Source(str(pattern)))
    with pytest.raises(DataError, match=r"c\.txt, a pipe"):
        find_files(Source(str(tmp_path / "c.txt")))
    (tmp_path / "a.txt").write_text("text")
    for pattern in (tmp_path, tmp_path / "*"):
        caplog.clear()
        rows, files = Tally(), []
        batches = list(readers.read_batches(Source(str(pattern)), rows, files, None))
        assert [document.text for batch in batches for document in batch] == ["text"]
        assert rows.notes == {"files_passed_over": 2}
        assert "b.txt, a link to nowhere" in caplog.text


def test_bad_text_files_are_counted_or_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n \n")
    (tmp_path / "c.txt").write_bytes(b"fine\nbut \xff not here")
    (tmp_path / "d.txt").write_text("good")
    texts, _, rows = read(tmp_path / "*.txt")
    assert texts == ["good"] and rows.skipped == {"empty": 1, "blank": 1, "bad_utf8": 1}
    assert rows.first["bad_utf8"].startswith(f"{tmp_path / 'c.txt'}:2")
    with pytest.raises(DataError, match=r"c\.txt:2: not valid UTF-8 \(byte 0xff\)"):
        read(tmp_path / "c.txt", error=True)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(st.text(max_size=12), min_size=1, max_size=40), size=st.integers(4, 40))
def test_a_long_file_is_read_in_sections_that_lose_nothing(tmp_path, monkeypatch, lines, size):
    text = "\n".join(line.replace("\r", "") for line in lines)
    monkeypatch.setattr(readers, "SECTION_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    rows = Tally()
    file = find_files(Source(str(path)))[0][0]
    documents = list(FileReader(file, "text", rows))
    joined = "".join(document.text for document in documents)
    kept = text.removeprefix("\ufeff")
    assert "bad_utf8" not in rows.skipped
    if not rows.skipped:
        assert joined == kept
    assert [d.begins for d in documents] == [i == 0 for i in range(len(documents))]
    assert [d.ends for d in documents] == [i == len(documents) - 1 for i in range(len(documents))]
    for document in documents:
        line = int(document.origin.rsplit(":", 1)[1])
        assert kept.split("\n")[line - 1 :][0].find(document.text.split("\n")[0]) >= 0


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_files_are_read_and_damage_is_named(tmp_path, ending, name):
    body = b'{"text": "one"}\n' * 2000
    if ending == "gz":
        packed = gzip.compress(body) + gzip.compress(body)
    else:
        packed = zstandard.compress(body) + zstandard.compress(body)
    path = tmp_path / f"{name}.{ending}"
    path.write_bytes(packed)
    texts, _, _ = read(path, error=True)
    assert len(texts) == (4000 if name == "a.jsonl" else 1)
    assert "".join(texts).count("one") == 4000
    for damaged in (packed[: len(packed) // 2 - 3], b"not compressed at all"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name}\.{ending}: the \w+ data are damaged"):
            read(path)


def test_parquet_rows_are_documents_with_row_numbers(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    bad = b"\xff\xfe"
    column = pa.array([b"one", None, b"", b"  ", bad, b"two"]).cast(pa.binary())
    string = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"body": string, "n": range(6)}), path)
    texts, origins, rows = read(path, field="body")
    assert texts == ["one", "two"] and origins == [f"{path}:1", f"{path}:6"]
    assert rows.skipped == {"null": 1, "empty": 1, "blank": 1, "bad_utf8": 1}
    with pytest.raises(DataError, match=r"a\.parquet:2: the text is null"):
        read(path, field="body", error=True)
    assert read(path, field="n")[2].skipped == {"not_text": 6}
    assert read(path, field="nope")[2].skipped == {"missing_field": 6}
    pq.write_table(pa.table({"t": pa.array(["x", "y", "x"]).dictionary_encode()}), path)
    assert read(path, field="t")[0] == ["x", "y", "x"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: damaged or not a parquet file"):
        read(path, field="t")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install 'localtrain\[data\]'"):
        read(tmp_path / "a.parquet")


def test_a_json_file_is_rows_when_it_holds_rows(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(path)[0] == ["one", "two"]
    path.write_text('{\n "text": "one"\n}\n')
    assert read(path)[0] == ['{\n "text": "one"\n}\n']
    path.write_text('[{"text": "one"}]')
    with pytest.raises(DataError, match=r"a\.json: one JSON array .* one object per line"):
        read(path)


def test_nothing_that_could_unpack_or_run_code_is_read(tmp_path):
    for name in ("a.zip", "a.tar", "a.tar.gz", "a.tgz"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match="archives are not read"):
            find_files(Source(str(tmp_path / name)))


def test_no_module_of_the_data_package_can_read_a_pickle():
    from pathlib import Path

    for path in (Path(readers.__file__).parent).glob("*.py"):
        text = path.read_text()
        assert "pickle" not in text and "np.load" not in text and "eval(" not in text, path


def test_a_pattern_that_matches_nothing_is_named(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    for pattern in (f"{tmp_path}/*.jsonl", f"{tmp_path}/**/*.md", "memory://nowhere/*.txt"):
        with pytest.raises(DataError) as caught:
            find_files(Source(pattern))
        assert str(caught.value).startswith(f"source {pattern}: no file matches")
    with pytest.raises(DataError, match=r"Did you mean .*corpus\.txt\?"):
        find_files(Source(str(tmp_path / "korpus.txt")))
    with pytest.raises(DataError, match="There is no folder"):
        find_files(Source(str(tmp_path / "none" / "korpus.txt")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder holds no file"):
        find_files(Source(str(tmp_path / "empty")))


def test_the_standard_library_is_the_same_list_every_time():
    files, _ = find_files(Source("python:stdlib"))
    names = [file.name for file in files]
    assert names == sorted(names) and len(names) > 300
    assert "stdlib/abc.py" in names and "stdlib/json/decoder.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "site-packages", "__pycache__"}
    assert files == find_files(Source("python:stdlib"))[0]


def test_urls_are_sources_like_files():
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/data/a.jsonl", b'{"text": "one"}\n{"text": ""}\n')
    memory.pipe_file("/data/b.jsonl.gz", gzip.compress(b'{"text": "two"}\n'))
    texts, origins, rows = read("memory://data/*")
    assert texts == ["one", "two"] and origins[0] == "memory://data/a.jsonl:1"
    assert rows.skipped == {"empty": 1}
    assert read("memory://data")[0] == ["one", "two"]
    memory.store.clear()


def test_the_reader_knows_size_and_checksum_of_what_it_read(tmp_path):
    for name, body in (("a.txt", b"x" * 3_000_000), ("a.jsonl.gz", gzip.compress(b"{}\n" * 9))):
        path = tmp_path / name
        path.write_bytes(body)
        file = find_files(Source(str(path)))[0][0]
        reader = FileReader(file, "text", Tally())
        list(reader)
        assert (reader.crc32c, reader.size) == checksum(str(path)) and reader.size == len(body)


def test_sources_are_taken_as_text_mapping_or_config_entry():
    run = RunConfig(
        name="t",
        model={"preset": "qwen3-tiny"},
        data={"sources": ["a.txt", {"path": "b.jsonl", "weight": 2, "field": "body"}]},
    )
    assert as_sources(run.data.sources) == [
        Source("a.txt", 1.0),
        Source("b.jsonl", 2.0, "body"),
    ]
    assert as_sources("a.txt") == [Source("a.txt")]
    assert as_source({"path": "x", "format": "jsonl"}) == Source("x", None, "text", "jsonl")
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        as_source({"path": "x", "format": "json"})
    with pytest.raises(ConfigError, match="must be above 0"):
        as_source({"path": "x", "weight": 0})


def test_a_file_that_two_sources_name_counts_twice_and_is_told(tmp_path, byte, corpus_of, caplog):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text of {name} " * 90)
    sources = [str(tmp_path / "*.txt"), str(tmp_path / "b.txt")]
    corpus = corpus_of(sources)
    assert any("b.txt is named by more than one source" in line for line in corpus.report())
    assert build_dataset(sources, byte, str(tmp_path / "out")).documents == 4
    assert "b.txt is named by more than one source" in caplog.text
    caplog.clear()
    build_dataset(sources[:1], byte, str(tmp_path / "once"))
    assert "more than one source" not in caplog.text
    assert len(corpus_of(sources[:1]).notes) < len(corpus.notes)
