"""The rows of a large corpus, kept in the cache so that a start does not pack them again.

Only derived data: a file that is missing, damaged or of another version is made anew.
"""

from __future__ import annotations

import hashlib
import struct

import google_crc32c
import numpy as np

from localtrain import storage
from localtrain.data.pack import BLOCK, Packed, pack
from localtrain.data.split import Side

KEEP_FROM = 1 << 17  # documents; fewer are packed in a tenth of a second
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")  # magic, version, crc32c of the rest, rows, pieces
MAGIC = b"LTROWS\0\0"


def rows_of(side: Side, seq_len: int, packing: str, cache_dir: str) -> Packed:
    """`pack` of the documents of one side, from the cache when they are many."""
    if len(side.starts) < KEEP_FROM:
        return pack(side.starts, side.lengths, seq_len, packing)
    key = hashlib.sha256(str((VERSION, BLOCK, seq_len, packing)).encode())
    key.update(side.dataset.index.hash.encode())
    key.update(np.ascontiguousarray(side.starts))
    key.update(np.ascontiguousarray(side.lengths))
    path = storage.join(cache_dir, f"rows-{key.hexdigest()[:20]}.bin")
    found = _read(path, seq_len)
    if found is None:
        found = pack(side.starts, side.lengths, seq_len, packing)
        _write(path, found)
    return found


def _write(path: str, packed: Packed) -> None:
    arrays = (packed.row_starts, packed.starts, packed.places)
    body = b"".join(
        array.astype(kind).tobytes()
        for array, kind in zip(arrays, ("<i8", "<i8", "<i4"), strict=True)
    )
    crc = google_crc32c.value(body)
    head = HEADER.pack(MAGIC, VERSION, crc, packed.rows, len(packed.starts))
    storage.write_atomic(path, [head, body])


def _read(path: str, seq_len: int) -> Packed | None:
    try:
        data = memoryview(storage.read_bytes(path))
    except FileNotFoundError:
        return None
    if len(data) < HEADER.size:
        return None
    magic, version, crc, rows, pieces = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    size = (rows + 1) * 8 + pieces * 12
    if (magic, version, len(body)) != (MAGIC, VERSION, size):
        return None
    if google_crc32c.value(bytes(body)) != crc:
        return None
    starts_at = (rows + 1) * 8
    return Packed(
        seq_len,
        np.frombuffer(body, "<i8", rows + 1),
        np.frombuffer(body, "<i8", pieces, starts_at),
        np.frombuffer(body, "<i4", pieces, starts_at + pieces * 8),
    )
