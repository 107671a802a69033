"""`localtrain plan`: does a run fit, without running it."""

from __future__ import annotations

import math
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
        size = float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2]]
        if not (math.isfinite(size) and size >= 1):
            self.fail(f"'{str(value)[:40]}' is not a number of bytes that a device has", param, ctx)
        return int(size)


class Minutes(click.FloatRange):
    """A time that ends."""

    def convert(self, value, param, ctx) -> float:
        minutes = float(super().convert(value, param, ctx))
        if not math.isfinite(minutes):
            self.fail(f"{value} is not a number of minutes such as 10", param, ctx)
        return minutes


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--device", metavar="NAME", help="A card to compile for, such as rtx-3060-12gb.")
@click.option("--topology", metavar="NAME", help="A slice to compile for, such as v5e:4x4.")
@click.option("--slices", type=click.IntRange(min=1), default=1, help="Slices of that topology.")
@click.option("--memory", type=Size(), metavar="SIZE", help="What a device may use, as 8GB.")
@click.option("--tune", is_flag=True, help="Look for the fastest setting that fits.")
@click.option(
    "--minutes",
    type=Minutes(min=0),
    default=10.0,
    show_default=True,
    help="How long to look (a begun compile is finished), also if it does not fit. 0: not at all.",
)
@backend_options
@json_option
def plan(
    run: str,
    overrides: tuple[str, ...],
    device: str | None,
    topology: str | None,
    slices: int,
    memory: int | None,
    tune: bool,
    minutes: float,
    backend: str | None,
    devices: int | None,
    as_json: bool,
) -> None:
    """Say whether a run fits and how long a step takes, from the compiler of a device not here.

    Compiles the train step (half a minute to two for most models) and trains nothing. Without
    --device and --topology it is compiled for this machine. For a TPU or GPU that is not here: pip
    install 'localtrain[tpu]' or 'localtrain[plan-gpu]'.
    """
    from localtrain.config import load_run
    from localtrain.runtime import StopSignal

    loaded = load_run(run, overrides)
    # The compiler's own remarks about memory say less than the table below; errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    with StopSignal.install() as stop:  # at once, though a compile may take minutes
        stop.nothing_to_save(True)
        from localtrain.plan import plan as make_plan

        found = make_plan(
            loaded,
            backend,
            device=device,
            topology=topology,
            slices=slices,
            devices=devices,
            memory=memory,
            tune=tune,
            minutes=minutes,
            progress=lambda line: click.echo(line, err=True),
        )
    print_json(found.to_dict()) if as_json else _show(found)


def _show(found: Plan) -> None:
    memory = found.memory_per_device
    many = f"{found.devices} devices of " if found.devices > 1 else ""
    slices = f"{found.slices} x " if found.slices > 1 else ""
    axes = " x ".join(f"{axis} {n}" for axis, n in found.mesh.items() if n > 1)
    mesh = f" ({axes})" if axes else ""
    click.echo(f"{found.parameters:,} parameters on {many}{slices}{found.device}{mesh}")
    click.echo("memory of one device:")
    names = ("parameters", "optimizer", "temporaries", "code", "total")
    rows = [(name, f"{memory[name] / 1e9:.2f} GB") for name in names]
    rows.append(("available", f"{memory['available'] / 1e9:.2f} GB ({found.available_is})"))
    print_table(("what", "size"), rows)
    for line in _work(found):
        click.echo(line)
    click.echo(f"compiled in {found.compile_s} s")
    if found.fits:
        share = 100 * memory["total"] / memory["available"]
        click.echo(f"it fits: {share:.0f}% of the memory")
    else:
        click.echo("IT DOES NOT FIT. What lowers the need: " + "; ".join(found.advice))
    if found.suggestion is not None:
        click.echo("the fastest setting found that fits, as lines of the run file:")
        click.echo(found.suggestion)


def _work(found: Plan) -> list[str]:
    """What a step does and how long it takes at best."""
    lines = [
        f"a step: {found.tokens_per_step:,} tokens, {found.model_flops_per_step:.3g} model FLOPs"
    ]
    if found.flops_per_step is not None:
        lines[0] += (
            f", {found.flops_per_step:.3g} as compiled (all devices, recomputation included)"
        )
        calls = found.kernels["custom_calls"]
        named = ", ".join(f"{name} x {count}" for name, count in calls.items())
        lines.append(
            f"attention: {found.kernels['attention']}" + (f"; kernels: {named}" * bool(calls))
        )
    sent = [
        f"{kind} {row['count']} x, {row['bytes'] / 1e9:.3g} GB"
        for kind, row in found.collectives.items()
    ]
    if sent:
        lines.append("exchanged by one device: " + "; ".join(sent))
    if found.step_time_s is not None:
        days = f"{found.tokens_per_day / 1e9:.3g} billion tokens a day, MFU {100 * found.mfu:.0f}%"
        lines += [f"at best {found.step_time_s:.3g} s a step, {days}:", f"  {found.how}"]
    else:
        lines.append(f"step time and MFU: {found.how}")
    return lines
