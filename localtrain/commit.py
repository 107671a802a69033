"""The commit record of a folder: what makes a checkpoint believable.

Orbax and tensorstore verify nothing on their own: a flipped bit comes back as a weight. So the
writer lists every file of the finished folder with its size and crc32c in `commit.json`, and only
then gives the folder its final name. A reader believes a folder only when that record is intact
(it carries its own checksum, and must be byte for byte what we would write) and every listed file
matches it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import google_crc32c

from localtrain import storage
from localtrain.errors import DataError, LocaltrainError

COMMIT = "commit.json"
FORMAT = 1
_CHUNK = 4 << 20
_SYNCS = 8  # files at a time: the disk writes their journals together
_READS = 8


class Damaged(DataError):
    """A file of a checkpoint is missing, short, long or has flipped bits."""


class Uncommitted(DataError):
    """The folder has no commit record: whoever wrote it never finished."""


def encode_json(value: Any) -> bytes:
    """The one spelling of a JSON value that we write (sorted keys, so it can be compared)."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def write_durably(path: str | os.PathLike, data: bytes) -> None:
    """Write a new file and push it to the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike) -> None:
    """Push a folder's entries to the disk, where the platform can (Windows cannot)."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: str | os.PathLike, sync: bool = False) -> tuple[int, int]:
    """(size in bytes, crc32c) of a file; with `sync` it is also pushed to the disk."""
    size, crc = 0, 0
    with open(path, "r+b" if sync else "rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = google_crc32c.extend(crc, chunk)
        if sync:
            os.fsync(file.fileno())
    return size, crc


def checksums(folder: str | os.PathLike, names: list[str] | None = None) -> dict[str, Any]:
    """Size and crc32c of files under `folder` (None: of all), everything pushed to the disk."""
    folder = Path(folder)
    if names is None:
        found = [Path(parent, name) for parent, _, there in os.walk(folder) for name in there]
        names = [path.relative_to(folder).as_posix() for path in found]
    files = {}
    with ThreadPoolExecutor(_SYNCS) as pool:
        sums = pool.map(lambda name: checksum(folder / name, sync=True), names)
        for name, (size, crc) in zip(names, sums, strict=True):
            files[name] = {"size": size, "crc32c": crc}
    for parent in {(folder / name).parent for name in names} | {folder}:
        sync_folder(parent)
    return files


def write_commit(
    folder: str | os.PathLike, facts: dict[str, Any], files: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Record files (None: every one under `folder`) in its commit.json, pushed to the disk."""
    folder = Path(folder)
    files = checksums(folder) if files is None else files
    record = {**facts, "format": FORMAT, "files": files}
    record["checksum"] = _own_checksum(record)
    write_durably(folder / COMMIT, encode_json(record))
    sync_folder(folder)
    return record


def read_commit(folder: str | os.PathLike, sizes: bool = True) -> dict[str, Any]:
    """The record of a committed folder whose files all exist with the recorded size (`sizes`).

    Raises Uncommitted without a commit.json, Damaged naming the file otherwise, StorageError when
    the storage does not say. Contents are not read: `verify` does that.
    """
    folder = Path(folder)
    path = folder / COMMIT
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise uncommitted(str(folder)) from error
    except OSError as error:
        raise unreadable(str(path), error) from error
    record = decode_commit(raw, str(path))
    for name, entry in record["files"].items() if sizes else ():
        _check_size_here(folder / name, entry["size"])
    return record


def only(record: dict[str, Any], needed: Callable[[str], bool]) -> dict[str, Any]:
    """The record with those of its files that are needed, by their names in the checkpoint."""
    inside = f"{record['folder']}/" if record.get("folder") else ""
    files = {
        name: entry for name, entry in record["files"].items() if needed(name.removeprefix(inside))
    }
    return {**record, "files": files}


def without(record: dict[str, Any], part: str) -> dict[str, Any]:
    """The record without the files of one part of the state, such as the optimizer's, "opt"; those
    of checkpoints that keep all arrays in one database stay."""
    return only(record, lambda name: not name.startswith((f"{part}.", f"{part}/")))


def uncommitted(where: str) -> Uncommitted:
    return Uncommitted(f"{where} has no {COMMIT}: it is not a complete checkpoint.")


def unreadable(where: str, error: OSError) -> LocaltrainError:
    """What a failed read says. That there is no such file is damage; that the storage fails or the
    file may not be read says nothing about the checkpoint: StorageError."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Damaged(f"{where} cannot be read: {error.strerror or error}.")
    return storage.storage_error("read", where, error)


def verify(folder: str | os.PathLike, record: dict[str, Any], where: str | None = None) -> None:
    """Read every file that the record lists and compare.

    Raises Damaged naming the file, StorageError when one cannot be read.
    where: what to call the folder, when it is a local copy.
    """
    folder = Path(folder)

    def check(name: str, entry: dict[str, Any]) -> None:
        path = folder / name
        shown = str(path) if where is None else f"{where}/{name}"
        _check_size_here(path, entry["size"], shown)
        try:
            size, crc = checksum(path)
        except OSError as error:
            raise unreadable(shown, error) from error
        if (size, crc) != (entry["size"], entry["crc32c"]):
            raise Damaged(
                f"{shown} is damaged: its crc32c is {crc:08x}, {entry['crc32c']:08x} was recorded "
                f"when it was written."
            )

    with ThreadPoolExecutor(_READS) as pool:
        for _ in pool.map(check, *zip(*record["files"].items(), strict=True)):
            pass  # the first that is damaged, in the record's order, is raised


def check_size(where: str, size: int | None, expected: int) -> None:
    """Raise Damaged unless a file is there (None: it is not) with the recorded size."""
    if size is None:
        raise Damaged(f"{where} is missing; the checkpoint's {COMMIT} lists it.")
    if size != expected:
        raise Damaged(f"{where} is damaged: it has {size} bytes, {expected} were recorded.")


def _check_size_here(path: Path, expected: int, shown: str | None = None) -> None:
    """`check_size` of a file on this disk; shown: what to call it, when it is a copy."""
    shown = shown or str(path)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        size = None
    except OSError as error:
        raise unreadable(shown, error) from error
    check_size(shown, size, expected)


def _own_checksum(record: dict[str, Any]) -> int:
    rest = {key: value for key, value in record.items() if key != "checksum"}
    return google_crc32c.value(encode_json(rest))


def decode_commit(raw: bytes, path: str) -> dict[str, Any]:
    """Parse without trusting anything: every way to be wrong ends in Damaged."""
    try:
        record = json.loads(raw)
        intact = (
            encode_json(record) == raw
            and record["checksum"] == _own_checksum(record)
            and record["format"] == FORMAT
            and re.fullmatch("|[0-9a-f]{16}", record.get("folder", "")) is not None
            and all(_is_entry(name, entry) for name, entry in record["files"].items())
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{path} is damaged: it is not the record that was written.")
    return record


def _is_entry(name: str, entry: dict[str, Any]) -> bool:
    """A plain relative name inside the folder, a size and a checksum."""
    inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
    return inside and isinstance(entry["size"], int) and isinstance(entry["crc32c"], int)
