"""The moment in which the processes of a run meet: jax.distributed, with what it does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from localtrain.errors import ConfigError, PeerError
from localtrain.launcher import Place, split_address

log = logging.getLogger(__name__)

JOIN_S = 180.0  # how long a process waits for all the others to be there
HEARTBEAT_S = 100  # jax's own, which ends a process by abort(); heartbeat.py is faster and says why
_TELL_S = 10.0  # a line says what is waited for


def connect(place: Place, local_devices: list[int] | None) -> None:
    """Meet the others there. Raises ConfigError, PeerError after JOIN_S seconds."""
    import jax

    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(JOIN_S),
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    except RuntimeError as error:  # jaxlib's errors of the coordinator are these
        if "must be called before" in str(error):
            raise ConfigError(
                f"{place.source}: jax is already up in this process; start the processes of a run "
                f"before any other use of jax."
            ) from error
        raise PeerError(
            f"process {place.index} of {place.count}: not all processes were at "
            f"{place.coordinator} within {JOIN_S:g} s ({' '.join(str(error).split())[:200]}). "
            f"Start every process from 0 to {place.count - 1} once, with the same --coordinator "
            f"and --num-processes."
        ) from error


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


def check_way(place: Place) -> None:
    """Fail early where jax would hang or abort: a taken port, a coordinator that does not answer.

    gRPC would also try a proxy of the environment, which does not know hosts of a cluster.
    """
    host, port = split_address(place.coordinator)
    name = "no_grpc_proxy"  # gRPC reads it in lower case only
    direct = [os.environ.get(name) or os.environ.get("no_proxy", ""), host]
    os.environ[name] = ",".join(filter(None, direct))
    if place.index == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                used = error.errno == errno.EADDRINUSE
                raise ConfigError(
                    f"port {port} of the coordinator {place.coordinator} cannot be opened on this "
                    f"host: {'another program uses it' if used else error}. Choose another one "
                    f"with --coordinator HOST:PORT, the same for all processes."
                ) from error
        return
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
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
