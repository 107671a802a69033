"""The command line: parse, load, call one function of the core.

Nothing heavy is imported before a command runs: `--help` takes a tenth of a second, and a mistake
in a run file is reported before jax is loaded. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from typing import NoReturn

import click

from localtrain.cli.chat import chat
from localtrain.cli.data import data
from localtrain.cli.doctor import doctor
from localtrain.cli.evaluate import evaluate
from localtrain.cli.frame import Group, help_alone
from localtrain.cli.generate import generate
from localtrain.cli.hub import export, import_
from localtrain.cli.models import models
from localtrain.cli.plan import plan
from localtrain.cli.report import report
from localtrain.cli.show import backends, config
from localtrain.cli.train import TASK_COMMANDS, train
from localtrain.errors import LocaltrainError, Stopped, StorageError

BUG = (
    "this is a bug of localtrain, not of your run: please report it with the lines above and the "
    "output of `localtrain doctor`"
)
STOPPED = "stopped by a signal; start the same command again"


@click.group(cls=Group)
@click.version_option(package_name="localtrain", message="localtrain %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Train language models with JAX: on a laptop, a GPU box or a TPU slice.

    \b
    Start here:  localtrain train quickstart
    Keys:        localtrain config
    """
    help_alone(context)


for _command in (
    *(train, *TASK_COMMANDS, plan, report, generate, chat, evaluate),
    *(import_, export, data, models, backends, config, doctor),
):
    app.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: `localtrain ... 2>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if arguments is not None:
        sys.exit(run(arguments))
    # A KeyboardInterrupt inside the import of jax is swallowed or becomes another error. Commands
    # that have something to save or to remove take the signals over when they begin.
    signal.signal(signal.SIGINT, _leave)
    if os.getpid() == 1:  # of a container: the kernel drops signals that process 1 does not handle
        signal.signal(signal.SIGTERM, _leave)
    sys.exit(run(sys.argv[1:], own=True))


def _leave(*_: object) -> NoReturn:
    """End without Python's tidying up: under a compile that still runs, that crashes."""
    with contextlib.suppress(RuntimeError):  # in the middle of another line
        _report(STOPPED, Stopped.exit_code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError):
            stream.flush()
    os._exit(Stopped.exit_code)


def run(arguments: list[str], own: bool = False) -> int:
    """Run one command; returns the exit code. Every error becomes one paragraph on stderr.

    own: this process was started for it.
    """
    debug = "--debug" in arguments
    for argument in arguments:
        if not argument.isascii() and any("\ud800" <= char <= "\udfff" for char in argument):
            return _report(f"argument {argument!r} is not valid Unicode; write it in UTF-8", 2)
    try:
        with app.make_context("localtrain", list(arguments), obj=own) as context:
            app.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as request:  # --help and --version
        return request.exit_code
    except LocaltrainError as error:
        if isinstance(error, Stopped):  # the handlers are gone, and jax takes a while to leave
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: os._exit(Stopped.exit_code))
        return _report(str(error), error.exit_code, debug)
    except click.ClickException as error:
        return _report(_usage(error), 2, debug)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(own)
    except BrokenPipeError:  # `localtrain models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            traceback.print_exc()
            return _report(BUG, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it would fail once more
        return _report("the output could not be written: the disk is full", StorageError.exit_code)
    except Exception as error:
        if _is_interrupt(error):
            return _interrupted(own)
        traceback.print_exc()
        return _report(BUG, 1)


def _interrupted(own: bool) -> int:
    return _leave() if own else _report(STOPPED, Stopped.exit_code)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it began as Ctrl-C: the import of an extension makes an ImportError of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report(message: str, code: int, debug: bool = False) -> int:
    from localtrain.config.secret import mask

    if debug:
        traceback.print_exc()
    print(f"error: {mask(message)}", file=sys.stderr)
    return code


def _key_meant(option: str) -> str | None:
    """The key of a run file that was written as an option: --steps is train.steps."""
    from localtrain.config.alias import ALIASES
    from localtrain.config.message import keys

    name = option.lstrip("-")
    if "." in name:
        return name
    name = name.replace("-", "_").lower()
    known = [key for key, _ in keys()]
    found = [key for key in known if key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else next(iter({ALIASES.get(name)} & set(known)), None)


def _usage(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and (key := _key_meant(error.option_name)):
        return f"No such option '{error.option_name}'. Keys are written without dashes: {key}=VALUE"
    path = context.command_path if context else "localtrain"
    return f"{message} See `{path} --help`"
