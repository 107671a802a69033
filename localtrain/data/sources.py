"""Where text comes from: files, globs and URLs, the standard library, random tokens.

A source names files; `find_files` turns it into a sorted list with sizes and stamps, `readers.py`
turns each file into documents. Archives (.zip, .tar) are refused: nothing is ever unpacked here,
so nothing can escape a folder; no format that is read can carry code.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localtrain import storage
from localtrain.errors import ConfigError, DataError, StorageError, nearest

STDLIB = "python:stdlib"
SYNTHETIC = "synthetic:"
# Folders of the standard library that are tests, bundled packages or an editor, at any depth.
STDLIB_SKIP = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages"}
STDLIB_SKIP |= {"turtledemo", "lib2to3", "_bundled", "__pycache__", "pip", "setuptools"}

JSONL = {".jsonl", ".ndjson"}
PARQUET = {".parquet", ".pq"}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz"}
# What a folder is searched for; a file named directly may have any other ending.
_TEXT = """
.txt .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .log .json .yaml .yml .toml .ini
.cfg .conf .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .java .kt .scala .go .rs .swift .m .js .jsx
.ts .tsx .css .scss .php .rb .pl .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .el .scm .sh .bash
.zsh .ps1 .sql .proto .cmake
"""
TEXT = frozenset(_TEXT.split())
FORMATS = ("text", "jsonl", "parquet", "shards", "synthetic")


@dataclass(frozen=True)
class Source:
    """One entry of data.sources. `weight` None: take part in proportion to its size."""

    path: str
    weight: float | None = None
    field: str = "text"
    format: str | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is what errors and fingerprints call it."""

    path: str
    name: str
    size: int
    stamp: str
    format: str  # text | jsonl | json (either, by its first line) | parquet
    compression: str | None = None


def as_source(entry: Any) -> Source:
    """A str, a mapping or any object with the fields of Source."""
    if isinstance(entry, str):
        return Source(entry)
    if isinstance(entry, dict):
        unknown = set(entry) - {"path", "weight", "field", "format"}
        if unknown:
            raise ConfigError(f"data.sources: unknown key {sorted(unknown)[0]!r} in {entry}.")
        entry = Source(**entry)
    source = Source(
        str(entry.path),
        getattr(entry, "weight", None),
        getattr(entry, "field", None) or "text",
        getattr(entry, "format", None),
    )
    if source.format is not None and source.format not in FORMATS:
        close = nearest(source.format, FORMATS)
        raise ConfigError(
            f"data.sources: format {source.format!r} of {source.path} is not known"
            + (f"; did you mean {close!r}?" if close else f"; known: {', '.join(FORMATS)}.")
        )
    if source.weight is not None and not 0 < source.weight < float("inf"):
        raise ConfigError(
            f"data.sources: weight {source.weight} of {source.path} must be above 0 and finite."
        )
    return source


def as_sources(entries: Any) -> list[Source]:
    """A single source or a list of them."""
    if isinstance(entries, (str, dict)) or not isinstance(entries, Iterable):
        entries = [entries]
    return [as_source(entry) for entry in entries]


def find_files(source: Source) -> tuple[list[SourceFile], list[str]]:
    """All files of a source in a fixed order, and the names of files that were passed over.

    Raises DataError when nothing matches, naming the pattern.
    """
    if source.path == STDLIB:
        return _stdlib_files(), []
    try:
        found = storage.list_files(source.path)
    except FileNotFoundError:
        found = []
    except StorageError as error:
        raise StorageError(f"source {source.path}: {error}") from error
    if not found:
        raise DataError(_nothing_found(source.path))
    searched = storage.is_dir(source.path)
    files, passed = [], []
    for info in found:
        name = info.path
        kind, compression = classify(name, source.format, searched)
        if kind is None or (searched and _is_hidden(name, source.path)):
            passed.append(name)
            continue
        files.append(SourceFile(info.path, name, info.size, info.stamp, kind, compression))
    if not files:
        raise DataError(
            f"source {source.path}: none of its {len(found)} files has a known ending (the first "
            f"is {passed[0]}). Name the files with a glob, e.g. {source.path.rstrip('/')}/**/*."
        )
    return files, passed


def classify(name: str, format: str | None, searched: bool) -> tuple[str | None, str | None]:
    """(format, compression) of a file by its ending; format None = not one that we read.

    `searched`: the file was met in a folder, not named, so that unknown endings are passed over.
    """
    base = storage.name_of(name).lower()
    stem, ending = os.path.splitext(base)
    compression = COMPRESSED.get(ending)
    if compression:
        stem, ending = os.path.splitext(stem)
    if ending in ARCHIVES or base.endswith((".tar.gz", ".tar.zst")):
        if searched:
            return None, None
        raise DataError(
            f"{name}: archives are not read. Unpack it, or convert it to .jsonl.zst or parquet."
        )
    if format in ("text", "jsonl", "parquet"):
        return format, compression
    if ending in JSONL:
        return "jsonl", compression
    if ending in PARQUET:
        return "parquet", None
    if ending == ".json":
        return "json", compression
    if searched and ending not in TEXT:
        return None, None
    return "text", compression


def _is_hidden(name: str, top: str) -> bool:
    below = name[len(storage.local_path(top)) :].replace(os.sep, "/")
    return any(part.startswith(".") for part in below.split("/") if part)


def _nothing_found(path: str) -> str:
    if unreadable := storage.list_unreadable(path):
        return f"source {path}: there is no file to read, only {'; '.join(unreadable[:3])}."
    if storage.is_dir(path):
        return f"source {path}: the folder holds no file."
    message = f"source {path}: no file matches."
    if "://" in path or any(mark in path for mark in "*?["):
        return message + " Check the path and the glob (** crosses folders)."
    folder = os.path.dirname(os.path.abspath(storage.local_path(path)))
    if not os.path.isdir(folder):
        return message + f" There is no folder {folder}."
    close = nearest(os.path.basename(path), os.listdir(folder))
    hint = f" Did you mean {os.path.join(os.path.dirname(path), close)}?" if close else ""
    return message + hint + " A relative path starts at the folder of the command."


def _stdlib_files() -> list[SourceFile]:
    """The .py files of the running interpreter's standard library, sorted by relative path."""
    top = sysconfig.get_path("stdlib") or os.path.dirname(os.__file__)
    files = []
    for folder, below, names in os.walk(top):
        below[:] = [d for d in below if d not in STDLIB_SKIP and not d.startswith("config-")]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path):
                relative = os.path.relpath(path, top).replace(os.sep, "/")
                stat = os.stat(path)
                stamp = str(stat.st_mtime_ns)
                files.append(SourceFile(path, f"stdlib/{relative}", stat.st_size, stamp, "text"))
    if not files:
        raise DataError(
            f"source {STDLIB}: no .py files below {top} (a frozen or zipped interpreter). Use your "
            f"own text files instead."
        )
    return sorted(files, key=lambda file: file.name)
