"""Checkpoints behind a URL: written into a local folder, uploaded, committed by their last object.

    <step>/<attempt>/...     the files of one attempt to save; 16 hex digits, never used again
    <step>/commit.json       names the attempt, with size and crc32c of each of its files

An attempt writes only below a name of its own, so that a writer which was taken for dead and wakes
up in the middle of an upload cannot touch what its successor has committed. Readers copy a step to
a local folder and verify it there. A tree that is copied elsewhere, here or to another store, is
read in the same way.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localtrain import commit, storage
from localtrain.errors import StorageError
from localtrain.shelf import Shelf, numbers
from localtrain.stage import Stage

log = logging.getLogger(__name__)

ATTEMPT = re.compile(r"[0-9a-f]{16}")


class RemoteShelf(Shelf):
    """See the module. Nothing is kept in memory of what the store holds."""

    is_remote = True

    def __init__(self, url: str):
        self.folder = url  # type: ignore[assignment]
        self._fetched: dict[int, tuple[Stage, set[str]]] = {}  # and the files in it, verified
        self._writing: dict[Path, Stage] = {}

    def where(self, step: int) -> str:
        return storage.join(self.folder, str(step))

    def numbered(self) -> list[int]:
        """Steps with more than uploads that were never finished."""
        found = self._all()
        return [
            step
            for step in numbers({name.split("/", 1)[0] for name in found if "/" in name})
            if any(not _attempt_of(name) for name in found if name.startswith(f"{step}/"))
        ]

    def holds(self, step: int) -> bool:
        return bool(storage.find_below(self.where(step)))

    def record(self, step: int, sizes: bool = True) -> dict[str, Any]:
        where = storage.join(self.where(step), commit.COMMIT)
        try:
            raw = storage.read_bytes(where)
        except FileNotFoundError as error:
            raise commit.uncommitted(self.where(step)) from error
        record = commit.decode_commit(raw, where)
        found = storage.find_below(self.where(step)) if sizes else {}
        for name, entry in record["files"].items() if sizes else ():
            commit.check_size(storage.join(self.where(step), name), found.get(name), entry["size"])
        return record

    def fetch(self, step: int, record: dict[str, Any]) -> Path:
        if step not in self._fetched:
            self._fetched[step] = Stage(), set()
        stage, have = self._fetched[step]
        missing = {name: at for name, at in record["files"].items() if name not in have}
        if missing:
            try:
                self._download(step, {**record, "files": missing}, stage.path)
            except BaseException:
                self.release(step)  # its room is needed for the step before
                raise
            have.update(missing)
        return stage.path / record.get("folder", "")

    def _download(self, step: int, record: dict[str, Any], local: Path) -> None:
        names = record["files"]
        for attempt in (1, 2):  # what was damaged on its way may come whole
            self.check_room(local, sum(names[name]["size"] for name in names))
            wanted = {}
            for name in names:
                (local / name).parent.mkdir(parents=True, exist_ok=True)
                url = storage.join(self.where(step), name)
                wanted[url] = str(local / name), names[name]["size"]
            try:
                storage.download_all(wanted)
                return commit.verify(local, record, self.where(step))
            except FileNotFoundError as error:
                raise commit.Damaged(f"{self.where(step)}: {error} is missing.") from error
            except commit.Damaged:
                if attempt == 2:
                    raise

    def release(self, step: int) -> None:
        if step in self._fetched:
            self._fetched.pop(step)[0].close()

    def check_room(self, folder: Path, need: int) -> None:
        try:
            super().check_room(folder, need)
        except OSError as error:
            raise storage.storage_error("write", str(folder), error) from error

    # writing

    def start(self, step: int, token: str) -> Path:
        stage = Stage()
        tmp = stage.path / secrets.token_hex(8)
        tmp.mkdir()
        self._writing[tmp] = stage
        return tmp

    def join(self, step: int, name: str) -> Path:
        stage = Stage()
        tmp = stage.path / name
        tmp.mkdir()
        self._writing[tmp] = stage
        return tmp

    def finish(self, step: int, tmp: Path, names: list[str] | None = None) -> dict[str, Any]:
        """The same, and they are uploaded."""
        top, here = self.where(step), tmp.parent
        files = {
            f"{tmp.name}/{name}": entry for name, entry in super().finish(step, tmp, names).items()
        }
        storage.upload_all({str(here / name): storage.join(top, name) for name in files})
        return files

    def publish(
        self,
        step: int,
        tmp: Path,
        facts: dict[str, Any],
        files: dict[str, Any],
        guard: Callable[[], None],
    ) -> None:
        top, here = self.where(step), tmp.parent
        commit.write_commit(here, {**facts, "folder": tmp.name}, files)
        there = storage.find_below(storage.join(top, tmp.name))
        for name, entry in files.items():
            size = there.get(name.split("/", 1)[1])
            if size != entry["size"]:
                raise StorageError(
                    f"{storage.join(top, name)} was uploaded with {entry['size']} bytes, but the "
                    f"store lists {size}."
                )
        guard()  # whoever lost the lease stops here
        storage.write_atomic(storage.join(top, commit.COMMIT), (here / commit.COMMIT).read_bytes())
        self._writing.pop(tmp).close()

    def discard(self, tmp: Path) -> None:
        """The local part; what was uploaded of it is swept by the next writer."""
        if tmp in self._writing:
            self._writing.pop(tmp).close()
        shutil.rmtree(tmp, ignore_errors=True)

    def remove(self, step: int) -> None:
        """The commit goes first, so that a half deleted one is not believed."""
        top = self.where(step)
        listed = self.record(step)["files"]
        storage.remove_all([storage.join(top, commit.COMMIT)])
        found = storage.find_below(top)
        ours = [name for name in found if name in listed or _attempt_of(f"{step}/{name}")]
        storage.remove_all(storage.join(top, name) for name in ours)

    def sweep(self) -> None:
        """Remove uploads that no commit names. A step with a damaged commit is left alone."""
        found = self._all()
        for step in sorted({name.split("/", 1)[0] for name in found if _attempt_of(name)}):
            keep = None
            if f"{step}/{commit.COMMIT}" in found:
                try:
                    keep = self.record(int(step)).get("folder")
                except commit.Damaged:
                    continue
            mine = [name for name in found if name.startswith(f"{step}/")]
            stale = [name for name in mine if _attempt_of(name) not in (None, keep)]
            if stale:
                log.info("removing %d objects of unfinished saves of step %s", len(stale), step)
                storage.remove_all(storage.join(self.folder, name) for name in stale)
        try:
            if begun := storage.abort_uploads(self.folder):
                log.info("removed the parts of %d unfinished uploads", begun)
        except StorageError as error:  # needs a right of its own; training does not
            log.info("parts of unfinished uploads, if any, stay: %s", error)

    def _all(self) -> dict[str, int]:
        return storage.find_below(self.folder)


def _attempt_of(name: str) -> str | None:
    """The attempt that an object belongs to: <step>/<attempt>/..."""
    parts = name.split("/")
    ours = len(parts) > 2 and parts[0].isdigit() and ATTEMPT.fullmatch(parts[1])
    return parts[1] if ours else None
