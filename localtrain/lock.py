"""One writer per run directory: an advisory lock that dies with its process.

The kernel holds the lock (flock), so a killed owner never leaves a directory unusable, whatever
the lock file says; the file's content only names the owner to whoever is turned away. The file is
never deleted: removing a lock file is a race.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from localtrain.errors import BusyError, StorageError

LOCK = ".lock"
_DYING_S = 10.0  # a killed process with much memory takes a while to let go
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The lock on a folder, held until `release` or the end of the process.

    `token` (16 hex digits) is new for every owner. Raises BusyError naming process, host and start
    time if another process holds it, StorageError if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / LOCK
        self.token = secrets.token_hex(8)
        try:
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be written: {error.strerror or error}. Choose another place "
                f"with --out, or change its permissions."
            ) from error
        try:
            self._acquire()
        except BaseException:
            self.release()
            raise
        _held.add(self)
        self._sign()

    def check(self) -> None:
        """Raise StorageError when the folder is no longer the one that was locked."""
        if self._descriptor is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise StorageError(
                f"{self.path.parent} was moved, deleted or replaced while this run wrote to it, so "
                f"nothing more can be saved there. Put it back, then start the same command again "
                f"to go on from its last checkpoint."
            )

    def release(self) -> None:
        """Let go. Harmless when it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self) -> None:
        deadline = time.monotonic() + _DYING_S
        while not try_lock(self._descriptor):
            owner = self._owner()
            if _alive(owner) or time.monotonic() > deadline:
                raise BusyError(in_use(self.path.parent, owner))
            time.sleep(0.05)

    def _owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _sign(self) -> None:
        """Say who we are. On a full disk the lock holds all the same."""
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        try:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, json.dumps({**owner, "token": self.token}).encode())
            os.fsync(self._descriptor)  # NFS: other hosts of the run read it at once
        except OSError:
            pass


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process if nobody has it; StorageError where locks are unknown."""
    if sys.platform == "win32":  # not tested
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # away from the text, which others read
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise StorageError(
            f"the file system does not support locks (flock: {error.strerror}); put the run "
            f"directory on one that does (--out)."
        ) from error
    return True


def _alive(owner: dict[str, Any]) -> bool:
    """False only when the owner ran on this host and is gone: then its lock is about to go."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def in_use(folder: Path | str, owner: dict[str, Any]) -> str:
    """The paragraph of the BusyError: who has it, and what to do."""
    who = "another process"
    if "pid" in owner:
        who = f"process {owner['pid']} on {owner.get('host')} since {owner.get('started')}"
    return (
        f"{folder} is in use by {who}. Wait for it, stop it (kill -TERM saves first), or choose "
        f"another directory with --out."
    )


def _forget_after_fork() -> None:
    """A forked child would keep the lock alive after its parent's death."""
    for lock in _held:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
