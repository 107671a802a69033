"""Checkpoints: written in the background, believed only when complete, checked before use.

A save copies the arrays to host memory (the only part that blocks), then a thread lets Orbax
write them into `tmp-<step>-<token>/`, adds `meta.json`, records size and crc32c of every file in
`commit.json`, and renames the folder to `<step>/`. That rename is the commit: a kill at any moment
leaves either the whole checkpoint or a tmp folder that the next writer sweeps away.

Arrays are written from host memory, so no device name is stored: a checkpoint opens on any
platform, and onto whatever shardings the template carries. Nothing here reads a pickle.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from localtrain import arrays, commit, storage
from localtrain.errors import LocaltrainError, StorageError
from localtrain.restore import META, CheckpointReader, find_checkpoint, restore_params

__all__ = ["CheckpointReader", "Checkpoints", "find_checkpoint", "restore_params"]

log = logging.getLogger(__name__)

_TMP = re.compile(r"tmp-\d+-[0-9a-f]{16}")
_RETRY_AFTER_S = 1.0


class Checkpoints(CheckpointReader):
    """The checkpoints of one run, to be written (and read).

    One writer at a time (the lock of the run directory sees to it); any number of readers.
    `token` marks this writer's files: 16 hex digits, made up when not given. `guard` is called
    before each write and raises when the folder is no longer this writer's.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        keep: int = 3,
        token: str | None = None,
        guard: Callable[[], None] | None = None,
    ):
        super().__init__(folder)
        self.keep = keep
        self.guard = guard
        self.token = token or secrets.token_hex(8)
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self._swept = False

    def save(self, step: int, state: Any, meta: dict[str, Any], block: bool = False) -> float:
        """Save in the background; returns the seconds the caller was blocked.

        state: pytree (nested dict) of arrays, which may be donated as soon as this returns.
        meta: JSON values; `step`, library versions and the list of arrays are added.
        Saving a step that is already there does nothing. Raises StorageError if the save before
        this one failed.
        """
        began = time.monotonic()
        self.wait()
        if step in self.steps() and step not in self._damaged:
            return time.monotonic() - began
        leaves = arrays.to_host(state)
        facts = {**meta, "step": step, "versions": versions(), "arrays": arrays.describe(leaves)}
        encoded = commit.encode_json(facts)
        self._thread = threading.Thread(
            target=self._save_with_retry, args=(step, leaves, encoded), name=f"save-{step}"
        )
        self._thread.start()
        if block:
            self.wait()
        return time.monotonic() - began

    def write(
        self, step: int, leaves: dict[str, np.ndarray | arrays.Deferred], meta: dict[str, Any]
    ) -> None:
        """Save in the foreground, one leaf (by its full name) after another.

        Raises StorageError, or what `Deferred.make` raises; then nothing is left.
        """
        facts = {**meta, "step": step, "versions": versions(), "arrays": arrays.describe(leaves)}
        tmp = self.folder / f"tmp-{step}-{self.token}"
        try:
            self._write(tmp, step, leaves, commit.encode_json(facts))
        except BaseException as error:
            shutil.rmtree(tmp, ignore_errors=True)
            if isinstance(error, LocaltrainError) or not isinstance(error, Exception):
                raise
            raise storage.storage_error("write", str(self.folder), error) from error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save in progress; False if it is still running after `timeout` seconds.

        Raises StorageError if it failed.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        self.check()
        return True

    def check(self) -> None:
        """Raise the StorageError of a background save that failed; cheap, call it every step."""
        if self._failure is not None:
            raise self._failure

    @property
    def busy(self) -> bool:
        """A save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Wait for the save in progress. Call it before the process ends."""
        self.wait()

    def _save_with_retry(self, step: int, leaves: dict[str, np.ndarray], meta: bytes) -> None:
        for attempt in (1, 2):
            token = self.token if attempt == 1 else secrets.token_hex(8)  # in case it cannot go
            tmp = self.folder / f"tmp-{step}-{token}"
            try:
                self._write(tmp, step, leaves, meta)
                return
            except Exception as error:  # whatever it was, training must hear of it
                shutil.rmtree(tmp, ignore_errors=True)
                if isinstance(error, StorageError):  # of the guard: trying again is no use
                    self._failure = error
                    return
                if attempt == 1:
                    log.warning("saving step %d failed, trying once more: %s", step, _first(error))
                    time.sleep(_RETRY_AFTER_S)
                    continue
                self._failure = _storage_error(error, step, self.folder, self._committed_now())

    def _write(self, tmp: Path, step: int, leaves: dict[str, np.ndarray], meta: bytes) -> None:
        if self.guard is not None:
            self.guard()
        self._sweep()
        tmp.mkdir(parents=True)
        need, free = sum(leaf.nbytes for leaf in leaves.values()), shutil.disk_usage(tmp).free
        if need > free:  # fail before the disk is full: logs and metrics still want to be written
            raise OSError(errno.ENOSPC, f"No space left on device: {need} bytes for {free} free")
        arrays.write(tmp, leaves)
        commit.write_durably(tmp / META, meta)
        commit.write_commit(tmp, {"step": step, "token": self.token})
        self._publish(tmp, step)
        self._damaged.discard(step)
        self._prune(step)

    def _publish(self, tmp: Path, step: int) -> None:
        """The commit: give the finished folder its final name."""
        final = self.folder / str(step)
        if os.path.lexists(final):  # damaged or foreign: keep it for its owner, out of the way
            aside = self.folder / f"damaged-{step}-{secrets.token_hex(8)}"
            final.rename(aside)
            log.warning("%s was not a usable checkpoint; it is now %s", final, aside.name)
        tmp.rename(final)
        try:
            commit.sync_folder(self.folder)
        except OSError as error:  # it is there; only a power cut in this second could undo it
            log.warning("%s could not be synced: %s", self.folder, error)

    def _prune(self, just_saved: int) -> None:
        """Delete all but the newest `keep`; only now, when a newer one is committed."""
        steps = [step for step in self._committed_now() if step not in self._damaged]
        for step in steps[: -self.keep] if self.keep > 0 else []:
            if step == just_saved or (self.folder / str(step)).is_symlink():
                continue
            trash = self.folder / f"tmp-{step}-{secrets.token_hex(8)}"
            try:
                (self.folder / str(step)).rename(trash)  # a half deleted one is never seen
                shutil.rmtree(trash)
            except OSError as error:
                log.warning("the old checkpoint of step %d was not deleted: %s", step, error)

    def _sweep(self) -> None:
        """Remove tmp folders of dead writers, once, before the first write."""
        if self._swept or not self.folder.is_dir():
            return
        for entry in os.scandir(self.folder):
            if _TMP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                log.info("removing %s, left by a save that was interrupted", entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
        self._swept = True

    def _committed_now(self) -> list[int]:
        try:
            return self.steps()
        except OSError:
            return []


def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint, for the reader's eyes only."""
    import importlib.metadata as packages
    import platform

    found = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    for name in ("localtrain", "jaxlib", "flax", "orbax-checkpoint"):
        try:
            found[name] = packages.version(name)
        except packages.PackageNotFoundError:
            continue
    return found


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _storage_error(
    error: BaseException, step: int, folder: Path, committed: list[int]
) -> StorageError:
    text = str(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, getattr(errno, "EDQUOT", -1))
    full = full or "No space left on device" in text or "quota exceeded" in text.lower()
    what = "the disk is full" if full else f"{type(error).__name__}: {_first(error)}"
    left = f"the checkpoints of steps {committed} are intact" if committed else "none was saved yet"
    todo = "Free some space or lower checkpoint.keep" if full else "Repair the storage"
    return StorageError(
        f"Saving step {step} to {folder} failed twice: {what}; {left}. {todo}, then start the "
        f"same command again to go on."
    )
