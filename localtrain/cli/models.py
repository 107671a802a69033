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
    row = describe(name)
    if as_json:
        return print_json(row)
    print_table(("what", "value"), [(key, _words(value)) for key, value in row.items()])


def describe(name: str) -> dict[str, Any]:
    """Sizes of a model, from its Hub config alone."""
    from localtrain.models import read_hub_config, spec_from

    hf = read_hub_config(name)
    spec = spec_from(hf, name)
    return {
        "name": name,
        "model_type": hf["model_type"],
        "parameters": spec.parameters(),
        "active_parameters": spec.active_parameters(),
        "layers": len(spec.layers),
        "dim": spec.dim,
        "vocab": spec.vocab,
        "tied": spec.tied,
        "max_length": spec.max_length,
        "stacks": [{"repeat": s.repeat, "layers": len(s.period)} for s in spec.stacks],
        "mixers": _kinds(layer.mixer for layer in spec.layers),
        "ffns": _kinds(layer.ffn for layer in spec.layers),
        "cache_bytes_per_token": spec.cache_bytes_per_token(),
        "train_bytes": train_bytes(spec.parameters()),
    }


def train_bytes(parameters: int) -> int:
    """Parameters, gradients and two AdamW moments, all float32, without activations."""
    return 16 * parameters


def _kinds(parts: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in parts:
        counts[str(part)] = counts.get(str(part), 0) + 1
    return counts


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{count} x {kind}" for kind, count in value.items())
    if isinstance(value, list):
        return "; ".join(f"{entry['repeat']} x {entry['layers']}" for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
