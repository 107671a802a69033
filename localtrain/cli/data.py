"""`localtrain data`: token shards from documents."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, Group, help_alone


@click.group(cls=Group)
@click.pass_context
def data(context: click.Context) -> None:
    """Prepare training data."""
    help_alone(context)


@data.command(cls=Command)
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.option("--tokenizer", default="byte", metavar="T", help="byte, or a tokenizer.json.")
@click.option("--out", required=True, metavar="URL", help="Folder for the shards.")
@click.option(
    "--train-tokenizer",
    type=click.IntRange(min=300),
    metavar="N",
    help="First train a byte-level BPE tokenizer of N tokens on the sources.",
)
def build(sources: tuple[str, ...], tokenizer: str, out: str, train_tokenizer: int | None) -> None:
    """Turn documents into token shards.

    SRC... are paths, globs, folders or URLs; `train` reads the result as a source.
    """
    from localtrain.data import build as building

    building.build_command(sources, tokenizer, out, train_tokenizer)
