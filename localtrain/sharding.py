"""Mesh and placement: one table from the words on parameters to the axes of the machine.

Parameters and activations carry logical axis names (embed, heads, mlp, vocab, ...). `RULES` says
which mesh axis each word is split over. Everything else (optimizer state, gradients, checkpoints)
follows from the parameters' placement. Mesh axes, outermost first: replica (whole copies, across
slices), fsdp (parameters and batch split), context (sequence), expert, tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.config import MeshConfig

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
        raise ConfigError(
            f"the mesh ({given}) does not fit {devices} device{'s' if devices > 1 else ''}: the "
            f"product of its sizes must be {devices}. Set one axis to -1 to let it take what is "
            f"left, for example mesh.fsdp=-1."
        )
    return tuple(sizes)


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices (or the given ones), every axis placed by the compiler (Auto)."""
    devices = list(devices if devices is not None else jax.devices())
    sizes = mesh_sizes(mesh, len(devices))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


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
    """The axes that tokens are split over and an array of this spec is not."""
    used = {n for names in spec for n in ((names,) if isinstance(names, str) else names or ())}
    return tuple(axis for axis in (*RULES["batch"], RULES["length"]) if axis not in used)


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
