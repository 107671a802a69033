"""Which documents are trained on and which are held out.

The side is decided by a hash of the text: equal documents land on one side, in whatever file or
order they come, and adding documents moves none of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localtrain.data.shards import Dataset


@dataclass(frozen=True)
class Side:
    """Documents of one dataset, each a range of its token stream."""

    dataset: Dataset
    starts: np.ndarray  # int64 [documents]
    lengths: np.ndarray  # int64 [documents]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def whole_side(dataset: Dataset) -> Side:
    return Side(dataset, dataset.starts, dataset.lengths.astype(np.int64))


def split_documents(
    datasets: list[Dataset], fraction: float
) -> tuple[list[Side], list[Side], list[str]]:
    """(training sides, held-out sides, notes for the log).

    With two different documents or more each side has at least one; a single document is cut: its
    end is held out.
    """
    wholes = [whole_side(dataset) for dataset in datasets]
    nothing = [Side(d, d.starts[:0], d.lengths[:0].astype(np.int64)) for d in datasets]
    if fraction <= 0:
        return wholes, nothing, ["data.eval_fraction is 0: nothing is held out for evaluation"]
    hashes = np.concatenate([dataset.hashes for dataset in datasets])
    if len(hashes) == 1:
        return _cut_one(datasets, fraction)
    if hashes.min() == hashes.max():
        note = "all documents are equal: nothing is held out for evaluation"
        return wholes, nothing, [note]
    limit = np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))
    notes = []
    if limit <= hashes.min():  # nobody is below: hold out the lowest
        limit = hashes.min() + np.uint64(1)
        notes.append(f"data.eval_fraction {fraction} of few documents: one of them is held out")
    elif limit > hashes.max():
        limit = hashes.max()
    train, held = [], []
    for whole, dataset in zip(wholes, datasets, strict=True):
        below = dataset.hashes < limit
        train.append(Side(dataset, whole.starts[~below], whole.lengths[~below]))
        held.append(Side(dataset, whole.starts[below], whole.lengths[below]))
    return train, held, notes


def _cut_one(
    datasets: list[Dataset], fraction: float
) -> tuple[list[Side], list[Side], list[str]]:
    train, held = [], []
    kept = 0
    for whole in map(whole_side, datasets):
        tail = np.minimum(np.maximum(2, np.round(whole.lengths * fraction)), whole.lengths - 2)
        tail = np.maximum(tail, 0).astype(np.int64)
        train.append(Side(whole.dataset, whole.starts, whole.lengths - tail))
        held.append(Side(whole.dataset, whole.starts + whole.lengths - tail, tail))
        kept += int(tail.sum())
    return train, held, [f"a single document: its last {kept} tokens are held out for evaluation"]
