"""`localtrain backends` and `localtrain config`: what there is to choose from."""

from __future__ import annotations

import click

from localtrain.cli.frame import Command, json_option, print_json, print_table


@click.command(cls=Command)
@json_option
def backends(as_json: bool) -> None:
    """Places to train; which are usable here."""
    from localtrain.backend import survey

    rows = survey()
    if as_json:
        return print_json(rows)
    print_table(
        ("backend", "usable", "what"),
        [(row["name"], row["usable"], row["summary"]) for row in rows],
    )
    for row in rows:
        if row["reason"]:
            click.echo(f"\n{row['name']}: {row['reason']}")


@click.command(cls=Command)
@click.argument("section", required=False)
@click.option("--markdown", is_flag=True, help="Print docs/config.md.")
@json_option
def config(section: str | None, markdown: bool, as_json: bool) -> None:
    """Every key of a run file.

    SECTION: one section such as optim, or one key such as optim.lr.
    """
    from localtrain.config import explain
    from localtrain.config.explain import to_markdown, write_default

    rows = explain(section)
    if as_json:
        return print_json([row._asdict() for row in rows])
    if markdown:
        return click.echo(to_markdown(), nl=False)
    print_table(
        ("key", "type", "default", "meaning"),
        [(row.key, row.type, write_default(row.default), row.meaning) for row in rows],
    )
