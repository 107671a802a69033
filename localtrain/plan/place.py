"""Where a run is compiled for: a card or a slice that is not here, or this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from localtrain import backend as backends
from localtrain.backend import Backend, Facts
from localtrain.config import RunConfig
from localtrain.errors import ConfigError, nearest


@dataclass(frozen=True)
class Place:
    """Devices to compile for, and what is known of one of them."""

    backend: Backend
    device: str
    devices: list[Any]
    available: int  # bytes that a run can have on a device
    available_is: str  # where that comes from
    slices: int = 1

    @property
    def facts(self) -> Facts | None:
        """The vendor's figures; None where there is no source."""
        return self.backend.facts(self.devices[0].device_kind)


def targets() -> dict[str, list[str]]:
    """Backend -> names of machines that it can compile for without being on one."""
    found = {name: backends.find(name).topologies() for name in backends.names()}
    return {name: known for name, known in found.items() if known}


def elsewhere(name: str, backend: str | None, devices: int | None, slices: int) -> Place:
    """A machine that is not here. ConfigError for an unknown name or a missing compiler."""
    known = targets() if backend is None else {backend: backends.find(backend).topologies()}
    owner = next((owner for owner, names in known.items() if name in names), None)
    if owner is None:
        every = sorted({name for names in known.values() for name in names})
        alike = [known for known in every if (":" in known) == (":" in name)]
        close = nearest(name.lower(), every)
        hint = f"did you mean '{close}'? " if close else ""
        where = f"backend {backend} has" if backend else "there is"
        raise ConfigError(
            f"{where} no machine '{name}' to compile for; {hint}known: {_listed(alike) or 'none'}"
        )
    place = backends.find(owner)
    if not backends.jax_is_up():
        backends.set_jax(jax_platforms="cpu")  # the compiler needs no device of its own
    found = place.topology(name, devices, slices)
    available, how = place.usable_memory(name)
    return Place(place, name, list(found), available, how, slices)


@contextlib.contextmanager
def environment_as_it_was() -> Iterator[None]:
    """Around compiling for elsewhere: what that puts into the environment is no one else's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _listed(every: list[str]) -> str:
    """Cards, then the shapes of each generation of slices: v5e: 1x1, 2x2; ..."""
    groups: dict[str, list[str]] = {}
    for name in every:
        generation, _, shape = name.rpartition(":")
        groups.setdefault(generation, []).append(shape)
    return "; ".join(f"{key}: {', '.join(v)}" if key else ", ".join(v) for key, v in groups.items())


def here(run: RunConfig, backend: str | None, devices: int | None) -> Place:
    """The devices of this machine."""
    place, _ = backends.choose(backend)
    place.prepare_environment(run, devices)
    found = jax.devices()
    kind, limit = found[0].device_kind, (found[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        if place.name != "cpu" or not hasattr(os, "sysconf"):
            raise ConfigError(f"{kind} does not say how much memory it has: give --memory, as 8GB")
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(found)
        return Place(place, kind, found, limit, "the memory of this machine, shared by its devices")
    return Place(place, kind, found, limit, "the limit of jax's allocator on this device")
