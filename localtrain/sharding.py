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
from collections.abc import Iterator, Sequence
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


def mesh_sizes(mesh: MeshConfig, devices: int) -> tuple[int, ...]:
    """Sizes of AXES with -1 filled in; their product is the device count, or ConfigError."""
    sizes = [getattr(mesh, axis) for axis in AXES]
    fixed = int(np.prod([s for s in sizes if s != -1]))
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    if int(np.prod(sizes)) != devices:
        given = ", ".join(f"{a}: {getattr(mesh, a)}" for a in AXES if getattr(mesh, a) != 1)
        near = " ".join(
            f"mesh.{axis}={size}"
            for axis, size in zip(AXES, _nearest_sizes(sizes, devices), strict=True)
            if size != getattr(mesh, axis) and getattr(mesh, axis) != -1
        )
        raise ConfigError(
            f"the mesh ({given}) does not fit {devices} device{'s' if devices > 1 else ''}: the "
            f"product of its sizes must be {devices} (-1 takes what is left). Nearest that fits: "
            f"{near}; or run on {fixed} devices."
        )
    return tuple(sizes)


def _nearest_sizes(wanted: Sequence[int], devices: int) -> tuple[int, ...]:
    """The sizes whose product is `devices` that are nearest to the wanted ones; -1 may be any."""

    def splits(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for first in (d for d in range(1, left + 1) if left % d == 0):
            yield from ((first, *rest) for rest in splits(left // first, axes - 1))

    def distance(sizes: tuple[int, ...]) -> float:
        near = zip(sizes, wanted, strict=True)
        return sum(abs(np.log2(s / w)) + 0.01 * (s != w) for s, w in near if w != -1)

    return min(splits(devices, len(wanted)), key=distance)


def check_model(mesh: Mesh, seq_len: int, spec: Any) -> None:
    """ConfigError when a model (nn.spec.Model) or its rows cannot be split like that.

    Over `tensor` every device has whole query heads. Fewer key/value heads than devices are kept on
    all of them, and each device computes the one that its queries need.
    """
    ways = mesh.shape["tensor"]
    if wrong := _indivisible(spec, ways):
        most = max(layer.mixer.heads for layer in spec.layers)
        fits = [n for n in range(1, most + 1) if not _indivisible(spec, n)]
        raise ConfigError(
            f"mesh.tensor = {ways} devices cannot share {wrong} of this model evenly: mesh.tensor "
            f"can be {', '.join(map(str, fits))}, nearest {_nearest_of(fits, ways)}."
        )
    _check_length(mesh, seq_len, spec)
    if mesh.shape["expert"] > 1:
        raise ConfigError(
            f"mesh.expert = {mesh.shape['expert']}: this model has no experts to split; take "
            f"mesh.expert=1 and mesh.fsdp=-1."
        )
    if spec.dim % mesh.shape["fsdp"]:
        fits = [n for n in range(1, spec.dim + 1) if spec.dim % n == 0]
        log.warning(
            "mesh.fsdp = %d does not divide the model's dim = %d: every device holds the whole "
            "model and optimizer state; with mesh.fsdp=%d they are split",
            mesh.shape["fsdp"],
            spec.dim,
            _nearest_of(fits, mesh.shape["fsdp"]),
        )


def _check_length(mesh: Mesh, seq_len: int, spec: Any) -> None:
    """Every device has two chunks of a row over `context`, and a part of them over `tensor`."""
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    for number, layer in enumerate(spec.layers):
        if context > 1 and not layer.mixer.supports_context:
            raise ConfigError(
                f"mesh.context = {context}: the {type(layer.mixer).__name__} mixer of layer "
                f"{number} ({layer.mixer.kind}) cannot work on a part of a row; take "
                f"mesh.context=1, and mesh.fsdp or mesh.tensor for these devices."
            )
    rows = partial(row_multiple, tensor=tensor)
    for axis, ways, multiple in (
        ("context", context, partial(row_multiple, tensor=1)),
        ("tensor", tensor, partial(row_multiple, context)),
    ):
        if seq_len % multiple(ways):
            fits = [n for n in range(1, seq_len + 1) if seq_len % multiple(n) == 0]
            each = " with two chunks each" if axis == "context" else ""
            raise ConfigError(
                f"data.seq_len = {seq_len} tokens cannot be split evenly over mesh.{axis} = {ways} "
                f"devices{each}: take mesh.{axis}={_nearest_of(fits, ways)} or "
                f"data.seq_len={-(-seq_len // rows(context)) * rows(context)}."
            )


def row_multiple(context: int, tensor: int) -> int:
    """What the tokens of a row must be a multiple of."""
    return math.lcm(2 * context if context > 1 else 1, context * tensor)


def _indivisible(spec: Any, ways: int) -> str:
    """What of a model cannot be split over so many devices, in words; empty when all can."""
    for layer in spec.layers:
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


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices (or the given ones), every axis placed by the compiler (Auto)."""
    devices = list(devices if devices is not None else jax.devices())
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if slices > 1 and devices[0].platform == "tpu":
        return _over_slices(mesh, devices, slices)
    sizes = mesh_sizes(mesh, len(devices))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _over_slices(mesh: MeshConfig, devices: list[jax.Device], slices: int) -> Mesh:
    """Of several TPU slices each holds whole copies: only `replica` crosses the slow network.

    mesh.replica left at 1 becomes the number of slices.
    """
    mesh = mesh.model_copy(update={"replica": slices}) if mesh.replica == 1 else mesh
    sizes = mesh_sizes(mesh, len(devices))
    if sizes[0] % slices:
        raise ConfigError(
            f"mesh.replica = {sizes[0]}: the {slices} slices exchange over the data centre's "
            f"network, which is only good for mesh.replica; make it a multiple of {slices}, or "
            f"leave it at 1 for one copy a slice."
        )
    inside = (sizes[0] // slices, *sizes[1:])
    between = (slices, *(1 for _ in sizes[1:]))
    grid = mesh_utils.create_hybrid_device_mesh(
        inside, between, devices, allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


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
