"""Whether a run is finished, stopped, broken off or still going on."""

from __future__ import annotations

import os
from typing import Any

from localtrain import storage
from localtrain.lock import LOCK


def state_of(run_dir: str, rows: list[dict[str, Any]], steps: float | None) -> dict[str, Any]:
    """`state` (finished, running, stopped, failed, interrupted or empty), `why` in words, and the
    last `step` that was logged."""
    step = max((row["step"] for row in rows), default=0)
    ending = next((row for row in reversed(rows) if row.get("event") in _BOUNDS), {})
    event = ending.get("event")
    running = _locked(run_dir)
    if running:
        state, why = "running", "a process holds the run directory"
    elif event == "end" and (steps is None or ending["step"] >= steps):
        state, why = "finished", "trained to its last step"
    elif event == "stop":
        state, why = "stopped", f"by {ending.get('reason')}; the same command goes on"
    elif event == "non_finite":
        state, why = "failed", str(ending.get("reason"))
    elif rows:
        state, why = "interrupted", "it left no end; the same command goes on"
        if storage.is_url(run_dir):
            why = "it left no end yet: interrupted, or running elsewhere"
    else:
        state, why = "empty", "nothing was logged yet"
    return {"state": state, "why": why, "step": step}


_BOUNDS = ("start", "resume", "end", "stop", "non_finite")


def _locked(run_dir: str) -> bool:
    """Whether a living process holds the lock of a local directory, where the kernel can tell.

    The lock file's text alone would call a run alive whose number another process has got since.
    """
    if storage.is_url(run_dir):
        return False
    try:
        import fcntl

        descriptor = os.open(storage.join(run_dir, LOCK), os.O_RDONLY)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
