"""Who of a run's processes is alive: each sends a sign every second, and silence ends the run.

A collective waits for ever for a process that is gone, deep inside a library, and jax's own
heartbeat ends everything by abort() after minutes. So each process keeps one connection to the lead
and sends a line a second that says where it is. What is noticed, and how soon:

- a process that was killed or died: its connection closes, at once;
- one that was stopped, or whose host or network is gone: silence for SILENT_S seconds;
- the same of the lead, by everyone.

Then every process prints one paragraph that names the process, its host and where it was, and ends
with exit code 7. A process that ends by itself with an error says so first, so that the others can
tell. All of it runs in one thread, and ends the process whatever the main thread waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localtrain.errors import PeerError, Stopped

log = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 30.0  # a long garbage collection or page-out is shorter, a job's idle time is not
_KNOWN_S = 10.0  # so long a new connection may take to say who it is,
_KNOWN_BYTES = 4096  # and so much
_VERDICT_S = 5.0  # an error of a collective is seen this much before its cause, at most
AGAIN = (
    "The run cannot go on without it. Start the same command in every process again: it goes on "
    "from the last checkpoint."
)


@dataclass(eq=False)
class _Peer:
    """The other end of a connection, and what it said last."""

    index: int
    count: int
    host: str = "?"
    pid: int = 0
    at: str = "its start"
    seen: float = field(default_factory=time.monotonic)
    leaving: bool = False  # it said so: its end is no news
    socket: socket.socket | None = None
    unread: bytes = b""

    def __str__(self) -> str:
        return f"process {self.index} of {self.count} (pid {self.pid} on {self.host})"


class Heart:
    """The thread of one process; `start` makes it."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count
        self.at = "its start"
        self.saving: int | None = None  # the step that a background thread writes
        self._peers: list[_Peer] = []
        self._unknown: list[_Peer] = []  # connections that did not say who they are
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._ended = threading.Lock()
        self._token = ""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    # starting

    def listen(self) -> str:
        """The lead: returns what the others need to connect."""
        family, dual = socket.AF_INET, socket.has_dualstack_ipv6()
        if dual:
            family = socket.AF_INET6
        server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        server.setblocking(False)
        self._token = secrets.token_hex(16)  # a port scanner is nobody's death
        self._peers = [_Peer(index, self.count) for index in range(1, self.count)]
        self._selector.register(server, selectors.EVENT_READ, None)
        self._thread.start()
        return f"{server.getsockname()[1]} {self._token}"

    def connect(self, host: str, key: str) -> None:
        """The others."""
        port, self._token = key.split()
        try:
            link = socket.create_connection((host, int(port)), timeout=SILENT_S)
        except OSError as error:
            raise PeerError(
                f"process {self.index} of {self.count}: port {port} of {host}, where process 0 "
                f"waits for the signs of life of all, cannot be reached ({error}). This port must "
                f"be reachable too, beside the coordinator's: the system chooses it anew for each "
                f"run, so open the ports between the hosts of a run."
            ) from error
        lead = _Peer(0, self.count, host, socket=link)
        self._peers = [lead]
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, lead)
        self._send(lead, {"token": self._token, **self._facts()})
        self._thread.start()

    # telling

    def tell(self, code: int, why: str) -> None:
        """This process is about to end with an error: the others need not find out."""
        self._closing = True
        _forget_coordinator()
        for peer in self._peers:
            self._send(peer, {"leave": code, "why": why, **self._facts()})

    def close(self) -> None:
        """This process ends as all do: from now on nobody's end is news."""
        self._closing = True
        for peer in self._peers:
            self._send(peer, {"bye": True})

    def _facts(self) -> dict[str, Any]:
        saving = "" if self.saving is None else f", while step {self.saving} was being saved"
        at = self.at + saving
        return {"index": self.index, "host": socket.gethostname(), "pid": os.getpid(), "at": at}

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.socket is None:
            return
        with contextlib.suppress(OSError):  # a lost connection is noticed by reading
            peer.socket.send(json.dumps(message).encode() + b"\n")

    # listening

    def _run(self) -> None:
        beat = looked = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - looked > SILENT_S / 3:  # it was us who slept: nobody can be blamed for it
                for peer in self._peers + self._unknown:
                    peer.seen = now
            looked = now
            for peer in self._peers:
                if now - peer.seen > SILENT_S and not peer.leaving:
                    self._lost(peer, f"gave no sign of life for {SILENT_S:g} s")
            for new in [new for new in self._unknown if now - new.seen > _KNOWN_S]:
                self._turn_away(new)
            if now >= beat:
                beat = now + BEAT_S
                for peer in self._peers:
                    self._send(peer, self._facts())

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            link, _ = server.accept()
            link.setblocking(False)
            new = _Peer(-1, self.count, socket=link)
            self._selector.register(link, selectors.EVENT_READ, new)
            self._unknown.append(new)

    def _turn_away(self, new: _Peer) -> None:
        self._unknown.remove(new)
        self._selector.unregister(new.socket)
        new.socket.close()

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and peer.index < 0:
            self._turn_away(peer)
            return
        if not data:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None
            if not peer.leaving:
                self._lost(peer, "died or was killed")
            return
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        if peer.index < 0:  # the first line of a new connection says who it is
            known = self._known(peer, lines[0]) if lines else None
            if known is None:
                if lines or len(peer.unread) > _KNOWN_BYTES:
                    self._turn_away(peer)
                return
            peer = known
        for line in lines:
            self._hear(peer, json.loads(line))

    def _known(self, new: _Peer, line: bytes) -> _Peer | None:
        if len(line) > _KNOWN_BYTES:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            said = json.loads(line)
            index = said["index"]
            if secrets.compare_digest(said["token"], self._token) and 1 <= index < self.count:
                peer = self._peers[index - 1]
                if peer.socket is None and not peer.leaving:
                    peer.socket, peer.unread = new.socket, new.unread
                    self._unknown.remove(new)
                    self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
                    return peer
        return None

    def _hear(self, peer: _Peer, said: dict[str, Any]) -> None:
        peer.seen = time.monotonic()
        if "end" in said:
            self._end(said["end"], said["why"])
        elif "bye" in said:
            peer.leaving = True
        elif "leave" in said:
            peer.leaving = True
            stopped = said["leave"] == Stopped.exit_code
            why = f"{peer} ended at {said['at']} with exit code {said['leave']}: {said['why']}"
            again = "" if stopped else f" {AGAIN}"
            self._spread(said["leave"] if stopped else PeerError.exit_code, why + again)
        else:
            peer.host, peer.pid, peer.at = said["host"], said["pid"], said["at"]

    def _lost(self, peer: _Peer, how: str) -> None:
        peer.leaving = True
        self._spread(PeerError.exit_code, f"{peer} {how}; it was last seen at {peer.at}. {AGAIN}")

    def _spread(self, code: int, why: str) -> None:
        """Tell all the others, then end as they do."""
        if self._closing:
            return
        for peer in self._peers:
            if not peer.leaving:
                self._send(peer, {"end": code, "why": why})
        self._end(code, why)

    def _end(self, code: int, why: str) -> None:
        """End this process now, whatever its main thread is in. The first to come here does it."""
        if self._closing or not self._ended.acquire(blocking=False):
            return
        end(code, why)


_heart: Heart | None = None


def start(host: str, index: int, count: int, publish: Callable[[str, str | None], str]) -> None:
    """Watch over the processes of a run from now on; `publish` brings the lead's word to all."""
    global _heart
    _heart = Heart(index, count)
    if index == 0:
        publish("heartbeat", _heart.listen())
    else:
        _heart.connect(host, publish("heartbeat", None))


def note(at: str) -> None:
    """Where this process is, in words: "step 12". Cheap."""
    if _heart is not None:
        _heart.at = at


def note_saving(step: int | None) -> None:
    """The step that is being written beside it; None: none."""
    if _heart is not None:
        _heart.saving = step


def tell(code: int, why: str) -> None:
    """Before this process ends alone."""
    if _heart is not None:
        _heart.tell(code, why)


def close() -> None:
    """Before this process ends together with all."""
    if _heart is not None:
        _heart.close()


def settle() -> None:
    """Give the thread the time to find out whether an error was caused by another's death."""
    if _heart is not None:
        time.sleep(_VERDICT_S)


def end(code: int, why: str) -> None:
    """Say why and leave, from any thread. A stderr that blocks cannot hold it up."""

    def last_words() -> None:
        if sys.__stderr__ is not None and sys.__stderr__.isatty():
            sys.__stderr__.write("\x1b[?25h")  # a live line hides the cursor
        if logging.getLogger("localtrain").hasHandlers():
            log.error("%s", why)
        else:
            print(f"error: {why}", file=sys.stderr)
        logging.shutdown()

    aside = threading.Thread(target=last_words, daemon=True)
    aside.start()
    aside.join(2.0)
    os._exit(code)


def _forget_coordinator() -> None:
    """At exit jax would wait there for the other processes; the system closes it as well."""
    from jax._src.distributed import global_state

    for name in ("client", "service"):
        found = getattr(global_state, name)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))  # its end would abort this process
        setattr(global_state, name, None)
