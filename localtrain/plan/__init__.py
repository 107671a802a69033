"""Does a run fit, and how long is a step? The compiler's answer, for devices that need not be here.

`plan` traces the very train step that `train` runs, with shapes in place of arrays, compiles it for
a named card or slice, and reads what the compiler says of its memory and what the program does.
Nothing is trained, no array is made, no driver or accelerator is needed; the compiler is (the
extras `tpu` and `plan-gpu`).

What the figures do not cover: memory that libraries take beside the program (the CUDA context,
cuDNN and cuBLAS workspaces), which `available` leaves room for, and scratch memory of kernels that
are only chosen on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localtrain import hlo, steps
from localtrain.config import RunConfig, load_run
from localtrain.errors import ConfigError
from localtrain.job import (
    attention_kernels,
    compiled_memory,
    make_network,
    memory_by_class,
    run_mesh,
)
from localtrain.nn.spec import Gqa, Model
from localtrain.oom import is_out_of_memory, needed_bytes, remedies
from localtrain.plan import cost
from localtrain.plan.place import Place, elsewhere, environment_as_it_was, here, targets
from localtrain.warmstart import find_start

__all__ = ["Plan", "plan", "targets"]
_ONE_HOST = 8  # GPUs that NVLink connects in one machine (NVIDIA's HGX and DGX boards)
BLOCKWISE = "blockwise (XLA)"  # plain JAX: no kernel of that name is in the program


@dataclass(frozen=True)
class Plan:
    """What one device needs and has, in bytes, and what the run costs."""

    fits: bool
    device: str
    devices: int
    slices: int
    mesh: dict[str, int]
    parameters: int
    memory_per_device: dict[str, int]
    available_is: str  # where `memory_per_device["available"]` comes from
    tokens_per_step: int
    model_flops_per_step: float  # nothing recomputed, causal pairs once
    flops_per_step: float | None  # all devices, as compiled; None: the compiler gave no program
    memory_bytes_per_step: int | None  # read and written by one device
    collectives: dict[str, dict[str, int]]  # kind -> count, bytes: of one device in a step
    sent_bytes_per_step: dict[str, float]  # by one device: to neighbours, to other slices
    step_time_s: float | None  # an estimate; None without figures of the device
    step_time_parts: dict[str, float]
    how: str  # what the estimate assumes
    tokens_per_day: float | None
    mfu: float | None  # at that step time
    kernels: dict[str, Any]
    compile_s: float
    advice: list[str]  # keys that lower the need; empty when it fits
    suggestion: str | None = None  # lines of a run file: the fastest setting found that fits

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan(
    run: RunConfig | str,
    backend: str | None = None,
    *,
    device: str | None = None,
    topology: str | None = None,
    slices: int = 1,
    devices: int | None = None,
    memory: int | None = None,
    tune: bool = False,
    minutes: float = 10.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Compile the train step of a run and say whether it fits, how long it takes, what to change.

    device or topology: a name that a backend can compile for (see `targets`), not both; neither:
    the devices of this machine. slices: of a topology. devices: how many of a named card. memory:
    bytes that the run may use on each device, in place of the backend's figure. tune: look for a
    faster setting that fits; one that does not fit is always searched for another, for `minutes`.
    Raises ConfigError for unknown names and a missing compiler, the errors of `find_start`.
    """
    run = load_run(run) if isinstance(run, str) else run
    if device and topology:
        raise ConfigError(f"--device {device} and --topology {topology}: name one of them")
    if slices > 1 and not topology:
        raise ConfigError(f"--slices {slices} needs --topology: what each slice is, as v5e:4x4")
    start = find_start(run, None)
    name = device or topology
    with environment_as_it_was() if name else contextlib.nullcontext():
        place = elsewhere(name, backend, devices, slices) if name else here(run, backend, devices)
        if memory is not None:
            place = dataclasses.replace(place, available=memory, available_is="as given")
        found = compile_for(run, start, place)
        if found.fits and not tune:
            return found
        from localtrain.plan.tune import search

        suggestion, advice = search(run, start, place, found, minutes * 60, progress)
    return dataclasses.replace(found, suggestion=suggestion, advice=advice)


def compile_for(run: RunConfig, start: Any, place: Place) -> Plan:
    """The plan of one setting, compiled once."""
    network = make_network(run, start.hf, start.name, place.backend)
    mesh = run_mesh(run, place.devices, network)
    programs = steps.lower(network, run, mesh)
    began, program, refusal = time.monotonic(), None, ""
    try:
        step = programs.train.compile(compiler_options=place.backend.compiler_options(run))
        needed = compiled_memory(programs, step)
        if "total" not in needed:
            raise ConfigError(f"the compiler for {place.device} does not say what memory it needs")
        program = hlo.read(step.as_text())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        refusal = str(error)
        needed = _refused(memory_by_class(programs), refusal, place.available)
    compile_s = time.monotonic() - began
    fits = program is not None and needed["total"] <= place.available
    tokens = run.train.batch_size * run.data.seq_len
    return Plan(
        fits=fits,
        device=place.device,
        devices=len(place.devices),
        slices=place.slices,
        mesh=dict(mesh.shape),
        parameters=network.spec.parameters(),
        memory_per_device={**needed, "available": place.available},
        available_is=place.available_is,
        tokens_per_step=tokens,
        model_flops_per_step=network.spec.model_flops_per_token(run.data.seq_len) * tokens,
        compile_s=round(compile_s, 1),
        advice=[] if fits else remedies(run),
        kernels={
            "attention": attention_kernels(run, network, mesh).replace("blockwise", BLOCKWISE, 1),
            "custom_calls": {} if program is None else hlo.kernels(program),
        },
        **_work(run, place, network, program, tokens, refusal),
    )


def _work(
    run: RunConfig,
    place: Place,
    network: Any,
    program: hlo.Program | None,
    tokens: int,
    refusal: str,
) -> dict[str, Any]:
    """The fields that are read out of the program; unknown when the compiler made none."""
    fields: dict[str, Any] = {
        "flops_per_step": None,
        "memory_bytes_per_step": None,
        "collectives": {},
        "sent_bytes_per_step": {},
        "step_time_s": None,
        "step_time_parts": {},
        "how": "not estimated: the compiler refused, so there is no program",
        "tokens_per_day": None,
        "mfu": None,
    }
    if program is None:
        if needed_bytes(refusal) is None:
            fields["how"] += (
                "; it does not say what the step needs, so the total above is only more than is "
                f"available. Its words: {' '.join(refusal.split())[:500]}"
            )
        return fields
    flops = program.flops() + cost.kernel_flops(program, _keys(network.spec, run.data.seq_len))
    fields["flops_per_step"] = flops * len(place.devices)
    fields["memory_bytes_per_step"] = moved = hlo.memory_bytes(program)
    exchanges = program.collectives()
    fields["collectives"] = hlo.by_kind(exchanges)
    sent = cost.wire_bytes(exchanges, place.slices)
    fields["sent_bytes_per_step"] = dict(zip(("link", "network"), sent, strict=True))
    facts = place.facts
    if facts is None:
        kind = place.devices[0].device_kind
        fields["how"] = f"not estimated: no figures of {kind} are known, so neither is its MFU"
        return fields
    time_s = cost.step_time(flops, moved, sent, facts)
    model = network.spec.model_flops_per_token(run.data.seq_len) * tokens
    return fields | {
        "step_time_s": time_s.total_s,
        "step_time_parts": {
            "arithmetic": time_s.arithmetic_s,
            "memory": time_s.memory_s,
            "link": time_s.link_s,
            "network": time_s.network_s,
        },
        "how": time_s.how + _if_many_gpus(place) + _if_unknown(program),
        "tokens_per_day": tokens / time_s.total_s * 86400,
        "mfu": model / time_s.total_s / facts.peak_flops / len(place.devices),
    }


def _if_many_gpus(place: Place) -> str:
    """Of GPUs only the speed within a host is known; the network is not the card's."""
    count, is_tpu = len(place.devices), place.devices[0].device_kind.startswith("TPU")
    if count <= _ONE_HOST or is_tpu or place.facts is None or place.facts.link is None:
        return ""
    return f"; exchanges as if all {count} GPUs were on one host, which is too fast for several"


def _if_unknown(program: hlo.Program) -> str:
    loops = program.unknown_loops()
    return f"; {loops} loops whose length is not in the program count once" if loops else ""


def _keys(spec: Model, seq_len: int) -> float:
    """Keys that a query of an attention layer sees, in the mean of places and layers."""
    seen = [m.mixer.keys_per_query(seq_len) for m in spec.layers if isinstance(m.mixer, Gqa)]
    return sum(seen) / max(len(seen), 1)


def _refused(known: dict[str, int], message: str, available: int) -> dict[str, int]:
    """Memory by class when the compiler gives up: its total from the message, no program."""
    state = known["parameters"] + known["optimizer"]
    total = max(needed_bytes(message) or 0, state, available + 1)
    temporaries = total - state
    rest = {"temporaries": temporaries, "compiler_temp": temporaries, "code": 0}
    return {**known, **rest, "arguments": state, "total": total}
