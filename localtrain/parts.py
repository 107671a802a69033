"""Arrays that several processes hold: each writes the parts that it has, one file a part.

The layout is that of Orbax without its database: a zarr array (format 2, uncompressed) in a folder
per leaf. Uncompressed, a part's file is its bytes, so nobody has to agree on anything to write one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

Part = tuple[tuple[int, int], ...]  # (start, stop) by dimension


@dataclass(frozen=True)
class Split:
    """What one process writes of an array that several hold: equal parts on a grid, by their place
    in it, "0.2" say."""

    shape: tuple[int, ...]
    dtype: np.dtype
    part_shape: tuple[int, ...]
    parts: dict[str, np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def to_host(leaf: Any) -> np.ndarray | Split:
    """A copy of an array; of one that several processes hold, of the parts that are this one's to
    write: those that no device before its own has."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.array(leaf, copy=True)
    size = leaf.sharding.shard_shape(leaf.shape)
    parts = {}
    for shard in leaf.addressable_shards if leaf.size else ():
        if shard.replica_id == 0:
            starts = [start for start, _ in bounds(shard.index, leaf.shape)]
            at = [start // n for start, n in zip(starts, size, strict=True)]
            parts[_place(at)] = np.array(shard.data, copy=True)
    return Split(leaf.shape, leaf.dtype, size, parts)


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Part:
    """The part of an array that an index of slices means."""
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def dotted(name: str) -> str:
    """The folder of a leaf."""
    return name.replace("/", ".")


def _place(at: list[int]) -> str:
    """The name of a part in zarr's layout."""
    return ".".join(map(str, at)) or "0"


def chunk_shape(folder: Path) -> tuple[int, ...] | None:
    """The shape of an array's parts, by the .zarray in its folder; None if that does not say."""
    try:
        found = json.loads((folder / ".zarray").read_bytes())
        shape, joined = tuple(found["chunks"]), found.get("dimension_separator", ".") == "."
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return shape if joined and all(type(size) is int and size > 0 for size in shape) else None


def overlaps(file: str, shape: tuple[int, ...], wanted: list[Part]) -> bool:
    """Whether a file in an array's folder is needed for some parts of it, when its own parts are of
    a shape. What is not the name of a part is needed."""
    at = file.split(".")
    if len(at) != max(1, len(shape)) or not all(map(str.isdecimal, at)):
        return True
    spans = [(int(i) * size, (int(i) + 1) * size) for i, size in zip(at, shape, strict=False)]
    return any(
        all(a < stop and start < b for (a, b), (start, stop) in zip(spans, part, strict=False))
        for part in wanted
    )


def write(folder: Path, leaves: dict[str, np.ndarray | Split], lead: bool) -> list[str]:
    """Write this process's parts of the arrays, one file each; returns the names of the files.

    The lead writes what describes the arrays, too, and those that all have.
    """
    written = []
    for name, leaf in leaves.items():
        if not leaf.size:
            continue
        place = folder / dotted(name)
        place.mkdir(exist_ok=True)
        split = isinstance(leaf, Split)
        files = {at: _bytes(part) for at, part in leaf.parts.items()} if split else {}
        if lead:
            part_shape = leaf.part_shape if split else leaf.shape
            files[".zarray"] = json.dumps(_zarray(leaf, part_shape)).encode()
            if not split:
                files[_place([0] * leaf.ndim)] = _bytes(leaf)
        for at, data in files.items():
            (place / at).write_bytes(data)
            written.append(f"{place.name}/{at}")
    return written


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order, not copied where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _zarray(leaf: np.ndarray | Split, part_shape: tuple[int, ...]) -> dict[str, Any]:
    """zarr format 2; of dtypes that numpy does not have tensorstore takes the name."""
    plain = leaf.dtype.kind in "biuf" and leaf.dtype.isbuiltin == 1
    return {
        "zarr_format": 2,
        "shape": leaf.shape,
        "chunks": part_shape,
        "dtype": leaf.dtype.newbyteorder("<").str if plain else leaf.dtype.name,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
