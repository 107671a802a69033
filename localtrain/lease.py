"""One writer per run directory behind a URL: an object that its owner keeps touching.

    lease.json   {"token", "host", "boot", "space", "pid", "process", "beat", "every_s", "started"}

It is made by exclusive create. Whoever finds one decides so: its process ran on this machine and is
gone: take over at once; it runs on this machine: it is in use; otherwise watch `beat`: when it
moves it is in use, when it stands still for three beats its owner is gone (Gray and Cheriton,
"Leases", 1989, with a counter in place of clocks, which two machines never share). An owner looks
at the lease again before each commit and each upload, so that one which was taken for dead and
wakes up changes nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from localtrain import storage
from localtrain.errors import BusyError, StorageError
from localtrain.lock import in_use

log = logging.getLogger(__name__)

LEASE = "lease.json"
BEAT_S = 10.0
STILL_BEATS = 3


class Lease:
    """The lease on the folder at a URL, held until `release`.

    `token` (16 hex digits) is new for every owner. Raises BusyError naming the owner, StorageError.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.path = storage.join(folder, LEASE)
        self.token = secrets.token_hex(8)
        self._beat = 0
        self._started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._lost: BusyError | None = None
        self._stop = threading.Event()
        self._acquire()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Look at the store: BusyError when another process took over."""
        self.check_known()
        if not self._is_ours():
            self._lose()
            self.check_known()

    def check_known(self) -> None:
        """The same from what is known already; no request."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Let others have it. Harmless when it is not held."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=60)
        try:
            if self._lost is None and self._is_ours():
                storage.remove_all([self.path])
        except StorageError as error:
            log.warning("the lease was not given back, the next start has to wait: %s", error)

    def _acquire(self) -> None:
        while True:
            owner = self._read()
            if owner is None:
                if storage.create(self.path, self._encode()) or self._is_ours():
                    return
                continue
            if owner.get("token") == self.token:
                return
            if not is_gone(owner):
                self._wait_until_still(owner)
            log.info("taking over %s from %s, which is gone", self.folder, _who(owner))
            storage.remove_all([self.path])
            if storage.create(self.path, self._encode()) or self._is_ours():
                time.sleep(random.uniform(0.1, 0.3))  # another one may have had the same idea
                if self._is_ours():
                    return

    def _wait_until_still(self, owner: dict[str, Any]) -> None:
        """Return when the owner shows no life; BusyError when it does."""
        busy = BusyError(in_use(self.folder, owner))
        if _same_machine(owner):
            raise busy
        every = owner.get("every_s")
        every = min(float(every), 600.0) if isinstance(every, int | float) and every > 0 else BEAT_S
        log.info("%s seems to be in use by %s; watching for a sign", self.folder, _who(owner))
        end = time.monotonic() + STILL_BEATS * every
        while time.monotonic() < end:
            time.sleep(min(every / 4, 1.0))
            now = self._read()
            if now is None:
                return
            if (now.get("token"), now.get("beat")) != (owner.get("token"), owner.get("beat")):
                raise busy

    def _keep(self) -> None:
        """Touch the lease for as long as it is ours."""
        while not self._stop.wait(BEAT_S):
            try:
                if not self._is_ours():  # gone: another one took over and has ended meanwhile
                    return self._lose()
                self._beat += 1
                storage.write_atomic(self.path, self._encode())
            except StorageError as error:  # the next one may come through
                log.warning("the lease of %s could not be renewed: %s", self.folder, error)

    def _lose(self) -> None:
        owner = self._read()
        who = "another process, which has ended meanwhile" if owner is None else _who(owner)
        self._lost = BusyError(
            f"{self.folder} was taken over by {who}, because this process showed no sign of life "
            f"for {STILL_BEATS * BEAT_S:g} s, or {LEASE} was deleted. Nothing more is written "
            f"by this one; the same command goes on from the last checkpoint."
        )

    def _is_ours(self) -> bool:
        return (self._read() or {}).get("token") == self.token

    def _read(self) -> dict[str, Any] | None:
        """The lease; None when there is none, {} when it is damaged."""
        try:
            owner = json.loads(storage.read_bytes(self.path))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _encode(self) -> bytes:
        facts = {**this_process(), "token": self.token, "beat": self._beat, "every_s": BEAT_S}
        return json.dumps({**facts, "started": self._started}).encode()


def this_process() -> dict[str, Any]:
    """What tells a process from every other one, on this machine and on all others.

    A host name alone does not: containers share it, or the numbers of their processes.
    """
    boot = space = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    facts = {"host": socket.gethostname(), "boot": boot, "space": space}
    return {**facts, "pid": pid, "process": _started_at(pid)}


def is_gone(owner: dict[str, Any]) -> bool:
    """True only when the owner ran on this machine and its process does not exist any more."""
    pid = owner.get("pid")
    if not _same_machine(owner) or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _started_at(pid) != owner.get("process")  # the number was given to another one


def _same_machine(owner: dict[str, Any]) -> bool:
    here = this_process()
    return all(owner.get(key) == here[key] for key in ("host", "boot", "space"))


def _started_at(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (Linux)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _who(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "another process"
    return f"process {owner['pid']} on {owner.get('host')}"
