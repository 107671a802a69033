"""Metrics of a run: metrics.jsonl, TensorBoard, and the console.

metrics.jsonl is the record: one JSON object per logged step, flushed as it is written, so that a
kill loses nothing. On resume, rows after the restored step go (they will be computed again) and an
event row marks the place and says what went. TensorBoard gets one event file per attempt; its first
event tells it to purge what earlier attempts logged at the steps to come.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from localtrain import storage
from localtrain.errors import StorageError
from localtrain.eventfile import EventFile
from localtrain.goodput import discarded

log = logging.getLogger(__name__)

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
_NOT_CHARTED = ("step", "time", "event")


class MetricsWriter:
    """Writes one run's metrics; one writer at a time (the lock of the run directory).

    `restored_step` is the step that training goes on from (0: from the start). Call it before the
    first step. Raises StorageError when the disk is full.
    """

    def __init__(self, run_dir: str | os.PathLike, restored_step: int = 0):
        self.path = Path(run_dir) / METRICS
        lost = _rewind(self.path, restored_step)
        resumed = lost is not None or restored_step > 0
        try:
            self._file = open(self.path, "ab")  # noqa: SIM115
            folder = Path(run_dir) / TENSORBOARD
            purge = (restored_step + 1 if restored_step else 0) if resumed else None
            self._events = EventFile(folder, purge_step=purge)
        except OSError as error:
            raise storage.storage_error("write", str(self.path), error) from error
        if resumed:
            self.event("resume", restored_step, **(lost or {}))

    def log(self, row: dict[str, Any]) -> None:
        """Append a row (`step` and any numbers; `time` is added) and chart its numbers.

        Names with "eval" go to the group eval, all others to train. Values may be numpy or jax
        scalars; NaN and infinity, which JSON does not have, are written as null.
        """
        row = {key: plain(value) for key, value in row.items()}
        row.setdefault("time", time.time())
        self._append(row)
        charts = {chart_name(key): value for key, value in row.items() if key not in _NOT_CHARTED}
        numbers = {key: value for key, value in charts.items() if isinstance(value, int | float)}
        self._guard(lambda: self._events.scalars(row["step"], numbers, row["time"]))

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Append an event row: {"event": ..., "step": ...}."""
        self._append({"event": event, "step": step, **facts, "time": time.time()})

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Put a text (Markdown) into TensorBoard: the run's settings, a sample."""
        self._guard(lambda: self._events.text(step, tag, text, time.time()))

    def flush(self) -> None:
        """Push everything to the disk: at each checkpoint and at the end."""

        def push() -> None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._events.flush()

        self._guard(push)

    def close(self) -> None:
        """Flush and close; harmless when closed already."""
        if not self._file.closed:
            self.flush()
            self._file.close()
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"

        def write() -> None:
            self._file.write(line)
            self._file.flush()

        self._guard(write)

    def _guard(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise storage.storage_error("write", str(self.path), error) from error


def read_metrics(run_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl (a path or URL); what is not a row, such as a last line torn by
    a kill, is left out."""
    try:
        raw = storage.read_bytes(storage.join(run_dir, METRICS))
    except FileNotFoundError:
        return []
    return [row for _, row in _parse(raw) if row is not None]


def plain(value: Any) -> Any:
    """numpy and jax scalars as Python numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else value


def chart_name(key: str) -> str:
    """Where TensorBoard shows a metric: "loss" -> train/loss, "eval_loss" -> eval/loss."""
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval") else f"train/{key}"


def _rewind(path: Path, step: int) -> dict[str, Any] | None:
    """Remove rows after `step` and torn lines; what they stood for (`goodput.discarded`), or None
    without rows of an earlier attempt. Of step 0 the rows that say who started when stay."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
    parsed = _parse(raw)
    rows = [(line, row) for line, row in parsed if row is not None]
    kept = [
        (line, row)
        for line, row in rows
        if row["step"] <= step and (step > 0 or row.get("event") in ("start", "resume"))
    ]
    torn = sum(row is None for _, row in parsed[:-1])
    if torn:
        log.warning("%s: %d lines were not valid JSON and are removed", path, torn)
    data = b"".join(line + b"\n" for line, _ in kept)
    if data != raw:
        storage.write_atomic(str(path), data)
    if not parsed:
        return None
    return discarded([row for _, row in rows], [row for _, row in kept], step)


def _parse(raw: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Lines with their rows; None for one that is torn or not a row."""
    rows: list[tuple[bytes, dict[str, Any] | None]] = []
    for line in raw.split(b"\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            valid = isinstance(row, dict) and isinstance(row.get("step"), int)
        except ValueError:
            row, valid = None, False
        rows.append((line, row if valid else None))
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
