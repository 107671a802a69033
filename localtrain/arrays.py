"""Trees of arrays to and from a folder, through Orbax.

Every leaf has a name, its path in the tree joined by "/". What is written is host memory, so the
files know no device. What is read is placed straight onto the template's shardings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (teaches numpy the names bfloat16, float8_e4m3fn, ...)
import numpy as np

from localtrain.errors import DataError

Contents = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)
_SHOWN = 8  # names listed in an error


@dataclass(frozen=True)
class Deferred:
    """An array that is made only when it is written, so that one at a time is in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def name_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by name, in the order of jax.tree.leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the tree have the same name")
    return named


def to_host(tree: Any) -> dict[str, np.ndarray]:
    """Real copies in host memory, by name. Afterwards the arrays may be donated.

    On CPU a device array and its numpy view share memory, hence copies and never views.
    """
    named = name_leaves(tree)
    with jax.transfer_guard_device_to_host("allow"):  # these transfers are meant
        for name, leaf in named.items():
            if not isinstance(leaf, jax.Array):
                continue
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(f"{name} is a typed key: save jax.random.key_data(key)")
            if not leaf.is_fully_addressable:
                raise NotImplementedError(f"{name} spans several processes: not supported yet")
            leaf.copy_to_host_async()  # all transfers at once, collected below
        return {name: np.array(leaf, copy=True) for name, leaf in named.items()}


def describe(leaves: dict[str, np.ndarray | Deferred]) -> Contents:
    """The table of contents in meta.json."""
    return {name: (leaf.dtype.name, leaf.shape) for name, leaf in leaves.items()}


def write(folder: Path, leaves: dict[str, np.ndarray | Deferred]) -> None:
    """Write the arrays with Orbax into an existing folder; returns when all is written.

    Nothing may change the arrays meanwhile. Uncompressed: float32 weights shrink by 7% only, at
    three times the time to save.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    solid = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax refuses empty ones
    if not solid:
        return
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_compression=False, type_handler_registry=_writers()
    )
    try:
        handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(_nest(solid)))
        handler.finalize(epath.Path(folder))
    finally:
        handler.close()


def _writers() -> Any:
    """How Orbax writes our leaves: without the copy of each that it makes by default."""
    from orbax.checkpoint import type_handlers

    class WriteDeferred(type_handlers.NumpyHandler):
        async def serialize(self, values, infos, args=None):
            for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
                arg = arg or type_handlers.SaveArgs()
                for written in await super().serialize([value.make()], [info], [arg]):
                    written.result()
            return []

    return type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (Deferred, WriteDeferred(deepcopy_host_arrays=False)),
        (jax.Array, type_handlers.ArrayHandler()),  # not used; Orbax warns when it is missing
    )


def read(folder: Path, contents: Contents, template: Any) -> Any:
    """Read the template's leaves from a folder (checked before with `compare`)."""
    import orbax.checkpoint as ocp
    from etils import epath

    wanted = name_leaves(template)
    solid = {name: leaf for name, leaf in wanted.items() if np.prod(leaf.shape)}
    restored: dict[str, Any] = {}
    if solid:
        args = ocp.args.PyTreeRestore(
            item=_nest(solid),
            restore_args=_nest({name: _restore_args(leaf) for name, leaf in solid.items()}),
            partial_restore=len(solid) < len(contents),
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
        try:
            restored = name_leaves(handler.restore(epath.Path(folder), args=args))
        except (RuntimeError, MemoryError):  # out of memory, not the file's fault
            raise
        except Exception as error:  # tensorstore raises plain Exception
            raise DataError(
                f"{folder} passed its checksums but cannot be read: {type(error).__name__}: "
                f"{' '.join(str(error)[:300].split())}. It may come from another version of Orbax "
                f"(meta.json says which)."
            ) from error
        finally:
            handler.close()
    leaves = [restored[name] if name in restored else _empty(leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def compare(contents: Contents, template: Any, folder: Path, partial: bool, cast: bool) -> None:
    """Raise a DataError that names the leaves in which checkpoint and template differ."""
    wanted = name_leaves(template)
    missing = [name for name in wanted if name not in contents]
    problems = _list("missing from the checkpoint", missing)
    if not partial:
        problems += _list("unknown to this run", [name for name in contents if name not in wanted])
    shapes, dtypes = [], []
    for name, leaf in wanted.items():
        if name not in contents:
            continue
        dtype, shape = contents[name]
        if shape != tuple(leaf.shape):
            shapes.append(f"{name} {shape} instead of {tuple(leaf.shape)}")
        elif dtype != np.dtype(leaf.dtype).name and not cast:
            dtypes.append(f"{name} {dtype} instead of {np.dtype(leaf.dtype).name}")
    problems += _list("of another shape", shapes) + _list("of another dtype", dtypes)
    if problems:
        raise DataError(
            f"{folder} does not fit this run: {'; '.join(problems)}. Use the model and optimizer "
            f"settings of the run that wrote it, or another --out."
        )


def _list(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"]


def _nest(named: dict[str, Any]) -> dict[str, Any]:
    """Names back to nested dicts, so that the files make sense to other readers of Orbax."""
    root: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    found = getattr(leaf, "sharding", None)
    if found is not None:
        return found
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
        device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device)


def _restore_args(leaf: Any) -> Any:
    import orbax.checkpoint as ocp

    if isinstance(leaf, np.ndarray | np.generic):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=_sharding(leaf), global_shape=tuple(leaf.shape), dtype=leaf.dtype
    )


def _empty(leaf: Any) -> Any:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return zeros if isinstance(leaf, np.ndarray) else jax.device_put(zeros, _sharding(leaf))
