"""One run directory and the same data for all processes of a run."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from localtrain import processes, storage
from localtrain.errors import DataError, StorageError
from localtrain.lease import LEASE
from localtrain.lock import LOCK
from localtrain.rundir import RunDirectory
from localtrain.stage import Stage

_SEEN_S = 60.0  # NFS shows other hosts a new file, and what is in it, after up to acdirmax: 60 s


def open_together(out: str | None, run: Any, override: bool = False) -> RunDirectory:
    """`RunDirectory.open` in a run of several processes: the lead decides, holds and writes it.

    The others get what was decided, and a folder of their own that goes away with them, so that
    nothing else has to know who may write. Raises in all what is raised in the lead.
    """
    opened: list[RunDirectory] = []

    def decide() -> dict[str, Any]:
        home = RunDirectory.open(out, run, override)
        opened.append(home)
        name = home.name if storage.is_url(home.name) else os.path.abspath(home.name)
        return {
            "name": name,
            "step": home.step,
            "finished": home.finished,
            "resumed": home.resumed,
            "token": home.token,
        }

    decided = processes.by_lead(decide)
    if opened:
        return opened[0]
    _check_same(decided["name"], decided["token"])
    stage = Stage()
    return RunDirectory(path=stage.path, _stage=stage, **decided)


def _check_same(name: str, token: str) -> None:
    """Checkpoints are written by all processes: StorageError where this one sees another folder."""
    owner = storage.join(name, LEASE if storage.is_url(name) else LOCK)
    end = time.monotonic() + _SEEN_S
    while not (same := _token(owner) == token) and time.monotonic() < end:
        time.sleep(0.5)
    if not same:
        raise StorageError(
            f"{name}: process {processes.index()} on {socket.gethostname()} does not see the run "
            f"directory that process 0 opened. In a run of several processes --out has to be on a "
            f"file system that all hosts share, or a URL."
        )


def _token(owner: str) -> str | None:
    """What the owner's file says; None where there is none, or nothing in it."""
    try:
        found = json.loads(storage.read_bytes(owner))
    except (FileNotFoundError, ValueError):
        return None
    return found.get("token") if isinstance(found, dict) else None


def same_data(corpus: Any) -> None:
    """DataError where this process has other data (a `data.Corpus`) than the lead: rows would be
    read twice, and others never."""
    if corpus.index_hash != processes.agree(corpus.index_hash):
        raise DataError(
            f"process {processes.index()} on {socket.gethostname()} has other data than process "
            f"0: the files of data.sources, or what data.cache holds of them, differ between the "
            f"hosts. Give all of them the same files, best on a file system that they share."
        )
