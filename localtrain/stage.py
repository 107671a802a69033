"""Local folders for what is on its way to a URL or from one.

They lie in the user's cache folder, where there is room (/tmp may be memory). Each is locked while
its process lives, so that whoever comes next can tell and remove what a killed one left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from localtrain import storage
from localtrain.lock import try_lock


class Stage:
    """An empty folder (`path`) that goes away with `close`, the object, or the process.

    Raises StorageError when it cannot be made.
    """

    def __init__(self) -> None:
        root = _root()
        _sweep(root)
        name = secrets.token_hex(8)
        self.path = root / name
        lock = root / f"{name}.lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try_lock(descriptor)  # before the folder is there: nobody sweeps it meanwhile
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise storage.storage_error("create", str(self.path), error) from error
        self._close = weakref.finalize(self, _remove, self.path, lock, descriptor)

    def close(self) -> None:
        """Remove it; harmless when that was done."""
        self._close()


def _root() -> Path:
    root = storage.user_cache() / "localtrain" / "stage"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(root, os.W_OK):
            return root
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass  # then a temporary folder does
    return Path(tempfile.mkdtemp(prefix="localtrain-stage-"))


def _remove(folder: Path, lock: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(lock)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _sweep(root: Path) -> None:
    """Remove the folders whose process is gone."""
    for lock in root.glob("*.lock"):
        folder = lock.with_suffix("")
        if not folder.is_dir():
            continue  # someone is making it at this moment
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        if try_lock(descriptor):
            _remove(folder, lock, descriptor)
        else:
            os.close(descriptor)
