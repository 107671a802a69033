"""One builder at a time: a lock on a local file that the system releases when its owner dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from localtrain.errors import Stopped

# progress(stage, done, total): bytes of the sources tokenized so far, of all
Progress = Callable[[str, int, int | None], None]


@contextmanager
def build_lock(
    path: str, progress: Progress | None, stop: threading.Event | None
) -> Iterator[None]:
    """Hold an exclusive lock on a local file; waiting ends with Stopped when `stop` is set."""
    with open(path, "a+b") as file:
        waited = False
        while not _try_lock(file):
            if not waited and progress:
                progress("waiting for another process that builds the same data", 0, None)
            waited = True
            if stop is not None and stop.wait(0.1):
                raise Stopped("stopped while another process was building the data.")
            if stop is None:
                time.sleep(0.1)
        yield  # closing the file releases the lock; the empty file stays for the next one


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
