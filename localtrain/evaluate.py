"""The loss of a model on held-out text: a sum over tokens, each counted once, so that neither
batch size nor padding changes it."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from localtrain import steps, storage
from localtrain.api import load
from localtrain.complete import find_tokenizer, home_of
from localtrain.config import RunConfig, Source, load_run
from localtrain.data.build import Progress
from localtrain.data.loader import View, prepare
from localtrain.errors import ConfigError, DataError, Stopped
from localtrain.models import read_hub_config, spec_from


def evaluate(
    source: str,
    sources: Sequence[str] = (),
    *,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    batches: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Mean loss in nats per token, perplexity and counts of the model at `source`.

    sources: documents; without them, what the run at `source` held out while it trained. Token
    shards of new documents go into a temporary folder. Raises ConfigError and DataError.
    """
    words = find_tokenizer(source, tokenizer)
    run, cache = _settings(source, sources, seq_len)
    with nullcontext(cache) if cache else tempfile.TemporaryDirectory() as folder:
        held = prepare(run, words, folder, progress, stop).eval
        if not held.rows:
            raise DataError(f"{source}: its run held nothing out; name documents with --data")
        model = load(source, dtype)
        if words.size > model.spec.vocab:
            raise DataError(
                f"the tokenizer has {words.size} tokens, but the model at {source} knows "
                f"{model.spec.vocab} only; use the model's own tokenizer"
            )
        program = jax.jit(partial(steps.eval_step, model.network, run))
        nll, tokens = _sum(program, model.params, held, batch_size, batches, stop)
    loss = nll / tokens
    return {
        "source": source,
        "data": list(sources) or "held out by the run",
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": int(tokens),
        "rows": held.rows if batches is None else min(held.rows, batches * batch_size),
        "seq_len": held.seq_len,
    }


def _sum(
    program: Any,
    params: Any,
    held: View,
    batch_size: int,
    batches: int | None,
    stop: threading.Event | None,
) -> tuple[float, float]:
    totals = np.zeros(2, np.float64)
    for batch in held.eval_batches(min(batch_size, held.rows), batches):
        if stop is not None and stop.is_set():
            raise Stopped("stopped while evaluating; nothing was written")
        totals += np.asarray(program(params, batch), np.float64)
    return float(totals[0]), float(totals[1])


def _settings(
    source: str, sources: Sequence[str], seq_len: int | None
) -> tuple[RunConfig, str | None]:
    """A run that describes the data, and the cache that belongs to it (None: a temporary one)."""
    home = home_of(source)
    stored = storage.join(home, "run.yaml")
    if storage.exists(stored):
        run = load_run(stored)
    elif sources:
        longest = spec_from(read_hub_config(source), source).max_length
        settings = {"sources": list(sources), "seq_len": min(1024, longest)}
        run = RunConfig(model={"path": source}, data=settings)
    else:
        raise ConfigError(f"{source} is not a run of localtrain: name documents with --data")
    cache = None if sources else run.data.cache or storage.join(home, "data")
    data: dict[str, Any] = {"seq_len": seq_len or run.data.seq_len}
    if sources:
        named = tuple(Source(path=path) for path in sources)
        data |= {"sources": named, "eval_sources": named}
    # One row is enough here; training would want a batch of them.
    train = run.train.model_copy(update={"batch_size": 1, "micro_batch": None})
    update = {"data": run.data.model_copy(update=data), "train": train}
    return run.model_copy(update=update), cache
