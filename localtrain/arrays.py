"""Trees of arrays to and from a folder: written by Orbax, read with tensorstore.

Every leaf has a name, its path in the tree joined by "/". What is written is host memory, so the
files know no device. What is read is placed straight onto the template's shardings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (teaches numpy the names bfloat16, float8_e4m3fn, ...)
import numpy as np

from localtrain import parts
from localtrain.errors import DataError

Contents = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)
_IN_FLIGHT = 1 << 30  # bytes of host memory that a restore may read ahead
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


def to_host(tree: Any) -> dict[str, np.ndarray | parts.Split]:
    """Real copies in host memory, by name. Afterwards the arrays may be donated.

    Of an array that several processes hold, each copies the parts that no process before it has.
    On CPU a device array and its numpy view share memory, hence copies and never views.
    """
    named = name_leaves(tree)
    with jax.transfer_guard_device_to_host("allow"):  # these transfers are meant
        for name, leaf in named.items():
            if not isinstance(leaf, jax.Array):
                continue
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(f"{name} is a typed key: save jax.random.key_data(key)")
            leaf.copy_to_host_async()  # all transfers at once, collected below
        return {name: parts.to_host(leaf) for name, leaf in named.items()}


def describe(leaves: dict[str, np.ndarray | Deferred | parts.Split]) -> Contents:
    """The table of contents in meta.json."""
    return {name: (leaf.dtype.name, leaf.shape) for name, leaf in leaves.items()}


def write(folder: Path, leaves: dict[str, np.ndarray | Deferred]) -> None:
    """Write the arrays with Orbax into an existing folder; returns when all is written.

    A folder per leaf and no database (OCDBT), so that whoever needs the parameters alone reads and
    checks their files alone. Nothing may change the arrays meanwhile. Uncompressed: float32
    weights shrink by 7% only, at three times the time to save.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    solid = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax refuses empty ones
    if not solid:
        return
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=_writers()
    )
    try:
        handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(_nest(solid)))
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


def read(folder: Path, contents: Contents, template: Any, where: str | None = None) -> Any:
    """Read the template's leaves from a folder (checked before with `compare`).

    where: what errors call the folder, when it is a copy.

    Straight through tensorstore: Orbax starts every read at once and, when one fails, closes its
    event loop under the others, each of which then complains on stderr at some later moment
    (measured with Orbax 0.12). Each device's part is read for itself. What was begun and not
    yet placed, counted in whole chunks since tensorstore reads those, is at most `_IN_FLIGHT`
    bytes, or one array.
    """
    import tensorstore as ts

    wanted = name_leaves(template)
    solid = {name: leaf for name, leaf in wanted.items() if math.prod(leaf.shape)}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})  # Orbax's own value
    restored: dict[str, Any] = {}
    reading: deque[tuple[str, int, dict[parts.Part, Any]]] = deque()
    ahead = 0

    def finish() -> int:
        name, size, futures = reading.popleft()
        values = {part: future.result() for part, future in futures.items()}
        restored[name] = _assemble(solid[name], values)
        return size

    try:
        stores = {name: ts.open(_where(folder, name), open=True, context=context) for name in solid}
        for name, leaf in solid.items():
            stored = stores.pop(name).result()
            store = ts.cast(stored, np.dtype(leaf.dtype).name)
            if store.shape != tuple(leaf.shape):
                raise ValueError(f"{name} has shape {store.shape}, meta.json says {leaf.shape}")
            views = {part: store[_slices(part)] for part in _parts(leaf)}
            each = max(stored.dtype.numpy_dtype.itemsize, leaf.dtype.itemsize)
            chunk = stored.chunk_layout.read_chunk.shape or store.shape  # None of a scalar
            size = each * _elements_read(list(views), chunk)
            while reading and ahead + size > _IN_FLIGHT:
                ahead -= finish()
            ahead += size
            reading.append((name, size, {part: view.read() for part, view in views.items()}))
        while reading:
            finish()
    except (RuntimeError, MemoryError):  # out of memory, not the file's fault
        raise
    except Exception as error:  # tensorstore raises plain Exception
        shown = where or str(folder)
        reason = " ".join(str(error).replace(str(folder), shown).split())[:300]
        raise DataError(
            f"{shown} passed its checksums but cannot be read: {type(error).__name__}: {reason}. "
            f"It may come from another version of Orbax (meta.json says which), or be deleted at "
            f"this moment."
        ) from error
    leaves = [restored[name] if name in restored else _empty(leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def needs(folder: Path, contents: Contents, template: Any) -> Callable[[str], bool]:
    """Which files `read` needs for the template, by name: of an array the parts that overlap what
    this process's devices hold. Its .zarray must be in the folder; without, all its files are."""
    known = {parts.dotted(name) for name in contents}
    wanted = {parts.dotted(name): leaf for name, leaf in name_leaves(template).items()}
    held = {name: _parts(leaf) for name, leaf in wanted.items()}
    shapes = {name: parts.chunk_shape(folder / name) for name in wanted}

    def needed(file: str) -> bool:
        name, _, part = file.partition("/")
        if name not in known:
            return True
        shape = shapes.get(name)
        return name in wanted and (shape is None or parts.overlaps(part, shape, held[name]))

    return needed


def describing(template: Any) -> Callable[[str], bool]:
    """Which files say how the arrays of a template are stored, for `needs`."""
    files = {f"{parts.dotted(name)}/.zarray" for name in name_leaves(template)}
    return lambda file: file in files


def _where(folder: Path, name: str) -> dict[str, Any]:
    """Where a leaf is: a zarr array in Orbax's OCDBT database, or in a folder; its path dotted."""
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{parts.dotted(name)}/"}
    if not (folder / "manifest.ocdbt").exists():
        kvstore = {"driver": "file", "path": f"{folder}/{parts.dotted(name)}/"}
    # a part that is missing (deleted by a writer at this moment) is an error, not zeros
    strict = {"recheck_cached_data": False, "fill_missing_data_reads": False}
    return {"driver": "zarr", "kvstore": kvstore, **strict}


def _parts(leaf: Any) -> list[parts.Part]:
    """The distinct parts of a leaf that this process needs; the whole of a numpy leaf."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        return [tuple((0, size) for size in shape)]
    found = _sharding(leaf).addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(parts.bounds(index, shape) for index in found))


def _elements_read(wanted: list[parts.Part], chunk: tuple[int, ...]) -> int:
    """How many elements the chunks have that some parts of an array touch. Parts of the same
    chunks share them."""
    boxes = set()
    for part in wanted:
        sides = zip(part, chunk, strict=True)
        boxes.add(tuple((start // n * n, -(-stop // n) * n) for (start, stop), n in sides))
    return sum(math.prod(stop - start for start, stop in box) for box in boxes)


def _slices(part: parts.Part) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in part)


def _assemble(leaf: Any, values: dict[parts.Part, np.ndarray]) -> Any:
    """Host parts to an array on the leaf's devices, or to the numpy array that they are."""
    if isinstance(leaf, np.ndarray | np.generic):
        return next(iter(values.values()))
    shape = tuple(leaf.shape)
    return jax.make_array_from_callback(
        shape, _sharding(leaf), lambda index: values[parts.bounds(index, shape)], dtype=leaf.dtype
    )


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


def _empty(leaf: Any) -> Any:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return zeros if isinstance(leaf, np.ndarray) else jax.device_put(zeros, _sharding(leaf))
