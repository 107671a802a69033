"""Which documents share a row: deterministic best fit inside blocks of consecutive documents.

A document of n tokens trains n - 1 transitions and takes n - 1 places: the place of token i holds
the label i + 1, so the last token is only ever a label. A document with more than T transitions is
cut into pieces of T + 1 tokens that overlap by one; each transition is in exactly one piece.
Full pieces are rows of their own; the rest of every document is packed, longest first, each into
the row with the least room that still takes it. A block of 4096 documents is packed by itself, so
that a row depends on its block alone and rows can be built in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK = 4096


@dataclass(frozen=True)
class Packed:
    """Rows as runs of pieces: row r holds pieces [row_starts[r], row_starts[r + 1]).

    A piece is `places` transitions from token `starts` of the dataset's stream on.
    """

    seq_len: int
    row_starts: np.ndarray  # int64 [rows + 1]
    starts: np.ndarray  # int64 [pieces]
    places: np.ndarray  # int32 [pieces]

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def trained_tokens(self) -> int:
        return int(self.places.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the places of all rows that train something."""
        return self.trained_tokens / (self.rows * self.seq_len) if self.rows else 0.0


def pack(
    starts: np.ndarray, lengths: np.ndarray, seq_len: int, packing: str = "best_fit"
) -> Packed:
    """Pack documents given by the start and length of each in the token stream."""
    row_sizes, piece_starts, piece_places = [], [], []
    places = np.maximum(lengths.astype(np.int64) - 1, 0)
    for first in range(0, len(places), BLOCK):
        block = slice(first, first + BLOCK)
        for part in _pack_block(starts[block], places[block], seq_len, packing):
            row_sizes.append(part[0])
            piece_starts.append(part[1])
            piece_places.append(part[2])
    sizes = _join(row_sizes, np.int64)
    return Packed(
        seq_len,
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        _join(piece_starts, np.int64),
        _join(piece_places, np.int32),
    )


def _pack_block(
    starts: np.ndarray, places: np.ndarray, seq_len: int, packing: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(pieces per row, piece starts, piece places): first the full rows, then the packed ones."""
    full, rest = np.divmod(places, seq_len)
    total = int(full.sum())
    if total:
        document = np.repeat(np.arange(len(places)), full)
        nth = np.arange(total) - np.repeat(np.cumsum(full) - full, full)
        yield np.ones(total, np.int64), starts[document] + nth * seq_len, np.full(total, seq_len)
    has_rest = np.flatnonzero(rest)
    if not len(has_rest):
        return
    rest_starts = (starts + full * seq_len)[has_rest]
    rest = rest[has_rest]
    if packing == "none":
        yield np.ones(len(rest), np.int64), rest_starts, rest
        return
    longest_first = np.argsort(-rest, kind="stable")
    row_of = np.array(best_fit(rest[longest_first].tolist(), seq_len), np.int64)
    by_row = np.argsort(row_of, kind="stable")
    chosen = longest_first[by_row]
    yield np.bincount(row_of), rest_starts[chosen], rest[chosen]


def best_fit(sizes: list[int], room: int) -> list[int]:
    """The row of each size in turn: the row with the least room left that takes it, else a new one.

    Bit s of `open_sizes` is set while some row has s places left, so that the smallest fitting row
    is the lowest set bit from `size` on: one shift of a big integer instead of a search.
    """
    rows_with: list[list[int]] = [[] for _ in range(room)]
    open_sizes, count, row_of = 0, 0, []
    for size in sizes:
        fitting = open_sizes >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                open_sizes ^= 1 << left
        else:
            left, row = room, count
            count += 1
        left -= size
        if left:
            rows_with[left].append(row)
            open_sizes |= 1 << left
        row_of.append(row)
    return row_of


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
