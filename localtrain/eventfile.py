"""TensorBoard event files, written with the protos and the record format of `tensorboard`.

Its own EventFileWriter imports tensorflow where that is installed (seconds, and pages of
warnings), and writes from a thread that hides a full disk; the record writer below it does neither.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."


class EventFile:
    """A new event file in a folder, named so that it sorts after those of earlier attempts.

    `purge_step`: TensorBoard drops what earlier files hold from that step on. Raises OSError.
    """

    def __init__(self, folder: str | os.PathLike, purge_step: int | None = None):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stamp = max([int(time.time()), *(earlier + 1 for earlier in _stamps(folder))])
        name = f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.path = folder / name
        self._file = open(self.path, "wb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        now = time.time()
        self._write(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=purge_step, session_log=start))
        self._file.flush()

    def scalars(self, step: int, values: dict[str, float], at: float) -> None:
        """One point per tag."""
        summary = summary_pb2.Summary(
            value=[
                summary_pb2.Summary.Value(tag=tag, simple_value=float(value))
                for tag, value in values.items()
            ]
        )
        self._write(event_pb2.Event(wall_time=at, step=step, summary=summary))
        self._file.flush()

    def text(self, step: int, tag: str, text: str, at: float) -> None:
        """A Markdown text in the page "Text"."""
        metadata = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"),
            data_class=summary_pb2.DATA_CLASS_TENSOR,
        )
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8", "replace")]
        )
        value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        summary = summary_pb2.Summary(value=[value])
        self._write(event_pb2.Event(wall_time=at, step=step, summary=summary))
        self._file.flush()

    def flush(self) -> None:
        """Push to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())


def _stamps(folder: Path) -> list[int]:
    """The times in the names of the event files that are there."""
    names = [name.removeprefix(_PREFIX) for name in os.listdir(folder) if name.startswith(_PREFIX)]
    return [int(name[:10]) for name in names if name[:10].isdigit()]
