"""`localtrain chat`: talk with a model from disk."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from localtrain.cli.frame import Command, open_backend
from localtrain.cli.generate import (
    model_options,
    sampling_options,
    settings_from,
    show,
    show_warnings,
)
from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.chat import Chat

HELP = "/reset starts over, /exit leaves; Ctrl-C ends an answer."


@click.command(cls=Command)
@click.argument("source", metavar="CKPT_OR_HF_DIR")
@click.option("--system", metavar="TEXT", help="A first message that tells the model what to be.")
@click.option(
    "--template",
    metavar="FILE",
    help="Chat template instead of the folder's; `chatml` is built in.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="The longest answer.",
)
@sampling_options
@model_options
def chat(
    source: str,
    system: str | None,
    template: str | None,
    backend: str | None,
    dtype: str | None,
    tokenizer: str | None,
    **options: Any,
) -> None:
    """Talk with a model.

    CKPT_OR_HF_DIR is a run directory, one checkpoint of it, or a folder with config.json and
    safetensors. Without a terminal every line of stdin is a message. /reset starts over, /exit or
    the end of the input leaves.
    """
    place = open_backend(backend)
    show_warnings()
    from localtrain import compile_cache
    from localtrain.chat import Chat
    from localtrain.complete import Writer, find_tokenizer, memory_advice
    from localtrain.data.template import find_template

    words = find_tokenizer(source, tokenizer)
    form = find_template(words, template)
    settings = settings_from(source, options)
    compile_cache.enable()
    with memory_advice("try --dtype bfloat16, or /reset before the conversation is that long."):
        writer = Writer.open(source, dtype or place.defaults().dtype, words)
        talk(Chat(writer, form, settings, system))


def talk(conversation: Chat) -> None:
    """Lines in, answers out, until the input ends."""
    live = sys.stdin.isatty()
    if live:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ends an answer, then the chat
        click.echo(HELP, err=True)
    for line in _lines(live):
        if line.startswith("/"):
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                conversation.reset()
            else:
                click.echo(f"there is no {line.split()[0]}. {HELP}", err=True)
            continue
        try:
            _say(conversation, line)
        except ConfigError as error:  # this message cannot be answered, others can
            if not live:
                raise
            click.echo(f"error: {error}", err=True)


def _say(conversation: Chat, line: str) -> None:
    answer = conversation.answer(line)
    try:
        for piece in answer:
            show(piece)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        answer.close()
    click.echo()


def _lines(live: bool) -> Iterator[str]:
    """Messages: what is typed, or the lines of stdin; empty ones are passed over."""
    if live:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - editing and history for input()
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    while True:
        try:
            line = input("> ") if live else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if not live and not line:
            return
        if line := line.strip():
            yield line.encode("utf-8", "replace").decode()
