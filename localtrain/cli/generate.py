"""`localtrain generate` and `localtrain eval`: use a model from disk."""

from __future__ import annotations

import dataclasses
import sys

import click

from localtrain.cli.frame import (
    Command,
    backend_option,
    json_option,
    open_backend,
    print_json,
    printable,
)
from localtrain.progress import show_stages

DTYPES = click.Choice(["float32", "bfloat16"])


@click.command(cls=Command)
@click.argument("source", metavar="CKPT_OR_HF_DIR")
@click.option("--prompt", default="", help="Text to continue; default: a text from its beginning.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True, metavar="N"
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    metavar="T",
    help="0 = always the best token.",
)
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Of the K best tokens only.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", type=DTYPES, help="Of weights and arithmetic; default: the backend's.")
@click.option("--tokenizer", metavar="T", help="Instead of the one beside the model.")
@backend_option
@json_option
def generate(source: str, backend: str | None, as_json: bool, **options) -> None:
    """Continue a text.

    CKPT_OR_HF_DIR is a run directory, one checkpoint of it, or a folder with config.json and
    safetensors. The text goes to stdout as it is written.
    """
    place = open_backend(backend)
    from localtrain.complete import complete

    options["dtype"] = options["dtype"] or place.defaults().dtype
    if as_json:
        return print_json(dataclasses.asdict(complete(source, **options)))
    shown = False

    def write(piece: str) -> None:
        nonlocal shown
        text = piece if shown else options["prompt"] + piece
        click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
        shown = True

    done = complete(source, **options, write=write)
    click.echo()
    click.echo(f"{done.tokens} tokens in {done.seconds:.1f} s", err=True)


@click.command("eval", cls=Command)
@click.argument("source", metavar="CKPT_OR_HF_DIR")
@click.option("--data", "sources", multiple=True, metavar="SRC", help="Documents; may be repeated.")
@click.option("--seq-len", type=click.IntRange(min=2), metavar="N", help="Default: the run's.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, metavar="N")
@click.option("--batches", type=click.IntRange(min=1), metavar="N", help="Default: all rows.")
@click.option("--dtype", type=DTYPES, help="Of weights and arithmetic; default: the backend's.")
@click.option("--tokenizer", metavar="T", help="Instead of the one beside the model.")
@backend_option
@json_option
def evaluate(source: str, backend: str | None, as_json: bool, **options) -> None:
    """Loss and perplexity on held-out text.

    Without --data: on what the run at CKPT_OR_HF_DIR held out while it trained.
    """
    place = open_backend(backend)
    from localtrain.evaluate import evaluate as measure
    from localtrain.runtime import StopSignal

    options["dtype"] = options["dtype"] or place.defaults().dtype
    with StopSignal.install() as stop:
        stop.nothing_to_save(True)
        facts = measure(source, **options, progress=show_stages(), stop=stop.event)
    if as_json:
        return print_json(facts)
    click.echo(
        f"{source}: loss {facts['loss']:.4f}, perplexity {facts['perplexity']:.2f} on "
        f"{facts['tokens']:,} tokens in {facts['rows']:,} rows of {facts['seq_len']}"
    )
