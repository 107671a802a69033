"""`localtrain plan`: does a run fit, without running it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import click

from localtrain.cli.frame import Command, backend_options, json_option, print_json, print_table

if TYPE_CHECKING:
    from localtrain.plan import Plan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Size(click.ParamType):
    """Bytes: 8GB, 7.5GiB, 8000000000."""

    name = "size"

    def convert(self, value, param, ctx) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).strip().lower())
        if match is None or (match[3] and not match[2]) or float(match[1]) == 0:
            self.fail(f"'{value}' is not a size such as 8GB or 7.5GiB", param, ctx)
        return int(float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2]])


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--device", metavar="NAME", help="A card to compile for, such as rtx-3060-12gb.")
@click.option("--topology", metavar="NAME", help="A slice to compile for, such as v5e:4x4.")
@click.option("--memory", type=Size(), metavar="SIZE", help="What a device may use, as 8GB.")
@backend_options
@json_option
def plan(
    run: str,
    overrides: tuple[str, ...],
    device: str | None,
    topology: str | None,
    memory: int | None,
    backend: str | None,
    devices: int | None,
    as_json: bool,
) -> None:
    """Say whether a run fits, from the compiler of a device that need not be here.

    Compiles the train step (half a minute for 0.6B) and trains nothing. Without --device and
    --topology it is compiled for this machine. For a GPU that is not here: pip install
    'localtrain[plan-gpu]'.
    """
    from localtrain.config import load_run

    loaded = load_run(run, overrides)
    # The compiler's own remarks about memory say less than the table below; errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from localtrain.plan import plan as make_plan

    found = make_plan(
        loaded, backend, device=device, topology=topology, devices=devices, memory=memory
    )
    print_json(found.to_dict()) if as_json else _show(found)


def _show(found: Plan) -> None:
    memory = found.memory_per_device
    rows = [(name, f"{memory[name] / 1e9:.2f} GB") for name in ("parameters", "optimizer")]
    rows += [
        ("temporaries", f"{memory['temporaries'] / 1e9:.2f} GB"),
        ("code", f"{memory['code'] / 1e9:.2f} GB"),
        ("total", f"{memory['total'] / 1e9:.2f} GB"),
        ("available", f"{memory['available'] / 1e9:.2f} GB ({found.available_is})"),
    ]
    many = f"{found.devices} x " if found.devices > 1 else ""
    click.echo(f"{found.parameters:,} parameters on {many}{found.device}, memory of one device:")
    print_table(("what", "size"), rows)
    cost = f"{found.tokens_per_step:,} tokens and {found.model_flops_per_step:.3g} model FLOPs"
    click.echo(f"a step: {cost}; compiled in {found.compile_s} s")
    click.echo("it fits" if found.fits else "IT DOES NOT FIT. Try: " + "; ".join(found.advice))
