"""`localtrain data`: token shards from documents."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, Group, help_alone, json_option, print_json
from localtrain.errors import ConfigError


@click.group(cls=Group)
@click.pass_context
def data(context: click.Context) -> None:
    """Prepare training data."""
    help_alone(context)


@data.command(cls=Command)
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.option("--tokenizer", metavar="T", help="byte (the default), or a tokenizer.json.")
@click.option("--out", required=True, metavar="URL", help="Folder for the shards.")
@click.option(
    "--train-tokenizer",
    type=int,
    metavar="N",
    help="First train a byte-level BPE tokenizer of N tokens on the sources.",
)
@json_option
def build(
    sources: tuple[str, ...],
    tokenizer: str | None,
    out: str,
    train_tokenizer: int | None,
    as_json: bool,
) -> None:
    """Turn documents into token shards.

    SRC... are paths, globs, folders or URLs; `train` reads the result as a source. The tokenizer
    is stored beside the shards, in URL/tokenizer.
    """
    if tokenizer and train_tokenizer:
        raise ConfigError("--tokenizer and --train-tokenizer are both given; choose one of them")
    from localtrain import storage
    from localtrain.data.build import build_dataset
    from localtrain.data.build import train_tokenizer as train_on
    from localtrain.data.tokenizer import load_tokenizer
    from localtrain.progress import show_stages
    from localtrain.runtime import StopSignal

    progress = show_stages()
    with StopSignal.install() as stop:
        if train_tokenizer:
            made = train_on(list(sources), train_tokenizer, progress=progress, stop=stop.event)
        else:
            made = load_tokenizer(tokenizer or "byte")
        index = build_dataset(list(sources), made, out, progress=progress, stop=stop.event)
        made.save(storage.join(out, "tokenizer"))
    facts = {
        "out": out,
        "tokenizer": storage.join(out, "tokenizer"),
        "vocabulary": made.size,
        "documents": index.documents,
        "tokens": index.tokens,
        "skipped": index.skipped,
    }
    if as_json:
        return print_json(facts)
    skipped = "".join(f", {count:,} skipped: {why}" for why, count in index.skipped.items())
    click.echo(f"{out}: {index.documents:,} documents, {index.tokens:,} tokens{skipped}")
    click.echo(f"use it: data.sources={out} data.tokenizer={facts['tokenizer']}")
