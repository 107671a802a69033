"""`localtrain import` and `localtrain export`: weights from and to Hugging Face, with a proof."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from localtrain.cli.frame import Command, json_option, print_json, print_table

if TYPE_CHECKING:
    from localtrain.convert import Report, Side


@click.command("import", cls=Command)
@click.argument("hf_dir", metavar="HF_DIR")
@click.argument("out", metavar="OUT")
@json_option
def import_(hf_dir: str, out: str, as_json: bool) -> None:
    """Hugging Face weights into a folder of ours.

    HF_DIR is a folder with config.json and safetensors, a URL of one, or a Hub id such as
    Qwen/Qwen3-0.6B. OUT is a new folder, for model.init_from=OUT, generate and export. (Training
    can also start from HF_DIR itself.) Ends with a table that compares both.
    """
    _prepare()
    from localtrain.convert import import_hub
    from localtrain.progress import show_stages

    with _tidy_when_stopped():
        report = import_hub(hf_dir, out, show_stages())
    if as_json:
        return print_json(report.to_dict())
    _print(report)
    click.echo(f"use it: model.init_from={out}")


@click.command(cls=Command)
@click.argument("source", metavar="RUN_OR_CKPT")
@click.argument("out", metavar="OUT_DIR")
@click.option("--check", is_flag=True, help="Compare with transformers, which must be installed.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the written weights; default: as they are.",
)
@json_option
def export(source: str, out: str, check: bool, dtype: str | None, as_json: bool) -> None:
    """A run, checkpoint or imported folder into a Hugging Face folder.

    OUT_DIR is a new folder or URL: config.json, safetensors, tokenizer. Ends with a table that
    compares what was written with the source.
    """
    _prepare()
    from localtrain.convert import export_hub
    from localtrain.progress import show_stages

    with _tidy_when_stopped():
        report = export_hub(source, out, dtype=dtype, check=check, progress=show_stages())
    if as_json:
        return print_json(report.to_dict())
    _print(report)
    written = next(iter(report.written.dtypes))
    if dtype is None and written == "F32":
        click.echo("half the size: --dtype bfloat16")


def _prepare() -> None:
    """Conversion needs no accelerator, and its numbers should not depend on one."""
    from localtrain.backend import choose

    backend, _ = choose("cpu")
    backend.prepare_environment(None, None)


@contextlib.contextmanager
def _tidy_when_stopped() -> Iterator[None]:
    """Meanwhile a signal is an exception, so that what was begun is removed."""
    import jax  # noqa: F401 - its import would make another error of the exception

    def again(given: Any) -> None:  # it came in a callback, where Python cannot raise it
        if issubclass(given.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            hook(given)

    hook, sys.unraisablehook = sys.unraisablehook, again
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _print(report: Report) -> None:
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)  # the line that showed the progress
    sides = (report.source, report.written)
    rows = [(name, *(value(side) for side in sides)) for name, value in _ROWS]
    print_table(("", "source", "written"), rows)
    click.echo(
        f"largest difference of logits: {report.max_difference:.3g} "
        f"(on {len(report.tokens)} fixed tokens, float32)"
    )
    if report.transformers:
        version, difference = (report.transformers[k] for k in ("version", "max_difference"))
        click.echo(f"largest difference from transformers {version}: {difference:.3g}")
    for note in report.notes:
        click.echo(f"note: {note}")


def _tensors(side: Side) -> str:
    return f"{side.tensors:,}" + (f" + {side.carried:,} carried" if side.carried else "")


_ROWS = (
    ("where", lambda side: side.where),
    ("tensors", _tensors),
    ("parameters", lambda side: f"{side.parameters:,}"),
    ("dtype", lambda side: ", ".join(side.dtypes)),
    ("bytes", lambda side: f"{side.bytes:,}"),
    ("logits mean", lambda side: f"{side.logits['mean']:.6f}"),
    ("logits std", lambda side: f"{side.logits['std']:.6f}"),
    ("best next token", lambda side: f"{side.logits['best']} ({side.logits['best_logit']:.4f})"),
)
