"""Sources to token shards, built once.

The cache keys a build by everything that decides its content: the path, size and stamp of every
file, the field, the tokenizer and the format version. One process builds (a lock that the system
releases when its owner dies), others wait and then find it. Shards are written into a temporary
folder that is renamed when its index is written, so a killed build leaves nothing that is believed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from localtrain import storage
from localtrain.config.secret import mask
from localtrain.data import synthetic
from localtrain.data.build_lock import Progress, build_lock
from localtrain.data.readers import read_batches
from localtrain.data.shards import (
    FORMAT_VERSION,
    DatasetIndex,
    ShardWriter,
    is_dataset,
    read_index,
    token_bytes_for,
)
from localtrain.data.sources import SYNTHETIC, Source, as_sources, find_files
from localtrain.data.tally import Document, Tally, bad_row_message, repeated_files
from localtrain.data.tokenizer import Tokenizer, mark_document
from localtrain.errors import DataError, Stopped

log = logging.getLogger(__name__)
FIELD = "Set the `field` of the source to the key that holds the text."
ADVICE = {  # when nothing of a source can be used
    "missing_field": FIELD,
    "not_text": FIELD,
    "bad_json": "Write one JSON object per line, or set the `format` of the source to text.",
    "bad_utf8": "Convert the files to UTF-8, for example with iconv.",
}


def build_dataset(
    sources: object,
    tokenizer: Tokenizer,
    out: str,
    bad_rows: str = "skip",
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> DatasetIndex:
    """Build one dataset from `sources`, in order, at the folder or URL `out`.

    An `out` that already holds exactly this dataset is left as it is; one that holds another is a
    DataError. Use the folder as a source afterwards. Raises DataError when nothing is usable.
    """
    listed = as_sources(sources)
    key = dataset_key(listed, tokenizer)
    if is_dataset(out):
        index = read_index(out)
        if index.key == key:
            return _accept(index, bad_rows, listed)
        raise DataError(
            f"{out} already holds another dataset (other sources, tokenizer or settings). Choose "
            f"another --out, or remove that folder first."
        )
    return _build_locked(listed, tokenizer, out, key, bad_rows, progress, stop)


def cached_dataset(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str,
    bad_rows: str = "skip",
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> str:
    """The folder of the built form of one source, built now if it is not in the cache."""
    if source.format in (None, "shards") and _holds_shards(source):
        _check_tokenizer(source.path, read_index(source.path), tokenizer)
        return source.path
    key = dataset_key([source], tokenizer)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    folder = storage.join(cache_dir, f"tokens-{digest}")
    if is_dataset(folder):
        _accept(read_index(folder), bad_rows, [source])
    else:
        _build_locked([source], tokenizer, folder, key, bad_rows, progress, stop)
    return folder


def _holds_shards(source: Source) -> bool:
    if source.path.startswith(("python:", SYNTHETIC)):
        return False
    return source.format == "shards" or is_dataset(source.path)


def _check_tokenizer(path: str, index: DatasetIndex, tokenizer: Tokenizer) -> None:
    if index.tokenizer != tokenizer.hash:
        raise DataError(
            f"{path}: its tokens were made with another tokenizer (hash {index.tokenizer}) than "
            f"data.tokenizer ({tokenizer.name}, hash {tokenizer.hash}). Build it again with this "
            f"tokenizer, or name the one it was built with."
        )


def dataset_key(sources: list[Source], tokenizer: Tokenizer) -> dict:
    """What decides the content of a build. DataError when a source matches nothing."""
    listed = []
    for source in sources:
        entry: dict = {"path": source.path, "field": source.field, "format": source.format}
        if not source.path.startswith(SYNTHETIC):
            entry["path"] = mask(_absolute(source.path))  # it is stored
            stamps = [(f.path, f.size, f.stamp, f.format) for f in find_files(source)[0]]
            entry["files"] = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
        listed.append(entry)
    return {"version": FORMAT_VERSION, "tokenizer": tokenizer.hash, "sources": listed}


def _absolute(path: str) -> str:
    if storage.is_url(path) or path.startswith("python:"):
        return path
    return os.path.abspath(storage.local_path(path))


def _accept(index: DatasetIndex, bad_rows: str, sources: list[Source]) -> DatasetIndex:
    """A finished index, held to the bad_rows setting of this run and to having documents."""
    if bad_rows == "error" and index.skipped:
        reason = next(iter(index.skipped))
        raise DataError(bad_row_message(reason, index.first_skipped.get(reason, "?")))
    if not index.documents:
        raise DataError(_nothing_usable(sources, index.skipped, index.first_skipped))
    return index


def _nothing_usable(sources: list[Source], skipped: dict, first: dict) -> str:
    names = ", ".join(source.path for source in sources)
    if not skipped:
        return f"source {names}: there is no text in it."
    said = skips(skipped, first)
    return f"source {names}: not one usable document: {said}".rstrip()


def skips(skipped: dict[str, int], first: dict[str, str]) -> str:
    """What was left out of the data, where it begins, and what to do about it."""
    reasons = "; ".join(f"{n} x {r}, first at {first.get(r, '?')}" for r, n in skipped.items())
    advice = " ".join(text for reason, text in ADVICE.items() if reason in skipped)
    return f"{reasons}. {advice}"


def _build_locked(
    sources: list[Source],
    tokenizer: Tokenizer,
    folder: str,
    key: dict,
    bad_rows: str,
    progress: Progress | None,
    stop: threading.Event | None,
) -> DatasetIndex:
    if storage.is_url(folder):  # an upload is whole or absent, and the index comes last
        return _build(sources, tokenizer, folder, key, bad_rows, progress, stop)
    folder = os.path.abspath(storage.local_path(folder))
    storage.make_dirs(os.path.dirname(folder))
    with build_lock(f"{folder}.lock", progress, stop):
        if is_dataset(folder):  # another process was faster
            index = read_index(folder)
            if index.key == key:
                return _accept(index, bad_rows, sources)
        _remove_leftovers(folder)
        temporary = f"{folder}.tmp-{uuid.uuid4().hex[:12]}"
        try:
            index = _build(sources, tokenizer, temporary, key, bad_rows, progress, stop)
            if os.path.isdir(folder) and not os.listdir(folder):
                os.rmdir(folder)
            if os.path.lexists(folder):
                raise DataError(f"{folder} exists and is not a dataset. Choose another place.")
            storage.rename(temporary, folder)
        finally:
            storage.remove_tree(temporary)
        storage.sync_dir(os.path.dirname(folder))
    return index


def _remove_leftovers(folder: str) -> None:
    """Temporary folders of killed builds of this very folder (we hold its lock)."""
    parent, name = os.path.split(folder)
    for entry in storage.list_dir(parent):
        if entry.startswith(f"{name}.tmp-"):
            storage.remove_tree(os.path.join(parent, entry))


def _build(
    sources: list[Source],
    tokenizer: Tokenizer,
    folder: str,
    key: dict,
    bad_rows: str,
    progress: Progress | None,
    stop: threading.Event | None,
) -> DatasetIndex:
    begin = time.monotonic()
    tally = Tally(error=bad_rows == "error")
    writer = ShardWriter(folder, token_bytes_for(tokenizer.size))
    files: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(1) as pool:  # reads and parses the next batch while this one is encoded
        for source in sources:
            if source.path.startswith(SYNTHETIC):
                for tokens in synthetic.documents(source.path, tokenizer):
                    writer.add(tokens, hash_bytes(tokens.tobytes()))
                files.append((source.path, 0, 0))
                continue
            batches = read_batches(source, tally, files, progress)
            ahead = pool.submit(next, batches, None)
            while (batch := ahead.result()) is not None:
                ahead = pool.submit(next, batches, None)
                if stop is not None and stop.is_set():
                    ahead.cancel()
                    raise Stopped("stopped while building the data; nothing was kept of it.")
                _encode(batch, tokenizer, writer, tally)
    if said := repeated_files(files):
        log.warning("%s", said)
    if not writer.tokens:
        raise DataError(_nothing_usable(sources, tally.skipped, tally.first))
    spent = max(time.monotonic() - begin, 1e-9)
    size = sum(file[1] for file in files)
    log.info(
        "tokenized %s: %.2f M tokens of %.2f MB in %.1f s (%.2f M tokens/s, %.2f MB/s)",
        ", ".join(source.path for source in sources),
        *(writer.tokens / 1e6, size / 1e6, spent, writer.tokens / 1e6 / spent, size / 1e6 / spent),
    )
    return writer.finish(
        tokenizer.hash,
        files=tuple(files),
        key=key,
        skipped=tally.skipped,
        first_skipped=tally.first,
        notes=tally.notes,
    )


def _encode(batch: list[Document], tokenizer: Tokenizer, writer: ShardWriter, tally: Tally) -> None:
    encoded = tokenizer.encode_documents([document.text for document in batch])
    for document, ids in zip(batch, encoded, strict=True):
        tokens = mark_document(ids, tokenizer, document.begins, document.ends)
        if not len(tokens):
            tally.skip("no_tokens", document.origin)
            continue
        writer.add(tokens, hash_bytes(document.text.encode("utf-8")))


def hash_bytes(data: bytes) -> int:
    """64 bits that depend on the content alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def train_tokenizer(
    sources: object,
    size: int,
    folder: str | None = None,
    bad_rows: str = "skip",
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `size` ids; written to `folder` when given."""
    from localtrain.data.train_bpe import train_bpe

    def texts() -> Iterable[str]:
        tally = Tally(error=bad_rows == "error")
        for source in as_sources(sources):
            for batch in read_batches(source, tally, [], progress):
                if stop is not None and stop.is_set():
                    raise Stopped("stopped while training the tokenizer.")
                yield from (document.text for document in batch)

    tokenizer = train_bpe(texts(), size)
    if folder is not None:
        tokenizer.save(folder)
    return tokenizer
