"""`localtrain doctor`: what this machine is, and what is missing on it."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, json_option, print_json


@click.command(cls=Command)
@click.option("--backend", metavar="NAME", help="Backend to open; default: the best usable one.")
@json_option
def doctor(backend: str | None, as_json: bool) -> None:
    """What this machine is and has.

    Versions, devices, memory, disk, caches. Uses no network.
    """
    from localtrain.doctor import examine, write_report

    report = examine(backend)
    if as_json:
        return print_json(report)
    click.echo(write_report(report))
