"""Packed rows of one or several datasets, in training or evaluation order, as batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from localtrain.data.order import Mixture, Order
from localtrain.data.pack import Packed
from localtrain.data.split import Side
from localtrain.errors import DataError

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """One dataset's side, packed."""

    side: Side
    packed: Packed


class View:
    """Rows of the training or the evaluation side.

    Sources without a weight (or all of weight 1) are pooled: one epoch reads every row of all once.
    With weights, each source has its own epochs and the given share of all rows.
    """

    def __init__(
        self,
        parts: list[Part],
        weights: list[float | None],
        seed: int,
        shuffle: bool,
        vocabulary: int,
    ):
        self.seq_len = parts[0].packed.seq_len
        self.vocabulary = vocabulary
        weighted = any(weight not in (None, 1, 1.0) for weight in weights)
        kept = [(p, w) for p, w in zip(parts, weights, strict=True) if p.packed.rows]
        self.parts = [part for part, _ in kept]
        counts = [part.packed.rows for part in self.parts]
        self.rows = sum(counts)
        # rows of all parts, numbered through
        self._first_row = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if weighted and len(kept) > 1:
            self.mixture = Mixture([1.0 if w is None else w for _, w in kept], seed)
            self._orders = [Order(n, seed, i, shuffle) for i, n in enumerate(counts)]
        else:
            self.mixture = None
            self._orders = [Order(self.rows, seed, 0, shuffle)]

    @property
    def tokens(self) -> int:
        """Trained tokens of all rows (one per transition)."""
        return sum(part.packed.trained_tokens for part in self.parts)

    @property
    def fill(self) -> float:
        """Share of the places of all rows that train something."""
        return self.tokens / (self.rows * self.seq_len) if self.rows else 0.0

    @property
    def index_hash(self) -> str:
        """Identity of the packed rows: which tokens of which dataset are in which row."""
        digest = hashlib.sha256(str(self.seq_len).encode())
        for part in self.parts:
            digest.update(part.side.dataset.index.hash.encode())
            for array in (part.packed.row_starts, part.packed.starts, part.packed.places):
                digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]

    def row_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Rows at these positions of the endless training order (int64, numbered through)."""
        positions = np.asarray(positions, np.int64)
        if self.mixture is None:
            return self._orders[0](positions)
        source, number = self.mixture(positions)
        rows = np.empty_like(positions)
        for i, order in enumerate(self._orders):
            here = source == i
            rows[here] = self._first_row[i] + order(number[here])
        return rows

    def batch(self, t: int, batch_size: int, rows: np.ndarray | None = None) -> Batch:
        """Batch t (from 0 on), or some rows of it: those that a process needs.

        tokens, labels, positions, segments int32 [B, T], weights float32 [B, T].
        """
        if not self.rows:
            raise DataError("there are no rows to make a batch of.")
        rows = np.arange(batch_size) if rows is None else rows
        return self.assemble(self.row_numbers(t * batch_size + rows))

    def eval_batches(
        self,
        batch_size: int,
        limit: int | None = None,
        rows: np.ndarray | None = None,
    ) -> Iterator[Batch]:
        """Every row once, in index order, or the first `limit` batches; the last short batch is
        filled with rows of weight 0. `rows`: as in `batch`."""
        wanted = np.arange(batch_size) if rows is None else rows
        for count, first in enumerate(range(0, self.rows, batch_size)):
            if limit is not None and count >= limit:
                return
            yield self.assemble(np.where(first + wanted < self.rows, first + wanted, -1))

    def assemble(self, rows: np.ndarray) -> Batch:
        """The given rows as a batch; row -1 is an empty one."""
        shape = (len(rows), self.seq_len)
        out: Batch = {
            name: np.zeros(shape, np.int32)
            for name in ("tokens", "labels", "positions", "segments")
        }
        out["weights"] = np.zeros(shape, np.float32)
        owner = np.searchsorted(self._first_row, rows, side="right") - 1
        for i, part in enumerate(self.parts):
            slots = np.flatnonzero((owner == i) & (rows >= 0))
            if len(slots):
                self._fill(out, part, slots, rows[slots] - self._first_row[i])
        return out

    def _fill(self, out: Batch, part: Part, slots: np.ndarray, rows: np.ndarray) -> None:
        """Write the rows `rows` of `part` into the batch rows `slots` (ascending).

        Pieces lie one after the other from a row's first place on, and rows are written in order,
        so that all places are one boolean mask and no index per token is needed.
        """
        packed, dataset = part.packed, part.side.dataset
        first = packed.row_starts[rows]
        counts = packed.row_starts[rows + 1] - first
        total = int(counts.sum())
        nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # within its row
        pieces = np.repeat(first, counts) + nth
        places = packed.places[pieces]
        stream = dataset.read(packed.starts[pieces], places.astype(np.int64) + 1)
        self._check_ids(stream, dataset.folder)
        ends = np.cumsum(places + 1)
        not_last = np.ones(len(stream), bool)
        not_last[ends - 1] = False
        not_first = np.ones(len(stream), bool)
        not_first[ends - places - 1] = False
        begin = (np.cumsum(places) - places).astype(np.int32)
        used = np.add.reduceat(places, np.cumsum(counts) - counts)
        mask = np.zeros(out["tokens"].shape, bool)
        mask[slots] = np.arange(self.seq_len) < used[:, None]
        out["tokens"][mask] = stream[not_last]
        out["labels"][mask] = stream[not_first]
        out["positions"][mask] = np.arange(int(places.sum()), dtype=np.int32) - np.repeat(
            begin, places
        )
        out["segments"][mask] = np.repeat(nth.astype(np.int32) + 1, places)
        out["weights"][mask] = 1.0

    def _check_ids(self, stream: np.ndarray, folder: str) -> None:
        """Ids beyond the vocabulary would read a wrong row of the embedding without a word."""
        if len(stream) and int(stream.max()) >= self.vocabulary:
            raise DataError(
                f"{folder}: holds token {int(stream.max())}, but the tokenizer has "
                f"{self.vocabulary} ids. Build it again with this tokenizer."
            )

    def describe_row(self, row: int) -> dict[str, Any]:
        """Where a row (numbered through) comes from, for error messages and notebooks."""
        i = int(np.searchsorted(self._first_row, row, side="right") - 1)
        packed = self.parts[i].packed
        local = row - int(self._first_row[i])
        pieces = slice(int(packed.row_starts[local]), int(packed.row_starts[local + 1]))
        return {
            "dataset": self.parts[i].side.dataset.folder,
            "starts": packed.starts[pieces].tolist(),
            "places": packed.places[pieces].tolist(),
        }
