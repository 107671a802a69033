"""Sample texts: what the model writes at every evaluation, in metrics.jsonl and TensorBoard.

The prompts and the random draws stay the same, so that texts of different steps can be compared.
Parameters are only read: a run with samples and one without are equal bit for bit. A sampler that
fails is one line in the log and never the end of a run.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from localtrain import processes
from localtrain.config.secret import mask
from localtrain.data.loader import Corpus
from localtrain.data.tokenizer import Tokenizer
from localtrain.generate import stream_tokens
from localtrain.job import Job
from localtrain.metrics import MetricsWriter, read_metrics
from localtrain.runtime import StopSignal

log = logging.getLogger(__name__)

TEMPERATURE = 0.8
HELD_OUT, PREFIX = 2, 24  # without eval.prompt: this many documents, this many tokens of each
SMALL = 2 << 30  # bytes; parameters of several processes are gathered up to here
SEARCHED = 2**17  # places of the held-out rows in which they are looked for


@dataclass(frozen=True)
class Prompt:
    """How a sample starts."""

    text: str
    ids: tuple[int, ...]


class Sampler:
    """Continues the prompts of a run, once per step."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        corpus: Corpus,
        metrics: MetricsWriter,
        stop: StopSignal,
    ):
        self.job, self.tokenizer, self.metrics, self.stop = job, tokenizer, metrics, stop
        self.prompts = make_prompts(job.run.eval.prompt, tokenizer, corpus)
        self._done = {row["step"] for row in sample_rows(read_metrics(metrics.path.parent))}
        params = job.programs.state["params"]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        if processes.count() > 1 and size > SMALL and job.run.eval.sample_length:
            log.info("no sample texts: the model is spread over several processes and is large")
            self.prompts = []

    def write(self, params: Any, step: int) -> None:
        """The samples of this step, unless they were written before or a stop comes between."""
        if not self.prompts or not self.job.run.eval.sample_length:
            return
        if processes.agree(step in self._done):
            return
        if processes.count() > 1:
            params = processes.whole(params)
            if not processes.lead():
                return
        began = time.monotonic()
        try:
            texts = self._continue(params)
        except Exception as error:  # whatever it is, training is worth more than a sample
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            log.warning("step %d: no sample text: %s", step, reason)
            return
        if texts is None:
            return
        self._done.add(step)
        seconds = round((time.monotonic() - began) / len(texts), 3)
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True), start=1):
            row = {"prompt": mask(prompt.text), "text": text, "seconds": seconds}
            self.metrics.event("sample", step, **row)
            self.metrics.text(f"samples/{number}", code_block(row["prompt"] + text), step)

    def _continue(self, params: Any) -> list[str] | None:
        """One text per prompt, all prompts at once; None when a stop came between."""
        longest = max(len(prompt.ids) for prompt in self.prompts)
        pads = [longest - len(prompt.ids) for prompt in self.prompts]
        ids = [[0] * pad + list(p.ids) for pad, p in zip(pads, self.prompts, strict=True)]
        mask_BT = [[0] * pad + [1] * (longest - pad) for pad in pads]
        steps = []
        for tokens_B in stream_tokens(
            self.job.network,
            params,
            np.array(ids, np.int32),
            np.array(mask_BT, np.int32),
            max_new_tokens=self.job.run.eval.sample_length,
            temperature=TEMPERATURE,
            stop_ids=self.tokenizer.stop_ids,
            seed=[self.job.run.seed + row for row in range(len(ids))],
            vocab=self.tokenizer.size,
        ):
            if self.stop.requested:
                return None
            steps.append(tokens_B)
        return [self._text([tokens_B[row] for tokens_B in steps]) for row in range(len(ids))]

    def _text(self, ids: list[np.integer]) -> str:
        stops = self.tokenizer.stop_ids
        end = next((n for n, token in enumerate(ids) if token in stops), len(ids))
        return self.tokenizer.decode([int(token) for token in ids[:end]])


def make_prompts(given: tuple[str, ...], tokenizer: Tokenizer, corpus: Corpus) -> list[Prompt]:
    """The given prompts; without any, how some held-out documents begin, else the empty text."""
    if not given and corpus.eval.rows:
        return [
            Prompt(tokenizer.decode(ids, skip_special=True).rstrip("\ufffd"), tuple(ids))
            for ids in _beginnings(corpus, tokenizer.prefix)
        ]
    prompts = []
    for text in given or ("",):
        ids = (*tokenizer.prefix, *tokenizer.encode(text).tolist())
        if ids or tokenizer.stop_ids:  # a model needs something to go on from
            prompts.append(Prompt(text, ids or tokenizer.stop_ids[:1]))
    return prompts


def _beginnings(corpus: Corpus, prefix: tuple[int, ...]) -> list[list[int]]:
    """First tokens of held-out documents. What a long document was cut into comes last: only where
    documents begin with a marker can it be told apart."""
    rows = max(HELD_OUT, SEARCHED // corpus.eval.seq_len)
    batch = corpus.eval.assemble(np.arange(min(rows, corpus.eval.rows)))
    found = []
    for row, start in np.argwhere((batch["positions"] == 0) & (batch["segments"] > 0)):
        piece = slice(start, start + PREFIX)
        same = batch["segments"][row, piece] == batch["segments"][row, start]
        found.append(batch["tokens"][row, piece][same].tolist())
    found.sort(key=lambda ids: (tuple(ids[: len(prefix)]) != prefix, -len(ids)))
    return found[:HELD_OUT]


def sample_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that are samples: step, prompt, text."""
    return [row for row in rows if row.get("event") == "sample"]


def code_block(text: str) -> str:
    """Markdown that shows a text as it is, whatever marks are in it."""
    return "".join(f"    {line}\n" for line in text.split("\n"))
