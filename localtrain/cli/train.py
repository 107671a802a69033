"""`localtrain train`, and the tasks by their own names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from localtrain.cli.frame import (
    Command,
    backend_options,
    json_option,
    print_json,
    printable,
    restart_with,
)
from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.config import RunConfig
    from localtrain.train import Result

TASKS = ("sft", "dpo", "distill", "rl")
BUILT = ("pretrain",)  # what this version can train


def _options(command: Callable) -> Callable:
    for decorate in (
        click.option("--override", is_flag=True, help="Go on in --out although the run differs."),
        click.option("--strict", is_flag=True, help="End where a committed checkpoint is damaged."),
        click.option("--dry-run", is_flag=True, help="Print the resolved run and its size only."),
        json_option,
        click.option("--out", metavar="URL", help="Run directory; default: runs/<name>."),
        click.option("--process-id", type=int, metavar="I", help="Which one this is, from 0 on."),
        click.option("--num-processes", type=int, metavar="N", help="How many processes it has."),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="A run of several processes: where they meet. srun and mpirun need none of these.",
        ),
        backend_options,
        click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1),
        click.argument("run", metavar="RUN"),
    ):
        command = decorate(command)
    return command


def _start(
    run: str,
    overrides: tuple[str, ...],
    backend: str | None,
    devices: int | None,
    out: str | None,
    dry_run: bool,
    override: bool,
    strict: bool,
    as_json: bool,
    task: str | None = None,
    **group: Any,
) -> None:
    from localtrain.backend import choose

    place, _ = choose(backend)  # one that cannot be used is refused before jax is loaded
    # before a run file from a pipe is read, and before anything that takes long to import
    restart_with(place.process_environment())

    from localtrain.runtime import StopSignal

    with StopSignal.install() as stop:  # jax's import would swallow a KeyboardInterrupt
        stop.nothing_to_save(True)  # until `train` has its own
        from localtrain import processes, storage
        from localtrain.config import load_run
        from localtrain.launcher import find_place

        loaded = load_run(run, overrides)
        _check_task(loaded.task, task)
        find_place(**group)
        storage.reach(out or "")  # and so is a URL without its package or credentials

        from localtrain.goodput import process_start
        from localtrain.train import train as start

        result = start(
            loaded,
            backend=backend,
            out=out,
            devices=devices,
            override=override,
            strict=strict,
            dry_run=dry_run,
            began=process_start(),
            **group,
        )
    if not processes.lead():
        return
    if as_json:
        print_json(_document(loaded, result, dry_run))
    else:
        click.echo(_plan(loaded, result) if dry_run else _summary(result))


def _check_task(task: str, command: str | None) -> None:
    if task not in BUILT or (command and command not in BUILT):
        raise ConfigError(
            f"task {command or task} is not part of this version yet; it trains {', '.join(BUILT)}"
        )
    if command and task != command:
        raise ConfigError(
            f"the run has task: {task}, `localtrain {command}` wants task: {command}; use "
            f"`localtrain train`, or set task={command}"
        )


def _document(run: RunConfig, result: Result, dry_run: bool) -> dict[str, Any]:
    if dry_run:
        return {"run": run.to_dict(), "out": result.out, **result.facts}
    names = ("out", "step", "start_loss", "end_loss", "eval_loss", "sample")
    return {name: getattr(result, name) for name in names}


def _plan(run: RunConfig, result: Result) -> str:
    """A run file: the resolved run, and what it costs as comments."""
    facts = [
        f"# {key}: {value if isinstance(value, str) else format(value, ',.0f')}"
        for key, value in result.facts.items()
    ]
    return run.to_yaml() + "\n".join(["", f"# out: {result.out}", *facts, "# nothing was started"])


def _summary(result: Result) -> str:
    """What happened, what the model writes now, and what to type next."""
    lines = [f"{result.out}: step {result.step}"]
    if result.start_loss is not None and result.end_loss is not None:
        lines[0] += f", loss {result.start_loss:.4f} -> {result.end_loss:.4f}"
    if result.eval_loss is not None:
        lines[0] += f", held-out loss {result.eval_loss:.4f}"
    if result.sample:
        lines += ["", "a sample of what the model writes:", printable(result.sample)]
    out = shlex.quote(result.out)
    lines += [
        "",
        "next:",
        f"  localtrain generate {out} --prompt {shlex.quote(result.prompt or 'Once')}",
        f"  localtrain report {out}",
        f"  tensorboard --logdir {shlex.quote(os.path.join(result.out, 'tensorboard'))}",
        f"  the same command with train.steps={2 * result.step} goes on from here",
    ]
    return "\n".join(lines)


@click.command(cls=Command)
@_options
def train(**arguments: Any) -> None:
    """Train, or go on training.

    RUN is a packaged run such as 'quickstart', a preset such as 'qwen3-0.6b', a run file or a URL.
    KEY=VALUE arguments come after the run file, such as train.steps=100. The same command resumes.

    Exit codes: 0 done, 2 bad usage or config, 3 bad data, 4 non-finite loss, 5 out of memory,
    6 storage failed, 7 a peer failed, 8 directory in use, 75 stopped after saving.
    """
    _start(**arguments)


def _task_command(task: str) -> click.Command:
    def start(**arguments: Any) -> None:
        _start(**arguments, task=task)

    about = f"The same as train, for runs with task: {task}."
    return click.command(task, cls=Command, help=about, hidden=task not in BUILT)(_options(start))


TASK_COMMANDS = [_task_command(task) for task in TASKS]
