"""Where checkpoints lie: a folder with one sub-folder for each saved step.

`Shelf` is a local folder; `remote_shelf.RemoteShelf` is one behind a URL. Both give a step's files
only as verified local files, and both commit a finished step in one act.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from localtrain import commit, storage

log = logging.getLogger(__name__)

STEP = re.compile(r"0|[1-9]\d{0,17}")
_TMP = re.compile(r"tmp-\d+-[0-9a-f]{16}")


def open_shelf(folder: str | os.PathLike) -> Any:
    """The Shelf of a local folder, or the RemoteShelf of a URL."""
    if storage.is_url(folder):
        from localtrain.remote_shelf import RemoteShelf

        return RemoteShelf(os.fspath(folder).rstrip("/"))
    return Shelf(Path(os.path.abspath(storage.local_path(folder))))


def numbers(names: Any) -> list[int]:
    """The names that are steps, in rising order."""
    return sorted(int(name) for name in names if STEP.fullmatch(name))


class Shelf:
    """A local folder. A save is written into `tmp-<step>-<token>`; its rename is the commit."""

    is_remote = False

    def __init__(self, folder: Path):
        self.folder = folder

    # reading

    def where(self, step: int) -> str:
        """What messages call the place of a step."""
        return str(self.folder / str(step))

    def numbered(self) -> list[int]:
        """Steps with a folder of that name, committed or not, in rising order."""
        try:
            return numbers(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage.storage_error("list", str(self.folder), error) from error

    def holds(self, step: int) -> bool:
        """Whether there is anything of a step."""
        folder = self.folder / str(step)
        try:
            return folder.is_dir() and any(folder.iterdir())
        except FileNotFoundError:  # deleted by a writer at this moment
            return False
        except OSError as error:
            raise storage.storage_error("list", str(folder), error) from error

    def record(self, step: int, sizes: bool = True) -> dict[str, Any]:
        """The commit record; Uncommitted or Damaged when it cannot be believed.

        sizes: whether all files are there with their sizes, too: one look at each of them.
        """
        return commit.read_commit(self.folder / str(step), sizes)

    def fetch(self, step: int, record: dict[str, Any]) -> Path:
        """The local folder with the files of a step that the record lists, each verified. Damaged.

        A second call for other files of the step adds them.
        """
        folder = self.folder / str(step)
        commit.verify(folder, record)
        return folder / record.get("folder", "")

    def release(self, step: int) -> None:
        """The files of `fetch` are not needed any more."""

    # writing

    def start(self, step: int, token: str) -> Path:
        """A new empty local folder to write a step into."""
        tmp = self.folder / f"tmp-{step}-{token}"
        tmp.mkdir(parents=True)
        return tmp

    def check_room(self, folder: Path, need: int) -> None:
        """Fail before the disk is full: logs and metrics still want to be written."""
        free = shutil.disk_usage(folder).free
        if need > free:
            full = f"No space left on device: {need} bytes for {free} free"
            raise OSError(errno.ENOSPC, full)

    def join(self, step: int, name: str) -> Path:
        """The folder that the lead of several processes has made by `start`."""
        tmp = self.folder / name
        if not tmp.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder that process 0 made is not here", tmp)
        return tmp

    def finish(self, step: int, tmp: Path, names: list[str] | None = None) -> dict[str, Any]:
        """Checksums of the files that this process has written (None: of all)."""
        return commit.checksums(tmp, names)

    def publish(
        self, step: int, tmp: Path, facts: dict[str, Any], files: dict[str, Any], guard: Any
    ) -> None:
        """Commit what `finish` gave, of all processes: the record, then the final name."""
        commit.write_commit(tmp, facts, files)
        guard()
        final = self.folder / str(step)
        if os.path.lexists(final):  # damaged or foreign: keep it for its owner, out of the way
            aside = self.folder / f"damaged-{step}-{secrets.token_hex(8)}"
            final.rename(aside)
            log.warning("%s was not a usable checkpoint; it is now %s", final, aside.name)
        tmp.rename(final)
        try:
            commit.sync_folder(self.folder)
        except OSError as error:  # it is there; only a power cut in this second could undo it
            log.warning("%s could not be synced: %s", self.folder, error)

    def discard(self, tmp: Path) -> None:
        """Remove what was not published."""
        shutil.rmtree(tmp, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Delete an old checkpoint; a half deleted one is never seen. Raises OSError."""
        if (self.folder / str(step)).is_symlink():
            return
        trash = self.folder / f"tmp-{step}-{secrets.token_hex(8)}"
        (self.folder / str(step)).rename(trash)
        shutil.rmtree(trash)

    def sweep(self) -> None:
        """Remove what dead writers left."""
        if not self.folder.is_dir():
            return
        for entry in os.scandir(self.folder):
            if _TMP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                log.info("removing %s, left by a save that was interrupted", entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
