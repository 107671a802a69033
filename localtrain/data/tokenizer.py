"""Text to ids and back: a byte tokenizer that needs no file, and any tokenizer.json.

`load_tokenizer("byte")` works offline and at once: ids 0..255 are the UTF-8 bytes, then a few
control tokens. Everything else is a tokenizer.json as the Hub carries it, alone or in a folder
(`hub_tokenizer.py`). A padding token is never needed: padding is told by segment 0 and weight 0,
not by an id, so that a tokenizer without one learns to stop.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from localtrain import storage
from localtrain.data.stream import ByteStream, Stream
from localtrain.errors import DataError

BYTE_MARKER = "byte_tokenizer.json"  # what `save` writes for a tokenizer that has no other file


class Tokenizer(Protocol):
    """What the rest of localtrain asks of a tokenizer."""

    name: str
    size: int  # one more than the largest id
    bos_id: int | None  # put before a document, or None
    eos_id: int | None  # put after a document, or None
    prefix: tuple[int, ...]  # all that is put before a document: () or (bos_id,)
    suffix: tuple[int, ...]  # all that is put after it: () or (eos_id,)
    stop_ids: tuple[int, ...]  # ids that end a generated text
    special: dict[str, int]
    named: dict[str, str]  # what a chat template calls them: bos_token, eos_token, ...
    hash: str  # changes when any id or marker could change
    chat_template: str | list | None  # a list holds several, with names

    def encode(self, text: str) -> np.ndarray: ...

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

    def encode_document(self, text: str) -> np.ndarray: ...

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def decode_stream(self, skip_special: bool = False) -> Stream: ...

    def byte_lengths(self) -> np.ndarray: ...

    def save(self, folder: str) -> None: ...


def mark_document(
    ids: np.ndarray, tokenizer: Tokenizer, begins: bool = True, ends: bool = True
) -> np.ndarray:
    """[bos if there is one] + ids + [eos]; a marker that is there already is not doubled."""
    head, tail = tokenizer.prefix, tokenizer.suffix
    if not begins or (head and tuple(ids[: len(head)].tolist()) == head):
        head = ()
    if not ends or (tail and tuple(ids[-len(tail) :].tolist()) == tail):
        tail = ()
    if not head and not tail:
        return ids
    return np.concatenate([np.array(head, np.int32), ids, np.array(tail, np.int32)])


BYTE_SPECIAL = {
    "<|endoftext|>": 256,
    "<|im_start|>": 257,
    "<|im_end|>": 258,
    **{f"<|reserved_{n}|>": 259 + n for n in range(5)},
}
_BYTE_NAMES = {number: name for name, number in BYTE_SPECIAL.items()}
_BYTE_SPLIT = re.compile("(" + "|".join(re.escape(name) for name in BYTE_SPECIAL) + ")")


class ByteTokenizer:
    """One id per UTF-8 byte; "<|endoftext|>" begins and ends a document."""

    name = "byte"
    size = 264
    bos_id = 256
    eos_id = 256
    prefix = (256,)
    suffix = (256,)
    stop_ids = (256, 258)
    special = BYTE_SPECIAL
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}  # noqa: RUF012
    chat_template = None
    hash = hashlib.sha256(b"localtrain byte tokenizer 1").hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]; the name of a control token in the text becomes that token."""
        if "<|" not in text:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        parts = []
        for part in _BYTE_SPLIT.split(text):
            if part in self.special:
                parts.append(np.array([self.special[part]], np.int32))
            elif part:
                parts.append(np.frombuffer(part.encode("utf-8"), np.uint8).astype(np.int32))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`encode`, and the first and end character in the text of every id."""
        starts, ends = [], []
        for part in re.finditer(_BYTE_SPLIT.pattern + "|.", text, re.DOTALL):
            size = 1 if part[0] in self.special else len(part[0].encode("utf-8"))
            starts += [part.start()] * size
            ends += [part.end()] * size
        return self.encode(text), np.array(starts, np.int64), np.array(ends, np.int64)

    def encode_document(self, text: str) -> np.ndarray:
        return mark_document(self.encode(text), self)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts (no markers)."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        stream = self.decode_stream(skip_special)
        return "".join([stream.push(int(token)) for token in ids]) + stream.flush()

    def decode_stream(self, skip_special: bool = False) -> Stream:
        return ByteStream(self._bytes_of, skip_special)

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 [size]; 0 for control tokens."""
        return (np.arange(self.size) < 256).astype(np.int64)

    def _bytes_of(self, token: int, skip_special: bool) -> bytes:
        if 0 <= token < 256:
            return bytes([token])
        name = _BYTE_NAMES.get(token)
        return b"" if name is None or skip_special else name.encode()

    def save(self, folder: str) -> None:
        text = json.dumps({"type": "byte", "version": 1})
        storage.write_atomic(storage.join(folder, BYTE_MARKER), text.encode())


def load_tokenizer(name: str) -> Tokenizer:
    """byte, a tokenizer.json, or a folder (or URL) that holds one. DataError when there is none."""
    if name == "byte":
        return ByteTokenizer()
    if storage.exists(storage.join(name, BYTE_MARKER)):
        return ByteTokenizer()
    try:
        from localtrain.data.hub_tokenizer import load_hub_tokenizer
    except ImportError as error:
        raise DataError(
            f"tokenizer {name!r} needs the package `tokenizers`, which cannot be imported "
            f"({error}). Install it, or use tokenizer: byte."
        ) from error
    return load_hub_tokenizer(name)
