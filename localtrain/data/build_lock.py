"""One builder at a time: a lock on a local file that the system releases when its owner dies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from localtrain import storage
from localtrain.errors import Stopped

# progress(stage, done, total): bytes of the sources tokenized so far, of all
Progress = Callable[[str, int, int | None], None]


@contextmanager
def build_lock(
    path: str, progress: Progress | None, stop: threading.Event | None
) -> Iterator[None]:
    """Hold an exclusive lock on a local file; waiting ends with Stopped when `stop` is set.

    The file is removed at the end; one that a killed process left is taken over.
    """
    waited = False
    while True:
        with storage.open_file(path, "a+b") as file:
            if _try_lock(file) and _is_current(file, path):
                try:
                    yield
                finally:
                    # while it is still locked: whoever waits on this file sees that it is gone
                    with contextlib.suppress(OSError):  # Windows keeps open files
                        os.unlink(path)
                return
        if not waited and progress:
            progress("waiting for another process that builds the same data", 0, None)
        waited = True
        if stop is None:
            time.sleep(0.1)
        elif stop.wait(0.1):
            raise Stopped("stopped while another process was building the data.")


def _is_current(file: IO[bytes], path: str) -> bool:
    """False when the file was removed, or made anew, before its lock was ours."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
