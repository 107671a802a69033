"""The loss of a model on text: a sum over tokens, each counted once, so that neither the batch size
nor padding changes it.

Three numbers: the mean loss in nats over all scored tokens (what training logs), its exponential,
and the bits that the model needs for a byte of text, which models with different tokenizers share.
Bits and bytes leave out tokens that are no text, such as the end of a document, and the first token
of a document when nothing comes before it.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from localtrain import storage
from localtrain.api import LanguageModel
from localtrain.complete import Writer, find_tokenizer, home_of
from localtrain.config import RunConfig, Source, load_run
from localtrain.data.build import Progress, cached_dataset
from localtrain.data.dataset import Dataset
from localtrain.data.loader import View, prepare
from localtrain.data.rows import rows_of
from localtrain.data.sources import as_source
from localtrain.data.split import whole_side
from localtrain.data.tokenizer import Tokenizer
from localtrain.data.view import Part
from localtrain.errors import ConfigError, DataError, NonFiniteError, Stopped
from localtrain.losses import Head, token_logprobs
from localtrain.nn.decoder import Context, Network, Params

SEQ_LEN = 1024  # of models that no run of ours has trained


def evaluate(
    source: str,
    sources: Sequence[str] = (),
    *,
    field: str = "text",
    tokenizer: str | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Loss, perplexity, bits per byte and counts of the model at `source`.

    sources: documents; without them, what the run at `source` held out while it trained. Documents
    longer than `seq_len` are cut, each token is scored once. limit: only so many rows of seq_len
    tokens. Token shards of new documents go into a temporary folder.
    """
    words = find_tokenizer(source, tokenizer)
    run = _run_of(source)
    if run is None and not sources:
        raise ConfigError(f"{source} is not a run of localtrain: name documents with --data.")
    with tempfile.TemporaryDirectory() if sources else nullcontext() as folder:
        if not sources:
            held = _held_out(source, run, words, seq_len, progress, stop)
        model = Writer.open(source, dtype, words).model
        if sources:
            length = seq_len or (run.data.seq_len if run else min(SEQ_LEN, model.spec.max_length))
            listed = [Source(path=path, field=field) for path in sources]
            held = _documents(listed, words, length, folder, progress, stop)
        sums = score(model, words, held, batch_size, limit, progress, stop)
    return {"source": source, "data": list(sources) or "held out by the run", **sums}


def score(
    model: LanguageModel,
    tokenizer: Tokenizer,
    held: View,
    batch_size: int,
    limit: int | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """The sums over the rows of `held`, or the first `limit` of them, as numbers to report."""
    program = jax.jit(partial(_logprobs, model.network))
    rows = min(held.rows, limit or held.rows)
    sizes = tokenizer.byte_lengths()
    nll = text_nll = 0.0
    tokens = text_bytes = 0
    for batch, logprobs_BT in _scored(
        program, model.params, held, rows, batch_size, progress, stop
    ):
        scored_BT = batch["weights"] > 0
        losses = -np.asarray(logprobs_BT, np.float64)[scored_BT]
        counts = sizes[batch["labels"][scored_BT]]
        nll += losses.sum()
        tokens += losses.size
        text_nll += losses[counts > 0].sum()
        text_bytes += int(counts.sum())
    loss = float(nll / max(tokens, 1))
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss}: the weights or the arithmetic are broken. Try --dtype float32."
        )
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": float(text_nll / math.log(2) / text_bytes) if text_bytes else None,
        "tokens": tokens,
        "bytes": text_bytes,
        "documents": None if limit else sum(len(part.side.lengths) for part in held.parts),
        "rows": rows,
        "seq_len": held.seq_len,
    }


def _scored(
    program: Callable,
    params: Params,
    held: View,
    rows: int,
    batch_size: int,
    progress: Progress | None,
    stop: threading.Event | None,
) -> Iterator[tuple[dict[str, np.ndarray], jax.Array]]:
    """Batches with their log-probabilities; one is computed while the one before is summed."""
    size = min(batch_size, rows)
    waiting = None
    for first in range(0, rows, size):
        if stop is not None and stop.is_set():
            raise Stopped("stopped while evaluating; nothing was written.")
        numbers = np.arange(first, first + size)
        batch = held.assemble(np.where(numbers < rows, numbers, -1))  # -1: an empty row
        scored = batch, program(params, batch)
        if waiting is not None:
            yield waiting
        waiting = scored
        if progress is not None and first:
            progress(f"scored {first:,} of {rows:,} rows", first, None)
    if waiting is not None:
        yield waiting


def _logprobs(network: Network, params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """log p of every label, float32 [B, T]."""
    ctx = Context(batch["tokens"], batch["positions"], batch["segments"])
    w, layout = network.head(params)
    head = Head(layout, network.softcap, vocab=network.spec.vocab)
    return token_logprobs(head, w, network.hidden(params, ctx), batch["labels"])


def _run_of(source: str) -> RunConfig | None:
    stored = storage.join(home_of(source), "run.yaml")
    return load_run(stored) if storage.exists(stored) else None


def _held_out(
    source: str,
    run: RunConfig,
    words: Tokenizer,
    seq_len: int | None,
    progress: Progress | None,
    stop: threading.Event | None,
) -> View:
    """The evaluation side of a run's own data."""
    cache = run.data.cache or storage.join(home_of(source), "data")
    data = run.data.model_copy(update={"seq_len": seq_len or run.data.seq_len})
    # One row is enough here; training would want a batch of them.
    train = run.train.model_copy(update={"batch_size": 1, "micro_batch": None})
    run = run.model_copy(update={"data": data, "train": train})
    held = prepare(run, words, cache, progress, stop).eval
    if not held.rows:
        raise DataError(f"{source}: its run held nothing out; name documents with --data.")
    return held


def _documents(
    sources: Sequence[Source],
    words: Tokenizer,
    seq_len: int,
    folder: str,
    progress: Progress | None,
    stop: threading.Event | None,
) -> View:
    """All documents of the sources."""
    parts = []
    for one in map(as_source, sources):
        dataset = Dataset(cached_dataset(one, words, folder, "skip", progress, stop))
        side = whole_side(dataset)
        parts.append(Part(side, rows_of(side, seq_len, "best_fit", folder)))
    held = View(parts, [None] * len(parts), 0, False, words.size)
    if not held.rows:
        raise DataError("--data: no document has two tokens or more, so nothing can be predicted.")
    return held
