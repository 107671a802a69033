"""THE loop: from a run file to a trained model, readable top to bottom.

`train` decides where the run lives, prepares data and programs, restores or initialises the state,
and hands over to `_loop`. The loop dispatches step n and then reads the numbers of step n - 1, so
the device never waits for the host. Order at a boundary: log row, evaluation, save; so a committed
checkpoint has every row up to its step on disk, and a resumed run writes the same rows.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import jax
import numpy as np

from localtrain import goodput, heartbeat, processes, runtime, storage
from localtrain.backend import choose
from localtrain.checkpoint import Checkpoints
from localtrain.config import RunConfig, load_run
from localtrain.data.fingerprint import explain_difference
from localtrain.data.loader import Corpus, Prefetcher, prepare
from localtrain.data.tokenizer import Tokenizer
from localtrain.errors import ConfigError, DataError, NonFiniteError, Stopped
from localtrain.job import Job, compile_job, describe, make_network, run_mesh
from localtrain.metrics import MetricsWriter, read_metrics
from localtrain.oom import memory_advice
from localtrain.outcome import Result, ended, newest_intact, result_of
from localtrain.progress import Progress, show_stages
from localtrain.rundir import RunDirectory
from localtrain.runtime import StopSignal
from localtrain.samples import Sampler, code_block
from localtrain.shared_rundir import open_together, same_data
from localtrain.source import Source
from localtrain.steplog import Profiler, StepLog
from localtrain.warmstart import find_start

log = logging.getLogger(__name__)
Tree = Any
TASKS = ("pretrain",)  # what this version can train


def train(
    run: RunConfig | str,
    backend: str | None = None,
    out: str | None = None,
    *,
    devices: int | None = None,
    override: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    began: float | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Result:
    """Train a run to its last step, resuming what is in its directory.

    run: a RunConfig, or the name, path or URL of a run file. backend: where (None: the best usable
    one). out: run directory (None: runs/<name>). strict: a damaged checkpoint ends the run; else
    the one before is used, after saying so. began: time.time() at the start of the program, for
    the account of the time. The last three: see launcher.py. Raises the errors of
    `localtrain.errors`; Stopped (75) when a signal ended it after saving.
    """
    called = time.time()
    began = called if began is None else began
    run = load_run(run) if isinstance(run, str) else run
    if run.task not in TASKS:
        raise ConfigError(f"task: {run.task} is not in this version; it has {', '.join(TASKS)}.")
    if out is not None and not str(out).strip():
        raise ConfigError("--out is empty: name a run directory, or leave it out for runs/<name>.")
    if run.data.tokenizer is None and run.model.init_from is None:  # one spelling in run.yaml
        data = run.data.model_copy(update={"tokenizer": "byte"})
        run = run.model_copy(update={"data": data})
    place, why = choose(backend)
    notes = place.prepare_environment(run, devices)
    start = find_start(run, out, override)
    network, tokenizer = make_network(run, start.hf, start.name, place), start.tokenizer
    if not dry_run:
        notes += filter(None, [place.initialize(coordinator, num_processes, process_id)])
    with processes.shared():  # before hours of tokenizing
        jax.devices()  # in all processes: they tell each other what they have
        processes.by_lead(lambda: run_mesh(run, network=network) and None)
    if dry_run:
        return Result(out or f"runs/{run.name}", facts=describe(run, network))
    runtime.setup_logging()  # waiting for a lease, or for a store that fails, is told
    with (
        StopSignal.install() as stop,
        processes.shared(last=True),
        open_together(out, run, override) as home,
    ):
        home.strict = strict
        stop.nothing_to_save(True)
        runtime.setup_logging(home.path)
        left = processes.agree(home.finished and not ended(home, run.train.steps))
        told = ["only the last evaluation and the sample are left"] if left else home.notes
        for line in (why, *notes, *told, *start.notes):
            log.info("%s", line)
        if (
            home.finished
            and not left
            and processes.by_lead(partial(newest_intact, home)) >= (run.train.steps)
        ):
            return result_of(home)
        facts = runtime.host_facts() | {"began": began, "import_s": called - began}
        facts["init_s"] = time.time() - called
        log.info("%s", runtime.describe_host(facts))
        home.write_model(start.hf)
        start.keep(str(home.path))
        cache = run.data.cache or storage.join(home.name, "data")
        clock = time.monotonic()
        heartbeat.note("preparing the data")
        build = partial(prepare, run, tokenizer, cache, show_stages(), stop.event)
        corpus = processes.lead_first(build)
        same_data(corpus)
        facts["data_s"] = time.monotonic() - clock
        for line in corpus.report():
            log.info("%s", line)
        log.info("compiling %s", describe(run, network)["summary"])
        heartbeat.note("compiling")
        job = compile_job(run, network, place)
        cached = f" ({job.from_cache} of 3 programs from the cache)" if job.from_cache else ""
        log.info("compiled in %.1f s%s", job.compile_s, cached)
        processes.barrier("compiled")
        with memory_advice(run, job.memory):
            return _train(job, corpus, tokenizer, start.source, home, stop, override, facts)


def _train(
    job: Job,
    corpus: Corpus,
    tokenizer: Tokenizer,
    source: Source | None,
    home: RunDirectory,
    stop: StopSignal,
    override: bool,
    facts: dict[str, Any],
) -> Result:
    """Restore or initialise, run the loop, sum up. `facts`: of this start, for the record."""
    run = job.run
    checkpoints = home.checkpoints(run.checkpoint.keep)
    clock = time.monotonic()
    state, trained = _start(job, corpus, checkpoints, source, override)
    first = int(state["step"])
    processes.barrier("restored")
    facts["restore_s"] = time.monotonic() - clock
    with (
        MetricsWriter(home.path, first) as metrics,
        Progress(run.train.steps, None if processes.lead() else False) as progress,
        Prefetcher(
            corpus.train,
            run.train.batch_size,
            first,
            run.data.prefetch,
            stop.event if processes.count() == 1 else None,  # else all stop at the same step
            job.place,
            job.rows,
        ) as feed,
    ):
        sizes = {"parameters": job.network.spec.parameters(), "compile_s": job.compile_s}
        metrics.event("start", first, **facts, **sizes)
        metrics.text("run", code_block(run.to_yaml()), first)
        desk = StepLog(job, metrics, progress, trained)
        sampler = Sampler(job, tokenizer, corpus, metrics, stop)
        try:
            state = _loop(job, state, feed, corpus, checkpoints, desk, sampler, stop, home)
        finally:
            checkpoints.close()
        result = result_of(home)
        if stop.agreed(now=True):
            metrics.event("stop", int(state["step"]), reason=str(stop.reason))
            raise processes.in_all(
                Stopped(
                    f"stopped by {stop.reason} at step {int(state['step'])} of {run.train.steps}; "
                    f"the checkpoint is saved. Start the same command again to go on."
                )
            )
        metrics.event("end", run.train.steps)
        if line := goodput.describe(goodput.goodput(read_metrics(home.path))):
            log.info("%s", line)
    return result


def _start(
    job: Job, corpus: Corpus, checkpoints: Checkpoints, source: Source | None, override: bool
) -> tuple[Tree, int]:
    """(state, trained tokens so far): the newest good checkpoint, or step 0."""
    if processes.by_lead(checkpoints.latest) is None:
        return job.fresh_state(source), 0
    state, meta = checkpoints.restore(None, job.programs.state)
    if changed := explain_difference(meta["data"], corpus.fingerprint):
        if not override:
            changed_data = DataError(
                f"the data changed since step {meta['step']} was saved, so the run cannot go on "
                f"exactly: {changed}. Restore the files, start a new run with another --out, or "
                f"go on with the new data by --override."
            )
            raise processes.in_all(changed_data)
        log.warning("--override: the data changed: %s", changed)
    return state, meta["trained_tokens"]


def _loop(
    job: Job,
    state: Tree,
    feed: Prefetcher,
    corpus: Corpus,
    checkpoints: Checkpoints,
    desk: StepLog,
    sampler: Sampler,
    stop: StopSignal,
    home: RunDirectory,
) -> Tree:
    """Train until the last step or a stop signal; returns the last state, saved."""
    run = job.run
    saved = step = int(state["step"])
    saved_at = time.monotonic()
    profiler = Profiler(run.train.profile, home.path / "profile")

    def save(state: Tree, step: int, block: bool = False) -> None:
        desk.metrics.flush()
        meta = {
            "seed": run.seed,
            "trained_tokens": desk.trained,
            "data": corpus.fingerprint,
            "run": run.to_dict(),
            "model": home.model,
            "stacks": [[len(stack.period), stack.repeat] for stack in job.network.stacks],
        }
        seconds = checkpoints.save(step, state, meta, block)
        desk.metrics.event("save", step, save_block_s=round(seconds, 3), **desk.unlogged())

    def evaluate_if_due(state: Tree, step: int) -> None:
        every = run.eval.every
        due = step == run.train.steps or (every and step % every == 0)
        if due and corpus.eval.rows and not processes.agree(desk.has_eval(step)):
            heartbeat.note(f"the evaluation after step {step}")
            desk.eval_row(step, lambda: evaluate(job, state["params"], corpus, stop))
        if due:
            sampler.write(state["params"], step)

    if step:
        evaluate_if_due(state, step)  # a stop may have come between the step and its evaluation
    stopping = stop.agreed()
    try:
        while step < run.train.steps and not stopping:
            heartbeat.note(f"step {step + 1}")
            try:
                batch, wait = feed.next(step)
            except Stopped:  # the signal came while waiting for data
                break
            stop.nothing_to_save(False)
            profiler.before(step + 1)
            with jax.transfer_guard("disallow"):
                state, numbers = job.step(state, batch, job.number(step))
            desk.read()  # the step before, while this one runs
            desk.dispatched(step, numbers, wait)
            checkpoints.check()
            home.check()
            step += 1
            profiler.after(step, state)
            last = step == run.train.steps
            minutes = run.checkpoint.every_minutes
            save_due = last or step % run.checkpoint.every == 0
            if minutes and saved < step - 1:
                late = time.monotonic() - saved_at > 60 * minutes
                save_due |= processes.any_of(late, "save")
            eval_due = last or (run.eval.every and step % run.eval.every == 0)
            stopping = stop.agreed()
            if save_due or eval_due or stopping:
                desk.read()
                evaluate_if_due(state, step)
                if eval_due and not stopping:  # a signal that cut it: no step more, or it is lost
                    stopping = stop.agreed(now=True)
                if save_due:
                    save(state, step, block=last)
                    saved, saved_at = step, time.monotonic()
                desk.resume_clock()
        desk.read()
    except NonFiniteError as error:
        # The bad update was not applied and nothing after it was: this is the last good state.
        good = int(state["step"])
        desk.metrics.event("non_finite", good, reason=str(processes.in_all(error)))
        if good > saved:
            save(state, good, block=True)
        raise
    finally:
        profiler.stop(state)
    if step > saved:
        save(state, step, block=True)
    checkpoints.wait()
    desk.metrics.flush()
    return state


def evaluate(job: Job, params: Tree, corpus: Corpus, stop: StopSignal) -> tuple[float, int] | None:
    """(mean loss, trained tokens) over held-out rows, each once; None when a stop came between."""
    run = job.run
    totals = []
    for batch in corpus.eval.eval_batches(run.train.batch_size, run.eval.batches, job.rows):
        if stop.agreed():
            return None
        totals.append(job.evaluate(params, job.place(batch)))
    nll, tokens = np.sum(np.asarray(jax.device_get(totals), np.float64), axis=0)
    return float(nll / max(tokens, 1)), int(tokens)
