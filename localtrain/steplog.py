"""What the loop reports: the numbers of each step, read one step late, and honest times.

A step's time runs from the end of the step before (or its own dispatch, when evaluation or a save
came between) to its own end: evaluation and saving are never counted as training, and the first and
the last step are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from localtrain.errors import NonFiniteError
from localtrain.job import Job
from localtrain.metrics import MetricsWriter, read_metrics
from localtrain.progress import Progress

log = logging.getLogger(__name__)
Tree = Any


class StepLog:
    """Reads each step's numbers one step late, keeps time, writes rows.

    `trained`: trained tokens up to the restored step.
    """

    def __init__(self, job: Job, metrics: MetricsWriter, progress: Progress, trained: int):
        self.job, self.metrics, self.progress = job, metrics, progress
        self.trained = trained
        self._evaluated = {
            row["step"] for row in read_metrics(metrics.path.parent) if "eval_loss" in row
        }
        self._pending: tuple[int, dict[str, jax.Array], float, float] | None = None
        self._done = 0.0
        self._reset()

    def _reset(self) -> None:
        self._steps, self._seconds, self._wait = 0, 0.0, 0.0

    def dispatched(self, step: int, numbers: dict[str, jax.Array], wait: float) -> None:
        self._pending = (step, numbers, wait, time.monotonic())

    def resume_clock(self) -> None:
        """Training goes on after something else."""
        self._done = time.monotonic()

    def read(self) -> None:
        """Wait for the step that was dispatched and log it if due; NonFiniteError if refused."""
        if self._pending is None:
            return
        step, numbers, wait, started = self._pending
        self._pending = None
        values = {key: value.item() for key, value in jax.device_get(numbers).items()}
        now = time.monotonic()
        seconds = now - (self._done or started)
        self._done = now
        run = self.job.run
        if not values["applied"]:
            raise NonFiniteError(
                f"step {step + 1}: the loss is {values['loss']:g} and the gradient norm "
                f"{values['grad_norm']:g}. The update was not applied and the last good state "
                f"(step {step}) is kept. The batch is rows {step * run.train.batch_size} to "
                f"{(step + 1) * run.train.batch_size - 1} of the data order. A lower optim.lr, a "
                f"longer optim.warmup or a smaller optim.clip usually helps."
            )
        self.trained += int(values["trained_tokens"])
        self._steps, self._seconds, self._wait = (
            self._steps + 1,
            self._seconds + seconds,
            self._wait + wait,
        )
        number = step + 1
        if number == 1 or number % run.train.log_every == 0 or number == run.train.steps:
            self._row(number, values, seconds)

    def _row(self, number: int, values: dict[str, Any], seconds: float) -> None:
        run = self.job.run
        per_step = run.train.batch_size * run.data.seq_len
        rate = self._steps * per_step / self._seconds
        flops = rate * self.job.flops_per_token
        peak = self.job.peak_flops
        row = {
            "step": number,
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "lr": values["lr"],
            "tokens_per_s": rate,
            "step_time_s": seconds,
            "mfu": None if peak is None else flops / peak,
            "flops_per_s": flops,
            "data_wait_s": self._wait,
            "tokens": number * per_step,
            "trained_tokens": self.trained,
        }
        self.metrics.log(row)
        self.progress.update(row)
        self._reset()

    def unlogged(self) -> dict[str, float]:
        """Times of the steps since the last row, for the row of a save: no other may follow."""
        return {"steps_s": round(self._seconds, 3), "wait_s": round(self._wait, 3)}

    def has_eval(self, step: int) -> bool:
        return step in self._evaluated

    def eval_row(self, step: int, evaluate: Callable[[], tuple[float, int] | None]) -> None:
        """Evaluate and log (mean loss, trained tokens), and the time it took; None: stopped."""
        began = time.monotonic()
        outcome = evaluate()
        if outcome is None:
            return
        self.metrics.event("eval", step, seconds=round(time.monotonic() - began, 3))
        row = {"step": step, "eval_loss": outcome[0], "eval_tokens": outcome[1]}
        self._evaluated.add(step)
        self.metrics.log(row)
        self.progress.update(row)


class Profiler:
    """`train.profile: [first, last]`: an XLA trace of these steps in <out>/profile."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._first, self._last = steps or (0, 0)
        self._folder = str(folder)
        self._on = False

    def before(self, step: int) -> None:
        if step == self._first:
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, state: Tree) -> None:
        if step == self._last:
            self.stop(state)

    def stop(self, state: Tree) -> None:
        if self._on:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._on = False
            log.info("profile of steps %d to %d: %s", self._first, self._last, self._folder)
