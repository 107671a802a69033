"""Does a run fit? The answer of the compiler, for a device that need not be here.

`plan` traces the very train step that `train` runs, with shapes in place of arrays, compiles it for
a named card or topology, and reads what the compiler says of its memory. Nothing is trained, no
array is made, no driver or accelerator is needed; the compiler is (the extra `plan-gpu`).

What the figures do not cover: memory that libraries take beside the program (the CUDA context,
cuDNN and cuBLAS workspaces), which `available` leaves room for, and scratch memory of kernels that
are only chosen on the device.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from typing import Any

import jax

from localtrain import backend as backends
from localtrain import steps
from localtrain.backend import Backend
from localtrain.config import RunConfig, load_run
from localtrain.errors import ConfigError, nearest
from localtrain.job import compiled_memory, make_network, run_mesh
from localtrain.oom import memory_advice, remedies
from localtrain.warmstart import find_start


@dataclass(frozen=True)
class Plan:
    """What one device needs and has, in bytes, and what the run costs."""

    fits: bool
    device: str
    devices: int
    parameters: int
    memory_per_device: dict[str, int]
    available_is: str  # where `memory_per_device["available"]` comes from
    tokens_per_step: int
    model_flops_per_step: float
    kernels: dict[str, str]
    compile_s: float
    advice: list[str]  # keys that lower the need; empty when it fits

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Place:
    """Where a run is compiled for."""

    backend: Backend
    device: str
    devices: list[Any]
    available: int
    available_is: str


def plan(
    run: RunConfig | str,
    backend: str | None = None,
    *,
    device: str | None = None,
    topology: str | None = None,
    devices: int | None = None,
    memory: int | None = None,
) -> Plan:
    """Compile the train step of a run and say whether it fits.

    device or topology: a name that a backend can compile for (see `targets`), not both; neither:
    the devices of this machine. devices: how many of a named card. memory: bytes that the run may
    use on each device, in place of the backend's figure. Raises ConfigError for unknown names and a
    missing compiler, the errors of `find_start` for the model, OutOfMemoryError when the compiler
    itself refuses.
    """
    run = load_run(run) if isinstance(run, str) else run
    if device and topology:
        raise ConfigError(f"--device {device} and --topology {topology}: name one of them")
    start = find_start(run, None)
    place = _target(device or topology, backend, devices) if device or topology else None
    place = place or _here(run, backend, devices)
    network = make_network(run, start.hf, start.name, place.backend)
    programs = steps.lower(network, run, run_mesh(run, place.devices, network))
    began = time.monotonic()
    with memory_advice(run):
        step = programs.train.compile(compiler_options=place.backend.compiler_options(run))
    compile_s = time.monotonic() - began
    needed = compiled_memory(programs, step)
    if "total" not in needed:
        raise ConfigError(f"the compiler for {place.device} does not say what memory it needs")
    available = place.available if memory is None else memory
    fits = needed["total"] <= available
    tokens = run.train.batch_size * run.data.seq_len
    return Plan(
        fits=fits,
        device=place.device,
        devices=len(place.devices),
        parameters=network.spec.parameters(),
        memory_per_device={**needed, "available": available},
        available_is=place.available_is if memory is None else "as given",
        tokens_per_step=tokens,
        model_flops_per_step=network.spec.model_flops_per_token(run.data.seq_len) * tokens,
        kernels={"attention": network.policy.attention},
        compile_s=round(compile_s, 1),
        advice=[] if fits else remedies(run),
    )


def targets() -> dict[str, list[str]]:
    """Backend -> names of machines that it can compile for without being on one."""
    found = {name: backends.find(name).topologies() for name in backends.names()}
    return {name: known for name, known in found.items() if known}


def _target(name: str, backend: str | None, devices: int | None) -> Place:
    """A machine that is not here."""
    known = targets() if backend is None else {backend: backends.find(backend).topologies()}
    owner = next((owner for owner, names in known.items() if name in names), None)
    if owner is None:
        every = sorted(name for names in known.values() for name in names)
        close = nearest(name.lower(), every)
        hint = f"did you mean '{close}'? " if close else ""
        where = f"backend {backend} has" if backend else "there is"
        raise ConfigError(
            f"{where} no machine '{name}' to compile for; {hint}known: {', '.join(every) or 'none'}"
        )
    place = backends.find(owner)
    if not backends.jax_is_up():
        backends.set_jax(jax_platforms="cpu")  # the compiler needs no device of its own
    found = place.topology(name, devices or 1)
    available, how = place.usable_memory(name)
    return Place(place, name, list(found), available, how)


def _here(run: RunConfig, backend: str | None, devices: int | None) -> Place:
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
