"""The run directory: which one, new or resumed, and who may write it.

Without --out it is runs/<name>. A directory that holds the same run is resumed; one that holds a
run which differs in a way that matters is left alone: the next name is taken (runs/<name>-2), or,
with --out, the run is refused with the keys named. What does not matter is everything that leaves
the sequence of updates as it is: how often something is logged, evaluated or saved, how a batch is
cut up, and how long training goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from localtrain import storage
from localtrain.checkpoint import Checkpoints
from localtrain.errors import ConfigError, DataError, StorageError
from localtrain.lock import LOCK, FolderLock

RUN, MODEL, METRICS, CHECKPOINTS = "run.yaml", "model.json", "metrics.jsonl", "checkpoints"
HARMLESS = (
    "name",
    "train.steps",
    "train.log_every",
    "train.profile",
    "train.micro_batch",
    "train.remat",
    "train.deterministic",
    "data.cache",
    "data.prefetch",
    "data.bad_rows",
    "eval.",
    "checkpoint.",
    "mesh.",
)
_NOT_FOREIGN = re.compile(rf"{re.escape(LOCK)}|\.run\.yaml\.tmp-.*|lost\+found|\.DS_Store|\.nfs.*")


@dataclass
class RunDirectory:
    """A run directory that this process alone may write, until `close`.

    `step` is the newest committed checkpoint (0: none yet). `finished`: nothing is left to train,
    nothing was written. `notes`: what the user should be told, one line each.
    """

    path: Path
    step: int
    finished: bool
    resumed: bool
    token: str
    notes: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)  # what `write_model` wrote
    _lock: FolderLock | None = None

    @classmethod
    def open(cls, out: str | None, run: Any, override: bool = False) -> RunDirectory:
        """Decide, lock, and write run.yaml.

        run: a RunConfig. Raises ConfigError (not a run directory, or a difference that matters),
        BusyError (another process has it), StorageError (cannot be written), DataError (damaged).
        """
        if out is not None and storage.is_url(out):
            raise ConfigError(f"--out {out}: a run directory at a URL is not supported yet.")
        notes: list[str] = []
        for path in _candidates(out, run):
            found = _look(path, run)
            if found.refuses and not override:
                if out is not None:
                    raise ConfigError(_refusal(path, found.matter))
                notes = [*notes, f"{path} holds another run ({_show(found.matter)})"]
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
    def _opened(cls, path: Path, run: Any, found: _Found, lock: FolderLock) -> RunDirectory:
        step = Checkpoints(path / CHECKPOINTS).latest() or 0
        finished = step >= run.train.steps
        opened = cls(path, step, finished, step > 0, lock.token, _lock=lock)
        opened.notes += _describe(path, run, found, step)
        if not finished and (found.stored is None or found.stored != run.to_dict()):
            storage.write_atomic(str(path / RUN), run.to_yaml().encode())
        return opened

    def checkpoints(self, keep: int) -> Checkpoints:
        """The checkpoints of this run, to be written under this lock."""
        guard = self._lock.check if self._lock is not None else None
        return Checkpoints(self.path / CHECKPOINTS, keep=keep, token=self.token, guard=guard)

    def write_model(self, hub_config: dict[str, Any]) -> None:
        """Store the model's config.json (Hub keys) as model.json."""
        self.model = hub_config
        data = json.dumps(hub_config, indent=2).encode() + b"\n"
        path = str(self.path / MODEL)
        if not (os.path.isfile(path) and storage.read_bytes(path) == data):
            storage.write_atomic(path, data)

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_started(out: str | None, run: Any, override: bool = False) -> Path | None:
    """The directory that `open` would resume, if it has a checkpoint and a model; no writing."""
    if out is not None and storage.is_url(out):
        return None
    for path in _candidates(out, run):
        found = _look(path, run)
        if found.refuses and not override:
            if out is not None:
                return None  # `open` will say why
            continue
        saved = (path / MODEL).is_file() and Checkpoints(path / CHECKPOINTS).latest() is not None
        return path if saved else None
    raise AssertionError("there is always another name")


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys in which two runs (nested dicts) differ: dotted key -> (old, new)."""
    before, after = _flat(old), _flat(new)
    keys = [*after, *(key for key in before if key not in after)]
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def matters(key: str) -> bool:
    """Whether a difference in this key makes it another run."""
    return not any(key == one or (one[-1] == "." and key.startswith(one)) for one in HARMLESS)


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
        return [Path(storage.local_path(out))]
    first = Path("runs", run.name)
    return itertools.chain([first], (Path("runs", f"{run.name}-{n}") for n in itertools.count(2)))


def _look(path: Path, run: Any) -> _Found:
    """Inspect without writing. Raises ConfigError for a directory that is not ours."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return _Found(None, {}, False)
    except NotADirectoryError as error:
        raise ConfigError(
            f"{path} is a file, not a run directory; choose another --out."
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
    if RUN not in names:
        foreign = sorted(name for name in names if not _NOT_FOREIGN.fullmatch(name))
        if foreign:
            raise ConfigError(
                f"{path} is not a run directory: it holds {', '.join(foreign[:3])}"
                f"{', ...' if len(foreign) > 3 else ''} but no {RUN}. Nothing was written there; "
                f"choose an empty or new directory with --out."
            )
        return _Found(None, {}, False)
    stored = _stored(path / RUN, run)
    started = METRICS in names or bool(os.path.isdir(path / CHECKPOINTS))
    return _Found(stored, differences(stored, run.to_dict()), started)


def _stored(path: Path, run: Any) -> dict[str, Any]:
    """The stored run with today's defaults for keys that it does not have."""
    try:
        values = yaml.safe_load(storage.read_bytes(str(path)))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = str(error).splitlines()[0]
    if not isinstance(values, dict):
        raise DataError(f"{path} is damaged, it is not a run file. Restore it, or choose --out.")
    try:
        return type(run).model_validate(values).to_dict()
    except ConfigError:  # written by a newer version, with keys that we do not know
        return values


def _claim(path: Path) -> FolderLock:
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


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _show(changed: dict[str, tuple[Any, Any]], most: int = 6) -> str:
    shown = [f"{key} {old!r} -> {new!r}" for key, (old, new) in list(changed.items())[:most]]
    more = f" and {len(changed) - most} more" if len(changed) > most else ""
    return ", ".join(text if len(text) < 200 else text[:200] + "..." for text in shown) + more


def _refusal(path: Path, changed: dict[str, tuple[Any, Any]]) -> str:
    return (
        f"{path} holds a run that differs in a way that matters: {_show(changed)}. Use the same "
        f"values to resume it, another --out to train anew, or --override to go on from its last "
        f"checkpoint with the new values."
    )


def _describe(path: Path, run: Any, found: _Found, step: int) -> list[str]:
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
        notes.append(f"--override: {_show(found.matter)}")
    if "train.steps" in found.changed and run.optim.schedule != "constant":
        notes.append(
            f"train.steps {found.changed['train.steps'][0]} -> {steps}: the learning-rate schedule "
            f"now spans {steps} steps"
        )
    return notes
