"""Rows of a parquet file as documents; pyarrow is imported only here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localtrain import storage
from localtrain.data.sources import SourceFile
from localtrain.data.tally import MAX_ROW_BYTES, Document, Tally, check_text
from localtrain.errors import DataError

ROWS = 1024  # rows held as Python objects at once


def read_parquet(file: SourceFile, field: str, tally: Tally) -> Iterator[Document]:
    """One document per row, from the column `field`; the origin is file:row, counted from 1."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{file.path}: reading parquet needs pyarrow: pip install 'localtrain[data]'."
        ) from error
    row = 0
    with storage.open_file(file.path, "rb") as raw:
        try:
            table = pq.ParquetFile(raw)
            names = table.schema_arrow.names
            if field not in names:
                origin, count = f"{file.name}:1", table.metadata.num_rows
                for _ in range(count):
                    tally.skip("missing_field", origin, f"field {field!r}; {', '.join(names[:6])}")
                return
            for batch in table.iter_batches(ROWS, columns=[field]):
                for value in _values(batch.column(0), pa):
                    row += 1
                    text = _text(value, f"{file.name}:{row}", tally)
                    if text is not None:
                        yield Document(text, f"{file.name}:{row}")
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.path}: damaged or not a parquet file, after row {row} ({error})."
            ) from error


def _values(column: Any, pa: Any) -> list:
    """Text as bytes, so that one bad row does not spoil its neighbours; all else as it is."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif str(column.type) == "string_view":
        column = column.cast(pa.large_string()).cast(pa.large_binary())
    return column.to_pylist()


def _text(value: object, origin: str, tally: Tally) -> str | None:
    if not isinstance(value, bytes):
        return check_text(value, origin, tally)
    if len(value) > MAX_ROW_BYTES:
        return tally.skip("huge", origin, f"{len(value) / (1 << 20):.1f} MiB")
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        return tally.skip("bad_utf8", origin, f"byte 0x{value[error.start]:02x}")
    return check_text(text, origin, tally)
