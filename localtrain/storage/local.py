"""Files on this machine: the standard library alone."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path


def local_path(path: str | os.PathLike) -> str:
    """The local file name; file:// and a leading ~ are understood."""
    text = os.fspath(path)
    return os.path.expanduser(text[len("file://") :] if text.startswith("file://") else text)


def user_cache() -> Path:
    """The user's cache folder, as the platform names it. RuntimeError without a home."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def find_names(pattern: str) -> list[str]:
    """What matches a glob, or all files below a folder, sorted.

    Raises PermissionError for a folder on the way that may not be read: what lies in it would be
    missing without a word.
    """
    local = local_path(pattern)
    if os.path.isdir(local):
        tree = os.walk(local, onerror=_refuse)
        return sorted(os.path.join(top, name) for top, _, names in tree for name in names)
    if os.path.lexists(local):  # a file whose own name holds glob characters
        return [local]
    for folder in _crossed(local):
        os.scandir(folder).close()
    return sorted(glob.glob(local, recursive=True))


def _crossed(pattern: str) -> list[str]:
    """The folders that a glob looks into."""
    above = os.path.dirname(pattern)
    if not glob.has_magic(above):
        return [above] if os.path.isdir(above) else []
    found = glob.glob(os.path.join(above, ""), recursive=True)
    return [*_crossed(above), *(folder for folder in found if os.path.isdir(folder))]


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # it went away meanwhile
        raise error


def find_unreadable(pattern: str) -> list[str]:
    """What matches but holds no bytes to read, each with the reason."""
    reasons = []
    for name in find_names(pattern):
        if os.path.isfile(name) or os.path.isdir(name):
            continue
        if os.path.islink(name) and not os.path.exists(name):
            reasons.append(f"{name}, a link to {os.readlink(name)}, which does not exist")
        elif os.path.exists(name):
            reasons.append(f"{name}, a pipe, a socket or a device")
    return reasons


def write_file(path: str, pieces: Iterable[bytes]) -> None:
    """A temporary file beside it, fsync, rename."""
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


def remove_tree(path: str) -> None:
    """Remove a file, or a folder with all it holds, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
