"""The run directory: which one, new or resumed, and who may write it.

Without --out it is runs/<name>. A directory that holds the same run is resumed; one that holds a
run which differs in a way that matters is left alone: the next name is taken (runs/<name>-2), or,
with --out, the run is refused with the keys named. What does not matter is everything that leaves
the sequence of updates as it is: how often something is logged, evaluated or saved, how a batch is
cut up, and how long training goes on.

Behind a URL the small files are written into a local folder, which is mirrored; checkpoints and
token shards go to the URL by themselves; a lease takes the place of the lock.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from localtrain import storage
from localtrain.checkpoint import Checkpoints
from localtrain.errors import ConfigError, DataError, LocaltrainError, StorageError
from localtrain.lease import LEASE, Lease
from localtrain.lock import LOCK, FolderLock
from localtrain.mirror import Mirror
from localtrain.rundiff import differences, matters, show
from localtrain.stage import Stage

log = logging.getLogger(__name__)

RUN, MODEL, METRICS, CHECKPOINTS = "run.yaml", "model.json", "metrics.jsonl", "checkpoints"
_OURS = (LOCK, LEASE)
_NOT_FOREIGN = re.compile(r"\.run\.yaml\.tmp-.*|lost\+found|\.DS_Store|\.nfs.*")


@dataclass
class RunDirectory:
    """A run directory that this process alone may write, until `close`.

    `name`: the path or URL. `path`: the local folder to write small files into; for a URL it is
    another one, which `name` follows. `step` is the newest committed checkpoint (0: none yet).
    `finished`: nothing is left to train, nothing was written. `notes`: what the user should be
    told, one line each.
    """

    name: str
    path: Path
    step: int
    finished: bool
    resumed: bool
    token: str
    notes: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)  # what `write_model` wrote
    strict: bool = False  # no falling back to the checkpoint before a damaged one
    _lock: FolderLock | Lease | None = None
    _mirror: Mirror | None = None
    _stage: Stage | None = None

    @classmethod
    def open(cls, out: str | None, run: Any, override: bool = False) -> RunDirectory:
        """Decide, lock, and write run.yaml.

        run: a RunConfig. Raises ConfigError (not a run directory, or a difference that matters),
        BusyError (another process has it), StorageError (cannot be written), DataError (damaged).
        """
        notes: list[str] = []
        for path in _candidates(out, run):
            found = _look(path, run)
            if found.refuses and not override:
                if out is not None:
                    raise ConfigError(_refusal(path, found.matter))
                notes = [*notes, f"{path} holds another run ({show(found.matter)})"]
                continue
            lock = _claim(path)
            try:
                again = _look(path, run)  # it was not ours before
                if again.refuses and not override:
                    lock.release()
                    return cls.open(out, run, override)
                opened = cls._opened(path, run, again, lock)
            except BaseException:
                lock.release()
                raise
            if notes:
                opened.notes.insert(0, f"{'; '.join(notes)}: this one goes to {path}.")
            return opened
        raise AssertionError("there is always another name")

    @classmethod
    def _opened(cls, name: str, run: Any, found: _Found, lock: FolderLock | Lease) -> RunDirectory:
        step = Checkpoints(storage.join(name, CHECKPOINTS)).latest() or 0
        finished = step >= run.train.steps
        opened = cls(name, Path(name), step, finished, step > 0, lock.token, _lock=lock)
        if isinstance(lock, Lease):
            opened._stage = Stage()
            opened.path = opened._stage.path
            opened._mirror = Mirror(opened.path, name, allowed=lock.check)
            opened._mirror.fetch()
        opened.notes += _describe(name, run, found, step)
        if not finished and (found.stored is None or found.stored != run.to_dict()):
            storage.write_atomic(storage.join(name, RUN), run.to_yaml().encode())
        if opened._mirror is not None:
            opened._mirror.start()
        return opened

    def checkpoints(self, keep: int) -> Checkpoints:
        """The checkpoints of this run, to be written under this lock."""
        place = storage.join(self.name, CHECKPOINTS)
        found = Checkpoints(place, keep=keep, token=self.token, guard=self._guard)
        found.strict = self.strict
        return found

    def check(self) -> None:
        """Raise BusyError when another process took the directory over; cheap, no request."""
        if isinstance(self._lock, Lease):
            self._lock.check_known()

    def _guard(self) -> None:
        """Before a commit: every row up to its step is there, and the directory is ours."""
        if self._mirror is not None:
            self._mirror.push()
        if self._lock is not None:
            self._lock.check()

    def write_model(self, hub_config: dict[str, Any]) -> None:
        """Store the model's config.json (Hub keys) as model.json."""
        self.model = hub_config
        data = json.dumps(hub_config, indent=2).encode() + b"\n"
        path = str(self.path / MODEL)
        if not (os.path.isfile(path) and storage.read_bytes(path) == data):
            storage.write_atomic(path, data)

    def close(self) -> None:
        """Upload what is left, and let other processes have it. Raises StorageError."""
        if self._lock is None:
            return
        try:
            if report := storage.retry_report():
                log.info("%s", report)
            if self._mirror is not None:
                self._mirror.close()
        finally:
            self._lock.release()
            self._lock = None
            if self._stage is not None:
                self._stage.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except LocaltrainError as late:
            if error is None:
                raise
            log.error("%s", late)  # what went wrong first is what the user must see last


def find_started(out: str | None, run: Any, override: bool = False) -> str | None:
    """The directory that `open` would resume, if it has a checkpoint and a model; no writing."""
    for name in _candidates(out, run):
        found = _look(name, run)
        if found.refuses and not override:
            if out is not None:
                return None  # `open` will say why
            continue
        has_model = storage.exists(storage.join(name, MODEL))
        saved = has_model and Checkpoints(storage.join(name, CHECKPOINTS)).latest() is not None
        return name if saved else None
    raise AssertionError("there is always another name")


@dataclass
class _Found:
    """What a candidate directory holds: no run (stored None), or one with these differences."""

    stored: dict[str, Any] | None
    changed: dict[str, tuple[Any, Any]]
    started: bool  # something was trained or logged: worth keeping apart

    @property
    def matter(self) -> dict[str, tuple[Any, Any]]:
        return {key: pair for key, pair in self.changed.items() if matters(key)}

    @property
    def refuses(self) -> bool:
        return self.started and bool(self.matter)


def _candidates(out: str | None, run: Any) -> Any:
    if out is not None:
        return [
            out.rstrip("/") if storage.is_url(out) else os.path.normpath(storage.local_path(out))
        ]
    first = os.path.join("runs", run.name)
    return itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))


def _look(name: str, run: Any) -> _Found:
    """Inspect without writing. Raises ConfigError for a directory that is not ours."""
    try:
        names = storage.list_dir(name) if storage.is_url(name) else os.listdir(name)
    except FileNotFoundError:
        return _Found(None, {}, False)
    except NotADirectoryError as error:
        raise ConfigError(
            f"{name} is a file, not a run directory; choose another --out."
        ) from error
    except OSError as error:
        raise StorageError(f"{name} cannot be read: {error.strerror or error}.") from error
    if RUN not in names:
        foreign = sorted(n for n in names if n not in _OURS and not _NOT_FOREIGN.fullmatch(n))
        if foreign:
            raise ConfigError(
                f"{name} is not a run directory: it holds {', '.join(foreign[:3])}"
                f"{', ...' if len(foreign) > 3 else ''} but no {RUN}. Nothing was written there; "
                f"choose an empty or new directory with --out."
            )
        return _Found(None, {}, False)
    stored = _stored(storage.join(name, RUN), run)
    started = METRICS in names or storage.is_dir(storage.join(name, CHECKPOINTS))
    return _Found(stored, differences(stored, run.to_dict()), started)


def _stored(path: str, run: Any) -> dict[str, Any]:
    """The stored run with today's defaults for keys that it does not have."""
    try:
        values = yaml.safe_load(storage.read_bytes(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = str(error).splitlines()[0]
    if not isinstance(values, dict):
        raise DataError(f"{path} is damaged, it is not a run file. Restore it, or choose --out.")
    try:
        return type(run).model_validate(values).to_dict()
    except ConfigError:  # written by a newer version, with keys that we do not know
        return values


def _claim(name: str) -> FolderLock | Lease:
    if storage.is_url(name):
        return Lease(name)
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path} cannot be a run directory: a part of it is a file; choose another --out."
        ) from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be created: {error.strerror or error}. Choose another place with --out."
        ) from error
    return FolderLock(path)


def _refusal(path: str, changed: dict[str, tuple[Any, Any]]) -> str:
    return (
        f"{path} holds a run that differs in a way that matters: {show(changed)}. Use the same "
        f"values to resume it, another --out to train anew, or --override to go on from its last "
        f"checkpoint with the new values."
    )


def _describe(path: str, run: Any, found: _Found, step: int) -> list[str]:
    """Lines for the user about a directory that was there before."""
    steps = run.train.steps
    if step >= steps:
        return [
            f"{path} is finished (step {step} of {steps}), nothing to do. To go on, give the same "
            f"command with train.steps={2 * step}; to train anew, another name=... or --out."
        ]
    if step == 0:
        return []
    notes = [f"resuming {path} at step {step} of {steps}"]
    if found.matter:
        notes.append(f"--override: {show(found.matter)}")
    if "train.steps" in found.changed and run.optim.schedule != "constant":
        notes.append(
            f"train.steps {found.changed['train.steps'][0]} -> {steps}: the learning-rate schedule "
            f"now spans {steps} steps"
        )
    return notes
