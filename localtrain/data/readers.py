"""One file to documents, without a crash and without a silent drop.

Rows end at \\n only: U+2028, form feeds and lone \\r are text. Text files keep their text but for a
leading byte order mark and \\r\\n, which becomes \\n.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from localtrain import storage
from localtrain.data.build_lock import Progress
from localtrain.data.compressed import HashingFile, checksum, damage_errors, decompress
from localtrain.data.sources import Source, SourceFile, find_files
from localtrain.data.tally import MAX_ROW_BYTES, Document, Tally, check_text, usable
from localtrain.errors import DataError

log = logging.getLogger(__name__)
BATCH_TEXT = 2 << 20  # characters handed to a tokenizer at once
BATCH_DOCUMENTS = 4096
SECTION_BYTES = 1 << 20  # a longer text file is read in sections, cut after a line


def read_batches(
    source: Source,
    tally: Tally,
    files: list[tuple[str, int, int]],
    progress: Progress | None,
) -> Iterator[list[Document]]:
    """Documents of a source in lists of some megabytes; appends to `files` what was read."""
    found, passed = find_files(source)
    if passed:
        tally.note("files_passed_over", len(passed))
    if unreadable := storage.list_unreadable(source.path):
        tally.note("files_passed_over", len(unreadable))
        log.warning("source %s: passed over %s", source.path, "; ".join(unreadable[:3]))
    total = sum(file.size for file in found)
    done = size = 0
    batch: list[Document] = []
    for file in found:
        reader = FileReader(file, source.field, tally)
        for document in reader:
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_TEXT or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
                if progress:
                    progress(f"tokenizing {source.path}", done + reader.size, total)
        _check_unchanged(file, reader)
        files.append((file.name, reader.size, reader.crc32c))
        done += file.size
    if batch:
        yield batch
    if progress:
        progress(f"tokenizing {source.path}", total, total)


def _check_unchanged(file: SourceFile, reader: FileReader) -> None:
    now = storage.info(file.path)
    if reader.size != file.size or (now.size, now.stamp) != (file.size, file.stamp):
        raise DataError(
            f"{file.path}: changed while it was being read ({file.size} bytes, now {now.size}). "
            f"Start again when nothing writes to it."
        )


class FileReader:
    """Documents of one file; afterwards `crc32c` and `size` tell what was read."""

    def __init__(self, file: SourceFile, field: str, tally: Tally):
        self.file, self.field, self.tally = file, field, tally
        self.crc32c = 0
        self.size = 0

    def __iter__(self) -> Iterator[Document]:
        if self.file.format == "parquet":
            from localtrain.data.parquet import read_parquet

            self.crc32c, self.size = checksum(self.file.path)
            yield from read_parquet(self.file, self.field, self.tally)
            return
        with _missing_is_data_error(self.file), storage.open_file(self.file.path, "rb") as raw:
            hashing = HashingFile(raw)
            source = decompress(io.BufferedReader(hashing, 1 << 20), self.file.compression)
            try:
                read = self._reader_for(source)
                for document in read(source, self.file.name, self.field, self.tally):
                    self.size = hashing.count
                    yield document
            except damage_errors() as error:
                raise DataError(
                    f"{self.file.path}: the {self.file.compression} data are damaged or cut short "
                    f"({error}). Fetch or compress the file again."
                ) from error
            hashing.drain()
            self.crc32c, self.size = hashing.crc32c, hashing.count

    def _reader_for(self, source: io.BufferedReader) -> Callable[..., Iterator[Document]]:
        """By format; a .json file holds rows when its first line is a row with the field."""
        if self.file.format != "json":
            return read_jsonl if self.file.format == "jsonl" else read_text
        head = source.peek(1 << 16).removeprefix(b"\xef\xbb\xbf")
        if re.match(rb"\s*\[\s*\{", head):
            raise DataError(
                f"{self.file.path}: one JSON array cannot be read row by row. Write one object per "
                f"line instead (.jsonl), or set the format of the source to text."
            )
        try:
            row = json.loads(head.split(b"\n", 1)[0])
        except (ValueError, RecursionError):
            return read_text
        return read_jsonl if isinstance(row, dict) and self.field in row else read_text


@contextmanager
def _missing_is_data_error(file: SourceFile):
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file.path}: the file went away while it was being read.") from error


def read_text(source: IO[bytes], name: str, field: str, tally: Tally) -> Iterator[Document]:
    """A text file as one document; a long one as sections that follow each other.

    Only the first section begins the document and only the last one ends it.
    """
    line = 1
    begins = True
    held: tuple[str, int] | None = None  # a section waits until it is known whether it is the last
    for block in _sections(source, tally):
        text = _text_of(block, f"{name}:{line}", tally)
        if text is not None:
            if held is not None:
                yield Document(held[0], f"{name}:{held[1]}", begins, False)
                tally.note("long_file_sections")
                begins = False
            held = (text, line)
        line += block.count(b"\n")
    if held is not None:
        yield Document(held[0], f"{name}:{held[1]}", begins, True)


def _sections(source: IO[bytes], tally: Tally) -> Iterator[bytes]:
    """Blocks of about SECTION_BYTES that end after a line, or at least after a character."""
    rest = source.read(3)
    if rest == b"\xef\xbb\xbf":
        tally.note("byte_order_marks")
        rest = b""
    first = True
    while True:
        chunk = _read_full(source, SECTION_BYTES)
        block = rest + chunk
        if len(chunk) < SECTION_BYTES:
            if block or first:
                yield block
            return
        cut = block.rfind(b"\n") + 1 or _character_cut(block)
        yield block[:cut]
        rest, first = block[cut:], False


def _read_full(source: IO[bytes], count: int) -> bytes:
    pieces = []
    while count:
        piece = source.read(count)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _character_cut(block: bytes) -> int:
    """The last place of `block` where no UTF-8 character is cut in two."""
    cut = len(block)
    while cut > len(block) - 4 and block[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    if block[cut - 1] >= 0xC0:
        return cut - 1
    return len(block)


def _text_of(block: bytes, origin: str, tally: Tally) -> str | None:
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = int(origin.rsplit(":", 1)[1]) + block[: error.start].count(b"\n")
        where = f"{origin.rsplit(':', 1)[0]}:{line}"
        tally.skip("bad_utf8", where, f"byte 0x{block[error.start]:02x}")
        return None
    if "\r\n" in text:
        tally.note("crlf_files")
        text = text.replace("\r\n", "\n")
    return text if usable(text, origin, tally) else None


def read_jsonl(source: IO[bytes], name: str, field: str, tally: Tally) -> Iterator[Document]:
    """One JSON object per line; the document is its `field`."""
    line = 0
    while raw := source.readline(MAX_ROW_BYTES + 1):
        line += 1
        origin = f"{name}:{line}"
        if len(raw) > MAX_ROW_BYTES and not raw.endswith(b"\n"):
            size = len(raw)
            while not raw.endswith(b"\n") and (raw := source.readline(1 << 20)):
                size += len(raw)
            tally.skip("huge", origin, f"{size / (1 << 20):.1f} MiB")
            continue
        if line == 1 and raw.startswith(b"\xef\xbb\xbf"):
            tally.note("byte_order_marks")
            raw = raw[3:]
        text = _row_text(raw, origin, field, tally)
        if text is not None:
            yield Document(text, origin)


def _row_text(raw: bytes, origin: str, field: str, tally: Tally) -> str | None:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return tally.skip("bad_utf8", origin, f"byte 0x{raw[error.start]:02x}")
    except RecursionError:
        return tally.skip("bad_json", origin, "nested too deep")
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        if not raw.strip():
            return tally.skip("empty", origin, "an empty line")
        return tally.skip("bad_json", origin, str(error)[:80])
    if not isinstance(row, dict):
        return tally.skip("not_an_object", origin, type(row).__name__)
    if field not in row:
        keys = ", ".join(list(map(str, row))[:6])
        return tally.skip("missing_field", origin, f"field {field!r}; it has {keys or 'none'}")
    return check_text(row[field], origin, tally)
