"""Reading checkpoints: which ones can be believed, and what is in them.

Only a step with an intact commit record counts, and every file is checked against it before use.
Any number of readers may look while one writer (localtrain/checkpoint.py) saves; they change
nothing. What lies behind a URL is copied to a local folder first.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from localtrain import arrays, commit, errors, processes, storage
from localtrain.errors import DataError, LocaltrainError, StorageError
from localtrain.shelf import open_shelf

log = logging.getLogger(__name__)

META = "meta.json"
T = TypeVar("T")


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
            return step, self._check_all(step)
        return self._newest(strict, self.shelf.numbered, self._check_all)

    def look(self) -> int:
        """The newest step that looks whole: its record and meta.json are intact and all files have
        their sizes; what is in the others is not read. Raises DataError as `restore` does."""
        return self._newest(False, self.shelf.numbered, self._check_meta)[0]

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
        the default device. Size and crc32c of every file that is used are checked first. A damaged
        newest checkpoint is named in a warning and the one before is used; with `strict`, or a
        given step, it is a DataError. Other arrays than the template's are a DataError that names
        them, but `partial` reads a part of the checkpoint and `cast` converts dtypes.

        All processes of a run call it. Each fetches and checks the parts that its devices hold,
        and what one finds damaged none of them uses.
        """

        def check(step: int) -> tuple[Path, dict]:
            try:
                return _in_all(lambda: self._check_parts(step, template, partial, cast))
            except BaseException:
                self._release(step)
                raise

        if step is None:
            numbered = functools.partial(processes.by_lead, self.shelf.numbered)
            try:
                found, (folder, meta) = self._newest(strict, numbered, check)
            except LocaltrainError as error:
                processes.in_all(error)  # they all found the same
                raise
        else:
            found, (folder, meta) = step, check(step)
        where = self.shelf.where(found)
        try:
            return arrays.read(folder, meta["arrays"], template, where), meta
        except DataError:
            if step is None and processes.count() == 1 and found not in self.shelf.numbered():
                # a writer went on: look again
                return self.restore(None, template, strict, partial, cast)
            raise
        finally:
            self._release(found)

    def _newest(
        self, strict: bool, numbered: Callable[[], list[int]], check: Callable[[int], T]
    ) -> tuple[int, T]:
        """The newest step that passes a check, and what the check gave. The damaged are named."""
        strict |= self.strict
        tried: set[int] = set()
        problems: list[str] = []
        while left := [step for step in numbered() if step not in tried]:
            candidate = left[-1]
            tried.add(candidate)
            try:
                found = check(candidate)
            except (commit.Damaged, commit.Uncommitted) as error:
                self._release(candidate)
                if candidate not in numbered():  # deleted by a writer meanwhile
                    continue
                if strict and isinstance(error, commit.Damaged):
                    raise
                problems.append(str(error))
                self._damaged.add(candidate)
                continue
            if problems:
                log.warning("%s Falling back to step %d.", " ".join(problems), candidate)
            return candidate, found
        if problems:
            raise _all_damaged(self.folder, problems)
        raise DataError(f"There is no checkpoint in {self.folder}.")

    def local(self, step: int) -> Path:
        """The local folder with the files of a step, verified: a copy, if they are behind a URL,
        which lives as long as this reader."""
        if step not in self._local:
            self._check_all(step)
        return self._local[step]

    def _release(self, step: int) -> None:
        self._local.pop(step, None)
        self.shelf.release(step)

    def _record(self, step: int, sizes: bool = True) -> dict[str, Any]:
        """What a step holds. sizes: look for all of it, too."""
        if sizes and step not in self.shelf.numbered():
            have = ", ".join(map(str, self.steps())) or "none"
            raise commit.Uncommitted(
                f"There is no checkpoint of step {step} in {self.folder}: {have}."
            )
        record = self.shelf.record(step, sizes)
        if record.get("step") != step:
            where = self.shelf.where(step)
            raise commit.Damaged(f"{where} holds step {record.get('step')}: it was renamed.")
        return commit.without(record, self._without) if self._without else record

    def _check_all(self, step: int) -> dict[str, Any]:
        """Fetch and check all files; returns meta."""
        folder = self.shelf.fetch(step, self._record(step))
        self._local[step] = folder
        return self._read_meta(step, folder)

    def _check_meta(self, step: int) -> None:
        record = self._record(step)
        try:
            folder = self.shelf.fetch(step, commit.only(record, lambda name: name == META))
            self._read_meta(step, folder)
        finally:
            self._release(step)

    def _check_parts(
        self, step: int, template: Any, partial: bool, cast: bool
    ) -> tuple[Path, dict[str, Any]]:
        """Fetch and check what this process needs of the arrays in a template, after a comparison
        with what there is; returns the local folder and meta."""
        try:
            record = self._record(step, sizes=processes.lead())  # one of all looks at every file
        except commit.Uncommitted as error:
            if processes.lead():
                raise
            raise StorageError(  # told only when the lead sees it
                f"{self.shelf.where(step)} is a checkpoint for process 0, but process "
                f"{processes.index()} finds no {commit.COMMIT} in it: the folder must be the same "
                f"on all hosts."
            ) from error
        describing = arrays.describing(template)
        first = commit.only(record, lambda file: file == META or describing(file))
        folder = self.shelf.fetch(step, first)
        meta = self._read_meta(step, folder)
        contents = meta["arrays"]
        arrays.compare(contents, template, self.shelf.where(step), partial=partial, cast=cast)
        needed = arrays.needs(folder, contents, template)
        rest = commit.only(
            record, lambda file: needed(file) and not (file == META or describing(file))
        )
        return self.shelf.fetch(step, rest), meta

    def _read_meta(self, step: int, folder: Path) -> dict[str, Any]:
        shown = storage.join(self.shelf.where(step), META)
        try:
            meta = json.loads((folder / META).read_bytes())
            found = {name: (dtype, tuple(shape)) for name, (dtype, shape) in meta["arrays"].items()}
        except OSError as error:
            raise commit.unreadable(shown, error) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise commit.Damaged(f"{shown} is not what localtrain writes.") from error
        return {**meta, "arrays": found}


def _in_all(action: Callable[[], T]) -> T:
    """What `action` gives in each process; what it raises in the first of them is raised in all."""
    if processes.count() == 1:
        return action()
    value, told = None, None
    try:
        value = action()
    except LocaltrainError as error:
        kind = type(error).__name__
        told = {"kind": kind if hasattr(commit, kind) else processes.kind_of(error)}
        told["message"] = str(error)
    said = processes.gather(told, "restore")
    first = processes.agree(next((one for one in said if one), None))
    if first:
        kind = getattr(commit, first["kind"], None) or getattr(errors, first["kind"])
        raise processes.in_all(kind(first["message"]))
    return value


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
