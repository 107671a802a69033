"""Prefetching: the same batches, its errors where they are asked for, and no hang."""

import threading
import time

import numpy as np
import pytest

from localtrain.data.loader import Prefetcher
from localtrain.errors import DataError, Stopped


class Slow:
    """A view whose batches are numbers."""

    def __init__(self, delay=0.0, fail_at=None):
        self.delay, self.fail_at, self.made = delay, fail_at, []

    def batch(self, t, batch_size, rows=None):
        time.sleep(self.delay)
        if t == self.fail_at:
            raise DataError(f"batch {t} is damaged")
        self.made.append(t)
        return {"t": t, "size": batch_size, "rows": rows}


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order_from_any_start(depth):
    with Prefetcher(Slow(), 4, 7, depth, rows=(2, 3)) as feed:
        for t in range(7, 30):
            batch, waited = feed.next(t)
            assert batch == {"t": t, "size": 4, "rows": (2, 3)} and waited >= 0
    assert not threads()


def test_prefetched_batches_equal_those_made_directly(corpus_of, write_jsonl):
    view = corpus_of(write_jsonl("a.jsonl", [f"text {n}" for n in range(50)])).train
    with Prefetcher(view, 4, 3, 2, place=lambda batch: batch["tokens"]) as feed:
        for t in range(3, 9):
            assert np.array_equal(feed.next(t)[0], view.batch(t, 4)["tokens"])


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_where_the_batch_is_asked_for(depth):
    with Prefetcher(Slow(fail_at=2), 4, 0, depth) as feed:
        assert feed.next(0)[0]["t"] == 0 and feed.next(1)[0]["t"] == 1
        with pytest.raises(DataError, match="batch 2 is damaged"):
            feed.next(2)
        with pytest.raises((ValueError, DataError)):
            feed.next(2)
    assert not threads()


def test_an_error_while_placing_is_raised_too():
    def refuse(batch):
        raise MemoryError("no room on the device")

    with Prefetcher(Slow(), 4, place=refuse) as feed, pytest.raises(MemoryError):
        feed.next(0)


def test_a_stop_while_waiting_ends_the_wait():
    stop = threading.Event()
    with Prefetcher(Slow(delay=1.5), 4, 0, 1, stop) as feed:
        threading.Timer(0.1, stop.set).start()
        begin = time.monotonic()
        with pytest.raises(Stopped, match="waiting for batch 0"):
            feed.next(0)
        assert time.monotonic() - begin < 1
    assert not threads()


def test_a_batch_that_is_ready_is_given_even_after_a_stop():
    stop = threading.Event()
    with Prefetcher(Slow(), 4, 0, 1, stop) as feed:
        while not feed._ready.qsize():
            time.sleep(0.01)
        stop.set()
        assert feed.next(0)[0]["t"] == 0


def test_no_more_than_depth_batches_are_made_ahead():
    view = Slow()
    with Prefetcher(view, 4, 0, 2) as feed:
        time.sleep(0.2)
        assert len(view.made) <= 3  # two ready and one in hand
        feed.next(0)
        time.sleep(0.2)
        assert len(view.made) <= 4


def test_closing_twice_or_without_use_is_clean():
    feed = Prefetcher(Slow(), 4)
    feed.close()
    feed.close()
    with pytest.raises(ValueError, match="closed"):
        feed.next(0)
    assert not threads()


def test_waiting_is_measured():
    with Prefetcher(Slow(delay=0.05), 4, 0, 1) as feed:
        assert 0.02 < feed.next(0)[1] < 2
        time.sleep(0.2)
        assert feed.next(1)[1] < 0.05


def test_a_batch_out_of_order_is_a_bug_that_is_named():
    with Prefetcher(Slow(), 4, 5) as feed, pytest.raises(ValueError, match="batch 0 asked for"):
        feed.next(0)
