"""Bytes of a file read forward: checksummed as they are, given out decompressed."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import IO

import google_crc32c

from localtrain import storage


class HashingFile(io.RawIOBase):
    """A file read forward that knows the crc32c and the number of its bytes so far."""

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._checksum = google_crc32c.Checksum()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._checksum.update(data)
        self.count += len(data)
        return len(data)

    def drain(self) -> None:
        """Read what a decoder left unread, so that the checksum covers the file."""
        while self.read(1 << 20):
            pass

    @property
    def crc32c(self) -> int:
        return int.from_bytes(self._checksum.digest(), "big")


def checksum(path: str) -> tuple[int, int]:
    """(crc32c, size) of a whole file."""
    with storage.open_file(path, "rb") as raw:
        hashing = HashingFile(raw)
        hashing.drain()
    return hashing.crc32c, hashing.count


def decompress(raw: IO[bytes], compression: str | None) -> io.BufferedReader:
    """The plain bytes of a file; data that end too soon raise one of `damage_errors`."""
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw, mode="rb"), 1 << 20)
    if compression == "zstd":
        return io.BufferedReader(ZstdFile(raw), 1 << 20)
    return raw


class ZstdFile(io.RawIOBase):
    """Frames one after the other. zstandard's own reader takes a cut file for a whole one."""

    def __init__(self, raw: IO[bytes]):
        import zstandard

        self._raw = raw
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = None  # the frame being read
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            chunk = self._frame.unused_data if self._frame and self._frame.eof else b""
            chunk = chunk or self._raw.read(1 << 14)
            if not chunk:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last frame is not complete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            self._ready = memoryview(self._frame.decompress(chunk))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def damage_errors() -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    try:
        import zstandard

        return (*errors, zstandard.ZstdError)
    except ImportError:
        return errors
