"""Reading and writing the Hub's weight files: safetensors, single or sharded with an index.

A file is 8 bytes of header length, a JSON header and the raw tensors. Both directions stream tensor
by tensor, and a header is believed only after every offset, shape and size in it was checked
against the file. Formats that can hold code (pickles) are refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from localtrain import storage
from localtrain.errors import DataError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of one file, as transformers writes them
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class HubFiles:
    """The tensors of a Hub folder (local or URL), read on demand."""

    def __init__(self, folder: str):
        self.folder = folder
        self.tensors = _find(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype."""
        stored = self.tensors[name]
        raw = storage.read_range(stored.path, stored.start, stored.end)
        if len(raw) != stored.end - stored.start:
            raise _damaged(stored.path, f"it ends inside the tensor {name}")
        return np.frombuffer(raw, DTYPES[stored.dtype]).reshape(stored.shape)

    def float_type(self, name: str) -> np.dtype:
        """The type to keep a weight in: its own, float32 for float64. DataError for others."""
        stored = self.tensors[name]
        if stored.dtype not in ("F64", "F32", "F16", "BF16"):
            raise DataError(
                f"{stored.path}: the tensor {name} has the type {stored.dtype}; weights must be "
                "F32, BF16 or F16 here. Packed weights of this kind cannot be read."
            )
        return DTYPES["F32" if stored.dtype == "F64" else stored.dtype]

    def read_float(self, name: str) -> np.ndarray:
        """The tensor as it is, when it holds finite floating-point numbers of 16 bits or more."""
        self.float_type(name)
        array = self.read(name)
        if not _all_finite(array):
            raise DataError(
                f"{self.tensors[name].path}: the tensor {name} holds numbers that are not finite; "
                "the file is damaged or the training that wrote it had failed. Fetch it again."
            )
        return array

    def are_equal(self, first: str, second: str, at_once: int = 1 << 24) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        a, b = self.tensors[first], self.tensors[second]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        pieces = range(0, a.end - a.start, at_once)
        return all(self._bytes(a, i, at_once) == self._bytes(b, i, at_once) for i in pieces)

    def _bytes(self, stored: Stored, offset: int, size: int) -> bytes:
        start = stored.start + offset
        return storage.read_range(stored.path, start, min(start + size, stored.end))


def _all_finite(array: np.ndarray, at_once: int = 1 << 22) -> bool:
    """In pieces, because the answer of numpy is as long as the question."""
    flat = array.reshape(-1)
    return all(np.isfinite(flat[i : i + at_once]).all() for i in range(0, flat.size, at_once))


def is_there(path: str) -> bool:
    """Whether a file exists. A link that leads nowhere is a DataError that says so."""
    if storage.exists(path):
        return True
    if not storage.is_url(path) and os.path.islink(storage.local_path(path)):
        target = os.readlink(storage.local_path(path))
        raise DataError(
            f"{path} is a symbolic link to {target}, which is not there: a Hugging Face cache that "
            "was copied without what its links lead to? Copy it with the links followed (cp -rL, "
            "rsync -L)."
        )
    return False


def _find(folder: str) -> dict[str, Stored]:
    single, index = storage.join(folder, SINGLE), storage.join(folder, INDEX)
    if is_there(single):
        return read_header(single)
    if is_there(index):
        return _read_index(folder, index)
    names = storage.list_dir(folder)
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz"))]
    if pickles:
        raise DataError(
            f"{folder}: the weights are in {pickles[0]}, a format that can run code when it is "
            f"opened, so it is refused. Take the {SINGLE} of the same model, or convert it."
        )
    found = f"; it holds {', '.join(names[:8])}" if names else ""
    raise DataError(
        f"{folder}: there is neither {SINGLE} nor {INDEX}, so there are no weights{found}."
    )


def _read_index(folder: str, index: str) -> dict[str, Stored]:
    """Only the files and tensors that the index names."""
    try:
        names = json.loads(storage.read_bytes(index))["weight_map"]
        files = sorted(set(names.values()))
        plain = all(isinstance(f, str) and os.path.basename(f) == f for f in files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"its `weight_map` cannot be read ({error})") from None
    if not plain or not names:
        raise _damaged(index, "its `weight_map` must give plain file names of this folder")
    paths = {file: storage.join(folder, file) for file in files}
    missing = [file for file in files if not is_there(paths[file])]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of the {len(files)} weight files that {INDEX} names are not "
            f"there: {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}. Was the "
            "download complete? Fetch them again."
        )
    headers = {file: read_header(paths[file]) for file in files}
    absent = [name for name, file in names.items() if name not in headers[file]]
    if absent:
        raise _damaged(index, f"{names[absent[0]]} does not hold {absent[0]} as the index says")
    unlisted = [n for header in headers.values() for n in header if n not in names]
    if unlisted:
        raise _damaged(index, f"its files hold {unlisted[0]}, which it does not list")
    return {name: headers[file][name] for name, file in names.items()}


def read_header(path: str) -> dict[str, Stored]:
    """The tensors of one safetensors file; DataError unless the header is right throughout."""
    size = storage.info(path).size
    first = storage.read_range(path, 0, 8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"it has {size} bytes, fewer than its header needs")
    try:
        text = storage.read_range(path, 8, 8 + length).decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from None
    position = 8 + length
    for stored in sorted(tensors.values(), key=lambda s: (s.start, s.end)):
        if stored.start != position:
            raise _damaged(path, "its tensors overlap or leave gaps")
        position = stored.end
    if position != size:
        cut = [name for name, stored in tensors.items() if stored.end > size]
        lost = f": {len(cut)} tensors are cut off, first {cut[0]}" if cut else ""
        raise _damaged(path, f"it has {size} bytes where its header promises {position}{lost}")
    return tensors


def _unique(pairs: list[tuple]) -> dict:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _stored(path: str, base: int, name: str, entry: dict) -> Stored:
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the tensor {name} has the unknown type {entry['dtype']!r}")
    if not whole or end - start != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
        raise ValueError(f"the tensor {name}: {list(shape)} does not fit its {end - start} bytes")
    return Stored(path, entry["dtype"], shape, base + start, base + end)


def _damaged(path: str, what: str) -> DataError:
    return DataError(f"{path}: the file is damaged or incomplete: {what}. Fetch it again.")


# writing ---------------------------------------------------------------------------------------


def write_tensors(
    folder: str,
    plan: dict[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write tensors, which must come in the order of `plan` and are cast to its dtypes.

    `plan` gives shape and dtype of each name. Returns the names of the files.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name in plan:
        size = _bytes(plan[name])
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    files = [SINGLE]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    stream = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        pieces = _encode({name: plan[name] for name in names}, stream)
        storage.write_atomic(storage.join(folder, file), pieces)
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(map(_bytes, plan.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2) + "\n"
        storage.write_atomic(storage.join(folder, INDEX), text.encode())
    return files


def _bytes(entry: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = entry
    return math.prod(shape) * np.dtype(dtype).itemsize


def _encode(plan: dict, stream: Iterator[tuple[str, np.ndarray]]) -> Iterator[bytes | memoryview]:
    header: dict = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (shape, dtype) in plan.items():
        end = position + _bytes(plan[name])
        offsets = [position, end]
        kind = NAMES[np.dtype(dtype)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    for expected, (shape, dtype) in plan.items():
        name, array = next(stream)
        if name != expected or array.shape != shape:
            raise AssertionError(f"expected the tensor {expected}, got {name} {array.shape}")
        yield np.ascontiguousarray(array, dtype).view(np.uint8).reshape(-1).data
