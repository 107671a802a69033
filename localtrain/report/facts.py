"""What a run directory tells, as plain data: every file may be missing, torn or half written.

A time is only given where something recorded it; what was not recorded is called that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from localtrain import storage
from localtrain.config import explain
from localtrain.config.secret import is_secret_key, mask
from localtrain.errors import DataError, LocaltrainError
from localtrain.goodput import goodput, number
from localtrain.metrics import METRICS, read_metrics
from localtrain.report.state import state_of

RUN, MODEL, LOG = "run.yaml", "model.json", "log.txt"
Row = dict[str, Any]
_WARNING = re.compile(r"^(\S+ \S+) (?:WARNING|ERROR|CRITICAL) (.*)$", re.M)
MOST_WARNINGS, MOST_SAMPLES = 50, 24


def gather(run_dir: str) -> dict[str, Any]:
    """All that the page shows; `rows` are those of metrics.jsonl. Raises DataError: no run here."""
    if not any(storage.exists(storage.join(run_dir, name)) for name in (RUN, METRICS)):
        raise DataError(
            f"{run_dir} is not a run directory: it holds neither {RUN} nor {METRICS}. Give the "
            f"directory that `localtrain train` named, such as runs/quickstart."
        )
    problems: list[str] = []
    stored = _read(run_dir, RUN, yaml.safe_load, problems)
    hub = _read(run_dir, MODEL, json.loads, problems)
    rows = [row for row in read_metrics(run_dir) if 0 <= row["step"] < 2**53]
    settings = _settings(stored)
    steps = number(_get(stored, "train", "steps"))
    name = storage.name_of(storage.local_path(run_dir).rstrip("/\\")) or "run"
    starts = [row for row in rows if row.get("event") == "start"]
    return mask(
        {
            "name": str(stored.get("name") or name),
            **state_of(run_dir, rows, steps),
            "steps": int(steps) if steps else None,
            "model": _model(stored, hub, problems),
            "place": {key: starts[-1].get(key) for key in _PLACE} if starts else {},
            "losses": losses(rows),
            "time": goodput(rows),
            "settings": settings,
            "samples": _samples(rows),
            "events": [_event(row) for row in rows if row.get("event") in _EVENTS],
            "warnings": _warnings(run_dir),
            "problems": problems,
            "rows": rows,
        }
    )


_PLACE = ("localtrain", "jax", "python", "platform", "device", "devices", "processes", "system")
_EVENTS = ("start", "resume", "stop", "end", "non_finite")


def series(rows: list[Row], key: str) -> list[tuple[int, float | None]]:
    """(step, value) in order of steps; None where a value is not finite; the last row wins."""
    found = {row["step"]: number(row[key]) for row in rows if key in row and "event" not in row}
    return sorted(found.items())


def losses(rows: list[Row]) -> dict[str, Any]:
    """First, last and best losses in nats, None where there is none; `tokens` seen."""
    train = [pair for pair in series(rows, "loss") if pair[1] is not None]
    held = [pair for pair in series(rows, "eval_loss") if pair[1] is not None]
    best = min(held, key=lambda pair: pair[1], default=(None, None))
    tokens = [value for _, value in series(rows, "tokens") if value is not None]
    return {
        "first": train[0][1] if train else None,
        "last": train[-1][1] if train else None,
        "eval_last": held[-1][1] if held else None,
        "eval_best": best[1],
        "eval_best_step": best[0],
        "tokens": int(tokens[-1]) if tokens else 0,
    }


def _read(run_dir: str, name: str, parse: Any, problems: list[str]) -> dict[str, Any]:
    try:
        found = parse(storage.read_text(storage.join(run_dir, name)))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return {}
    except (ValueError, RecursionError, yaml.YAMLError):
        found = None
    except LocaltrainError as error:
        problems.append(str(error))
        return {}
    if not isinstance(found, dict):
        problems.append(f"{name} is damaged")
        return {}
    return found


def _get(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _settings(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Every stored key with its default; those that differ first."""
    defaults = {row.key: row.default for row in explain()}
    found = []
    for key, value in _flat(stored):
        secret = key not in defaults and is_secret_key(key)
        changed = key not in defaults or value != defaults[key]
        entry = {"key": key, "value": "***" if secret else value, "changed": changed}
        found.append({**entry, "default": defaults.get(key)})
    return sorted(found, key=lambda one: not one["changed"])


def _flat(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _model(stored: dict[str, Any], hub: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    named = _get(stored, "model", "preset"), _get(stored, "model", "init_from")
    facts: dict[str, Any] = {
        "name": str(named[0] or named[1] or _get(stored, "model", "path") or "unknown"),
        "model_type": hub.get("model_type"),
        "parameters": None,
        "layers": None,
    }
    if hub:
        from localtrain.models import spec_from

        try:
            spec = spec_from(hub, MODEL)
        except LocaltrainError as error:
            problems.append(str(error))
        else:
            facts |= {"parameters": spec.parameters(), "layers": len(spec.layers)}
    return facts


def _samples(rows: list[Row]) -> list[dict[str, Any]]:
    """Per prompt its texts by step, the newest first, a few evenly spaced ones of many."""
    by_prompt: dict[str, dict[int, str]] = {}
    for row in rows:
        if row.get("event") == "sample":
            texts = by_prompt.setdefault(str(row.get("prompt") or ""), {})
            texts[row["step"]] = str(row.get("text") or "")
    found = []
    for prompt, texts in by_prompt.items():
        newest_first = sorted(texts.items(), reverse=True)
        every = math.ceil(len(newest_first) / MOST_SAMPLES)
        shown = [{"step": step, "text": text} for step, text in newest_first[::every]]
        found.append({"prompt": prompt, "texts": shown, "left_out": len(texts) - len(shown)})
    return found


def _event(row: Row) -> dict[str, Any]:
    return {
        "event": row["event"],
        "step": row["step"],
        "time": number(row.get("time")),
        "reason": str(row.get("reason") or ""),
    }


def _warnings(run_dir: str) -> list[dict[str, str]]:
    """Warnings and errors of log.txt, the last ones of many."""
    try:
        text = storage.read_bytes(storage.join(run_dir, LOG)).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    found = [{"time": time, "text": said} for time, said in _WARNING.findall(text)]
    return found[-MOST_WARNINGS:]
