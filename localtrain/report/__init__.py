"""One page that shows a run: curves, settings, where the time went, samples; opens offline.

Everything on it comes from the run directory, so it can be made while a run goes on, after it was
killed, and from a copy; equal files give an equal page.
"""

from __future__ import annotations

from typing import Any

from localtrain import storage
from localtrain.report.facts import gather
from localtrain.report.page import render

PAGE = "report.html"


def write_report(run: str, out: str | None = None) -> dict[str, Any]:
    """Write the page of a run; returns its facts, with where the page is as `report`.

    run: a run directory, its URL, or the name of one under runs/. out: the file (None: report.html
    in the run directory). Raises DataError when there is no run, StorageError when the page cannot
    be written.
    """
    run_dir = _find(run)
    facts = gather(run_dir)
    path = out or storage.join(run_dir, PAGE)
    storage.write_atomic(path, render(facts).encode("utf-8", "replace"))
    del facts["rows"]
    return {"report": path, **facts}


def _find(run: str) -> str:
    named = storage.join("runs", run)
    return named if not storage.exists(run) and storage.is_dir(named) else run
