"""Local copies of the shards of a dataset behind a URL.

Training reads rows in random order, which would be one small request for each row. So a dataset
that fits on the disk is copied once: a small one when it is opened, a large one by a thread while
training already reads it by ranges. One that does not fit is read by ranges to its end.
"""

from __future__ import annotations

import logging
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

from localtrain import storage
from localtrain.data.compressed import checksum
from localtrain.data.shards import ShardInfo
from localtrain.errors import DataError, StorageError
from localtrain.stage import Stage

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 256 << 20  # copied before the first batch: a second or two
AT_ONCE = 4  # shards; one stream from an object store is 50 to 100 MB/s
COPY_BYTES = 100 << 30
DISK_SHARE = 0.5  # of what is free; checkpoints pass through the same disk


class Copies:
    """`find(shard)` is the local file of a shard that is here already, else None."""

    def __init__(self, folder: str, shards: tuple[ShardInfo, ...]):
        self._folder, self._shards = folder, shards
        self._stage: Stage | None = None
        self._here: dict[int, str] = {}
        self._stop = threading.Event()
        total = sum(shard.size for shard in shards)
        if total > COPY_BYTES:
            return
        self._stage = Stage()
        if total > DISK_SHARE * shutil.disk_usage(self._stage.path).free:
            log.info("%s does not fit on the disk here: it is read by ranges", folder)
            self._stage.close()
        elif total <= AT_ONCE_BYTES:
            _copy_all(folder, shards, self._stage, self._here, self._stop)
        else:
            arguments = folder, shards, self._stage, self._here, self._stop
            threading.Thread(target=_copy_behind, args=arguments, daemon=True).start()
            weakref.finalize(self, self._stop.set)

    def find(self, shard: int) -> str | None:
        return self._here.get(shard)


def _copy_all(
    folder: str,
    shards: tuple[ShardInfo, ...],
    stage: Stage,
    here: dict[int, str],
    stop: threading.Event,
) -> None:
    def copy(number: int) -> None:
        if not stop.is_set():
            shard = shards[number]
            local = str(stage.path / shard.name)
            _copy(storage.join(folder, shard.name), local, shard)
            here[number] = local

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = [pool.submit(copy, number) for number in range(len(shards))]
        try:
            for one in done:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(url: str, local: str, shard: ShardInfo) -> None:
    for attempt in (1, 2):  # what was damaged on its way may come whole
        try:
            storage.download_all({url: (local, shard.size)})
        except FileNotFoundError as error:
            raise DataError(f"{url}: missing. Build the dataset again.") from error
        if checksum(local) == (shard.crc32c, shard.size):
            return
        if attempt == 1:
            log.warning("%s: the copy here differs from what was written; copying it again", url)
    raise DataError(f"{url}: damaged: its checksum differs. Build the dataset again.")


def _copy_behind(*arguments) -> None:
    try:
        _copy_all(*arguments)
    except (DataError, StorageError, OSError) as error:
        if not arguments[-1].is_set():  # reading it by ranges meets the same, and raises
            log.warning("the local copy of %s stopped: %s", arguments[0], error)
