"""A run's small files, written here and kept up to date at a URL.

Object stores cannot append. So metrics.jsonl, log.txt and the event files grow in a local folder,
and what changed is uploaded whole: every half minute, before each commit of a checkpoint (which
therefore never is ahead of its metrics) and at the end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from localtrain import storage
from localtrain.errors import LocaltrainError, StorageError

log = logging.getLogger(__name__)

EVERY_S = 30.0
GROWING = ("metrics.jsonl", "log.txt", "tensorboard/")  # appended to while we read them
_WHOLE = 64 << 20  # bytes; larger ones that do not grow are streamed


class Mirror:
    """Uploads what changes below `local` to `url`, each after `allowed` did not raise."""

    def __init__(self, local: Path, url: str, allowed: Callable[[], None]):
        self.local, self.url, self.allowed = local, url, allowed
        self._sent: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def fetch(self) -> None:
        """Bring what is to be appended to; of old event files only the names are needed."""
        there = storage.find_below(self.url)
        for name in ("metrics.jsonl", "log.txt"):
            if name in there:
                (self.local / name).write_bytes(storage.read_bytes(storage.join(self.url, name)))
                self._sent[name] = self._stamp(name)
        for name in there:
            if name.startswith("tensorboard/"):
                (self.local / name).parent.mkdir(parents=True, exist_ok=True)
                (self.local / name).touch()
                self._sent[name] = self._stamp(name)

    def start(self) -> None:
        """Upload in the background from now on."""
        self._thread.start()

    def push(self) -> None:
        """Upload what changed. Raises StorageError, or what `allowed` raises."""
        with self._lock:
            changed = {name: stamp for name in self._names() if (stamp := self._new(name))}
            for name, stamp in changed.items():
                self.allowed()  # before each: a process may be stopped anywhere and wake up late
                self._upload(name, stamp[0])
                self._sent[name] = stamp

    def close(self) -> None:
        """The last upload. Raises as `push` does."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.push()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self.push()
            except StorageError as error:  # before a commit and at the end it is an error
                log.warning("%s is not up to date: %s", self.url, error)
            except LocaltrainError:  # no longer ours; the owner hears of it by itself
                return

    def _upload(self, name: str, size: int) -> None:
        url, path = storage.join(self.url, name), self.local / name
        if size > _WHOLE and not name.startswith(GROWING):
            return storage.upload_all({str(path): url})
        with open(path, "rb") as file:
            storage.write_atomic(url, file.read(size))

    def _names(self) -> list[str]:
        """Files below the folder, run.yaml first: without it the rest means nothing."""
        found = []
        for top, _, names in os.walk(self.local):
            found += [Path(top, n).relative_to(self.local).as_posix() for n in names]
        return sorted((n for n in found if ".tmp-" not in n), key=lambda n: (n != "run.yaml", n))

    def _new(self, name: str) -> tuple[int, int] | None:
        try:
            stamp = self._stamp(name)
        except FileNotFoundError:  # replaced at this moment
            return None
        return None if self._sent.get(name) == stamp else stamp

    def _stamp(self, name: str) -> tuple[int, int]:
        stat = (self.local / name).stat()
        return stat.st_size, stat.st_mtime_ns
