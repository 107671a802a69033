"""Reading checkpoints: which ones can be believed, and what is in them.

Only a step with an intact commit record counts, and every file is checked against it before use.
Any number of readers may look while one writer (localtrain/checkpoint.py) saves; they change
nothing. What lies behind a URL is copied to a local folder first.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from localtrain import arrays, commit, processes, storage
from localtrain.errors import DataError
from localtrain.shelf import open_shelf

log = logging.getLogger(__name__)

META = "meta.json"


class CheckpointReader:
    """A folder or URL with one sub-folder per saved step, for reading.

    `without`: a part of the state ("opt") whose files are neither checked nor fetched.
    `strict`: a damaged newest checkpoint is always an error, as with the argument of that name.
    """

    strict = False

    def __init__(self, folder: str | os.PathLike, without: str | None = None):
        self.shelf = open_shelf(folder)
        self._without = without
        self.folder: Path | str = self.shelf.folder
        self._local: dict[int, Path] = {}  # verified
        self._damaged: set[int] = set()  # found so while reading: to be saved again

    def steps(self) -> list[int]:
        """Committed steps in rising order: an intact commit.json and every listed file there."""
        found = []
        for step in self.shelf.numbered():
            try:
                self.shelf.record(step)
            except DataError:
                continue
            found.append(step)
        return found

    def latest(self) -> int | None:
        """The newest committed step; None when there is no checkpoint at all.

        Raises DataError when there are checkpoints but not one can be believed: starting over
        without a word would be the worst answer.
        """
        steps = self.steps()
        if steps:
            return steps[-1]
        problems = []
        for step in self.shelf.numbered():
            try:
                self.shelf.record(step)
            except DataError as error:
                if self.shelf.holds(step):
                    problems.append(str(error))
        if problems:
            raise _all_damaged(self.folder, problems)
        return None

    def read_meta(self, step: int | None = None, strict: bool = False) -> tuple[int, dict]:
        """(step, meta) of the newest checkpoint that is intact, or of `step`; all files checked.

        Raises DataError as `restore` does.
        """
        if step is not None:
            return step, self._checked_meta(step)
        strict |= self.strict
        problems = []
        for candidate in reversed(self.shelf.numbered()):
            try:
                meta = self._checked_meta(candidate)
            except DataError as error:
                if candidate not in self.shelf.numbered():  # deleted by a writer meanwhile
                    return self.read_meta(None, strict)
                if strict and not isinstance(error, commit.Uncommitted):
                    raise
                problems.append(str(error))
                self._damaged.add(candidate)
                continue
            if problems:
                log.warning("%s Falling back to step %d.", " ".join(problems), candidate)
            return candidate, meta
        if problems:
            raise _all_damaged(self.folder, problems)
        raise DataError(f"There is no checkpoint in {self.folder}.")

    def restore(
        self,
        step: int | None,
        template: Any,
        strict: bool = False,
        partial: bool = False,
        cast: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Read the state of `step` (None: the newest) onto `template`; returns (state, meta).

        template: pytree of jax.ShapeDtypeStruct or arrays; a sharding on a leaf is used, else
        the default device. Size and crc32c of every file are checked first. A damaged newest
        checkpoint is named in a warning and the one before is used; with `strict`, or a given
        step, it is a DataError. Other arrays than the template's are a DataError that names
        them, but `partial` reads a part of the checkpoint and `cast` converts dtypes.
        """
        found, meta = self._choose(step, strict)
        where = self.shelf.where(found)
        arrays.compare(meta["arrays"], template, where, partial=partial, cast=cast)
        try:
            return arrays.read(self.local(found), meta["arrays"], template, where), meta
        except DataError:
            if step is None and found not in self.shelf.numbered():  # a writer went on: look again
                return self.restore(None, template, strict, partial, cast)
            raise
        finally:
            self._local.pop(found, None)
            self.shelf.release(found)

    def _choose(self, step: int | None, strict: bool) -> tuple[int, dict]:
        """`read_meta`, by the lead of a run of several processes; the others read what it chose."""
        chosen: list[tuple[int, dict]] = []

        def choose() -> int:
            chosen.append(self.read_meta(step, strict))
            return chosen[0][0]

        found = processes.by_lead(choose)
        return chosen[0] if chosen else self.read_meta(found)

    def local(self, step: int) -> Path:
        """The local folder with the files of a step, verified: a copy, if they are behind a URL,
        which lives as long as this reader."""
        if step not in self._local:
            self._checked_meta(step)
        return self._local[step]

    def _checked_meta(self, step: int) -> dict[str, Any]:
        where = self.shelf.where(step)
        if step not in self.shelf.numbered():
            have = ", ".join(map(str, self.steps())) or "none"
            raise DataError(f"There is no checkpoint of step {step} in {self.folder}: {have}.")
        record = self.shelf.record(step)
        if self._without:
            record = commit.without(record, self._without)
        folder = self._local[step] = self.shelf.fetch(step, record)
        if record.get("step") != step:
            raise commit.Damaged(f"{where} holds step {record.get('step')}: it was renamed.")
        try:
            meta = json.loads((folder / META).read_bytes())
            found = {name: (dtype, tuple(shape)) for name, (dtype, shape) in meta["arrays"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            shown = storage.join(where, META)
            raise commit.Damaged(f"{shown} is not what localtrain writes.") from error
        return {**meta, "arrays": found}


def find_checkpoint(path: str | os.PathLike) -> tuple[CheckpointReader, int | None]:
    """Understand a run directory, its `checkpoints` folder, or the folder of one step.

    Returns the checkpoints, without the optimizer's part, and the step that was meant (None: the
    newest). Raises DataError.
    """
    folder = os.fspath(path).rstrip("/")
    if not storage.is_url(folder):
        folder = os.path.abspath(storage.local_path(path))
    if storage.name_of(folder).isdigit() and storage.exists(storage.join(folder, commit.COMMIT)):
        parent = storage.parent_of(folder)
        return CheckpointReader(parent, without="opt"), int(storage.name_of(folder))
    for candidate in (storage.join(folder, "checkpoints"), folder):
        found = CheckpointReader(candidate, without="opt")
        if found.shelf.numbered():
            return found, None
    raise DataError(f"{folder} holds no checkpoint: give a run directory or a checkpoint folder.")


def restore_params(
    path: str | os.PathLike, template: Any, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Read only `params` of a run's newest checkpoint (or of `step`), cast to the template.

    template: the tree of parameters. Returns (params, meta). Raises DataError as `restore`.
    """
    found, named = find_checkpoint(path)
    want = {"params": template}
    state, meta = found.restore(named if step is None else step, want, partial=True, cast=True)
    return state["params"], meta


def _all_damaged(folder: Path | str, problems: list[str]) -> DataError:
    return DataError(
        f"No checkpoint in {folder} can be used. {' '.join(problems)} "
        f"Restore the files from a copy, or start over in another directory (--out)."
    )
