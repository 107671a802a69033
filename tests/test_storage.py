"""Storage: local without fsspec, URLs through it, writes that are whole or absent."""

import errno
import os
import subprocess
import sys

import pytest

from localtrain import storage
from localtrain.errors import StorageError


def test_a_drive_letter_and_file_scheme_are_local_and_the_rest_are_urls():
    for path in ("a/b", "/a", "C:\\x\\y", "C:/x", "file:///a/b", "python:stdlib"):
        assert not storage.is_url(path)
    for path in ("gs://b/x", "memory://x", "simplecache::s3://b/x", "hf://datasets/a/b"):
        assert storage.is_url(path)
    assert storage.local_path("file:///a/b") == "/a/b"


def test_local_work_imports_neither_fsspec_nor_jax(tmp_path):
    code = (
        "import sys; from localtrain import storage as s; p = sys.argv[1]\n"
        "s.write_atomic(s.join(p, 'd', 'f'), b'x'); s.read_bytes(s.join(p, 'd', 'f'))\n"
        "s.list_files(s.join(p, '**', '*')); s.info(s.join(p, 'd', 'f')); s.list_dir(p)\n"
        "import localtrain.data.loader\n"
        "assert not {'fsspec', 'jax', 'pyarrow', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.fixture(params=["local", "memory"])
def top(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path / "top")
        return
    import fsspec

    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/top"
    fsspec.filesystem("memory").store.clear()


def test_write_read_list_and_remove_are_the_same_here_and_behind_a_url(top):
    storage.make_dirs(top)
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/d.bin"):
        storage.write_atomic(storage.join(top, *name.split("/")), name.encode())
    path = storage.join(top, "sub", "c.txt")
    assert storage.exists(path) and not storage.exists(path + "x")
    assert storage.is_dir(storage.join(top, "sub")) and not storage.is_dir(path)
    assert storage.read_bytes(path) == b"sub/c.txt"
    assert storage.read_range(path, 4, 7) == b"c.t"
    assert storage.read_range(path, 4, 700) == b"c.txt"
    assert storage.read_ranges(path, [(0, 3), (4, 5)]) == [b"sub", b"c"]
    assert storage.info(path).size == 9
    assert storage.list_dir(top) == ["a.txt", "b.txt", "sub"]
    assert storage.list_dir(storage.join(top, "none")) == []

    def names(pattern):
        return [i.path[len(top) + 1 :].replace(os.sep, "/") for i in storage.list_files(pattern)]

    assert names(storage.join(top, "*.txt")) == ["a.txt", "b.txt"]
    assert names(storage.join(top, "**", "*.txt")) == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(top) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.bin"]
    assert names(path) == ["sub/c.txt"]
    assert all(storage.read_bytes(i.path) for i in storage.list_files(top))
    storage.remove_tree(path)
    assert not storage.exists(path)
    storage.remove_tree(storage.join(top, "sub"))
    storage.remove_tree(storage.join(top, "sub"))
    assert storage.list_dir(top) == ["a.txt", "b.txt"]
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(path)
    with pytest.raises(FileNotFoundError):
        storage.info(path)


def test_names_and_parents_of_paths_and_urls():
    assert storage.name_of("gs://b/x/y.json") == "y.json"
    assert storage.parent_of("gs://b/x/y.json") == "gs://b/x"
    assert storage.join("gs://b/x/", "y") == "gs://b/x/y"
    assert storage.parent_of("y.json") == "."


def test_a_file_whose_name_holds_glob_characters_is_found(tmp_path):
    path = tmp_path / "data [1].txt"
    path.write_text("x")
    assert [i.path for i in storage.list_files(str(path))] == [str(path)]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "f"
    storage.write_atomic(str(path), b"old")

    def pieces():
        yield b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="the disk is full: could not write"):
        storage.write_atomic(str(path), pieces())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_write_below_a_file_is_a_storage_error_that_names_the_path(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(StorageError, match=r"could not write .*f[/\\]g"):
        storage.write_atomic(str(tmp_path / "f" / "g"), b"x")


def test_a_missing_client_names_the_extra_and_an_unknown_protocol_is_named(monkeypatch):
    import fsspec

    def missing(protocol):
        raise ImportError("Please install gcsfs")

    with pytest.raises(StorageError, match="unknown protocol nosuch://"):
        storage.exists("nosuch://x/y")
    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StorageError, match=r"pip install 'localtrain\[gcs\]'"):
        storage.exists("gs://b/x")


def test_a_failing_client_is_a_storage_error_that_names_the_url(monkeypatch):
    import fsspec

    def refuse(*_, **__):
        raise RuntimeError("429 too many requests")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", refuse)
    with pytest.raises(StorageError, match=r"could not read memory://a/b: 429"):
        storage.read_bytes("memory://a/b")


def test_the_stamp_changes_with_the_content(tmp_path):
    path = tmp_path / "f"
    path.write_text("a")
    before = storage.info(str(path))
    path.write_text("b")
    os.utime(path, ns=(1, 1))
    assert storage.info(str(path)) != before
