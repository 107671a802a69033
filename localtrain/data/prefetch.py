"""Batches made ahead by one background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from localtrain import storage
from localtrain.data.view import View
from localtrain.errors import Stopped

AT_ONCE = 8  # batches from a store: at 50 ms a request, 160 batches a second
POLL_S = 0.05  # how soon a waiting side notices the stop event


class Prefetcher:
    """`next(t)` gives batch t and the seconds it was waited for.

    The thread makes batches start_step, start_step + 1, ... and is at most `depth` ahead; an error
    in it is raised in `next`. `place` (for example a device put) runs in the thread. `rows`: those
    of each batch that this process needs (None: all). With depth 0 there is no thread. Nothing here
    waits for ever: both sides poll the stop event.
    """

    def __init__(
        self,
        view: View,
        batch_size: int,
        start_step: int = 0,
        depth: int = 2,
        stop_event: threading.Event | None = None,
        place: Callable[[dict], Any] | None = None,
        rows: np.ndarray | None = None,
    ):
        self._make = lambda t: view.batch(t, batch_size, rows)
        self._place = place or (lambda batch: batch)
        self._stop = stop_event or threading.Event()
        self._closed = threading.Event()
        self._expected = start_step
        self._ready: queue.Queue = queue.Queue(max(1, depth))
        # What comes from a store is waited for, so several batches are; one of a local file is not.
        folders = [part.side.dataset.folder for part in getattr(view, "parts", ())]
        self._at_once = AT_ONCE if any(map(storage.is_url, folders)) else 1
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="batch") as pool:
            self._make_in_order(pool)

    def _make_in_order(self, pool: ThreadPoolExecutor) -> None:
        """Batches are made some at a time and handed over one after the other."""
        t = self._expected
        ahead = deque(pool.submit(self._make, t + i) for i in range(self._at_once))
        while not self._closed.is_set():
            try:
                item = (t, self._place(ahead.popleft().result()), None)
            except BaseException as error:  # raised where the batch is asked for
                item = (t, None, error)
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            if item[2] is not None:
                break
            ahead.append(pool.submit(self._make, t + self._at_once))
            t += 1
        for later in ahead:
            later.cancel()

    def next(self, t: int) -> tuple[Any, float]:
        """(batch t, seconds waited). Steps are asked for in order. Raises Stopped when the stop
        event is set before the batch is there."""
        if t != self._expected:
            raise ValueError(f"batch {t} asked for, but {self._expected} is next")
        if self._closed.is_set():
            raise ValueError("the prefetcher is closed")
        begin = time.perf_counter()
        if self._thread is None:
            batch = self._place(self._make(t))
        else:
            batch = self._wait(t)
        self._expected += 1
        return batch, time.perf_counter() - begin

    def _wait(self, t: int) -> Any:
        while True:
            try:
                made, batch, error = self._ready.get(timeout=POLL_S)
            except queue.Empty:
                if self._stop.is_set():
                    raise Stopped(f"stopped while waiting for batch {t}.") from None
                continue
            if error is not None:
                self._closed.set()
                raise error
            assert made == t
            return batch

    def close(self) -> None:
        """End the thread; a batch it is making is finished first. Safe to call twice."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
