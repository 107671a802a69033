"""A backend is a place to train: a small class, found through an entry point. No jax here.

Other packages add backends by registering a class under the entry point group
`localtrain.backends`; the core knows none of them by name. A run file never names a backend.

    backend, why = choose(None)                  # the best usable one, and one line saying so
    notes = backend.prepare_environment(run)     # before jax opens its devices
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from localtrain.errors import ConfigError, nearest
from localtrain.launcher import find_place

if TYPE_CHECKING:
    from localtrain.config import RunConfig

GROUP = "localtrain.backends"


@dataclass(frozen=True)
class Defaults:
    """What a run gets here unless it says otherwise."""

    dtype: str = "float32"  # of the arithmetic: float32 | bfloat16
    attention: str = "blockwise"  # kernel name
    mesh: dict[str, int] = field(default_factory=lambda: {"fsdp": -1})


@dataclass(frozen=True)
class Facts:
    """What the vendor says of one device, the unit that jax counts; bytes and per second."""

    peak_flops: float  # dense bfloat16 products
    memory: int
    memory_bandwidth: float
    link: float | None  # sent to neighbours, one direction, all links; None: it has none
    network: float | None  # sent to other slices or hosts; None: not the device's to say
    source: str


class Backend(Protocol):
    """What a backend can do; subclass it and override what differs.

    `priority` orders the choice when no --backend is given: the highest usable one is taken.
    """

    name: str
    summary: str
    priority: int = 0

    def check(self) -> str | None:
        """None when usable on this machine, else the reason: what was looked for, what to do."""
        return None

    def process_environment(self) -> dict[str, str]:
        """Variables that count only when they are set before the process starts.

        The command line starts itself again with them; what has no say over its process goes on
        without, so nothing but speed may depend on them.
        """
        return {}

    def prepare_environment(
        self, run: RunConfig | None = None, devices: int | None = None
    ) -> list[str]:
        """Set platform and allocator before jax opens its devices; returns lines to tell the user.

        Raises ConfigError when jax is already up with other settings.
        """
        return []

    def compiler_options(self, run: RunConfig) -> dict[str, bool | int | str]:
        """XLA options for `jax.jit(..., compiler_options=...)`, each with its source."""
        return {}

    def initialize(
        self,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> str | None:
        """Join the other processes of the run, as flags and launcher say (`processes.join`).

        Returns a line for the log, None when this process is alone. Raises ConfigError, PeerError.
        """
        place = find_place(coordinator, num_processes, process_id)
        if place is not None:
            raise ConfigError(
                f"{place.source}: this is process {place.index} of {place.count}, but backend "
                f"{self.name} runs in one. Name one for several with --backend: multi-gpu, tpu-vm "
                f"or cpu"
            )
        return None

    def defaults(self) -> Defaults:
        """Arithmetic, kernels and mesh of this place."""
        return Defaults()

    def facts(self, device_kind: str) -> Facts | None:
        """The vendor's figures for a device, by jax's name of it; None = no source."""
        return None

    def peak_flops(self, device_kind: str) -> float | None:
        """Dense bfloat16 matmul FLOP/s of one device by the vendor's sheet; None = no source."""
        found = self.facts(device_kind)
        return None if found is None else found.peak_flops

    def topologies(self) -> list[str]:
        """Names that `topology` knows; none when it cannot compile for other machines."""
        return []

    def topology(self, name: str, devices: int | None = None, slices: int = 1) -> list[Any]:
        """Compile-only devices of a machine that is not here, or of `slices` of them.

        devices: how many, where the name does not say it (a card).

        Raises ConfigError for an unknown name and when the compiler is not installed.
        """
        raise ConfigError(f"backend {self.name} cannot compile for a machine that is not here")

    def usable_memory(self, name: str) -> tuple[int, str]:
        """(bytes of one device of that topology that a run can have, how they were found)."""
        raise ConfigError(f"backend {self.name} cannot compile for a machine that is not here")

    def launch(self, run: RunConfig, **options: Any) -> None:
        """Start the run on many hosts through this backend's own engine."""
        raise ConfigError(
            f"backend {self.name} starts on this machine only; use `localtrain train`"
        )


def names() -> list[str]:
    """Names of all registered backends, sorted."""
    return sorted(_entries())


def find(name: str) -> Backend:
    """The backend of that name, usable or not. ConfigError names the nearest one."""
    entries = _entries()
    if name not in entries:
        close = nearest(name, entries)
        hint = f"did you mean '{close}'? " if close else ""
        known = ", ".join(sorted(entries)) or "none; reinstall localtrain"
        raise ConfigError(
            f"there is no backend '{name}'; {hint}looked for an entry point of the group "
            f"{GROUP}, found: {known}"
        )
    try:
        return entries[name].load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"backend '{name}' ({entries[name].value}) cannot be loaded: {error}"
        ) from error


def choose(name: str | None = None) -> tuple[Backend, str]:
    """A usable backend and one line that says which and why.

    With a name: that one, or ConfigError with the reason it cannot be used here.
    Without: the usable one of the highest priority.
    """
    if name is not None:
        backend = find(name)
        if reason := backend.check():
            raise ConfigError(f"backend {name} cannot be used here: {reason}")
        return backend, f"backend {name}"
    rejected = []
    for backend in sorted(_loadable(), key=lambda backend: (-backend.priority, backend.name)):
        reason = backend.check()
        if reason is None:
            return backend, f"backend {backend.name}: the best usable one" + (
                f" ({', '.join(rejected)}; see `localtrain backends`)" if rejected else ""
            )
        rejected.append(f"{backend.name}: {re.split('[:;]', reason)[0]}")
    raise ConfigError(f"no backend can be used here ({', '.join(rejected) or 'none is installed'})")


def survey() -> list[dict[str, Any]]:
    """Every backend with `name`, `usable`, `reason` and `summary`, best first."""
    rows = []
    for name in names():
        try:
            backend = find(name)
            reason, summary, priority = backend.check(), backend.summary, backend.priority
        except ConfigError as error:
            reason, summary, priority = str(error), "", -1
        rows.append((-priority, name, reason, summary))
    return [
        {"name": name, "usable": reason is None, "reason": reason, "summary": summary}
        for _, name, reason, summary in sorted(rows, key=lambda row: row[:2])
    ]


def jax_is_up() -> bool:
    """Whether jax has opened its devices in this process, after which settings come too late."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # jax has no public way to ask
    ask = getattr(bridge, "backends_are_initialized", None)
    return ask is not None and ask()


def jax_runs_on(platform: str, backend: str) -> bool:
    """Whether jax has opened its devices, on this platform; ConfigError when on another."""
    if not jax_is_up():
        return False
    running = sys.modules["jax"].default_backend()
    if running != platform:
        raise ConfigError(
            f"backend {backend}: jax already runs on {running} in this process; choose the backend "
            "before any other use of jax, or in a new process"
        )
    return True


def set_jax(**options: str | int) -> None:
    """Set jax configuration, imported or not, without importing it: jax_platforms="cpu"."""
    for key, value in options.items():
        os.environ[key.upper()] = str(value)
        if "jax" in sys.modules:
            sys.modules["jax"].config.update(key, value)


def _entries() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two packages register a backend '{entry.name}': {other.value} and "
                f"{entry.value}; uninstall one of them"
            )
    return found


def _loadable() -> list[Backend]:
    """All backends but those whose package is broken: one of them must not stop the others."""
    backends = []
    for name in names():
        try:
            backends.append(find(name))
        except ConfigError:
            continue
    return backends
