"""The process around a run: the stop signal, logging, and facts about the host.

Order at start-up: the backend's environment, then jax, then jax.distributed.initialize (which
takes SIGTERM over for its own preemption notice), and only then `StopSignal.install()`.
Nothing here imports jax before it is asked for something that only jax knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localtrain import heartbeat, processes, storage
from localtrain.config.secret import mask
from localtrain.errors import Stopped

log = logging.getLogger(__name__)

EXIT_STOPPED = Stopped.exit_code
_ECHO_S = 0.1  # a wrapper that forwards Ctrl-C delivers it twice within milliseconds


class StopSignal:
    """SIGTERM and SIGINT as a request to save and stop, noticed at any moment.

    Python runs a signal handler only between byte codes of the main thread, so never during a
    compile. The C part of the handler, however, writes the signal's number to a wake-up
    descriptor at once; a thread reads it there, sets `event` (poll it in loops, wait on it in
    threads) and ends the process by itself when that is the right thing:

    - the first signal while there is nothing to save: exit 75 at once;
    - a second signal: exit 75 at once;
    - `bound_s` seconds after the first signal, should stopping hang.

    `install` must come after jax.distributed.initialize, whose handler would replace ours.
    """

    def __init__(self, bound_s: float = 300.0):
        self.event = threading.Event()
        self.reason: str | None = None
        self.bound_s = bound_s
        self._nothing_to_save = False
        self._at_exit: list[Callable[[], None]] = []
        self._first_at = 0.0
        self._timer: threading.Timer | None = None
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup = -1
        self._watcher: threading.Thread | None = None
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    @classmethod
    def install(cls, bound_s: float = 300.0) -> StopSignal:
        """Install the handlers. Outside the main thread Python allows none: `event` stays unset."""
        stop = cls(bound_s)
        if threading.current_thread() is not threading.main_thread():
            log.debug("not in the main thread: signals are left to the application")
            return stop
        stop._reader, stop._writer = socket.socketpair()
        stop._writer.setblocking(False)
        stop._old_wakeup = signal.set_wakeup_fd(stop._writer.fileno(), warn_on_full_buffer=False)
        stop._watcher = threading.Thread(target=stop._watch, name="stop-signal", daemon=True)
        stop._watcher.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            stop._old_handlers[number] = signal.signal(number, stop._handler)
        return stop

    @property
    def requested(self) -> bool:
        """A signal has arrived: save if there is something new, and end with exit code 75."""
        return self.event.is_set()

    def agreed(self, now: bool = False) -> bool:
        """Whether to stop here, the same answer in all processes of the run: see
        `processes.any_of`. With one process: `requested`."""
        found = processes.any_of(self.requested, "stop", now)
        if found and not self.requested:
            self.reason = "a signal to another process"
            self.event.set()
        return found

    def nothing_to_save(self, flag: bool) -> None:
        """Say whether leaving at once would lose nothing (True during the first compile)."""
        self._nothing_to_save = flag
        if flag and self.requested:
            self._leave(f"{self.reason}: nothing to save, stopping.")

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Run this (quickly) before a process is ended at once, say to restore the terminal."""
        self._at_exit.append(callback)

    def uninstall(self) -> None:
        """Put back the handlers that were there before."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is None or self._watcher is None:
            return
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_wakeup)
        self._writer.close()  # ends the watcher
        self._writer = None
        self._watcher.join(1.0)

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _handler(self, number: int, _frame: object) -> None:
        """Runs late, in the main thread; only matters if someone took the wake-up descriptor."""
        if self._writer is None:
            return
        ours = self._writer.fileno()
        if signal.set_wakeup_fd(ours, warn_on_full_buffer=False) != ours:
            self._writer.send(bytes([number]))

    def _watch(self) -> None:
        reader = self._reader
        assert reader is not None
        with reader:
            while data := reader.recv(64):
                for number in data:
                    if number in (signal.SIGTERM, signal.SIGINT):
                        self._receive(signal.Signals(number).name)

    def _receive(self, name: str) -> None:
        if self.requested:
            if time.monotonic() - self._first_at > _ECHO_S:
                self._leave(f"{name}: second signal, quitting without saving.")
            return
        self.reason, self._first_at = name, time.monotonic()
        self.event.set()
        if self._nothing_to_save:
            self._leave(f"{name}: nothing to save, stopping.")
        late = f"stopping took longer than {self.bound_s:g} s, quitting."
        self._timer = threading.Timer(self.bound_s, self._leave, [late])
        self._timer.daemon = True
        self._timer.start()
        self._aside(lambda: log.warning("%s: stopping (a second signal quits at once).", name))

    def _leave(self, message: str) -> None:
        """End the process now, whatever the main thread is in."""

        def last_words() -> None:
            for callback in self._at_exit:
                try:
                    callback()
                except Exception:
                    log.debug("exit callback failed", exc_info=True)
            if sys.__stderr__ is not None and sys.__stderr__.isatty():
                sys.__stderr__.write("\x1b[?25h")  # a live line hides the cursor
            log.warning("%s Start the same command again to go on.", message)
            heartbeat.tell(EXIT_STOPPED, message)
            logging.shutdown()

        self._aside(last_words).join(2.0)
        os._exit(EXIT_STOPPED)

    @staticmethod
    def _aside(work: Callable[[], None]) -> threading.Thread:
        """In a thread of its own: a blocked stderr must not block the watcher."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


class _StderrHandler(logging.StreamHandler):
    """Whatever sys.stderr is now: rich replaces it while a live line is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: getattr(record, "console", True))

    @property
    def stream(self) -> Any:
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _FileHandler(logging.FileHandler):
    """A full disk must not turn each log line into a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


_handlers: list[logging.Handler] = []


def setup_logging(run_dir: str | os.PathLike | None = None, level: int = logging.INFO) -> None:
    """Plain lines to stderr and, with a run directory, dated lines to its log.txt.

    May be called again: the handlers of the call before are replaced.
    """
    close_logging()
    quiet_third_parties()
    logger = logging.getLogger("localtrain")
    logger.setLevel(level)
    taken = any(type(handler) is logging.StreamHandler for handler in logging.getLogger().handlers)
    if not taken:  # else the application shows our records already
        handler = _StderrHandler()
        if not processes.lead():  # all say the same: one is enough, but for what is wrong
            handler.setLevel(logging.WARNING)
            handler.setFormatter(logging.Formatter(f"process {processes.index()}: %(message)s"))
        _handlers.append(handler)
        logger.propagate = False  # or a root handler that a library adds later shows all twice
    if run_dir is not None and processes.lead():
        path = str(Path(run_dir) / "log.txt")
        try:
            file = _FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise storage.storage_error("write", path, error) from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _handlers.append(file)
    for handler in _handlers:
        handler.addFilter(_without_secrets)
        logger.addHandler(handler)


def _without_secrets(record: logging.LogRecord) -> bool:
    """Passwords and tokens in a URL do not belong into a log that is shown to others."""
    record.msg, record.args = mask(record.getMessage()), ()
    return True


def close_logging() -> None:
    """Detach and close what `setup_logging` added."""
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger("localtrain").removeHandler(handler)
        handler.close()
    logging.getLogger("localtrain").propagate = True


def quiet_third_parties() -> None:
    """Silence libraries that report their routine (absl, orbax, jax's hunt for platforms).

    absl's errors too: Orbax logs a traceback of what it also raises, and we say in one line.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ side; read when jax starts
    try:
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.FATAL)
    except ImportError:
        pass
    for name in ("orbax", "jax._src.xla_bridge", "jax._src.distributed", "fsspec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # futures that Orbax left behind
    if sys.unraisablehook is not _without_closed_loops:
        _hooks.append(sys.unraisablehook)
        sys.unraisablehook = _without_closed_loops


_hooks: list[Callable[[Any], None]] = []  # what was there before ours


def _without_closed_loops(unraisable: Any) -> None:
    """When a save fails, tensorstore's threads report the writes that are left to Orbax's event
    loop, which is closed by then, and print one traceback each. The failure itself is raised."""
    if str(unraisable.exc_value) != "Event loop is closed":
        _hooks[-1](unraisable)


def host_facts() -> dict[str, Any]:
    """What this run runs on, for the log and the metrics (starts jax's backend)."""
    import jax

    from localtrain import __version__

    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    return {
        "localtrain": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "device_memory": limit,
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_host(facts: dict[str, Any] | None = None) -> str:
    """The same in one line."""
    facts = host_facts() if facts is None else facts
    memory = f" of {facts['device_memory'] / 2**30:.1f} GiB" if facts["device_memory"] else ""
    several = f", {facts['processes']} processes" if facts["processes"] > 1 else ""
    return (
        f"localtrain {facts['localtrain']}, jax {facts['jax']}, Python {facts['python']}, "
        f"{facts['system']}, {facts['cpus']} CPUs; {facts['devices']} x {facts['device']}{memory} "
        f"({facts['platform']}{several})"
    )
