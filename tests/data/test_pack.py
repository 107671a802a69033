"""Packing: each transition once, rows that are full, blocks that stand for themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrain.data import pack as packing
from localtrain.data.pack import best_fit, pack

lengths_of = st.lists(st.integers(0, 70), max_size=120)


def make(lengths, seq_len, how="best_fit"):
    lengths = np.array(lengths, np.int64)
    return pack(np.cumsum(lengths) - lengths, lengths, seq_len, how)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_of, seq_len=st.integers(1, 40), how=st.sampled_from(["best_fit", "none"]))
def test_every_transition_is_in_exactly_one_piece(lengths, seq_len, how):
    packed = make(lengths, seq_len, how)
    seen = np.zeros(sum(lengths) + 1, int)
    for start, places in zip(packed.starts, packed.places, strict=True):
        assert 1 <= places <= seq_len
        seen[start : start + places] += 1
    end = np.cumsum(np.array(lengths, np.int64))
    expected = np.ones(sum(lengths) + 1, int)
    expected[sum(lengths)] = 0
    expected[[int(e) - 1 for e, n in zip(end, lengths, strict=True) if n]] = 0
    assert np.array_equal(seen, expected)
    sums = np.add.reduceat(packed.places, packed.row_starts[:-1]) if packed.rows else np.zeros(0)
    assert (sums <= seq_len).all() and (np.diff(packed.row_starts) > 0).all()
    if how == "none":
        assert (np.diff(packed.row_starts) == 1).all()
    assert packed.trained_tokens == sum(max(n - 1, 0) for n in lengths)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), max_size=60), room=st.integers(30, 64))
def test_best_fit_takes_the_fullest_row_that_has_room(sizes, room):
    sizes = sorted(sizes, reverse=True)
    left, expected = [], []
    for size in sizes:
        fitting = [row for row, space in enumerate(left) if space >= size]
        if fitting:
            least = min(left[row] for row in fitting)
            assert any(left[row] == least for row in fitting)
        else:
            left.append(room)
            least = room
        expected.append(least - size)
        left[min(row for row, space in enumerate(left) if space == least)] -= size
    rows = best_fit(sizes, room)
    room_left, ours = {}, []
    for size, row in zip(sizes, rows, strict=True):
        room_left[row] = room_left.get(row, room) - size
        ours.append(room_left[row])
    assert ours == expected and len(room_left) == len(left)


def test_a_block_is_packed_by_itself(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 16)
    lengths = np.random.default_rng(0).integers(2, 50, 48)
    starts = np.cumsum(lengths) - lengths
    whole = pack(starts, lengths, 32)
    parts = [pack(starts[i : i + 16], lengths[i : i + 16], 32) for i in range(0, 48, 16)]
    assert whole.starts.tolist() == [start for part in parts for start in part.starts]
    assert whole.rows == sum(part.rows for part in parts)


def test_real_lengths_fill_almost_every_place():
    lengths = np.random.default_rng(0).lognormal(6, 1, 4096).astype(np.int64) + 2
    assert make(lengths, 1024).fill > 0.99
    assert make(lengths, 1024, "none").fill < 0.9


@pytest.mark.parametrize("how", ["best_fit", "none"])
def test_no_documents_make_no_rows(how):
    for lengths in ([], [0], [1, 1]):
        packed = make(lengths, 8, how)
        assert packed.rows == 0 and packed.fill == 0.0 and packed.row_starts.tolist() == [0]


def test_the_rows_of_many_documents_are_kept_and_damage_only_costs_time(
    corpus_of, write_jsonl, monkeypatch, tmp_path
):
    from localtrain.data import rows

    path = write_jsonl("a.jsonl", [f"text {n} " * (n % 7 + 1) for n in range(60)])
    plain = corpus_of(path)
    monkeypatch.setattr(rows, "KEEP_FROM", 1)
    kept = corpus_of(path)
    file = next((tmp_path / "cache").glob("rows-*.bin"))
    good = file.read_bytes()

    def empty_only(starts, *rest):
        assert not len(starts), "packed again"
        return pack(starts, *rest)

    monkeypatch.setattr(rows, "pack", empty_only)
    assert corpus_of(path).index_hash == kept.index_hash == plain.index_hash
    ours, theirs = (corpus.train.batch(5, 4)["tokens"] for corpus in (corpus_of(path), plain))
    assert np.array_equal(ours, theirs)
    monkeypatch.setattr(rows, "pack", pack)
    for bad in (good[:10], good[:-1], good[:60] + b"x" + good[61:], b"", b"x" * len(good)):
        file.write_bytes(bad)
        assert corpus_of(path).index_hash == plain.index_hash
        assert file.read_bytes() == good
