"""Checkpoints: written in the background, believed only when complete, checked before use.

A save copies the arrays to host memory (the only part that blocks), then a thread lets Orbax
write them into a new local folder, adds `meta.json`, and records size and crc32c of every file in
`commit.json`. The commit is one act: locally the rename of that folder to `<step>/`, behind a URL
the upload of `commit.json` after all else (localtrain/remote_shelf.py). A kill at any moment leaves
either the whole checkpoint or a leftover that nobody believes and the next writer sweeps away.

Arrays are written from host memory, so no device name is stored: a checkpoint opens on any
platform, and onto whatever shardings the template carries. Nothing here reads a pickle.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from localtrain import arrays, commit, heartbeat, parts, processes, storage, together
from localtrain.errors import DataError, LocaltrainError, StorageError
from localtrain.restore import META, CheckpointReader, find_checkpoint, restore_params

__all__ = ["CheckpointReader", "Checkpoints", "find_checkpoint", "restore_params"]

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class Checkpoints(CheckpointReader):
    """The checkpoints of one run, to be written (and read).

    One writer at a time (the lock of the run directory sees to it); any number of readers.
    `token` marks this writer's files: 16 hex digits, made up when not given. `guard` is called
    before each write and each commit, and raises when the folder is no longer this writer's.
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
        self.guard = guard or (lambda: None)
        self.token = token or secrets.token_hex(8)
        self._thread: threading.Thread | None = None
        self._failure: LocaltrainError | None = None
        self._swept = False
        self._saves = 0  # begun so far
        self._known: list[int] | None = None  # the steps committed so far, once that is known

    def save(self, step: int, state: Any, meta: dict[str, Any], block: bool = False) -> float:
        """Save in the background; returns the seconds the caller was blocked.

        state: pytree (nested dict) of arrays, which may be donated as soon as this returns.
        meta: JSON values; `step`, library versions and the list of arrays are added.
        Saving a step that is already there does nothing. Raises StorageError if the save before
        this one failed.
        """
        began = time.monotonic()
        self.wait()
        self._saves += 1
        local = not self.shelf.is_remote  # else the thread looks
        if local and processes.agree(processes.lead() and self._looks_saved(step)):
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
        try:
            self._write_alone(self.token, step, leaves, commit.encode_json(facts))
        except OSError as error:
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
            try:
                heartbeat.note_saving(step)
                if processes.count() == 1:
                    if not self._is_saved(step):  # by an attempt that failed late, too
                        self._write_alone(token, step, leaves, meta)
                else:
                    self._write_together(attempt, token, step, leaves, meta)
                return
            except together.Refused as refused:  # trying again is no use
                self._failure = refused.reason
                return
            except Exception as error:  # whatever it was, training must hear of it
                if attempt == 1:
                    reason = together.first_line(error)
                    log.warning("saving step %d failed, trying once more: %s", step, reason)
                    time.sleep(_RETRY_AFTER_S)
                    continue
                self._failure = _storage_error(error, step, self.folder, self._known)
            finally:
                heartbeat.note_saving(None)

    def _begin(self, token: str, step: int) -> Path:
        self._known = self._committed_now()
        self._check_guard()
        if not self._swept:
            self.shelf.sweep()
            self._swept = True
        return self.shelf.start(step, token)

    def _write_alone(
        self, token: str, step: int, leaves: dict[str, np.ndarray | arrays.Deferred], meta: bytes
    ) -> None:
        tmp = self._begin(token, step)
        try:
            self.shelf.check_room(tmp, sum(leaf.nbytes for leaf in leaves.values()))
            arrays.write(tmp, leaves)
            commit.write_durably(tmp / META, meta)
            self._commit(step, tmp, self.shelf.finish(step, tmp))
        except BaseException:
            self.shelf.discard(tmp)
            raise

    def _commit(self, step: int, tmp: Path, files: dict[str, Any]) -> None:
        facts = {"step": step, "token": self.token}
        self.shelf.publish(step, tmp, facts, files, self._check_guard)
        self._damaged.discard(step)
        self._prune(step)

    def _write_together(
        self, attempt: int, token: str, step: int, leaves: dict[str, Any], meta: bytes
    ) -> None:
        """Every process writes its parts and records their checksums; then the lead commits.

        What fails in one fails in all, so that all try again or none does.
        """
        name, lead = f"save/{self._saves}/{attempt}", processes.lead()
        tmp: Path | None = None

        def begin() -> str | None:
            nonlocal tmp
            if self._is_saved(step):
                return None
            tmp = self._begin(token, step)
            return tmp.name

        def write(made: str) -> dict[str, Any]:
            nonlocal tmp
            tmp = tmp or self.shelf.join(step, made)
            self.shelf.check_room(tmp, sum(leaf.nbytes for leaf in leaves.values()))
            written = parts.write(tmp, leaves, lead)
            if lead:
                commit.write_durably(tmp / META, meta)
                written.append(META)
            return self.shelf.finish(step, tmp, written)

        try:
            made = together.in_all(begin, f"{name}/begin")
            if made is None:
                return
            mine = together.outcome(partial(write, made))
            found = processes.gather(mine, f"{name}/parts")
            end = f"{name}/end"
            together.in_all(lambda: self._commit(step, tmp, together.all_files(found)), end)
        except BaseException:
            if lead and tmp is not None:
                self.shelf.discard(tmp)
            raise
        finally:
            if not lead and tmp is not None and self.shelf.is_remote:
                self.shelf.discard(tmp)

    def _check_guard(self) -> None:
        try:
            self.guard()
        except LocaltrainError as error:
            raise together.Refused(error) from error

    def _is_saved(self, step: int) -> bool:
        if step in self._damaged:
            return False
        try:
            self.shelf.record(step)
        except DataError:
            return False
        return True

    def _looks_saved(self, step: int) -> bool:
        try:
            return self._is_saved(step)
        except StorageError:  # the thread looks, too, and tries again
            return False

    def _prune(self, just_saved: int) -> None:
        """Delete all but the newest `keep`; only now, when a newer one is committed."""
        self._known = self._committed_now()
        steps = [step for step in self._known or [] if step not in self._damaged]
        for step in steps[: -self.keep] if self.keep > 0 else []:
            if step == just_saved:
                continue
            try:
                self.shelf.remove(step)
            except (OSError, LocaltrainError) as error:
                log.warning("the old checkpoint of step %d was not deleted: %s", step, error)

    def _committed_now(self) -> list[int] | None:
        try:
            return self.steps()
        except (OSError, StorageError):
            return self._known


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


def _storage_error(
    error: BaseException, step: int, folder: Path | str, committed: list[int] | None
) -> StorageError:
    text = str(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, getattr(errno, "EDQUOT", -1))
    full = full or "No space left on device" in text or "quota exceeded" in text.lower()
    what = "the disk is full" if full else f"{type(error).__name__}: {together.first_line(error)}"
    if isinstance(error, LocaltrainError):
        what = together.first_line(error).rstrip(".")
    left = f"; the checkpoints of steps {committed} are intact" if committed else ""
    left = "; none was saved yet" if committed == [] else left  # None: unknown
    todo = "Free some space or lower checkpoint.keep" if full else "Repair the storage"
    return StorageError(
        f"Saving step {step} to {folder} failed twice: {what}{left}. {todo}, then start the "
        f"same command again to go on."
    )
