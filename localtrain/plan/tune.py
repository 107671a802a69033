"""The fastest setting of a run that fits: rows at once, remat, mesh, and types of the state.

The batch, the model and the data stay as they are, so the training is the same but for what is
newly stored in bfloat16; that is tried only where nothing else fits, and is said. Settings are put
in the order of a cheap estimate of their time; each is compiled once, from the fastest on, and what
was learned about memory strikes out others of the same kind. The search ends at the first that
fits, with figures of the device after two more that might be faster, or at its time limit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from localtrain import sharding
from localtrain.config import RunConfig
from localtrain.errors import ConfigError
from localtrain.job import make_network, run_mesh
from localtrain.nn.decoder import Network
from localtrain.plan.place import Place

if TYPE_CHECKING:
    from localtrain.plan import Plan

_MORE = 2  # settings tried after the first that fits: the estimate's order is not the roofline's
_NEAR = 1.15  # no setting is tried whose estimate is so much above that of the best
# Time of a step beside no remat: forward is a third of it; matmuls keeps most of that.
_REMAT = {"none": 1.0, "matmuls": 1.08, "full": 1.33}
# Kept of a token and layer, in values of the model's dim: the residual; products; all.
_KEPT = {"full": 1.0, "matmuls": 12.0, "none": 24.0}
# Of settings that newly store in bfloat16, the one that rounds what matters less comes first.
_BFLOAT16 = {"optim.state_dtype": 1.10, "train.param_dtype": 1.20}


@dataclass(frozen=True)
class Setting:
    """What one candidate changes, and cheap estimates of its time and of a device's memory."""

    changes: dict[str, Any]  # dotted key -> value
    cost: float  # beside the fastest
    state: float  # bytes of parameters, moments and sums of gradients
    activations: float  # bytes, before anything is learned from a compile
    rounded: tuple[str, ...] = ()  # keys that are newly bfloat16: the training is not the same

    @property
    def kind(self) -> str:
        """Settings of one kind keep the same values per token."""
        return str(self.changes["train.remat"])


def search(
    run: RunConfig,
    start: Any,
    place: Place,
    first: Plan,
    seconds: float,
    progress: Callable[[str], None],
) -> tuple[str | None, list[str]]:
    """(lines of a run file, or None when nothing better fits; what else lowers the need).

    `first` is the run as it is.
    """
    from localtrain.plan import compile_for

    end = time.monotonic() + seconds
    now = current(run)
    learned: dict[str, float] = {}
    network = make_network(run, start.hf, start.name, place.backend)
    part = held(network, run_mesh(run, place.devices))
    as_it_is = setting_of(run, place, network, part, now)
    _learn(learned, as_it_is, first)
    best, chosen, after, advice = (first if first.fits else None), as_it_is, 0, first.advice
    if best is not None and best.step_time_s is None:
        progress("the speed of this device is not known, so no other setting is known to be faster")
        return None, advice
    waiting = list(settings(run, place, network))
    if best is None and min(setting.state for setting in waiting) > place.available:
        return None, _beyond(run, place, network, waiting)
    if seconds <= 0:
        return None, advice
    progress(
        f"looking for the fastest setting that fits: {len(waiting)} settings, at most "
        f"{seconds / 60:g} min"
    )
    for setting in waiting:
        if setting.changes == now or _cannot_fit(setting, place.available, learned):
            continue
        if time.monotonic() > end:
            progress("the time is over")
            break
        known = best is not None and best.step_time_s is not None  # else the estimate decides
        if best is not None and (not known or after >= _MORE or _is_worse(setting, chosen)):
            break
        try:
            found = compile_for(_with(run, setting.changes), start, place)
        except ConfigError:  # a mesh that this model or batch cannot have
            continue
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            said = str(error).partition("\n")[0]
            progress(f"{_line(setting.changes, now)}: left out, the compiler says: {said}")
            continue
        _learn(learned, setting, found)
        progress(f"{_line(setting.changes, now)}: {_verdict(found)}")
        after += found.fits and best is not None
        if found.fits and (best is None or _faster(found, best)):
            best, chosen = found, setting
    else:
        if best is None:
            progress("none of them fits")
            untried = [tip for tip in first.advice if not tip.startswith(tuple(now))]
            advice = ["more devices", *untried]
    if best is None:
        return None, advice
    if chosen.changes == now:
        progress("none of them is faster than the run as it is")
        return None, advice
    new = {key: value for key, value in chosen.changes.items() if value != now[key]}
    return _warning(chosen) + as_lines(new), advice


def _beyond(run: RunConfig, place: Place, network: Network, waiting: list[Setting]) -> list[str]:
    """What is left to do where the state alone keeps every setting from fitting."""
    least = min(setting.state for setting in waiting)
    each = 2 if run.optim.name == "sgd" else 6  # in bfloat16: the parameter, two moments
    dim = network.spec.dim
    for ways in (n for n in range(2, dim + 1) if dim % n == 0):
        over = jax.sharding.AbstractMesh(
            tuple(ways if axis == "fsdp" else 1 for axis in sharding.AXES), sharding.AXES
        )
        if each * held(network, over) <= place.available:
            room = f"; over mesh.fsdp={ways} there is room for them"
            break
    else:
        room = ""
    here = len(place.devices)
    return [
        f"more devices (no setting of this run can fit on {here}: parameters and optimizer take "
        f"{least / 1e9:.2f} GB of {'it' if here == 1 else 'each'} even in bfloat16{room})",
        "a smaller model.preset",
    ]


def held(network: Network, mesh: Any) -> int:
    """Values of the parameters that one device of a mesh has."""
    places = sharding.param_shardings(mesh, network.shapes, network.axes)
    part = lambda whole, place: math.prod(place.shard_shape(whole.shape))  # noqa: E731
    return sum(jax.tree.leaves(jax.tree.map(part, network.shapes, places)))


def settings(run: RunConfig, place: Place, network: Network) -> Iterator[Setting]:
    """Every candidate: those that round as the run does before others, then the fastest first."""
    now, count, rows = current(run), len(place.devices), run.train.batch_size
    splits = [n for n in (1, 2, 4, 8) if count % n == 0 and n < max(count, 2)]
    meshes = [{}] + [{"mesh.fsdp": -1, "mesh.tensor": n} for n in splits]
    pieces = [n for n in range(1, rows + 1) if rows % n == 0]
    moment_types = dict.fromkeys([run.optim.state_dtype, "bfloat16"])
    if run.optim.name == "sgd":
        moment_types = dict.fromkeys([run.optim.state_dtype])
    param_types = dict.fromkeys([run.train.param_dtype, "bfloat16"])
    found: dict[Any, Setting] = {}
    parts: dict[Any, int] = {}  # of the parameters, by the mesh
    for mesh, piece, remat, moments, params in itertools.product(
        meshes, pieces, _REMAT, moment_types, param_types
    ):
        changes = now | mesh
        changes["train.micro_batch"] = None if piece == 1 else rows // piece
        changes |= {"train.remat": remat, "optim.state_dtype": moments, "train.param_dtype": params}
        try:
            made = run_mesh(_with(run, changes), place.devices)
        except (ConfigError, NotImplementedError):  # rows or a torus that cannot be split so
            continue
        # the run's own words for a mesh come first, and others for the same are left out
        shape = tuple(made.shape.values())
        if shape not in parts:
            parts[shape] = held(network, made)
        same = (*shape, piece, remat, moments, params)
        found.setdefault(same, setting_of(run, place, network, parts[shape], changes))
    yield from sorted(found.values(), key=lambda setting: (len(setting.rounded), setting.cost))


def setting_of(
    run: RunConfig, place: Place, network: Network, part: int, changes: dict[str, Any]
) -> Setting:
    """A candidate with its estimates. part: values of the parameters on each device."""
    size = {"float32": 4, "bfloat16": 2}
    rows = changes["train.micro_batch"] or run.train.batch_size
    pieces = run.train.batch_size // rows
    devices, tensor = len(place.devices), changes["mesh.tensor"]
    moments = 0 if run.optim.name == "sgd" else 2 * size[changes["optim.state_dtype"]]
    bytes_each = size[changes["train.param_dtype"]] + moments + (4 if pieces > 1 else 0)
    state = bytes_each * part
    tokens = rows * run.data.seq_len / devices
    # dim x layers of a dense model: 12 x layers x dim^2 parameters, and layers about dim / 128
    width = (network.spec.parameters() / 12) ** (2 / 3) / 5
    cost = _REMAT[changes["train.remat"]] * (1 + 0.03 * (pieces - 1)) * (1 + 0.1 * (tensor > 1))
    rounded = tuple(key for key in _BFLOAT16 if changes[key] == "bfloat16" != current(run)[key])
    for key in rounded:
        cost *= _BFLOAT16[key]
    activations = 2 * _KEPT[changes["train.remat"]] * tokens * width
    return Setting(changes, cost, state, activations, rounded)


def current(run: RunConfig) -> dict[str, Any]:
    """The keys that are varied, as the run has them."""
    rows = run.train.micro_batch
    return {
        "train.micro_batch": None if rows == run.train.batch_size else rows,
        "train.remat": run.train.remat,
        "optim.state_dtype": run.optim.state_dtype,
        "train.param_dtype": run.train.param_dtype,
        "mesh.fsdp": run.mesh.fsdp,
        "mesh.tensor": run.mesh.tensor,
    }


def as_lines(changes: dict[str, Any]) -> str:
    """Dotted keys as the lines of a run file."""
    sections: dict[str, list[str]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {'null' if value is None else value}")
    return "\n".join(line for name in sections for line in (f"{name}:", *sections[name]))


def _with(run: RunConfig, changes: dict[str, Any]) -> RunConfig:
    plain = run.model_dump()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        plain[section] = {**plain[section], name: value}
    return RunConfig.model_validate(plain)


def _learn(learned: dict[str, float], setting: Setting, found: Plan) -> None:
    """Bytes a compile took beside the state, for each byte that was estimated."""
    memory = found.memory_per_device
    if memory["total"] != memory["available"] + 1:  # else it refused without a figure
        rest = memory["total"] - min(memory["total"], setting.state)
        learned[setting.kind] = rest / max(setting.activations, 1.0)


def _cannot_fit(setting: Setting, available: int, learned: dict[str, float]) -> bool:
    """By its state alone, or by most of what settings of its kind took."""
    ratio = learned.get(setting.kind, 0.0)
    return setting.state + 0.95 * ratio * setting.activations > available


def _is_worse(setting: Setting, chosen: Setting) -> bool:
    """Not worth a compile where `chosen` fits."""
    return len(setting.rounded) > len(chosen.rounded) or setting.cost > _NEAR * chosen.cost


def _warning(chosen: Setting) -> str:
    """A comment above the lines of a run file whose training is not quite the same."""
    if not chosen.rounded:
        return ""
    return f"# not the same training: {' and '.join(chosen.rounded)} round to bfloat16\n"


def _faster(one: Plan, other: Plan) -> bool:
    if one.step_time_s is None or other.step_time_s is None:
        return False
    return one.step_time_s < other.step_time_s


def _line(changes: dict[str, Any], now: dict[str, Any]) -> str:
    new = [f"{key}={value}" for key, value in changes.items() if value != now[key]]
    return " ".join(new).replace("None", "null")


def _verdict(found: Plan) -> str:
    total = found.memory_per_device["total"] / 1e9
    said = f"{total:.2f} GB, {'fits' if found.fits else 'does not fit'}"
    return said if found.step_time_s is None else f"{said}, {found.step_time_s:.3g} s a step"
