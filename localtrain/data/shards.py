"""Token shards: the built form of a corpus, one folder with an index and flat binary files.

    index.json            format version, tokenizer, counts, and per shard: name, size, crc32c, ...
    shard-00000.tokens    header, uint32 lengths [documents], uint64 text hashes [documents],
                          then the tokens of all documents in order, uint16 or uint32; little-endian

The index is written last: a folder without one was never finished. Everything read is checked
against it, so that a damaged or truncated file is a DataError that names the file. Tokens are read
by ranges with pread: no file position is shared, so threads cannot corrupt each other's records.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import numpy as np

from localtrain import storage
from localtrain.errors import DataError

INDEX = "index.json"
FORMAT_VERSION = 1
MAGIC = b"LTTOKENS"
HEADER = struct.Struct("<8sIIQQ")  # magic, version, bytes per token, documents, tokens
SHARD_TOKENS = 1 << 25  # 64 or 128 MiB a shard


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the index describes it."""

    name: str
    size: int
    crc32c: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DatasetIndex:
    """index.json. `files`: [name, size, crc32c] of every source file that was read."""

    tokenizer: str
    token_bytes: int
    shards: tuple[ShardInfo, ...]
    files: tuple[tuple[str, int, int], ...] = ()
    key: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def hash(self) -> str:
        """Identity of the content: equal tokens in equal order, wherever they lie."""
        parts = [self.version, self.tokenizer, self.token_bytes]
        parts += [(s.documents, s.tokens, s.crc32c) for s in self.shards]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def token_bytes_for(size: int) -> int:
    """Bytes per token for a tokenizer of `size` ids."""
    return 2 if size <= 1 << 16 else 4


class ShardWriter:
    """Collects documents and writes shards into `folder`; `finish` writes the index last."""

    def __init__(self, folder: str, token_bytes: int, shard_tokens: int = SHARD_TOKENS):
        self.folder = folder
        self.token_bytes = token_bytes
        self.shard_tokens = shard_tokens
        self.shards: list[ShardInfo] = []
        self.tokens = 0
        self._held: list[np.ndarray] = []
        self._hashes: list[int] = []
        self._held_tokens = 0

    def add(self, tokens: np.ndarray, text_hash: int) -> None:
        """One document; `text_hash` (64 bits) decides on which side of a split it falls."""
        self._held.append(tokens.astype(f"<u{self.token_bytes}"))
        self._hashes.append(text_hash)
        self._held_tokens += len(tokens)
        self.tokens += len(tokens)
        if self._held_tokens >= self.shard_tokens:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        name = f"shard-{len(self.shards):05d}.tokens"
        lengths = np.array([len(t) for t in self._held], "<u4")
        pieces = [
            HEADER.pack(MAGIC, FORMAT_VERSION, self.token_bytes, len(lengths), self._held_tokens),
            lengths.tobytes(),
            np.array(self._hashes, "<u8").tobytes(),
            np.concatenate(self._held).tobytes(),
        ]
        crc = 0
        for piece in pieces:
            crc = google_crc32c.extend(crc, piece)
        size = sum(len(piece) for piece in pieces)
        storage.write_atomic(storage.join(self.folder, name), pieces)
        self.shards.append(ShardInfo(name, size, crc, len(lengths), self._held_tokens))
        self._held, self._hashes, self._held_tokens = [], [], 0

    def finish(self, tokenizer: str, **more: Any) -> DatasetIndex:
        """Write what is left, then the index: from here on the folder is believed."""
        self._flush()
        index = DatasetIndex(tokenizer, self.token_bytes, tuple(self.shards), **more)
        storage.write_atomic(storage.join(self.folder, INDEX), index.to_json())
        return index


def is_dataset(path: str) -> bool:
    """True for a folder that holds a finished dataset."""
    return storage.exists(storage.join(path, INDEX))


def read_index(folder: str) -> DatasetIndex:
    """The checked index of a dataset folder; DataError naming the file when it is damaged."""
    path = storage.join(folder, INDEX)
    try:
        raw = json.loads(storage.read_text(path))
    except FileNotFoundError as error:
        raise DataError(f"{folder}: no {INDEX}: this is not a finished token dataset.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged: not JSON ({error}). Build the dataset again.") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format version {version!r}; this program reads version {FORMAT_VERSION}. "
            f"Build the dataset again with `localtrain data build`."
        )
    try:
        return _checked_index(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: damaged ({type(error).__name__}: {error}). Build the dataset again."
        ) from error


def _checked_index(raw: dict) -> DatasetIndex:
    shards = tuple(ShardInfo(**shard) for shard in raw["shards"])
    for shard in shards:
        for number in (shard.size, shard.crc32c, shard.documents, shard.tokens):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a count")
        if not isinstance(shard.name, str) or shard.name != os.path.basename(shard.name):
            raise ValueError(f"{shard.name!r} is not a plain file name")
        size = HEADER.size + shard.documents * 12 + shard.tokens * raw["token_bytes"]
        if size != shard.size:
            raise ValueError(f"{shard.name}: size {shard.size}, but its counts make {size}")
    if raw["token_bytes"] not in (2, 4) or not isinstance(raw["tokenizer"], str):
        raise ValueError("token_bytes or tokenizer")
    files = tuple((str(n), int(s), int(c)) for n, s, c in raw.get("files", ()))
    dicts = {k: dict(raw.get(k) or {}) for k in ("key", "skipped", "first_skipped", "notes")}
    return DatasetIndex(raw["tokenizer"], raw["token_bytes"], shards, files, **dicts)


class Dataset:
    """A built dataset, open for reading. `lengths` and `hashes` are per document, in order.

    Raises DataError naming the file when a shard is missing, truncated or damaged.
    """

    MAX_OPEN = 128  # file handles kept; more shards than that are opened again when needed

    def __init__(self, folder: str, verify: bool = True):
        self.folder = folder
        self.index = read_index(folder)
        self._lock = threading.Lock()
        self._open: dict[int, _Handle] = {}
        tables = [self._read_tables(shard, verify) for shard in self.index.shards]
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
        if verify and not storage.is_url(path):
            from localtrain.data.readers import checksum

            if checksum(path)[0] != shard.crc32c:
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
        remote: dict[int, list[tuple[int, int, int]]] = {}
        local_starts = (starts - self._shard_starts[shards]) * width
        for shard, start, size, end in zip(
            shards.tolist(), local_starts.tolist(), (lengths * width).tolist(), ends.tolist(),
            strict=True,
        ):  # fmt: skip
            offset = self._token_offsets[shard] + start
            remote.setdefault(shard, []).append((offset, size, end - size))
        for shard, ranges in remote.items():
            self._fill(shard, ranges, view)
        return out

    def _fill(self, shard: int, ranges: list[tuple[int, int, int]], view: memoryview) -> None:
        path = storage.join(self.folder, self.index.shards[shard].name)
        try:
            if storage.is_url(path):
                blobs = storage.read_ranges(path, [(o, o + n) for o, n, _ in ranges])
                for (_, size, at), blob in zip(ranges, blobs, strict=True):
                    if len(blob) != size:
                        raise DataError(f"{path}: cut short while in use.")
                    view[at : at + size] = blob
                return
            handle = self._handle(shard, path)
            for offset, size, at in ranges:
                if handle.read_into(view[at : at + size], offset) != size:
                    raise DataError(f"{path}: cut short while in use. {_again(self.folder)}")
        except FileNotFoundError as error:
            raise DataError(f"{path}: missing. {_again(self.folder)}") from error
        except OSError as error:
            raise storage.storage_error("read", path, error) from error

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
        self._file = open(storage.local_path(path), "rb", buffering=0)
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
