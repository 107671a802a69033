"""`localtrain eval`: the loss of a model from disk on text."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, backend_option, json_option, open_backend, print_json
from localtrain.cli.generate import DTYPES
from localtrain.progress import show_stages


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
