"""`localtrain eval`: the loss of a model from disk on text."""

from __future__ import annotations

from typing import Any

import click

from localtrain.cli.frame import Command, json_option, open_backend, print_json
from localtrain.cli.generate import model_options
from localtrain.progress import show_stages


@click.command("eval", cls=Command)
@click.argument("source", metavar="CKPT_OR_HF_DIR")
@click.option(
    "--data",
    "sources",
    multiple=True,
    metavar="SRC",
    help="Documents: a file, folder, glob or URL; repeatable.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    metavar="KEY",
    help="The key that holds the text, in jsonl and parquet.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens seen at a time; default: the run's, else 1024.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, metavar="N")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Only N rows of seq-len tokens."
)
@model_options
@json_option
def evaluate(
    source: str, backend: str | None, dtype: str | None, as_json: bool, **options: Any
) -> None:
    """Loss, perplexity and bits per byte on text.

    Without --data: on what the run at CKPT_OR_HF_DIR held out while it trained. Every token is
    scored once; the batch size changes nothing but the speed.
    """
    place = open_backend(backend)
    from localtrain import compile_cache
    from localtrain.complete import memory_advice
    from localtrain.evaluate import evaluate as measure
    from localtrain.runtime import StopSignal

    compile_cache.enable()
    dtype = dtype or place.defaults().dtype
    advice = memory_advice("try a smaller --batch-size or --seq-len, or --dtype bfloat16.")
    with advice, StopSignal.install() as stop:
        stop.nothing_to_save(True)
        facts = measure(source, dtype=dtype, **options, progress=show_stages(), stop=stop.event)
    if as_json:
        return print_json(facts)
    bits = facts["bits_per_byte"]
    click.echo(
        f"{source}: loss {facts['loss']:.4f}, perplexity {facts['perplexity']:.2f}, "
        + (f"{bits:.4f} bits per byte " if bits is not None else "")
        + f"on {facts['tokens']:,} tokens in {facts['rows']:,} rows of {facts['seq_len']}"
    )
