"""One save by several processes: what fails in one fails in all, so that all try it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localtrain import errors, processes
from localtrain.errors import LocaltrainError, StorageError


class Refused(Exception):
    """The guard forbids to write: `reason`."""

    def __init__(self, reason: LocaltrainError):
        super().__init__(str(reason))
        self.reason = reason


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """What `action` gave or raised, as JSON."""
    try:
        return {"value": action()}
    except Refused as refused:
        return {"refused": processes.kind_of(refused.reason), "error": str(refused)}
    except Exception as error:  # whatever it was, all must hear of it
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def in_all(action: Callable[[], Any], name: str) -> Any:
    """The value of `action`, which the lead calls; its failure in all."""
    found = processes.agree(outcome(action) if processes.lead() else None, name)
    if "refused" in found:
        raise Refused(getattr(errors, found["refused"])(found["error"]))
    if "error" in found:
        raise StorageError(found["error"])
    return found["value"]


def all_files(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The files of all processes; StorageError naming the processes that failed."""
    failed = [f"process {i}: {part['error']}" for i, part in enumerate(parts) if "error" in part]
    if failed:
        raise StorageError("; ".join(failed))
    return {name: entry for part in parts for name, entry in part["value"].items()}


def first_line(error: BaseException) -> str:
    """The start of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
