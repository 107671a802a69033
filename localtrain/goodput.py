"""Goodput: which share of a run's wall time went into training steps that counted, and what took
the rest, over every attempt from the first start to the last row.

Everything is read from metrics.jsonl. An attempt leaves a `start` row (when it began, what its
start took), rows of steps, and rows of what came between them. A resume removes the rows after the
restored step; what they stood for is kept in the `resume` row as `lost_steps` and `lost_s`. The
word is that of "Introducing ML Productivity Goodput" (Google Cloud blog, 2024).

An attempt is known up to its last row: what a kill cut off after it (fewer than train.log_every
steps), and attempts that were killed before their first step, count as idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PARTS = {  # in the order of a bar; the names of the times of a `start` row are <part>_s
    "steps": "training steps",
    "wait": "waiting for data",
    "eval": "evaluation",
    "sample": "sample texts",
    "save": "saving (steps held up)",
    "lost": "steps that were repeated after a stop",
    "import": "starting Python, imports",
    "init": "devices, run directory",
    "data": "preparing data",
    "compile": "compiling",
    "restore": "restoring or initializing",
    "other": "not recorded",
    "idle": "between attempts",
}
START = ("import", "init", "data", "compile", "restore")


@dataclass
class _Account:
    """Seconds by part; `clock`: up to when the run is known; `carry`: of steps without a row."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    began: float | None = None
    clock: float | None = None
    carry: tuple[float, float] = (0.0, 0.0)
    attempts: int = 0
    lost_steps: int = 0

    def add(self, part: str, seconds: Any) -> None:
        self.spent[part] += max(0.0, number(seconds) or 0.0)

    def until(self, moment: float | None) -> None:
        if moment is not None:
            self.clock = max(moment, self.clock or moment)

    def settle(self) -> None:
        """The attempt is over: steps that a checkpoint kept although no row came after."""
        self.add("steps", self.carry[0] - self.carry[1])
        self.add("wait", self.carry[1])
        self.carry = (0.0, 0.0)

    @property
    def wall(self) -> float:
        return self.clock - self.began if self.clock and self.began is not None else 0.0


def goodput(rows: Iterable[Row]) -> dict[str, Any]:
    """What a run's time went into. rows: of metrics.jsonl.

    `goodput`: share of the wall time in kept training steps (None: no time was recorded), and
    `goodput_running`: of the time in which an attempt ran. `wall_s`, `attempts`, `lost_steps`.
    `parts`: what, seconds, share, without those below a millisecond; they add up to `wall_s`.
    """
    found = _account(list(rows))
    spent, known = found.spent, sum(found.spent.values())
    spent["other"] = max(0.0, found.wall - known)
    whole = known + spent["other"]
    running = whole - spent["idle"]
    return {
        "goodput": spent["steps"] / whole if found.attempts and whole else None,
        "goodput_running": spent["steps"] / running if found.attempts and running else None,
        "wall_s": round(whole, 3),
        "attempts": found.attempts,
        "lost_steps": found.lost_steps,
        "parts": [
            {"what": what, "seconds": round(seconds, 3), "share": seconds / whole}
            for what, seconds in spent.items()
            if round(seconds, 3) > 0
        ],
    }


def discarded(rows: list[Row], kept: list[Row], restored: int) -> dict[str, Any]:
    """What a resume at step `restored` throws away, for its row: `lost_steps`, `lost_s`, and
    `idle_s` when attempts lay between."""
    beyond = max((row["step"] - restored for row in rows), default=0)
    before, after = _account(rows), _account(kept)
    lost = max(0, beyond) + before.lost_steps - after.lost_steps
    found: dict[str, Any] = {"lost_steps": lost}
    if before.clock is not None and after.clock is not None:
        idle = before.spent["idle"] - after.spent["idle"]
        found["lost_s"] = round(max(0.0, before.clock - after.clock - idle), 3)
        if idle > 0:
            found["idle_s"] = round(idle, 3)
    return found


def describe(found: dict[str, Any], most: int = 4) -> str | None:
    """One line of what `goodput` found; None where no time was recorded."""
    if found["goodput"] is None:
        return None
    rest = [one for one in found["parts"] if one["what"] != "steps"]
    rest = sorted(rest, key=lambda one: -one["seconds"])[:most]
    told = ", ".join(f"{PARTS[one['what']]} {one['share']:.1%}" for one in rest)
    line = f"goodput {found['goodput']:.1%} of {found['wall_s']:,.1f} s went into training steps"
    if found["attempts"] > 1:
        line += f" ({found['attempts']} attempts, {found['lost_steps']:,} steps repeated)"
    return f"{line}; {told}" if told else line


def process_start() -> float:
    """time.time() at the start of this process; now, where the system does not tell (not Linux)."""
    try:
        after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.time() - max(0.0, age)


def number(value: Any) -> float | None:
    """A finite number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None  # NaN too: it is less than nothing
    return float(value)


def windows(rows: Iterable[Row]) -> Iterator[tuple[int, float, float]]:
    """(step, seconds, seconds of it waiting for data) of each logged row, over the steps since the
    row before it or since the resume."""
    before = 0
    for row in rows:
        if row.get("event") in ("resume", "start"):
            before = row["step"]
        elif "loss" in row:
            rate, tokens = number(row.get("tokens_per_s")), number(row.get("tokens"))
            steps, before = row["step"] - before, row["step"]
            if rate and tokens and steps > 0 and rate > 0:
                seconds = steps * tokens / row["step"] / rate
                yield row["step"], seconds, min(number(row.get("data_wait_s")) or 0.0, seconds)


def _account(rows: list[Row]) -> _Account:
    found = _Account()
    for row in rows:
        event = row.get("event")
        if event == "resume":
            found.settle()
            lost, idle = (number(row.get(key)) or 0.0 for key in ("lost_s", "idle_s"))
            found.add("lost", lost)
            found.add("idle", idle)
            found.lost_steps += int(number(row.get("lost_steps")) or 0)
            if found.clock is not None:  # its own time is that of the attempt which starts now
                found.clock += lost + idle
            continue
        if event == "start":
            _begin(found, row)
        elif event in ("eval", "sample"):
            found.add(event, row.get("seconds"))
        elif event == "save":
            found.add(event, row.get("save_block_s", row.get("seconds")))  # its older name
            steps, wait = (number(row.get(key)) or 0.0 for key in ("steps_s", "wait_s"))
            found.carry = (steps, min(steps, wait))
        elif "loss" in row:
            found.carry = (0.0, 0.0)
        found.until(number(row.get("time")))
    found.settle()
    for _, seconds, wait in windows(rows):
        found.add("steps", seconds - wait)
        found.add("wait", wait)
    return found


def _begin(found: _Account, row: Row) -> None:
    """Another attempt: its start, and the time since the one before."""
    began = number(row.get("began"))
    found.attempts += 1
    for part in START:
        found.add(part, row.get(f"{part}_s"))
    if began is None:
        return
    if found.began is None:
        found.began = began
    elif found.clock is not None:
        found.add("idle", began - found.clock)
    found.until(began)
