"""Files behind a URL, through fsspec. Every request goes through `call`."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from localtrain.errors import LocaltrainError, StorageError
from localtrain.storage import retry
from localtrain.storage.clients import (
    AMAZON,
    OBJECT_STORES,
    open_client,
    protocol_of,
    refusal_advice,
)

R = TypeVar("R")

AT_ONCE = 8  # requests in parallel; a small emulator refuses more than a few
READ_AHEAD = 8 << 20  # bytes that a sequential reader asks for at a time
GAP = 64 << 10  # bytes that are read and thrown away rather than asked for around: 1 ms at 60 MB/s


def call(action: str, path: str, work: Callable[[Any, str], R]) -> R:
    """Run `work(filesystem, key)`: the one place for retries of remote storage.

    FileNotFoundError and FileExistsError are for the caller; all else ends as StorageError.
    """
    try:
        return retry.persist(f"{action} {path}", lambda: work(*open_client(path)))
    except (FileNotFoundError, FileExistsError, LocaltrainError):
        raise
    except Exception as error:  # every client has its own exception classes
        raise storage_failure(action, path, error) from error


def storage_failure(action: str, path: str, error: Exception) -> StorageError:
    """The StorageError of a request that failed for good."""
    tried = getattr(error, "attempts", 1)
    spent = f" ({tried} attempts in {error.waited:.0f} s)" if tried > 1 else ""
    text = f"could not {action} {path}: {retry.reason(error).rstrip('.')}{spent}."
    return StorageError(text + refusal_advice(path, error))


def stamp_of(entry: dict) -> str:
    """What changes with the content of an object."""
    names = ("etag", "ETag", "md5Hash", "checksum", "sha256", "mtime", "updated", "LastModified")
    return next((str(entry[name]) for name in names if entry.get(name)), "")


def kind(path: str) -> str | None:
    """ "file", "directory", or None where there is nothing.

    fsspec's own exists, isdir, isfile and glob take some failures for "no"; these raise.
    """
    try:
        return call("look for", path, lambda filesystem, key: filesystem.info(key)["type"])
    except FileNotFoundError:
        return None


def find(pattern: str) -> list[tuple[str, dict]]:
    """(URL, entry) of what matches a glob, or of all files below a folder."""
    protocol = pattern[: pattern.index("://")]
    magic = any(mark in pattern for mark in "*?[")
    if protocol.startswith("http"):  # where "?" begins a query
        magic = "*" in pattern
    if not magic and kind(pattern) == "file":
        return [(pattern, call("look at", pattern, lambda filesystem, key: filesystem.info(key)))]

    def look(filesystem: Any, key: str) -> list[tuple[str, dict]]:
        if not magic:
            found = filesystem.find(key, detail=True)
        elif protocol.startswith("http"):
            found = filesystem.glob(key, detail=True)
        else:
            found = _glob(filesystem, key)
        return [
            # memory:// names begin with "/", object stores name bucket/key, http gives whole URLs
            (name if "://" in name else f"{protocol}://{name.lstrip('/')}", entry)
            for name, entry in found.items()
            if entry.get("type", "file") == "file"
        ]

    return call("list", pattern, look)


def _glob(filesystem: Any, key: str) -> dict[str, dict]:
    """Name -> entry of what matches; folders are listed one level at a time, but below a `**`."""
    parts = key.split("/")
    first = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
    found = {"/".join(parts[:first]): {"type": "directory"}}
    for part in parts[first:]:
        if "**" in part:
            from fsspec.utils import glob_translate

            fits = re.compile(glob_translate(key))
            below = [filesystem.find(top, detail=True) for top in found]
            return {name: e for many in below for name, e in many.items() if fits.match(name)}
        listed = {}
        for top, entry in found.items():
            if entry["type"] == "directory":
                with contextlib.suppress(FileNotFoundError):
                    listed |= {e["name"].rstrip("/"): e for e in filesystem.ls(top, detail=True)}
        names = re.compile(fnmatch.translate(part))
        found = {n: e for n, e in listed.items() if names.match(n.rsplit("/", 1)[-1])}
    return found


def find_below(folder: str) -> dict[str, int]:
    """Relative name -> size of every object below a folder; one listing, never a stale one."""

    def look(filesystem: Any, key: str) -> dict[str, int]:
        filesystem.invalidate_cache()
        found = filesystem.find(key, detail=True)
        top = key.rstrip("/") + "/"
        return {
            name[len(top) :]: int(entry.get("size") or 0)
            for name, entry in found.items()
            if name.startswith(top) and entry.get("type", "file") == "file"
        }

    try:
        return call("list", folder, look)
    except FileNotFoundError:
        return {}


def read_many(pieces: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Ranges of files of one store at the same time; only what failed or came short is asked for
    again. Those of one file that lie close together are one request."""
    wanted, places = _merge(pieces)
    got: dict[int, bytes] = {}

    def read(filesystem: Any, _: str) -> None:
        left = [i for i in range(len(wanted)) if i not in got]
        keys = {path: filesystem._strip_protocol(path) for path, _, _ in wanted}
        blobs = filesystem.cat_ranges(
            [keys[wanted[i][0]] for i in left],
            [wanted[i][1] for i in left],
            [wanted[i][2] for i in left],
            on_error="return",
        )
        failures: list[Exception] = []
        for i, blob in zip(left, blobs, strict=True):
            size = wanted[i][2] - wanted[i][1]
            if isinstance(blob, Exception):
                failures.append(blob)
            elif len(blob) != size:
                failures.append(retry.ShortRead(f"{len(blob)} of {size} bytes came"))
            else:
                got[i] = bytes(blob)
        if failures:  # one that will not pass tells more than those that may
            raise next((one for one in failures if not retry.is_passing(one)), failures[0])

    if wanted:
        call("read", wanted[0][0], read)
    return [got[i][offset : offset + size] for i, offset, size in places]


def _merge(
    pieces: Sequence[tuple[str, int, int]],
) -> tuple[list[tuple[str, int, int]], list[tuple[int, int, int]]]:
    """Requests that cover all pieces, and for each piece its request, its place in it, its size."""
    wanted: list[list[Any]] = []
    places = [(0, 0, 0)] * len(pieces)
    for n in sorted(range(len(pieces)), key=lambda n: pieces[n]):
        path, start, end = pieces[n]
        last = wanted[-1] if wanted else None
        if last and last[0] == path and start - last[2] <= GAP:
            last[2] = max(last[2], end)
        else:
            wanted.append([path, start, end])
        places[n] = len(wanted) - 1, start - wanted[-1][1], end - start
    return [(path, start, end) for path, start, end in wanted], places


def open_file(path: str, mode: str) -> IO:
    """A file object; reading goes by ranges, each of which is tried again for itself."""
    if "r" not in mode:
        return call("open", path, lambda filesystem, key: filesystem.open(key, mode))
    entry = call("open", path, lambda filesystem, key: filesystem.info(key))
    if entry.get("type") == "directory":
        raise FileNotFoundError(path)
    if entry.get("size") is None:  # a web server that does not say
        return call("open", path, lambda filesystem, key: filesystem.open(key, mode))
    file = io.BufferedReader(_Ranges(path, int(entry["size"])), READ_AHEAD)
    return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")


class _Ranges(io.RawIOBase):
    """A remote file of known size as a raw stream."""

    def __init__(self, path: str, size: int):
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = read_many([(self._path, self._at, end)])[0]
        buffer[: len(data)] = data
        self._at = end
        return len(data)


def write(path: str, data: bytes, create: bool = False) -> None:
    """One upload of bytes. With `create`, FileExistsError where there is an object already."""

    def put(filesystem: Any, key: str) -> None:
        _make_parent(filesystem, path, key)
        if create:
            filesystem.pipe_file(key, data, mode="create")
        else:
            filesystem.pipe_file(key, data)

    _upload("create" if create else "write", path, put)


def write_pieces(path: str, pieces: Iterable[bytes]) -> None:
    """An upload of what comes in pieces: through a local file, so that it can be repeated."""
    with tempfile.TemporaryDirectory(prefix="localtrain-") as folder:
        local = os.path.join(folder, "whole")
        with open(local, "wb") as file:
            for piece in pieces:
                file.write(piece)
        upload(local, path)


def upload(local: str, path: str) -> None:
    """A local file to a URL, whole or not at all."""

    def put(filesystem: Any, key: str) -> None:
        _make_parent(filesystem, path, key)
        filesystem.put_file(local, key)

    _upload("write", path, put)


def upload_all(files: dict[str, str]) -> None:
    """Local files to URLs, some at a time. The first failure is raised, when all have ended."""
    _in_parallel(lambda pair: upload(*pair), files.items())


def download(path: str, local: str, size: int | None = None) -> None:
    """A URL to a local file; one that comes short is fetched again."""

    def get(filesystem: Any, key: str) -> None:
        filesystem.get_file(key, local)
        have = os.path.getsize(local)
        if size is not None and have < size:
            raise retry.ShortRead(f"{have} of {size} bytes came")

    call("read", path, get)


def download_all(files: dict[str, tuple[str, int]]) -> None:
    """URLs to local files of known size, some at a time."""
    _in_parallel(lambda item: download(item[0], *item[1]), files.items())


def remove_all(paths: Iterable[str]) -> None:
    """Remove objects; those that are gone already are fine."""

    def remove(path: str) -> None:
        try:
            call("remove", path, lambda filesystem, key: filesystem.rm_file(key))
        except FileNotFoundError:
            return

    _in_parallel(remove, paths)


def abort_uploads(folder: str) -> int:
    """Remove the parts of uploads below a folder that were begun and never ended, as a kill leaves
    them; how many. Only S3 keeps such parts."""
    if protocol_of(folder) not in AMAZON:
        return 0

    def abort(filesystem: Any, key: str) -> int:
        bucket, _, prefix = key.rstrip("/").partition("/")
        found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        begun = found.get("Uploads") or []
        for one in begun:
            names = {"Key": one["Key"], "UploadId": one["UploadId"]}
            filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **names)
        return len(begun)

    return call("remove unfinished uploads from", folder, abort)


def make_dirs(path: str) -> None:
    """A folder, where the store has such a thing."""
    if protocol_of(path) not in OBJECT_STORES:
        call("create", path, lambda filesystem, key: filesystem.makedirs(key, exist_ok=True))


def remove_tree(path: str) -> None:
    """Remove a file or all below a folder, if there is any."""

    def remove(filesystem: Any, key: str) -> None:
        filesystem.invalidate_cache()
        filesystem.rm(key, recursive=True)

    try:
        call("remove", path, remove)
    except FileNotFoundError:
        return


def _in_parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for done in [pool.submit(work, item) for item in items]:
                done.result()
        except BaseException:  # the rest would each be tried for minutes too
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_parent(filesystem: Any, path: str, key: str) -> None:
    """Object stores have no folders, and s3fs would make a bucket of a mistyped name."""
    if protocol_of(path) not in OBJECT_STORES:
        filesystem.makedirs(key.rsplit("/", 1)[0], exist_ok=True)


def _upload(action: str, path: str, put: Callable[[Any, str], None]) -> None:
    try:
        call(action, path, put)
    except FileNotFoundError as error:
        raise StorageError(
            f"could not {action} {path}: there is no such bucket or folder. Check its name, or "
            f"make it first."
        ) from error
