"""Documents, and the count of rows that are none.

A document is a text with its origin "file:line". What cannot be trained on (empty, not UTF-8, a
missing key, ...) goes to a Tally: counted under a reason with its first place, or, with
bad_rows=error, a DataError with file:line. Nothing is dropped without being counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from localtrain.errors import DataError

MAX_ROW_BYTES = 16 << 20  # a longer jsonl or parquet row is "huge"

REASONS = {
    "empty": "the text is empty",
    "blank": "the text is only whitespace",
    "null": "the text is null",
    "missing_field": "the row has no such field",
    "not_text": "the field is not a string",
    "not_an_object": "the row is not a JSON object",
    "bad_json": "the row is not valid JSON",
    "bad_utf8": "not valid UTF-8",
    "bad_unicode": "the text holds a lone surrogate, which UTF-8 cannot carry",
    "no_tokens": "the tokenizer makes no token of it",
    "huge": f"longer than {MAX_ROW_BYTES >> 20} MiB",
}


class Document(NamedTuple):
    """A text and where it came from. A section of a long file may lack its begin or end."""

    text: str
    origin: str
    begins: bool = True
    ends: bool = True


class Tally:
    """Rows that were not used, by reason, with the first place of each; notes on the rest."""

    def __init__(self, error: bool = False):
        self.error = error
        self.skipped: dict[str, int] = {}
        self.first: dict[str, str] = {}
        self.notes: dict[str, int] = {}

    def skip(self, reason: str, origin: str, detail: str = "") -> None:
        """Count one row; with `error` raise DataError instead."""
        if self.error:
            raise DataError(bad_row_message(reason, origin, detail))
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.first.setdefault(reason, origin + (f" ({detail})" if detail else ""))

    def note(self, what: str, count: int = 1) -> None:
        """Something worth telling that loses no text."""
        self.notes[what] = self.notes.get(what, 0) + count


def bad_row_message(reason: str, origin: str, detail: str = "") -> str:
    more = f" ({detail})" if detail else ""
    return (
        f"{origin}: {REASONS.get(reason, reason)}{more}. Repair or remove the row, or set "
        f"data.bad_rows: skip to count such rows and go on."
    )


def usable(text: str, origin: str, tally: Tally) -> bool:
    """True when there is something to train on; otherwise the tally is told why not."""
    if not text:
        tally.skip("empty", origin)
    elif text.isspace():
        tally.skip("blank", origin)
    else:
        return True
    return False


def check_text(value: object, origin: str, tally: Tally) -> str | None:
    """A row's value as text, or None after telling the tally."""
    if value is None:
        return tally.skip("null", origin)
    if not isinstance(value, str):
        return tally.skip("not_text", origin, type(value).__name__)
    if not usable(value, origin, tally):
        return None
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return tally.skip("bad_unicode", origin)
    return value


def repeated_files(files: Iterable[tuple[str, int, int]]) -> str:
    """What to say of files that sources have in common: their documents count twice. "" if none."""
    counts = Counter(name for name, size, _ in files if size)
    twice = [name for name, count in counts.items() if count > 1]
    if not twice:
        return ""
    more = f" and {len(twice) - 1} more files are" if len(twice) > 1 else " is"
    return (
        f"{twice[0]}{more} named by more than one source, so their documents count as often; a "
        f"weight says that more clearly"
    )
