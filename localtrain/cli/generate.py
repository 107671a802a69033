"""`localtrain generate`: a model from disk continues texts."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from localtrain.cli.frame import (
    Command,
    backend_option,
    json_option,
    open_backend,
    print_json,
    printable,
)

FEW_TOKENS, SHORT_S = 10, 0.5  # of less than either no rate is told
DTYPES = click.Choice(["float32", "bfloat16"])


def model_options(command: Callable) -> Callable:
    """--dtype, --tokenizer and --backend."""
    command = backend_option(command)
    command = click.option("--tokenizer", metavar="T", help="Instead of the one beside the model.")(
        command
    )
    return click.option(
        "--dtype", type=DTYPES, help="Of weights and arithmetic; default: the backend's."
    )(command)


def sampling_options(command: Callable) -> Callable:
    """How the next token is chosen. What is not given is the folder's own choice."""
    ours = "default: the folder's generation_config.json, else"
    for option in reversed(
        [
            click.option(
                "--temperature",
                type=click.FloatRange(min=0),
                metavar="T",
                help=f"0 = always the best token; {ours} 0.8.",
            ),
            click.option(
                "--top-k",
                type=click.IntRange(min=1),
                metavar="K",
                help=f"Of the K best tokens only; {ours} all.",
            ),
            click.option(
                "--top-p",
                type=click.FloatRange(0, 1, min_open=True),
                metavar="P",
                help=f"Of the best tokens that have probability P together; {ours} 1.",
            ),
            click.option(
                "--min-p",
                type=click.FloatRange(0, 1),
                metavar="P",
                help=f"Of tokens with at least P times the best one's probability; {ours} 0.",
            ),
            click.option(
                "--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."
            ),
            click.option("--seed", type=int, default=0, show_default=True),
        ]
    ):
        command = option(command)
    return command


def settings_from(source: str, options: dict[str, Any]) -> Any:
    """The Settings of these command line options; takes them out of `options`."""
    from localtrain.complete import Settings, sampling_defaults

    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: options.pop(name) for name in names if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    asked = {"temperature", "top_k", "top_p", "min_p"} & set(given)
    if given.get("temperature") == 0 and asked == {"temperature"}:
        return Settings(**given)
    return Settings(**{**sampling_defaults(source), **given})


@click.command(cls=Command)
@click.argument("source", metavar="CKPT_OR_HF_DIR")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Text to continue; repeatable. Default: a text from its beginning.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True, metavar="N"
)
@sampling_options
@model_options
@json_option
def generate(
    source: str,
    prompts: tuple[str, ...],
    backend: str | None,
    dtype: str | None,
    tokenizer: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue texts.

    CKPT_OR_HF_DIR is a run directory, one checkpoint of it, or a folder with config.json and
    safetensors. One text goes to stdout as it is written, several one after the other at the end.
    """
    place = open_backend(backend)
    show_warnings()
    from localtrain import compile_cache
    from localtrain.complete import Writer, encode_prompt, find_tokenizer, memory_advice

    # what the shell gave in another encoding becomes U+FFFD
    prompts = tuple(text.encode("utf-8", "replace").decode() for text in prompts) or ("",)
    words = find_tokenizer(source, tokenizer)
    for prompt in prompts:  # refused before the weights are read
        encode_prompt(words, prompt)
    settings = settings_from(source, options)
    compile_cache.enable()
    done: list = []
    with memory_advice("try --dtype bfloat16, fewer prompts at a time, or fewer new tokens."):
        writer = Writer.open(source, dtype or place.defaults().dtype, words)
        clock = Clock()
        if len(prompts) == 1 and not as_json:
            show(prompts[0])
        for row, piece in writer.write(prompts, settings, done):
            clock.tick(row)
            if len(prompts) == 1 and not as_json:
                show(piece)
    if as_json:
        return print_json({"completions": [dataclasses.asdict(one) for one in done]})
    if len(prompts) > 1:
        for n, one in enumerate(done, 1):
            click.echo(f"--- {n} of {len(done)}")
            show(one.prompt + one.text)
            click.echo()
    else:
        click.echo()
    click.echo(clock.report(sum(one.tokens for one in done)), err=True)


def show_warnings() -> None:
    """As lines "warning: ..." on stderr until the command ends."""
    from localtrain import runtime

    runtime.setup_logging(level=logging.WARNING)
    click.get_current_context().call_on_close(runtime.close_logging)


def show(text: str) -> None:
    """To stdout at once, made harmless for a terminal."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


class Clock:
    """Time to the first piece (with compilation) and the pace after it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: float | None = None

    def tick(self, row: int) -> None:
        if self.first is None:
            self.first = time.monotonic()

    def report(self, tokens: int) -> str:
        now = time.monotonic()
        line = f"{tokens} tokens in {now - self.began:.1f} s"
        if self.first is not None and tokens >= FEW_TOKENS and now - self.first >= SHORT_S:
            line += f", the first after {self.first - self.began:.1f} s"
            line += f", then {(tokens - 1) / (now - self.first):.1f} tokens/s"
        return line
