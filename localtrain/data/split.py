"""Which documents are trained on and which are held out.

The side is decided by a hash of the text: equal documents land on one side, in whatever file or
order they come, and adding documents moves none of the others. In a small corpus the hash may hold
out far too much or too little; then whole documents are chosen in the order of their hashes, and
where even one document is too much the end of the longest one is held out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localtrain.data.dataset import Dataset

LEAST_TAIL = 64  # tokens held out of a single document, if it has twice as many


@dataclass(frozen=True)
class Side:
    """Documents of one dataset, each a range of its token stream."""

    dataset: Dataset
    starts: np.ndarray  # int64 [documents]
    lengths: np.ndarray  # int64 [documents]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


Sides = tuple[list[Side], list[Side], list[str]]


def whole_side(dataset: Dataset) -> Side:
    return Side(dataset, dataset.starts, dataset.lengths.astype(np.int64))


def split_documents(datasets: list[Dataset], fraction: float) -> Sides:
    """(training sides, held-out sides, notes for the log).

    The held-out side has about `fraction` of the tokens, at least a few when there are any.
    """
    if fraction <= 0:
        nothing = [Side(d, d.starts[:0], d.lengths[:0].astype(np.int64)) for d in datasets]
        note = "data.eval_fraction is 0: nothing is held out for evaluation"
        return [whole_side(d) for d in datasets], nothing, [note]
    hashes = np.concatenate([d.hashes for d in datasets])
    lengths = np.concatenate([d.lengths for d in datasets]).astype(np.int64)
    total = lengths.sum()
    wanted = fraction * total
    below = hashes < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))
    if wanted / 2 <= lengths[below].sum() <= min(wanted * 2, (wanted + total) / 2):
        return *_divide(datasets, hashes[below]), []
    chosen = _choose(hashes, lengths, wanted)
    if len(chosen):
        note = f"few documents: {len(chosen)} chosen to hold out about {fraction:.2%} of the tokens"
        return *_divide(datasets, chosen), [note]
    return _cut_longest(datasets, hashes, lengths, wanted)


def _divide(datasets: list[Dataset], held: np.ndarray) -> tuple[list[Side], list[Side]]:
    train, out = [], []
    held = np.unique(held)
    for dataset in datasets:
        whole, is_held = whole_side(dataset), np.isin(dataset.hashes, held)
        train.append(Side(dataset, whole.starts[~is_held], whole.lengths[~is_held]))
        out.append(Side(dataset, whole.starts[is_held], whole.lengths[is_held]))
    return train, out


def _choose(hashes: np.ndarray, lengths: np.ndarray, wanted: float) -> np.ndarray:
    """Hashes of documents with about `wanted` tokens, lowest first; none when that is not near.

    Equal documents count together; at most half of the different ones are taken, so that tiny
    files beside one big file are not all held out.
    """
    unique, owner = np.unique(hashes, return_inverse=True)
    tokens = np.bincount(owner, lengths).astype(np.int64)
    chosen, total = [], 0
    for index in range(len(unique)):
        if total >= wanted or len(chosen) >= len(unique) // 2:
            break
        if tokens[index] > 1 and total + tokens[index] <= 1.5 * wanted:
            chosen.append(unique[index])
            total += int(tokens[index])
    return np.array(chosen if total >= wanted / 2 else [], np.uint64)


def _cut_longest(
    datasets: list[Dataset], hashes: np.ndarray, lengths: np.ndarray, wanted: float
) -> Sides:
    """Hold out the end of the longest document (of every copy of it)."""
    longest = int(np.argmax(lengths))
    length = int(lengths[longest])
    copies = int((hashes == hashes[longest]).sum())
    tail = min(max(round(wanted / copies), LEAST_TAIL), length // 2)
    train, out = [], []
    for dataset in datasets:
        whole = whole_side(dataset)
        cut = np.where(dataset.hashes == hashes[longest], tail, 0)
        train.append(Side(dataset, whole.starts, whole.lengths - cut))
        out.append(Side(dataset, (whole.starts + whole.lengths - cut)[cut > 0], cut[cut > 0]))
    note = f"few documents: the last {tail} tokens of the longest one are held out"
    return train, out, [note]
