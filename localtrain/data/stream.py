"""Ids to text one at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Stream(Protocol):
    """Ids in, text out, piece by piece; a character that is not complete yet is held back."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteStream:
    """Ids to text where an id stands for bytes: incomplete UTF-8 waits for its next byte."""

    def __init__(self, bytes_of: Callable[[int, bool], bytes], skip_special: bool):
        self._bytes_of = bytes_of
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(int(token), self._skip_special))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Ids to text for any decoder: decode a short window again and give out what is new.

    Text that ends in U+FFFD may be a character that is not complete, so it waits.
    """

    def __init__(self, decode: Callable[[Sequence[int], bool], str], skip_special: bool):
        self._decode, self._skip = decode, skip_special
        self._ids: list[int] = []
        self._known = 0  # ids whose text was given out; they stay in the window as context

    def push(self, token: int) -> str:
        self._ids.append(int(token))
        text = self._new_text()
        if text.endswith("\ufffd"):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._known], self._skip)
        return self._decode(self._ids, self._skip)[len(before) :]

    def _give(self, text: str) -> str:
        if text:
            # What was given out last stays as context (a decoder may drop the space before a first
            # word, and it never begins inside a character); what was given before that goes.
            self._ids = self._ids[self._known :]
            self._known = len(self._ids)
        return text


def byte_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's vocabulary writes for each byte."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in keep]
    return {chr(b): b for b in keep} | {chr(256 + n): b for n, b in enumerate(moved)}
