"""The facts of a run as HTML: one file, nothing is fetched, every text is escaped."""

from __future__ import annotations

import datetime
import json
import statistics
from importlib import resources
from typing import Any

from jinja2 import Environment

from localtrain.goodput import PARTS, windows
from localtrain.progress import duration, quantity
from localtrain.report.curves import FRAME, Curve, chart, smooth
from localtrain.report.facts import series


def render(facts: dict[str, Any]) -> str:
    """The page. facts: of `gather`."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "t": printable,
        "value": _value,
        "utc": _utc,
        "duration": duration,
        "quantity": quantity,
    }
    source = resources.files("localtrain.report").joinpath("page.html").read_text("utf-8")
    spent = {one["what"]: one for one in facts["time"]["parts"]}
    return environment.from_string(source).render(
        facts,
        charts=charts(facts["rows"]),
        spent=[
            {**spent[key], "key": key, "name": name} for key, name in PARTS.items() if key in spent
        ],
        rate=_median(facts["rows"], "tokens_per_s"),
        mfu=_median(facts["rows"], "mfu"),
        frame=FRAME,
    )


def charts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Title, unit, legend and picture of every chart that has a value."""
    loss = series(rows, "loss")
    mean, span = smooth(loss)
    lines = [Curve("training", loss, "raw" if span > 1 else "smooth")]
    if span > 1:
        lines.append(Curve(f"training, mean of about {span} rows", mean))
    lines.append(Curve("held-out", series(rows, "eval_loss"), "held"))
    time = list(windows(rows))
    waits = [(step, 100 * wait / seconds) for step, seconds, wait in time]
    mfu = [(step, None if y is None else 100 * y) for step, y in series(rows, "mfu")]
    if not any(y is not None for _, y in mfu):
        mfu = []  # no peak is known for this device, so nothing failed
    resumes = sorted({row["step"] for row in rows if row.get("event") == "resume"} - {0})
    found = []
    for title, unit, curves, reach in (
        ("Loss", "nats per token", [line for line in lines if line.points], None),
        ("Learning rate", "", [Curve("learning rate", series(rows, "lr"))], 0),
        ("Gradient norm", "before clipping", [Curve("norm", series(rows, "grad_norm"))], None),
        ("Throughput", "tokens/s", [Curve("tokens/s", series(rows, "tokens_per_s"))], 0),
        ("Waiting for data", "% of the time of the steps", [Curve("wait, %", sorted(waits))], 1),
        ("Model FLOPs utilization", "% of the devices' peak", [Curve("MFU, %", mfu)], 0),
    ):
        lost = sum(y is None for curve in curves for _, y in curve.points if curve.kind != "smooth")
        lost = lost or sum(y is None for _, y in curves[0].points) if curves else 0
        picture = chart(title, curves, resumes, reach)
        if picture or lost:
            legend = curves if len(curves) > 1 else []
            entry = {"title": title, "unit": unit, "legend": legend, "lost": lost}
            found.append({**entry, "svg": picture})
    return found


def printable(text: Any) -> str:
    """A half-trained model may write control characters, which HTML does not have."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in str(text))


def _value(value: Any) -> str:
    """A setting as it stands in a run file."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _utc(seconds: float | None) -> str:
    try:
        at = datetime.datetime.fromtimestamp(seconds or 0, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "-"
    return at.strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else "-"


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [value for _, value in series(rows, key) if value is not None]
    return statistics.median(values) if values else None
