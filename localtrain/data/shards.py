"""Token shards: the built form of a corpus, one folder with an index and flat binary files.

    index.json            format version, tokenizer, counts, its own checksum, and per shard: name,
                          size, crc32c, ...
    shard-00000.tokens    header, uint32 lengths [documents], uint64 text hashes [documents],
                          then the tokens of all documents in order, uint16 or uint32; little-endian

The index is written last: a folder without one was never finished. Everything read is checked
against it, so that a damaged or truncated file is a DataError that names the file (`dataset.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import google_crc32c
import numpy as np

from localtrain import storage
from localtrain.config.secret import mask
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
        raw = json.loads(json.dumps(mask(asdict(self))))
        return (json.dumps({**raw, "checksum": _own_checksum(raw)}, indent=1) + "\n").encode()


def _own_checksum(raw: dict[str, Any]) -> int:
    """crc32c of what an index says, however it is spelled."""
    rest = {key: value for key, value in raw.items() if key != "checksum"}
    return google_crc32c.value(json.dumps(rest, sort_keys=True).encode())


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
    if type(version) is not int or version != FORMAT_VERSION:
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
    known = {field.name for field in fields(DatasetIndex)}
    if strange := set(raw) - known - {"checksum"}:
        raise ValueError(f"{min(strange)!r} is not a key of it")
    if "checksum" in raw and raw["checksum"] != _own_checksum(raw):  # older ones have none
        raise ValueError("its own checksum differs")
    if not isinstance(raw["shards"], list):
        raise TypeError("shards is not a list")
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
