"""Files, here or behind a URL: the only part that knows of protocols.

A path without "://" is a local file (a Windows drive letter too) and is handled by the standard
library alone (`local.py`); fsspec is imported at the first URL and never before, so that a local
run loads no cloud client and asks for no credential (`clients.py`). Every remote request goes
through `remote.call`, the one place for retries (`retry.py`). A missing file is FileNotFoundError,
for the caller to give it a meaning; every other failure is a StorageError that names the path.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from localtrain.errors import StorageError
from localtrain.storage import local
from localtrain.storage.local import local_path, sync_dir, user_cache

__all__ = ["local_path", "sync_dir", "user_cache"]  # beside what is defined here

R = TypeVar("R")
_ADVICE = {
    errno.EROFS: " Choose a place that can be written.",
    errno.EACCES: " Change its permissions, or choose another place.",
    errno.EPERM: " Change its permissions, or choose another place.",
}


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
    inside = getattr(error, "filename", None) if action == "list" else None
    where = f" ({inside})" if isinstance(inside, str) and inside != local_path(path) else ""
    return StorageError(f"could not {action} {path}: {reason}{where}.{_ADVICE.get(code, '')}")


def retry_report() -> str | None:
    """One line on the requests that were repeated; None when there were none."""
    from localtrain.storage import retry

    return retry.report()


def _local(action: str, path: str, call: Callable[[], R]) -> R:
    try:
        return call()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(action, path, error) from error


def _remote(action: str, path: str, work: Callable[[Any, str], R]) -> R:
    return _far().call(action, path, work)


def _far() -> Any:
    from localtrain.storage import remote  # not needed by local runs

    return remote


def reach(path: str) -> None:
    """For a URL: find its client and credentials now, so that a lack of them is told at once."""
    if is_url(path):
        from localtrain.storage.clients import open_client

        open_client(path)


def open_file(path: str, mode: str = "rb") -> IO:
    """A file object of this caller alone (never share one between threads)."""
    if is_url(path):
        return _far().open_file(path, mode)
    encoding = None if "b" in mode else "utf-8"
    return _local("open", path, lambda: open(local_path(path), mode, encoding=encoding))


def exists(path: str) -> bool:
    if is_url(path):
        return _far().kind(path) is not None
    return os.path.exists(local_path(path))


def is_dir(path: str) -> bool:
    if is_url(path):
        return _far().kind(path) == "directory"
    return os.path.isdir(local_path(path))


def info(path: str) -> FileInfo:
    """Size and stamp of one file."""
    if is_url(path):
        return _remote_info(path, _remote("look at", path, lambda fs, key: fs.info(key)))
    stat = _local("look at", path, lambda: os.stat(local_path(path)))
    return FileInfo(path, stat.st_size, str(stat.st_mtime_ns))


def _remote_info(path: str, entry: dict) -> FileInfo:
    return FileInfo(path, int(entry.get("size") or 0), _far().stamp_of(entry))


def list_files(pattern: str) -> list[FileInfo]:
    """The files that match a glob (`**` crosses folders), or all below a folder, sorted by path."""
    if is_url(pattern):
        found = [_remote_info(*one) for one in _far().find(pattern)]
        return sorted(found, key=lambda one: one.path)
    names = _local("list", pattern, lambda: local.find_names(pattern))
    return [info(name) for name in names if os.path.isfile(name)]


def list_unreadable(pattern: str) -> list[str]:
    """What matches in the same way but holds no bytes to read, each with the reason."""
    if is_url(pattern):
        return []
    return _local("list", pattern, lambda: local.find_unreadable(pattern))


def find_below(folder: str) -> dict[str, int]:
    """Relative name (with "/") -> size of every file below a folder; empty when there is none."""
    if is_url(folder):
        return _far().find_below(folder)
    top = local_path(folder)
    names = _local("list", folder, lambda: local.find_names(top)) if os.path.isdir(top) else []
    return {os.path.relpath(n, top).replace(os.sep, "/"): os.path.getsize(n) for n in names}


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
    """Many ranges of one file; none may pass its end."""
    return read_many([(path, start, end) for start, end in ranges])


def read_many(pieces: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Ranges (path, start, end) of files of one store, at the same time where it is remote."""
    if pieces and is_url(pieces[0][0]):
        return _far().read_many(pieces)
    return [read_range(path, start, end) for path, start, end in pieces]


def write_atomic(path: str, data: bytes | Iterable[bytes]) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part.

    Locally: a temporary file beside it, fsync, rename. Object stores publish an object when its
    upload ends, so there one upload does it.
    """
    whole = isinstance(data, (bytes, bytearray, memoryview))
    if not is_url(path):
        pieces = [data] if whole else data
        return _local("write", path, lambda: local.write_file(local_path(path), pieces))
    if whole:
        return _far().write(path, bytes(data))
    return _local("write", path, lambda: _far().write_pieces(path, data))


def create(path: str, data: bytes) -> bool:
    """Write an object unless there is one; False when there is.

    Of two that try at once, one gets True, where the store knows preconditions (S3, GCS). An
    upload whose answer was lost and that is sent again also gives False: compare what is there.
    """
    try:
        _far().write(path, data, create=True)
    except FileExistsError:
        return False
    return True


def upload_all(files: dict[str, str]) -> None:
    """Local files to URLs, some at a time."""
    _far().upload_all(files)


def download_all(files: dict[str, tuple[str, int]]) -> None:
    """URLs to (local file, expected size), some at a time."""
    _far().download_all(files)


def remove_all(paths: Iterable[str]) -> None:
    """Remove objects behind URLs; those that are gone already are fine."""
    _far().remove_all(paths)


def abort_uploads(folder: str) -> int:
    """Remove what kills left of uploads in parts below a URL; how many there were."""
    return _far().abort_uploads(folder)


def make_dirs(path: str) -> None:
    if is_url(path):
        return _far().make_dirs(path)
    return _local("create", path, lambda: os.makedirs(local_path(path), exist_ok=True))


def remove_tree(path: str) -> None:
    """Remove a file or a folder with all it holds; nothing happens when it is not there."""
    if is_url(path):
        return _far().remove_tree(path)
    return _local("remove", path, lambda: local.remove_tree(local_path(path)))


def rename(source: str, target: str) -> None:
    """Move inside one local file system; atomic. Object stores have no rename."""
    if is_url(source) or is_url(target):
        raise StorageError(f"{source}: a rename to {target} is not possible behind a URL.")
    _local("rename", source, lambda: os.rename(local_path(source), local_path(target)))
