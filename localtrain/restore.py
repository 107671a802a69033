"""Reading checkpoints: which ones can be believed, and what is in them.

Only a folder with an intact commit record counts, and every file is checked against it before use.
Any number of readers may look while one writer (localtrain/checkpoint.py) saves; they change
nothing.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from localtrain import arrays, commit, storage
from localtrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

META = "meta.json"


class CheckpointReader:
    """A folder with one sub-folder per saved step, for reading."""

    def __init__(self, folder: str | os.PathLike):
        if storage.is_url(folder):
            raise ConfigError(f"Checkpoints at a URL are not supported yet: {folder}.")
        self.folder = Path(os.path.abspath(storage.local_path(folder)))
        self._damaged: set[int] = set()  # found so while reading: to be saved again

    def steps(self) -> list[int]:
        """Committed steps in rising order: an intact commit.json and every listed file there."""
        found = []
        for step in self._numbered():
            try:
                commit.read_commit(self.folder / str(step))
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
        for step in self._numbered():
            folder = self.folder / str(step)
            try:
                commit.read_commit(folder)
            except DataError as error:
                if any(folder.iterdir()):
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
        problems = []
        for candidate in reversed(self._numbered()):
            try:
                meta = self._checked_meta(candidate)
            except DataError as error:
                if not (self.folder / str(candidate)).exists():  # deleted by a writer meanwhile
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
        found, meta = self.read_meta(step, strict)
        folder = self.folder / str(found)
        arrays.compare(meta["arrays"], template, folder, partial=partial, cast=cast)
        try:
            return arrays.read(folder, meta["arrays"], template), meta
        except DataError:
            if step is None and not folder.exists():  # a writer went on and deleted it: look again
                return self.restore(None, template, strict, partial, cast)
            raise

    def _checked_meta(self, step: int) -> dict[str, Any]:
        folder = self.folder / str(step)
        if not folder.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise DataError(f"There is no checkpoint of step {step} in {self.folder}: {have}.")
        record = commit.read_commit(folder)
        commit.verify(folder, record)
        if record.get("step") != step:
            raise commit.Damaged(f"{folder} holds step {record.get('step')}: it was renamed.")
        try:
            meta = json.loads((folder / META).read_bytes())
            found = {name: (dtype, tuple(shape)) for name, (dtype, shape) in meta["arrays"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise commit.Damaged(f"{folder / META} is not what localtrain writes.") from error
        return {**meta, "arrays": found}

    def _numbered(self) -> list[int]:
        """Steps with a folder of that name, committed or not, in rising order."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,17}", name))


def find_checkpoint(path: str | os.PathLike) -> tuple[CheckpointReader, int | None]:
    """Understand a run directory, its `checkpoints` folder, or the folder of one step.

    Returns the checkpoints and the step that was meant (None: the newest). Raises DataError.
    """
    folder = Path(os.path.abspath(storage.local_path(path)))
    if (folder / commit.COMMIT).is_file() and folder.name.isdigit():
        return CheckpointReader(folder.parent), int(folder.name)
    for candidate in (folder / "checkpoints", folder):
        found = CheckpointReader(candidate)
        if found._numbered():
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


def _all_damaged(folder: Path, problems: list[str]) -> DataError:
    return DataError(
        f"No checkpoint in {folder} can be used. {' '.join(problems)} "
        f"Restore the files from a copy, or start over in another directory (--out)."
    )
