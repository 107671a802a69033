"""`localtrain models`: the packaged presets, and what a model consists of."""

from __future__ import annotations

from typing import Any

import click

from localtrain.cli.frame import Command, Group, json_option, print_json, print_table


@click.group(cls=Group)
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """Packaged model presets.

    `models show NAME` says what one consists of.
    """
    if context.invoked_subcommand is not None:
        return
    from localtrain.models import presets
    from localtrain.models.describe import describe

    rows = [describe(name) for name in presets()]
    if as_json:
        return print_json(rows)
    keys = ("name", "model_type", "parameters", "active_parameters", "layers", "dim", "vocab")
    print_table(keys, [[row[key] for key in keys] for row in rows])


@models.command(cls=Command)
@click.argument("name", metavar="NAME|DIR")
@json_option
def show(name: str, as_json: bool) -> None:
    """Sizes of a preset, or of a folder with a Hugging Face config.json."""
    from localtrain.models.describe import describe

    row = describe(name)
    if as_json:
        return print_json(row)
    print_table(("what", "value"), [(key, _words(value)) for key, value in row.items()])


def _words(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(count, float) for count in value.values()):
        return "; ".join(f"{number:.4g} at length {length}" for length, number in value.items())
    if isinstance(value, dict):
        return "; ".join(f"{count} x {kind}" for kind, count in value.items())
    if isinstance(value, list):
        return "; ".join(f"{entry['repeat']} x {entry['layers']}" for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
