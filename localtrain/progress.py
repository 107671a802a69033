"""The console: aligned lines in a log, one live line on a terminal.

Everything goes to stderr; results belong to stdout. Plain lines also reach log.txt, because they
are log records. Columns keep their width so that a long run can be read by eye.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Progress:
    """Shows the rows that `MetricsWriter.log` gets; use as a context manager.

    `steps`: the last step of the run. `tty`: force the live line on or off (None: look at stderr).
    """

    def __init__(self, steps: int, tty: bool | None = None):
        self.steps = steps
        self._live: Any = None
        self._bar: Any = None
        self._tty = sys.stderr.isatty() if tty is None else tty
        self._last: tuple[int, float] | None = None
        self._pace: float | None = None  # seconds per step, smoothed

    def __enter__(self) -> Progress:
        if self._tty:
            self._start_live()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was; harmless when closed already."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: dict[str, Any]) -> None:
        """Show a training row (`loss`, `lr`, `tokens_per_s`, ...) or an evaluation row."""
        step = int(row["step"])
        if "eval_loss" in row:
            log.info("%s", eval_line(row, self.steps))
            return
        line = train_line(row, self.steps, self._eta(step))
        log.info("%s", line, extra={"console": self._live is None})  # log.txt gets every line
        if self._live is not None:
            self._bar.update(self._task, completed=step, text=line.split("  ", 1)[1])

    def _eta(self, step: int) -> float | None:
        """Seconds left, from a smoothed pace that includes evaluations and saves."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            pace = (now - self._last[1]) / (step - self._last[0])
            self._pace = pace if self._pace is None else 0.7 * self._pace + 0.3 * pace
        self._last = (step, now)
        return None if self._pace is None else self._pace * (self.steps - step)

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(20),
            TextColumn("{task.fields[text]}"),
            console=console,
            expand=False,
        )
        self._task = self._bar.add_task("", total=self.steps, text="compiling")
        self._live = Live(self._bar, console=console, refresh_per_second=4, transient=True)
        self._live.start()


def show_stages(every_s: float = 2.0) -> Callable[[str, int, int | None], None]:
    """Shows how far a long stage is, given (stage, done, total in bytes or None), on stderr.

    One line in two seconds at most; on a terminal one line that is rewritten.
    """
    last = time.monotonic()
    live = sys.stderr.isatty()

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < (0.1 if live else every_s):
            return
        last = now
        share = f" {done / total:4.0%} of {total / 1e6:,.1f} MB" if total else ""
        line = f"\r\x1b[K{stage}{share}" if live else f"{stage}{share}\n"
        print(line, end="", file=sys.stderr, flush=True)

    return report


def train_line(row: dict[str, Any], steps: int, eta: float | None = None) -> str:
    """One aligned line of a training row; absent columns are left out."""
    parts = [_step(row["step"], steps), f"loss {_number(row.get('loss'), '8.4f')}"]
    if row.get("grad_norm") is not None:
        parts.append(f"norm {_number(row['grad_norm'], '7.3f')}")
    if row.get("lr") is not None:
        parts.append(f"lr {row['lr']:.2e}")
    if row.get("tokens_per_s") is not None:
        parts.append(f"{quantity(row['tokens_per_s']):>6} tok/s")
    if row.get("mfu") is not None:
        parts.append(f"mfu {100 * row['mfu']:4.1f}%")
    elif row.get("flops_per_s") is not None:
        parts.append(f"{quantity(row['flops_per_s']):>6}FLOP/s")
    if row.get("step_time_s") is not None:
        parts.append(f"{duration(row['step_time_s']):>7}/step")
    if row.get("data_wait_s") is not None:
        parts.append(f"wait {duration(row['data_wait_s']):>6}")
    if eta is not None:
        parts.append(f"eta {duration(eta):>7}")
    return "  ".join(parts)


def eval_line(row: dict[str, Any], steps: int) -> str:
    """One line of an evaluation row."""
    loss = row["eval_loss"]
    parts = [_step(row["step"], steps), f"eval loss {_number(loss, '.4f')}"]
    if loss is not None and loss < 50:
        parts.append(f"perplexity {math.exp(loss):.2f}")
    if row.get("eval_tokens") is not None:
        parts.append(f"on {quantity(row['eval_tokens'])} tokens")
    return "  ".join(parts)


def quantity(value: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """For humans: 3ms, 1.25s, 4m05s, 2h13m, 3d04h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    minutes = round(seconds / 60)
    if seconds < 3599.5:
        return f"{round(seconds) // 60}m{round(seconds) % 60:02d}s"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _step(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def _number(value: float | None, spec: str) -> str:
    return "nan" if value is None else format(value, spec)
