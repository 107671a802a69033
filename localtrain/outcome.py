"""How a run ended, by what it left on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from localtrain import processes
from localtrain.metrics import read_metrics
from localtrain.rundir import RunDirectory
from localtrain.samples import sample_rows


@dataclass
class Result:
    """How a run ended. Losses are means over trained tokens, in nats; None when not measured."""

    out: str
    step: int = 0
    start_loss: float | None = None
    end_loss: float | None = None
    eval_loss: float | None = None
    sample: str = ""
    prompt: str = ""  # how the sample starts
    facts: dict[str, Any] = field(default_factory=dict)  # of a dry run


def ended(home: RunDirectory, steps: int) -> bool:
    """Whether the last evaluation and the sample were done too; a stop may have come before."""
    rows = read_metrics(home.path)
    ended = any(row.get("event") == "end" and row["step"] == steps for row in rows)
    return ended or home.step > steps


def newest_intact(home: RunDirectory) -> int:
    """The newest step whose checkpoint looks whole; a damaged one is named and trained again."""
    return home.checkpoints(1).look()


def result_of(home: RunDirectory) -> Result:
    """What the log on disk says about the run so far, this attempt and those before."""
    rows = read_metrics(home.path)
    losses = [row for row in rows if "loss" in row]
    evals = [row for row in rows if "eval_loss" in row]
    samples = sample_rows(rows)
    last = next((row for row in samples if row["step"] == samples[-1]["step"]), None)
    result = Result(
        out=home.name,
        step=losses[-1]["step"] if losses else home.step,
        start_loss=losses[0]["loss"] if losses else None,
        end_loss=losses[-1]["loss"] if losses else None,
        eval_loss=evals[-1]["eval_loss"] if evals else None,
        sample=last["prompt"] + last["text"] if last else "",
        prompt=last["prompt"] if last else "",
    )
    return Result(**processes.agree(asdict(result)))  # the others have not seen it all
