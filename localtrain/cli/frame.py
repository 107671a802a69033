"""What all commands share: --debug, -h, --json, tables, and the choice of a backend."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from localtrain.errors import nearest

if TYPE_CHECKING:
    from localtrain.backend import Backend

NAMES = {"help_option_names": ["-h", "--help"]}


class Command(click.Command):
    """A command with -h and --debug."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("context_settings", NAMES)
        super().__init__(*args, **kwargs)
        self.params.append(_debug())


class Group(click.Group):
    """A group of such commands, listed in the order they were added, with help for a typo."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("context_settings", NAMES)
        super().__init__(*args, invoke_without_command=True, **kwargs)
        self.params.append(_debug())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = [name for name, command in self.commands.items() if not command.hidden]
            close = nearest(args[0], known)
            hint = f"did you mean '{close}'?" if close else f"known: {', '.join(known)}."
            ctx.fail(f"There is no command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)


def help_alone(context: click.Context) -> None:
    """For a group that does nothing by itself: without a command it prints its help."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _debug() -> click.Option:
    # The value is read from the arguments in `run`, which outlives every click context.
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."
    )


def json_option(command: Callable) -> Callable:
    """--json: one JSON document on stdout instead of a table."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def backend_option(command: Callable) -> Callable:
    """--backend NAME."""
    return click.option(
        "--backend", metavar="NAME", help="Where to run; default: the best usable one."
    )(command)


def backend_options(command: Callable) -> Callable:
    """--backend and --devices."""
    devices = click.option(
        "--devices", type=click.IntRange(min=1), metavar="N", help="How many devices to use."
    )
    return backend_option(devices(command))


def open_backend(name: str | None, devices: int | None = None) -> Backend:
    """Choose a backend and set its environment, before jax is imported; says which on stderr."""
    from localtrain.backend import choose

    backend, why = choose(name)
    for line in (why, *backend.prepare_environment(None, devices)):
        click.echo(line, err=True)
    return backend


def restart_with(variables: dict[str, str]) -> None:
    """Start this very command again, in the same process, with these variables (if any).

    Not when the command is only a call within somebody else's process.
    """
    if variables and click.get_current_context().find_root().obj:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)


def printable(text: str) -> str:
    """Text for a terminal: a half-trained model may write control characters."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def print_json(value: Any) -> None:
    """One document on stdout; NaN is not JSON, so it is refused here rather than downstream."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Aligned columns in plain text; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        all(isinstance(row[i], (int, float)) or row[i] is None for row in rows) and bool(rows)
        for i in range(len(header))
    ]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    for row in [list(header), *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
