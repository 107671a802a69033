"""`localtrain train`, and the tasks by their own names."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, backend_options
from localtrain.errors import ConfigError

TASKS = ("sft", "dpo", "distill", "rl")
BUILT = ("pretrain",)  # what this version can train


def _options(command):
    for decorate in (
        click.argument("run", metavar="RUN"),
        click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1),
        backend_options,
        click.option("--out", metavar="URL", help="Run directory; default: runs/<name>."),
        click.option(
            "--dry-run", is_flag=True, help="Print the resolved run and its size; start nothing."
        ),
        click.option("--override", is_flag=True, help="Go on in --out although the run differs."),
    )[::-1]:
        command = decorate(command)
    return command


def _start(run, overrides, backend, devices, out, dry_run, override, task=None) -> None:
    from localtrain.backend import choose
    from localtrain.config import load_run

    loaded = load_run(run, overrides)
    _check_task(loaded.task, task)
    choose(backend)  # a backend that cannot be used is said before jax is loaded

    from localtrain.train import train as start

    start(loaded, backend=backend, out=out, devices=devices, override=override, dry_run=dry_run)


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


@click.command(cls=Command)
@_options
def train(**arguments) -> None:
    """Train, or go on training.

    RUN is a packaged run such as 'quickstart', a preset such as 'qwen3-0.6b', a run file or a URL.
    KEY=VALUE arguments come after the run file, such as train.steps=100. The same command resumes.

    Exit codes: 0 done, 2 bad usage or config, 3 bad data, 4 non-finite loss, 5 out of memory,
    6 storage failed, 7 a peer failed, 8 directory in use, 75 stopped after saving.
    """
    _start(**arguments)


def _task_command(task: str) -> click.Command:
    def start(**arguments) -> None:
        _start(**arguments, task=task)

    about = f"The same as train, for runs with task: {task}."
    return click.command(task, cls=Command, help=about, hidden=task not in BUILT)(_options(start))


TASK_COMMANDS = [_task_command(task) for task in TASKS]
