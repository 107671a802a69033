"""Mesh and placement: one table from the words on parameters to the axes of the machine.

Parameters and activations carry logical axis names (embed, heads, mlp, vocab, ...). `RULES` says
which mesh axis each word is split over. Everything else (optimizer state, gradients, checkpoints)
follows from the parameters' placement. The train step runs under `jax.shard_map` on these parts
and says itself what devices exchange (nn/parallel.py). Mesh axes, outermost first: replica (whole
copies, across slices), fsdp (parameters and batch split), context (sequence), expert, tensor.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.config import MeshConfig

log = logging.getLogger(__name__)
Tree = Any
AXES = ("replica", "fsdp", "context", "expert", "tensor")
RULES: dict[str, str | tuple[str, ...]] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "batch": ("replica", "fsdp"),
    "length": "context",
}
BATCH = PartitionSpec(RULES["batch"], RULES["length"])


def mesh_sizes(mesh: MeshConfig, devices: int, slices: int = 1) -> tuple[int, ...]:
    """Sizes of AXES with -1 filled in; their product is the device count, or ConfigError.

    slices: of how many TPU slices the devices are. Each holds whole copies, as only `replica` can
    cross the slow network between them; left at 1 it becomes their number.
    """
    given = [getattr(mesh, axis) for axis in AXES]
    if given[0] == 1:
        given[0] = slices
    sizes = list(given)
    fixed = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    words = ", ".join(f"{a}: {s}" for a, s in zip(AXES, given, strict=True) if s != 1)
    if math.prod(sizes) != devices:
        reason = (
            f"the mesh ({words or 'one device'}) does not fit {_devices(devices)}: the product of "
            f"its sizes must be {devices} (-1 takes what is left)"
        )
    elif sizes[0] % slices:
        reason = (
            f"the mesh ({words}) does not fit {slices} slices: they exchange over the data "
            f"centre's network, which is only good for mesh.replica; make it a multiple of "
            f"{slices}, or leave it at 1 for one copy a slice"
        )
    else:
        return tuple(sizes)
    near = _nearest_sizes(given, devices, lambda sizes: sizes[0] % slices == 0)
    advice = f"Nearest that fits: {_changes(near, given)}" if near else "No mesh fits"
    other = f"; or run on {_devices(fixed)}" if fixed != devices and slices == 1 else ""
    raise ConfigError(f"{reason}. {advice}{other}.")


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _changes(sizes: Sequence[int], given: Sequence[int]) -> str:
    """As arguments: what differs from the given sizes; -1 may stay."""
    triples = zip(AXES, sizes, given, strict=True)
    return " ".join(f"mesh.{axis}={size}" for axis, size, old in triples if old not in (size, -1))


def _nearest_sizes(
    wanted: Sequence[int], devices: int, works: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """The sizes whose product is `devices` that are nearest to the wanted ones; -1 may be any."""

    def splits(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for first in (d for d in range(1, left + 1) if left % d == 0):
            yield from ((first, *rest) for rest in splits(left // first, axes - 1))

    def distance(sizes: tuple[int, ...]) -> tuple[float, int]:
        near = zip(sizes, wanted, strict=True)
        far = sum(abs(math.log2(s / w)) + 0.01 * (s != w) for s, w in near if w != -1)
        return round(far, 6), -sizes[1]  # among equals the one with most fsdp

    return min(filter(works, splits(devices, len(wanted))), key=distance, default=None)


def check_model(mesh: Mesh, seq_len: int, spec: Any, rows: int = 0, slices: int = 1) -> None:
    """ConfigError when a model (nn.spec.Model) or its rows cannot be split like that.

    Over `tensor` every device has whole query heads. Fewer key/value heads than devices are kept on
    all of them, and each device computes the one that its queries need. rows: of a micro-batch,
    which the mesh that is named in the error divides; 0: any. So does it the number of slices.
    """
    given = tuple(mesh.shape[axis] for axis in AXES)
    if reason := _misfit(given, seq_len, spec):

        def works(sizes: tuple[int, ...]) -> bool:
            whole = sizes[0] % slices == 0 and rows % (sizes[0] * sizes[1]) == 0
            return whole and not _misfit(sizes, seq_len, spec)

        count = math.prod(given)
        advice = f"No mesh of {_devices(count)} works with this model and these rows."
        if near := _nearest_sizes(given, count, works):
            advice = f"Nearest that works on {_devices(count)}: {_changes(near, given)}."
        raise ConfigError(f"{reason} {advice}")
    _warn_of_whole(mesh, spec)


def _warn_of_whole(mesh: Mesh, spec: Any) -> None:
    """What every device holds whole although it need not."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if spec.dim % fsdp:
        fits = [n for n in range(1, spec.dim + 1) if spec.dim % n == 0]
        log.warning(
            "mesh.fsdp = %d does not divide the model's dim = %d: every device holds the whole "
            "model and optimizer state; with mesh.fsdp=%d they are split",
            fsdp,
            spec.dim,
            _nearest_of(fits, fsdp),
        )
    if spec.vocab % tensor:
        ends = spec.embedding_parameters() / (1 if spec.dim % fsdp else fsdp)
        log.warning(
            "mesh.tensor = %d does not divide the vocabulary of %d: its work is split, but every "
            "device of tensor holds the same %.3g M parameters of embedding and head (%.3g GB in "
            "float32 with two moments) instead of %.3g M",
            tensor,
            spec.vocab,
            ends / 1e6,
            12 * ends / 1e9,
            ends / tensor / 1e6,
        )


def _misfit(sizes: Sequence[int], seq_len: int, spec: Any) -> str:
    """Why a model or its rows cannot be split over a mesh of these sizes; empty when they can."""
    *_, context, expert, tensor = sizes
    if wrong := _indivisible(spec, tensor):
        most = max(layer.mixer.heads for layer in spec.layers)
        fits = [n for n in range(1, most + 1) if not _indivisible(spec, n)]
        return (
            f"mesh.tensor = {tensor} devices cannot share {wrong} of this model evenly: "
            f"mesh.tensor can be {', '.join(map(str, fits))}."
        )
    for number, layer in enumerate(spec.layers if context > 1 else ()):
        if not layer.mixer.supports_context:
            return (
                f"mesh.context = {context}: the {type(layer.mixer).__name__} mixer of layer "
                f"{number} ({layer.mixer.kind}) cannot work on a part of a row."
            )
    if seq_len % (multiple := row_multiple(context, tensor)):
        more = -(-seq_len // multiple) * multiple
        less = f"{seq_len - seq_len % multiple} or " if seq_len > multiple else ""
        chunks = ", with two chunks a device of context" if context > 1 else ""
        return (
            f"data.seq_len = {seq_len} tokens cannot be split evenly over mesh.context = {context} "
            f"and mesh.tensor = {tensor}{chunks}: take data.seq_len={less}{more}, or another mesh."
        )
    if expert > 1:
        return f"mesh.expert = {expert}: this model has no experts to split."
    return ""


def row_multiple(context: int, tensor: int) -> int:
    """What the tokens of a row must be a multiple of: every device has two chunks of it over
    `context`, and between products a part of those over `tensor`."""
    return math.lcm(2 * context if context > 1 else 1, context * tensor)


def _indivisible(spec: Any, ways: int) -> str:
    """What of a model cannot be split over so many devices, in words; empty when all can."""
    for layer in dict.fromkeys(spec.layers):
        mixer, ffn = layer.mixer, layer.ffn
        if mixer.heads % ways:
            return f"the {mixer.heads} heads"
        if mixer.kv_heads % ways and ways % mixer.kv_heads:
            return f"the {mixer.kv_heads} kv_heads"
        if ffn.hidden % ways:
            return f"the hidden dim {ffn.hidden}"
    return ""


def _nearest_of(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda n: (abs(n - wanted), n))


def slice_count(devices: Sequence[jax.Device]) -> int:
    """Of how many TPU slices devices are. (For GPUs jax calls each host a slice.)"""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", None) or 0 for device in devices})


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices (or the given ones), every axis placed by the compiler (Auto).

    Over several slices `replica` is the axis that crosses from one to another.
    """
    devices = list(devices if devices is not None else jax.devices())
    slices, kinds = slice_count(devices), (AxisType.Auto,) * len(AXES)
    if slices > 1:
        counts = sorted(Counter(device.slice_index for device in devices).values())
        if counts[0] != counts[-1]:
            raise ConfigError(f"the slices have {counts} devices: a mesh needs equal slices")
    sizes = mesh_sizes(mesh, len(devices), slices)
    if slices == 1:
        # jax.make_mesh refuses GPUs of several hosts, and splits no torus axis but on v5e
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=kinds)
    if mesh.replica == 1:
        log.info("%d slices, each with a whole copy: mesh.replica = %d", slices, sizes[0])
    inside = (sizes[0] // slices, *sizes[1:])
    between = (slices, *(1 for _ in sizes[1:]))
    grid = mesh_utils.create_hybrid_device_mesh(
        inside, between, devices, allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=kinds)


def partition(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """Where an array with these logical axes lives. A dim that does not divide stays whole.

    So do vectors (norms, biases) over fsdp: they are small, and would be a collective each.
    """
    used: set[str] = set()
    spec: list[Any] = []
    is_vector = len(set(axes) - {"layers"}) == 1
    for dim, word in zip(shape, axes, strict=True):
        names = RULES.get(word or "", ())
        names = (names,) if isinstance(names, str) else names
        names = () if is_vector and word == "embed" else names
        names = tuple(n for n in names if n not in used and mesh.shape[n] > 1)
        if names and dim % int(np.prod([mesh.shape[n] for n in names])) == 0:
            used.update(names)
            spec.append(names if len(names) > 1 else names[0])
        else:
            spec.append(None)
    return PartitionSpec(*spec)


def param_specs(mesh: Mesh, shapes: Tree, axes: Tree) -> Tree:
    """A PartitionSpec for every parameter; `axes` has a tuple of words where `shapes` a shape."""
    return jax.tree.map(lambda s, a: partition(mesh, s.shape, a), shapes, axes)


def param_shardings(mesh: Mesh, shapes: Tree, axes: Tree) -> Tree:
    """A NamedSharding for every parameter."""
    return jax.tree.map(partial(NamedSharding, mesh), param_specs(mesh, shapes, axes))


def unsplit(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes whose devices each have a part of the gradient of an array of this spec: tokens are
    split over them (over tensor between the products), the array is not."""
    used = {n for names in spec for n in ((names,) if isinstance(names, str) else names or ())}
    return tuple(axis for axis in (*RULES["batch"], RULES["length"], "tensor") if axis not in used)


def state_shardings(mesh: Mesh, abstract_state: Tree, params: Tree) -> Tree:
    """Optimizer moments live where their parameters live; scalars everywhere."""
    structure = jax.tree.structure(params)

    def place(value: Tree) -> Tree:
        if jax.tree.structure(value) == structure:
            return params
        if isinstance(value, dict):
            return {k: place(v) for k, v in value.items()}
        return NamedSharding(mesh, PartitionSpec())

    return place(abstract_state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over replica and fsdp, the tokens of a row over context."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
