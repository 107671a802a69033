"""Reading a built dataset: the lengths of its documents in memory, tokens by ranges.

Tokens are read with pread: no file position is shared, so threads cannot corrupt each other's
records. Remote shards are read from local copies, or by ranges that are fetched together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from localtrain import storage
from localtrain.data.compressed import checksum
from localtrain.data.copies import Copies
from localtrain.data.shards import FORMAT_VERSION, HEADER, MAGIC, ShardInfo, read_index
from localtrain.errors import DataError

# Local datasets up to this size are checked against their checksums whenever they are opened
# (about 1 s per GB); of larger ones headers, sizes and document tables are.
VERIFY_BYTES = 8 << 30
TABLES_AT_ONCE = 16  # of remote shards: 1000 shards at 50 ms a request in 6 s


class Dataset:
    """A built dataset, open for reading. `lengths` and `hashes` are per document, in order.

    Raises DataError naming the file when a shard is missing, truncated or damaged.
    """

    MAX_OPEN = 128  # file handles kept; more shards than that are opened again when needed

    def __init__(self, folder: str):
        self.folder = folder
        self.index = read_index(folder)
        verify = sum(shard.size for shard in self.index.shards) <= VERIFY_BYTES
        self._lock = threading.Lock()
        self._open: dict[int, _Handle] = {}
        self._copies = Copies(folder, self.index.shards) if storage.is_url(folder) else None
        shards = self.index.shards
        if self._copies is None:
            tables = [self._read_tables(shard, verify) for shard in shards]
        else:  # two requests a shard
            with ThreadPoolExecutor(TABLES_AT_ONCE) as pool:
                tables = list(pool.map(self._read_tables, shards, [verify] * len(shards)))
        self.lengths = _concatenate([t[0] for t in tables], np.uint32)
        self.hashes = _concatenate([t[1] for t in tables], np.uint64)
        # where each document begins in the stream of all tokens of the dataset
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = ends - self.lengths
        counts = np.array([shard.tokens for shard in self.index.shards], np.int64)
        self._shard_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._token_offsets = [HEADER.size + s.documents * 12 for s in self.index.shards]

    def _read_tables(self, shard: ShardInfo, verify: bool) -> tuple[np.ndarray, np.ndarray]:
        path = storage.join(self.folder, shard.name)
        try:
            size = storage.info(path).size
        except FileNotFoundError as error:
            raise DataError(f"{path}: missing. {_again(self.folder)}") from error
        if size != shard.size:
            raise DataError(
                f"{path}: damaged or cut short: {size} bytes, the index says {shard.size}. "
                f"{_again(self.folder)}"
            )
        if verify and not storage.is_url(path) and checksum(path)[0] != shard.crc32c:
            raise DataError(f"{path}: damaged: its checksum differs. {_again(self.folder)}")
        head = storage.read_range(path, 0, HEADER.size + shard.documents * 12)
        if len(head) != HEADER.size + shard.documents * 12:
            raise DataError(f"{path}: cut short. {_again(self.folder)}")
        expected = (MAGIC, FORMAT_VERSION, self.index.token_bytes, shard.documents, shard.tokens)
        if HEADER.unpack_from(head) != expected:
            raise DataError(f"{path}: its header differs from the index. {_again(self.folder)}")
        lengths = np.frombuffer(head, "<u4", shard.documents, HEADER.size)
        hashes = np.frombuffer(head, "<u8", shard.documents, HEADER.size + 4 * shard.documents)
        if int(lengths.sum(dtype=np.int64)) != shard.tokens:
            raise DataError(f"{path}: its document lengths do not add up. {_again(self.folder)}")
        return lengths.astype(np.uint32), hashes.astype(np.uint64)

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens [starts[i], starts[i] + lengths[i]) for every i, one after the other.

        A range lies inside one document, so inside one shard. Returns uint16 or uint32 [sum].
        """
        width = self.index.token_bytes
        out = np.empty(int(lengths.sum()), f"<u{width}")
        view = memoryview(out).cast("B") if len(out) else memoryview(b"")
        shards = np.searchsorted(self._shard_starts, starts, side="right") - 1
        ends = np.cumsum(lengths) * width
        here: dict[int, list[tuple[int, int, int]]] = {}
        for shard, start, size, end in zip(
            shards.tolist(),
            ((starts - self._shard_starts[shards]) * width).tolist(),
            (lengths * width).tolist(),
            ends.tolist(),
            strict=True,
        ):
            offset = self._token_offsets[shard] + start
            here.setdefault(shard, []).append((offset, size, end - size))
        there = []
        for shard, ranges in here.items():
            path = self._local(shard)
            if path is None:
                there += [(self._name(shard), *one) for one in ranges]
            else:
                self._fill(shard, path, ranges, view)
        self._fetch(there, view)
        return out

    def _name(self, shard: int) -> str:
        return storage.join(self.folder, self.index.shards[shard].name)

    def _local(self, shard: int) -> str | None:
        """The file of a shard on this machine: itself, or its copy when that is here already."""
        return self._name(shard) if self._copies is None else self._copies.find(shard)

    def _fetch(self, pieces: list[tuple[str, int, int, int]], view: memoryview) -> None:
        """(URL, offset, size, place in `view`), all at the same time: one latency for a batch."""
        try:
            blobs = storage.read_many([(url, o, o + size) for url, o, size, _ in pieces])
        except FileNotFoundError as error:
            raise DataError(f"{error} is missing. {_again(self.folder)}") from error
        for (_, _, size, at), blob in zip(pieces, blobs, strict=True):
            view[at : at + size] = blob

    def _fill(
        self, shard: int, path: str, ranges: list[tuple[int, int, int]], view: memoryview
    ) -> None:
        """(offset, size, place in `view`) of one file here."""
        name = self._name(shard)
        try:
            handle = self._handle(shard, path)
            for offset, size, at in ranges:
                if handle.read_into(view[at : at + size], offset) != size:
                    raise DataError(f"{name}: cut short while in use. {_again(self.folder)}")
        except FileNotFoundError as error:
            raise DataError(f"{name}: missing. {_again(self.folder)}") from error
        except OSError as error:
            raise storage.storage_error("read", name, error) from error

    def _handle(self, shard: int, path: str) -> _Handle:
        with self._lock:
            handle = self._open.get(shard)
            if handle is None:
                if len(self._open) >= self.MAX_OPEN:
                    self._open.pop(next(iter(self._open)))
                handle = self._open[shard] = _Handle(path)
            return handle


class _Handle:
    """Positional reads of one local file; closed when the last user lets go of it."""

    def __init__(self, path: str):
        self._file = open(storage.local_path(path), "rb", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()

    if hasattr(os, "preadv"):

        def read_into(self, view: memoryview, offset: int) -> int:
            return os.preadv(self._file.fileno(), [view], offset)

    else:  # no positional read on this system: one reader at a time

        def read_into(self, view: memoryview, offset: int) -> int:
            with self._lock:
                self._file.seek(offset)
                return self._file.readinto(view)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self._file.close()


def _concatenate(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    parts = list(parts)
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _again(folder: str) -> str:
    return f"Remove {folder} and start the command again to build it anew."
