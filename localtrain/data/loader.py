"""From a run's data settings to batches.

`prepare` builds or finds the token shards of every source, splits documents into a training and an
evaluation side by a hash of their text (equal documents land on one side), packs each side and
returns a Corpus with two views. A view's batch t depends on (seed, t) alone: not on hosts, workers
or restarts. `Prefetcher` (prefetch.py) makes batches ahead in a thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from localtrain.data.build import Progress, cached_dataset, skips
from localtrain.data.dataset import Dataset
from localtrain.data.fingerprint import Fingerprint, make_fingerprint
from localtrain.data.prefetch import Prefetcher
from localtrain.data.rows import rows_of
from localtrain.data.sources import Source, as_sources
from localtrain.data.split import Side, split_documents, whole_side
from localtrain.data.tally import repeated_files
from localtrain.data.tokenizer import Tokenizer
from localtrain.data.view import Part, View
from localtrain.errors import DataError, Stopped

__all__ = ["Corpus", "Prefetcher", "View", "prepare"]


@dataclass(frozen=True)
class Corpus:
    """The data of a run. `fingerprint` is JSON-able: store it, compare it with
    `fingerprint.explain_difference` when the run is started again."""

    train: View
    eval: View  # rows == 0 when there is nothing to evaluate on
    fingerprint: Fingerprint
    documents: int
    tokens: int
    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def index_hash(self) -> str:
        """Short identity of tokens, split, packing and order."""
        return self.fingerprint["hash"]

    def report(self) -> list[str]:
        """Lines for the log: what will be trained on, and what was left out."""
        lines = [
            f"data: {self.documents:,} documents, {self.tokens:,} tokens; "
            f"train {self.train.rows:,} rows ({self.train.fill:.1%} full), "
            f"eval {self.eval.rows:,} rows"
        ]
        if self.skipped:
            counts = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.skipped.items()))
            lines.append(f"data: skipped rows: {counts}")
        return lines + [f"data: {note}" for note in self.notes]


def prepare(
    run: Any,
    tokenizer: Tokenizer,
    cache_dir: str,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Corpus:
    """Build what is missing and open the data of `run` (a RunConfig).

    Raises DataError when there is nothing to train on, when one batch needs more rows than there
    are, or when a file is damaged; Stopped when `stop` was set meanwhile.
    """
    data = run.data
    sources = as_sources(data.sources)
    if not sources:
        raise DataError("data.sources is empty: name at least one file, glob or URL.")
    opened = [_open(s, tokenizer, cache_dir, data.bad_rows, progress, stop) for s in sources]
    notes = []
    eval_sources = as_sources(getattr(data, "eval_sources", None) or [])
    if eval_sources:
        train_sides = [whole_side(dataset) for dataset in opened]
        more = [_open(s, tokenizer, cache_dir, data.bad_rows, progress, stop) for s in eval_sources]
        eval_sides = [whole_side(dataset) for dataset in more]
    else:
        more = []
        train_sides, eval_sides, notes = split_documents(opened, data.eval_fraction)
    train = _view(train_sides, sources, run, tokenizer.size, cache_dir, stop)
    held = _view(eval_sides, eval_sources or sources, run, tokenizer.size, cache_dir, stop)
    _check_enough(train, run, opened)
    every = opened + more
    skipped: dict[str, int] = {}
    for dataset in every:
        for reason, count in dataset.index.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
        for what, count in dataset.index.notes.items():
            notes.append(f"{count:,} {what.replace('_', ' ')}")
        if short := int((dataset.lengths < 2).sum()):
            notes.append(f"{short:,} documents of a single token train nothing")
    if said := repeated_files(file for dataset in opened for file in dataset.index.files):
        notes.append(said)
    return Corpus(
        train,
        held,
        _fingerprint(run, sources + eval_sources, every, train, held),
        sum(dataset.index.documents for dataset in every),
        sum(dataset.index.tokens for dataset in every),
        skipped,
        notes,
    )


def _open(source: Source, tokenizer, cache_dir, bad_rows, progress, stop) -> Dataset:
    folder = cached_dataset(source, tokenizer, cache_dir, bad_rows, progress, stop)
    if stop is not None and stop.is_set():
        raise Stopped("stopped while preparing the data.")
    return Dataset(folder)


def _view(
    sides: list[Side], sources: list[Source], run: Any, size: int, cache_dir: str, stop: Any
) -> View:
    parts = []
    for side in sides:
        if stop is not None and stop.is_set():
            raise Stopped("stopped while preparing the data.")
        parts.append(Part(side, rows_of(side, run.data.seq_len, run.data.packing, cache_dir)))
    weights = [source.weight for source in sources]
    return View(parts, weights, run.seed, run.data.shuffle, size)


def _check_enough(train: View, run: Any, opened: list[Dataset]) -> None:
    """A batch larger than the data must be refused before anything is compiled, not end as "done"
    with no step made."""
    rows, batch = train.rows, run.train.batch_size
    if rows == 0:
        raise DataError(
            "data.sources: no document has two tokens or more, so there is nothing to predict."
        )
    if rows < batch:
        left_out = [
            skips(d.index.skipped, d.index.first_skipped) for d in opened if d.index.skipped
        ]
        raise DataError(
            f"the training data give {rows} row{'s' * (rows != 1)} of data.seq_len "
            f"{run.data.seq_len} tokens, fewer than one batch of train.batch_size {batch}. Set "
            f"train.batch_size to at most {rows}, lower data.seq_len, or add data."
            + "".join(f" Left out were {said}" for said in left_out).rstrip()
        )


def _fingerprint(
    run: Any, sources: list[Source], datasets: list[Dataset], train: View, held: View
) -> Fingerprint:
    settings = {
        "seed": run.seed,
        "seq_len": run.data.seq_len,
        "packing": run.data.packing,
        "shuffle": run.data.shuffle,
        "eval_fraction": run.data.eval_fraction,
        "tokenizer": datasets[0].index.tokenizer,
        "train_rows": train.rows,
        "eval_rows": held.rows,
    }
    rows = [train.index_hash, held.index_hash]
    return make_fingerprint(settings, sources, [d.index for d in datasets], rows)
