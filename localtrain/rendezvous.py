"""The moment in which the processes of a run meet: jax.distributed, with what it does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from localtrain import heartbeat
from localtrain.errors import ConfigError, PeerError
from localtrain.launcher import Place, split_address

log = logging.getLogger(__name__)

JOIN_S = 180.0  # how long a process waits for all the others to be there
HEARTBEAT_S = 100  # jax's own, which ends a process by abort(); heartbeat.py is faster and says why
_TELL_S = 10.0  # a line says what is waited for
_LEAVING_S = 10.0  # a run that ends may still hold the port
_HELLO, _WAIT, _GO = b"localtrain-hello", b"localtrain-wait\n", b"localtrain-go\n"
_END = b"localtrain-end"


def connect(place: Place, local_devices: list[int] | None) -> None:
    """Meet the others in jax. Raises ConfigError, PeerError; ends with 7 after JOIN_S seconds."""
    import jax

    missing = (
        f"process {place.index} of {place.count}: not all processes came to {place.coordinator} "
        f"within {JOIN_S:g} s. Start every process from 0 to {place.count - 1} once, with the same "
        f"--coordinator and --num-processes."
    )
    try:
        with _bounded(missing):
            jax.distributed.initialize(
                place.coordinator,
                place.count,
                place.index,
                local_device_ids=local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=int(JOIN_S) + 60,
                heartbeat_timeout_seconds=HEARTBEAT_S,
            )
    except RuntimeError as error:  # jaxlib's errors of the coordinator are these
        if "must be called before" in str(error):
            raise ConfigError(
                f"{place.source}: jax is already up in this process; start the processes of a run "
                f"before any other use of jax."
            ) from error
        raise PeerError(f"{missing} ({' '.join(str(error).split())[:200]})") from error


@contextlib.contextmanager
def _bounded(missing: str) -> Iterator[None]:
    """Around a wait inside jaxlib, which ends by abort() when it is over and holds up Python's
    handlers of signals: an end of our own before that, and Ctrl-C ends the process."""
    timer = threading.Timer(JOIN_S, heartbeat.end, [PeerError.exit_code, missing])
    timer.daemon = True
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if main else None
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def over_jax() -> Iterator[None]:
    """While jax connects: settings of its coordinator's client that it does not offer.

    At exit it would wait for minutes for processes that are gone. And where it notices that the
    coordinator is gone it calls abort() at once, from a thread that holds no lock of Python's; as
    the handler of that signal, libc's sleep() holds this up for 6 s (the signal's number), so that
    our thread can say what happened and end the process with its exit code.
    """
    from jax._src import distributed

    distributed._jax, jaxlib = _WithoutWait(distributed._jax), distributed._jax
    try:
        yield
    finally:
        distributed._jax = jaxlib
    if os.name == "posix":
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class _WithoutWait:
    """jaxlib, with one default changed."""

    def __init__(self, jaxlib: Any):
        self._jaxlib = jaxlib

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._jaxlib, name)
        if name == "get_distributed_runtime_client":
            return partial(found, shutdown_on_destruction=False)
        return found


def meet(place: Place) -> None:
    """Find the others of the same start before jax does: PeerError when not all are there.

    jax's coordinator takes whoever comes, also the processes of a second start with the same port:
    it then ends the healthy run. So all say their number first, to process 0 at the coordinator's
    port; when all are there process 0 gives the port to jax. Who comes later finds jax's server
    there, which gives another answer, and is turned away.
    """
    host, port = split_address(place.coordinator)
    name = "no_grpc_proxy"  # gRPC reads it in lower case only, and a proxy knows no cluster's hosts
    direct = [os.environ.get(name) or os.environ.get("no_proxy", ""), host]
    os.environ[name] = ",".join(filter(None, direct))
    if place.index == 0:
        with _open_port(place, port) as server:
            others = _call_roll(place, server)
        _tell(others, _GO)
    else:
        _report_in(place)
        _reach(place).close()  # jax's server is there


def _open_port(place: Place, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"port {port} of the coordinator {place.coordinator} cannot be opened on this "
            f"host: {'another program uses it' if used else error}. Choose another one "
            f"with --coordinator HOST:PORT, the same for all processes."
        ) from error


def _call_roll(place: Place, server: socket.socket) -> dict[int, socket.socket]:
    """Process 0: the connections of all the others."""
    here: dict[int, socket.socket] = {}
    began, told = time.monotonic(), False
    server.settimeout(0.5)
    while True:
        here = {i: link for i, link in here.items() if not _gone(link)}
        missing = [i for i in range(1, place.count) if i not in here]
        waited = time.monotonic() - began
        if not missing:
            return here
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        if waited > JOIN_S:
            why = (
                f"of {place.count} processes these did not come to {place.coordinator} within "
                f"{JOIN_S:g} s: {names}. Start every process from 0 to {place.count - 1} once, "
                f"with the same --coordinator and --num-processes."
            )
            _tell(here, b"%s %d %s\n" % (_END, PeerError.exit_code, why.encode()))
            raise PeerError(why)
        if waited > _TELL_S and not told:
            told = True
            log.warning("waiting at %s for the processes %s", place.coordinator, names)
        with contextlib.suppress(OSError):  # nobody came, or left at once
            link, _ = server.accept()
            index = _heard(place, link, here)
            if index is not None:
                here[index] = link


def _heard(place: Place, link: socket.socket, here: dict[int, socket.socket]) -> int | None:
    """The number that a new connection says; None, and closed, for anybody else."""
    refused = b""
    try:
        link.settimeout(2.0)
        with link.makefile("rb") as lines:
            words = lines.readline(200).split()
        if len(words) == 3 and words[0] == _HELLO:
            index, count = int(words[1]), int(words[2])
            if count != place.count or not 1 <= index < count:
                refused = b"process 0 was started with --num-processes %d" % place.count
            elif index in here:
                refused = b"process %d is already there; start each number once" % index
            else:
                link.sendall(_WAIT)
                return index
        if refused:
            link.sendall(b"%s %d %s\n" % (_END, ConfigError.exit_code, refused))
    except (OSError, ValueError) as error:
        log.debug("an unknown connection to the coordinator's port: %s", error)
    link.close()
    return None


def _gone(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return not link.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _tell(others: dict[int, socket.socket], line: bytes) -> None:
    for link in others.values():
        with contextlib.suppress(OSError):  # who is gone is missed by jax
            link.sendall(line)
        link.close()


def _report_in(place: Place) -> None:
    """The others: say who this is and wait until all are there."""
    me, stranger_until = f"process {place.index} of {place.count}", None
    while True:
        first = answer = b""
        with _reach(place) as link, contextlib.suppress(OSError):
            link.sendall(b"%s %d %d\n" % (_HELLO, place.index, place.count))
            link.settimeout(_TELL_S)
            with link.makefile("rb") as lines:
                first = answer = lines.readline(2000)
                if first == _WAIT:
                    link.settimeout(JOIN_S + 30)
                    answer = lines.readline(2000)
        if answer == _GO:
            return
        if answer.startswith(_END):
            code, why = answer[len(_END) :].decode(errors="replace").strip().split(" ", 1)
            kind = PeerError if int(code) == PeerError.exit_code else ConfigError
            raise kind(f"{me}: {why}")
        if first == _WAIT:
            raise PeerError(
                f"{me}: process 0 at {place.coordinator} ended while it waited for the others."
            )
        stranger_until = stranger_until or time.monotonic() + _LEAVING_S
        if time.monotonic() > stranger_until:
            raise ConfigError(
                f"{me}: at {place.coordinator} there is another program, or a run that has already "
                f"begun. Choose another port with --coordinator HOST:PORT, the same for all "
                f"processes of this run, or wait for the end of the other."
            )
        time.sleep(1.0)


def _reach(place: Place) -> socket.socket:
    """A connection to the coordinator's port, once it is open."""
    began, told = time.monotonic(), False
    while True:
        try:
            return socket.create_connection(split_address(place.coordinator), timeout=5)
        except OSError as error:
            waited, reason = time.monotonic() - began, error
        if waited > JOIN_S:
            raise PeerError(
                f"process {place.index} of {place.count}: the coordinator {place.coordinator} did "
                f"not answer within {JOIN_S:g} s ({reason}). Is process 0 running on that host, "
                f"and can this host reach that port? --coordinator names it."
            )
        if waited > _TELL_S and not told:
            told = True
            log.warning("waiting for the coordinator %s: %s", place.coordinator, reason)
        time.sleep(0.2)
