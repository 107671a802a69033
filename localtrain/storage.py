"""Files, here or behind a URL: the only module that knows of protocols.

A path without "://" is a local file (a Windows drive letter too) and is handled by the standard
library alone; fsspec is imported at the first URL and never before, so that a local run loads no
cloud client and asks for no credential. Every remote call goes through `_remote`, which is the one
place for retries. A missing file is FileNotFoundError, for the caller to give it a meaning; every
other failure of the storage is a StorageError that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import glob as local_glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from localtrain.errors import LocaltrainError, StorageError

R = TypeVar("R")

# What to install when fsspec knows a protocol but its implementation is missing.
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


@dataclass(frozen=True)
class FileInfo:
    """One file: where, how many bytes, and a stamp (mtime or etag) of its content."""

    path: str
    size: int
    stamp: str


def is_url(path: str | os.PathLike) -> bool:
    """True for anything with "://" other than file://; a drive letter is not a protocol."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def local_path(path: str | os.PathLike) -> str:
    """The local file name; file:// and a leading ~ are understood."""
    text = os.fspath(path)
    return os.path.expanduser(text[len("file://") :] if text.startswith("file://") else text)


def join(base: str | os.PathLike, *parts: str) -> str:
    """`base` with `parts` below it, with "/" in a URL and the local separator elsewhere."""
    if is_url(base):
        return "/".join([os.fspath(base).rstrip("/"), *parts])
    return os.path.join(local_path(base), *parts)


def name_of(path: str) -> str:
    """The last component of a path or URL."""
    return path.rstrip("/").rsplit("/", 1)[-1] if is_url(path) else os.path.basename(path)


def parent_of(path: str) -> str:
    """The folder that holds a path or URL."""
    return path.rstrip("/").rsplit("/", 1)[0] if is_url(path) else os.path.dirname(path) or "."


def storage_error(action: str, path: str, error: Exception) -> StorageError:
    """The StorageError for a failed `action`, with what can be done about it."""
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: could not {action} {path}. Free some space there, or choose "
            f"another place, and start the same command again."
        )
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return StorageError(f"could not {action} {path}: {reason}.")


def _local(action: str, path: str, call: Callable[[], R]) -> R:
    try:
        return call()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(action, path, error) from error


def _remote(action: str, path: str, call: Callable[[Any, str], R]) -> R:
    """Run `call(filesystem, key)`. The one place for retries of remote storage."""
    filesystem, key = _filesystem(path)
    try:
        return call(filesystem, key)
    except (FileNotFoundError, LocaltrainError):
        raise
    except Exception as error:  # every client has its own exception classes
        raise storage_error(action, path, error) from error


def _filesystem(path: str) -> tuple[Any, str]:
    import fsspec.core

    protocol = path.split("://", 1)[0].split("::")[-1]
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        advice = f"pip install 'localtrain[{extra}]'" if extra else f"({error})"
        raise StorageError(
            f"{path}: the package for {protocol}:// is not installed: {advice}."
        ) from error
    except ValueError as error:
        raise StorageError(f"{path}: unknown protocol {protocol}:// ({error}).") from error
    except Exception as error:
        raise storage_error("reach", path, error) from error


def open_file(path: str, mode: str = "rb") -> IO:
    """A file object of this caller alone (never share one between threads)."""
    if is_url(path):
        return _remote("open", path, lambda fs, key: fs.open(key, mode))
    encoding = None if "b" in mode else "utf-8"
    return _local("open", path, lambda: open(local_path(path), mode, encoding=encoding))


def exists(path: str) -> bool:
    if is_url(path):
        return _remote("look for", path, lambda fs, key: fs.exists(key))
    return os.path.exists(local_path(path))


def is_dir(path: str) -> bool:
    if is_url(path):
        return _remote("look at", path, lambda fs, key: fs.isdir(key))
    return os.path.isdir(local_path(path))


def info(path: str) -> FileInfo:
    """Size and stamp of one file."""
    if is_url(path):
        return _remote("look at", path, lambda fs, key: _remote_info(path, fs.info(key)))
    stat = _local("look at", path, lambda: os.stat(local_path(path)))
    return FileInfo(path, stat.st_size, str(stat.st_mtime_ns))


def _remote_info(path: str, entry: dict) -> FileInfo:
    names = ("etag", "ETag", "md5Hash", "checksum", "sha256", "mtime", "updated", "LastModified")
    stamp = next((str(entry[name]) for name in names if entry.get(name)), "")
    return FileInfo(path, int(entry.get("size") or 0), stamp)


def list_files(pattern: str) -> list[FileInfo]:
    """The files that match a glob (`**` crosses folders), or all below a folder, sorted by path."""
    if is_url(pattern):
        return _remote("list", pattern, lambda fs, key: _remote_files(pattern, fs, key))
    return [info(name) for name in _local_names(pattern) if os.path.isfile(name)]


def list_unreadable(pattern: str) -> list[str]:
    """What matches in the same way but holds no bytes to read, each with the reason."""
    if is_url(pattern):
        return []
    reasons = []
    for name in _local_names(pattern):
        if os.path.isfile(name) or os.path.isdir(name):
            continue
        if os.path.islink(name) and not os.path.exists(name):
            reasons.append(f"{name}, a link to {os.readlink(name)}, which does not exist")
        elif os.path.exists(name):
            reasons.append(f"{name}, a pipe, a socket or a device")
    return reasons


def _local_names(pattern: str) -> list[str]:
    local = local_path(pattern)
    if os.path.isdir(local):
        return sorted(os.path.join(top, name) for top, _, names in os.walk(local) for name in names)
    if os.path.lexists(local):  # a file whose own name holds glob characters
        return [local]
    return sorted(local_glob.glob(local, recursive=True))


def _remote_files(pattern: str, filesystem: Any, key: str) -> list[FileInfo]:
    protocol = pattern[: pattern.index("://")]
    if any(mark in key for mark in "*?[") and not (protocol.startswith("http") and "*" not in key):
        found = filesystem.glob(key, detail=True)
    elif filesystem.isfile(key):
        return [_remote_info(pattern, filesystem.info(key))]
    else:
        found = filesystem.find(key, detail=True)
    infos = []
    for name, entry in found.items():
        if entry.get("type", "file") == "file":
            # memory:// names begin with "/", object stores name bucket/key, http gives whole URLs
            url = name if "://" in name else f"{protocol}://{name.lstrip('/')}"
            infos.append(_remote_info(url, entry))
    return sorted(infos, key=lambda one: one.path)


def list_dir(path: str) -> list[str]:
    """Names directly inside a folder, sorted; empty when the folder does not exist."""
    try:
        if is_url(path):
            names = _remote("list", path, lambda fs, key: fs.ls(key, detail=False))
            return sorted({str(name).rstrip("/").rsplit("/", 1)[-1] for name in names})
        return sorted(_local("list", path, lambda: os.listdir(local_path(path))))
    except FileNotFoundError:
        return []


def read_bytes(path: str) -> bytes:
    if is_url(path):
        return _remote("read", path, lambda fs, key: fs.cat_file(key))
    with open_file(path, "rb") as file:
        return _local("read", path, file.read)


def read_text(path: str) -> str:
    """The file as UTF-8; bytes that are not UTF-8 raise UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8")


def read_range(path: str, start: int, end: int) -> bytes:
    """Bytes [start, end); fewer when the file ends before."""
    if is_url(path):
        return _remote("read", path, lambda fs, key: fs.cat_file(key, start=start, end=end))
    with open_file(path, "rb") as file:
        file.seek(start)
        return _local("read", path, lambda: file.read(end - start))


def read_ranges(path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Many ranges of one file, at the same time where the remote file system can."""
    if not is_url(path):
        return [read_range(path, start, end) for start, end in ranges]
    starts, ends = [r[0] for r in ranges], [r[1] for r in ranges]
    return _remote(
        "read",
        path,
        lambda fs, key: list(fs.cat_ranges([key] * len(ranges), starts, ends, on_error="raise")),
    )


def write_atomic(path: str, data: bytes | Iterable[bytes]) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part.

    Locally: a temporary file beside it, fsync, rename. Object stores publish an object when its
    upload ends, so there one upload does it.
    """
    if is_url(path):
        whole = isinstance(data, (bytes, bytearray, memoryview))
        put = _put if whole else _put_pieces
        return _remote("write", path, lambda fs, key: put(fs, key, data))
    pieces = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    return _local("write", path, lambda: _write_local(local_path(path), pieces))


def _put(filesystem: Any, key: str, data: bytes) -> None:
    filesystem.makedirs(key.rsplit("/", 1)[0], exist_ok=True)
    filesystem.pipe_file(key, bytes(data))


def _put_pieces(filesystem: Any, key: str, pieces: Iterable[bytes]) -> None:
    """One upload in parts; when it fails the object is not published, not even by __del__."""
    filesystem.makedirs(key.rsplit("/", 1)[0], exist_ok=True)
    file = filesystem.open(key, "wb")
    try:
        for piece in pieces:
            file.write(piece)
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
            file.closed = True
        with contextlib.suppress(Exception):  # file systems that publish while they write
            filesystem.rm_file(key)
        raise
    file.close()


def _write_local(path: str, pieces: Iterable[bytes]) -> None:
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    temporary = os.path.join(folder, f".{name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_dir(folder or ".")


def sync_dir(path: str) -> None:
    """Make a rename inside a local folder survive a power cut (where the system can)."""
    if os.name != "posix":
        return
    handle = os.open(local_path(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems refuse to sync a folder
    finally:
        os.close(handle)


def make_dirs(path: str) -> None:
    if is_url(path):
        return _remote("create", path, lambda fs, key: fs.makedirs(key, exist_ok=True))
    return _local("create", path, lambda: os.makedirs(local_path(path), exist_ok=True))


def remove_tree(path: str) -> None:
    """Remove a file or a folder with all it holds; nothing happens when it is not there."""
    if is_url(path):
        if exists(path):
            _remote("remove", path, lambda fs, key: fs.rm(key, recursive=True))
        return
    local = local_path(path)
    if os.path.isdir(local) and not os.path.islink(local):
        _local("remove", path, lambda: shutil.rmtree(local))
    elif os.path.lexists(local):
        _local("remove", path, lambda: os.unlink(local))


def rename(source: str, target: str) -> None:
    """Move inside one local file system; atomic. Object stores have no rename."""
    if is_url(source) or is_url(target):
        raise StorageError(f"{source}: a rename to {target} is not possible behind a URL.")
    _local("rename", source, lambda: os.rename(local_path(source), local_path(target)))
