"""`localtrain report`: a run as one page."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, json_option, print_json


@click.command(cls=Command)
@click.argument("run", metavar="RUN")
@click.option("--out", metavar="FILE", help="Where to write; default: report.html in RUN.")
@json_option
def report(run: str, out: str | None, as_json: bool) -> None:
    """Write one HTML page that shows a run.

    RUN is a run directory, its URL, or a name under runs/. Curves, settings, where the time went
    and samples are in one file that needs no network; it works while the run goes on.
    """
    from localtrain.report import write_report

    facts = write_report(run, out)
    if as_json:
        return print_json(facts)
    click.echo(facts["report"])
