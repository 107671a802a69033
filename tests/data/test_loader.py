"""Batches: what is trained, in which order, on which process, and when it is refused."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from localtrain.data.loader import prepare
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import DataError, Stopped


@pytest.fixture
def words(write_jsonl):
    """60 different documents of 3 to 60 bytes."""
    return write_jsonl("words.jsonl", [f"{n:02d} " + "abc " * (n % 15) + "." for n in range(60)])


def rows_of(view, batch_size, steps):
    return [view.row_numbers(np.arange(t * batch_size, (t + 1) * batch_size)) for t in steps]


def test_a_batch_has_the_promised_arrays(corpus_of, words):
    batch = corpus_of(words, seq_len=32).train.batch(0, 4)
    assert set(batch) == {"tokens", "labels", "positions", "segments", "weights"}
    for name, array in batch.items():
        assert array.shape == (4, 32)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)


def test_labels_positions_and_segments_follow_the_documents(corpus_of, words):
    batch = corpus_of(words, seq_len=24).train.batch(0, 8)
    for row in range(8):
        tokens, labels, positions, segments, weights = (
            batch[name][row] for name in ("tokens", "labels", "positions", "segments", "weights")
        )
        used = int((segments > 0).sum())
        assert (segments[:used] > 0).all() and (segments[used:] == 0).all()
        assert np.array_equal(weights, (segments > 0).astype(np.float32))
        for array in (tokens, labels, positions):
            assert (array[used:] == 0).all()
        assert segments[0] == 1 and set(np.diff(segments[:used]).tolist()) <= {0, 1}
        begins = np.flatnonzero(np.diff(segments[:used], prepend=0))
        assert (positions[begins] == 0).all()
        inside = np.setdiff1d(np.arange(used), begins)
        assert (positions[inside] == positions[inside - 1] + 1).all()
        # inside a document a label is the next token; at its end it is never the next document's
        assert np.array_equal(labels[inside - 1], tokens[inside])


def test_every_document_is_in_an_epoch_exactly_once(corpus_of, words, byte, documents_of):
    corpus = corpus_of(words, seq_len=128)
    found = []
    for row in range(corpus.train.rows):
        found += documents_of(corpus.train.assemble(np.array([row])))
    texts = sorted(byte.decode(tokens, skip_special=True) for tokens in found)
    assert texts == sorted(f"{n:02d} " + "abc " * (n % 15) + "." for n in range(60))
    assert all(tokens[0] == tokens[-1] == byte.eos_id for tokens in found)


def test_a_long_document_trains_each_transition_once_with_pieces_that_restart(
    corpus_of, tmp_path, byte
):
    path = tmp_path / "a.txt"
    text = "".join(chr(97 + n % 26) for n in range(100))
    path.write_text(text)
    view = corpus_of(str(path), seq_len=16, batch_size=1).train
    pairs = []
    for row in range(view.rows):
        batch = view.assemble(np.array([row]))
        for piece in range(1, int(batch["segments"].max()) + 1):
            at = batch["segments"][0] == piece
            assert batch["positions"][0][at].tolist() == list(range(int(at.sum())))
            labels = batch["labels"][0][at]
            pairs += zip(batch["tokens"][0][at].tolist(), labels.tolist(), strict=True)
    ids = byte.encode_document(text).tolist()
    assert sorted(pairs) == sorted(pairwise(ids))
    assert view.tokens == len(ids) - 1


def test_the_end_of_a_document_is_trained_without_a_padding_token(corpus_of, words, golden_folder):
    """A tokenizer that calls its end token the padding must still learn to stop."""
    for name in ("byte", str(golden_folder)):
        tokenizer = load_tokenizer(name)
        corpus = corpus_of(words, tokenizer=tokenizer, seq_len=64)
        ends = 0
        for row in range(corpus.train.rows):
            batch = corpus.train.assemble(np.array([row]))
            trained = batch["weights"] > 0
            ends += int((batch["labels"][trained] == tokenizer.eos_id).sum())
        assert ends == 60


def test_no_packing_means_one_piece_a_row(corpus_of, words):
    view = corpus_of(words, seq_len=32, packing="none").train
    assert view.assemble(np.arange(view.rows))["segments"].max() == 1
    assert view.rows > corpus_of(words, seq_len=32).train.rows


def test_a_batch_depends_on_seed_and_step_alone(corpus_of, words):
    first = corpus_of(words, seed=3).train
    later = corpus_of(words, seed=3).train
    other = corpus_of(words, seed=4).train
    for t in (0, 5, 10**9):
        ours = first.batch(t, 4)
        for name, array in later.batch(t, 4).items():
            assert np.array_equal(ours[name], array)
        assert not np.array_equal(other.batch(t, 4)["tokens"], ours["tokens"])


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(corpus_of, words):
    view = corpus_of(words).train
    epochs = [view.row_numbers(np.arange(e * view.rows, (e + 1) * view.rows)) for e in range(3)]
    assert all(sorted(epoch.tolist()) == list(range(view.rows)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    straight = corpus_of(words, shuffle=False).train
    assert straight.row_numbers(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12])
def test_any_number_of_processes_reads_the_same_rows(corpus_of, words, count):
    view = corpus_of(words).train
    for t in (0, 3, 10**9):
        whole = view.batch(t, 12)
        parts = [view.batch(t, 12, rows) for rows in np.split(np.arange(12), count)]
        for name in whole:
            assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_four_processes_read_an_epoch_disjoint_and_complete(corpus_of, tmp_path):
    """Each process shuffling files for itself once left 36% unread and read as many twice."""
    for n in range(16):
        (tmp_path / f"{n}.txt").write_text(f"file {n} " * 12)
    view = corpus_of(str(tmp_path / "*.txt"), seq_len=16, packing="none").train
    steps, left = divmod(view.rows, 4)
    seen = [[], [], [], []]
    for t in range(steps):
        for process in range(4):
            first = t * 4 + process
            seen[process] += view.row_numbers(np.arange(first, first + 1)).tolist()
    assert len({len(rows) for rows in seen}) == 1
    assert len(set().union(*seen)) == steps * 4 == view.rows - left


def test_a_resumed_stream_equals_the_uninterrupted_one(corpus_of, words):
    view = corpus_of(words).train
    straight = [rows.tolist() for rows in rows_of(view, 4, range(30))]
    resumed = rows_of(view, 4, range(13)) + rows_of(corpus_of(words).train, 4, range(13, 30))
    assert [rows.tolist() for rows in resumed] == straight


def test_pooled_sources_give_every_row_once_an_epoch(corpus_of, write_jsonl):
    a = write_jsonl("a.jsonl", [f"a{n}" * 20 for n in range(40)])
    b = write_jsonl("b.jsonl", [f"b{n}" * 20 for n in range(7)])
    view = corpus_of([a, b]).train
    assert view.mixture is None
    assert sorted(view.row_numbers(np.arange(view.rows)).tolist()) == list(range(view.rows))


def test_weighted_sources_have_their_share_and_their_own_epochs(corpus_of, write_jsonl):
    a = write_jsonl("a.jsonl", ["a" * 40 for n in range(40)])
    b = write_jsonl("b.jsonl", ["b" * 40 for n in range(7)])
    sources = [{"path": a, "weight": 0.3}, {"path": b, "weight": 0.7}]
    view = corpus_of(sources, seq_len=64, packing="none").train
    assert view.rows == 47
    rows = view.row_numbers(np.arange(1000))
    from_a = rows < 40
    assert abs(from_a.sum() - 300) <= 1
    epochs_of_b = (rows[~from_a] - 40)[: 7 * 90].reshape(90, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs_of_b.tolist())
    assert len({tuple(epoch) for epoch in epochs_of_b.tolist()}) > 50
    batch = view.batch(0, 10)
    assert sorted(batch["tokens"][:, 1].tolist()).count(ord("b")) == 7
    assert view.batch(10**9, 10)["weights"].sum() == 410


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_sees_every_row_once_whatever_the_batch(corpus_of, words, batch_size):
    corpus = corpus_of(words, eval_fraction=0.3)
    view = corpus.eval
    assert view.rows > 3
    batches = list(view.eval_batches(batch_size))
    assert len(batches) == -(-view.rows // batch_size)
    assert all(batch["tokens"].shape == (batch_size, 16) for batch in batches)
    stacked = np.concatenate([batch["tokens"] for batch in batches])
    whole = view.assemble(np.arange(view.rows))
    assert np.array_equal(stacked[: view.rows], whole["tokens"])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.sum() == view.tokens == whole["weights"].sum()
    assert not weights[view.rows :].any()
    assert len(list(view.eval_batches(batch_size, limit=2))) == min(2, len(batches))
    halves = np.split(np.arange(batch_size * 2), 2)  # what each of two processes reads
    parts = [list(view.eval_batches(batch_size * 2, None, half)) for half in halves]
    assert len(parts[0]) == len(parts[1])
    assert sum(b["weights"].sum() for part in parts for b in part) == view.tokens


def test_fewer_rows_than_a_batch_are_refused_with_the_numbers(corpus_of, write_jsonl):
    path = write_jsonl("a.jsonl", ["x" * 31] * 8)
    with pytest.raises(DataError) as caught:
        corpus_of(path, batch_size=32, seq_len=32, packing="none")
    message = str(caught.value)
    assert "8 rows of data.seq_len 32 tokens" in message
    assert "train.batch_size 32" in message and "at most 8" in message
    assert corpus_of(path, batch_size=8, seq_len=32, packing="none").train.rows == 8


def test_too_few_rows_because_others_were_left_out_says_which(corpus_of, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 31}) + "\n{broken\n{broken too\n")
    with pytest.raises(DataError, match=r"give 1 row of data\.seq_len 32 tokens") as caught:
        corpus_of(str(path), batch_size=2, seq_len=32, packing="none")
    assert re.search(r"Left out were 2 x \w+, first at .*a\.jsonl:2", str(caught.value))


def test_uneven_rows_give_every_process_the_same_number_of_batches(corpus_of, write_jsonl):
    """10 rows on 3 processes: the epoch ends nowhere, so nobody waits at its end."""
    path = write_jsonl("a.jsonl", ["x" * 31] * 10)
    view = corpus_of(path, seq_len=32, packing="none").train
    for t in range(7):
        parts = [view.batch(t, 3, np.array([index])) for index in range(3)]
        assert [part["tokens"].shape for part in parts] == [(1, 32)] * 3
        assert all(part["weights"].sum() == 32 for part in parts)


def test_documents_without_a_transition_are_refused_or_reported(corpus_of, tmp_path, golden_folder):
    tokenizer = load_tokenizer(str(golden_folder))
    tokenizer.suffix = ()  # as a tokenizer without any end token
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "H"}\n' * 3)
    with pytest.raises(DataError, match="no document has two tokens"):
        corpus_of(str(path), tokenizer=tokenizer)
    path.write_text('{"text": "H"}\n' * 3 + '{"text": "Hello, world!"}\n' * 3)
    corpus = corpus_of(str(path), tokenizer=tokenizer)
    assert any("3 documents of a single token" in line for line in corpus.report())


def test_no_sources_is_an_error(make_run, byte, tmp_path):
    from types import SimpleNamespace

    run = make_run(["x"])
    data = SimpleNamespace(**{**run.data.__dict__, "sources": []})
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare(SimpleNamespace(data=data, seed=0, train=run.train), byte, str(tmp_path))


def test_skipped_rows_are_in_the_report(corpus_of, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello there"}\n' * 9 + '{"text": ""}\n{"text": null}\nx\n')
    corpus = corpus_of(str(path))
    assert corpus.skipped == {"empty": 1, "null": 1, "bad_json": 1}
    assert "data: skipped rows: 1 bad_json, 1 empty, 1 null" in corpus.report()
    with pytest.raises(DataError, match=r"a\.jsonl:10: the text is empty"):
        corpus_of(str(path), bad_rows="error")


def test_tokens_beyond_the_vocabulary_are_refused(corpus_of, words):
    view = corpus_of(words).train
    view.vocabulary = 100
    with pytest.raises(DataError, match=r"holds token \d+, but the tokenizer has 100 ids"):
        view.batch(0, 8)


def test_a_stop_is_noticed_while_preparing(make_run, byte, words, tmp_path):
    import threading

    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        prepare(make_run(words), byte, str(tmp_path / "c"), stop=stop)


def test_everything_may_be_behind_urls(make_run, byte, words):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/in/words.jsonl", Path(words).read_bytes())
    run = make_run("memory://in/*.jsonl", eval_fraction=0.2)
    remote = prepare(run, byte, "memory://cache")
    again = prepare(run, byte, "memory://cache")
    assert remote.index_hash == again.index_hash
    local = prepare(make_run(words, eval_fraction=0.2), byte, words + ".cache")
    assert local.index_hash == remote.index_hash
    for name, array in local.train.batch(3, 4).items():
        assert np.array_equal(array, remote.train.batch(3, 4)[name])
    memory.store.clear()


def test_a_batch_bigger_than_an_epoch_still_has_every_row(corpus_of, words):
    view = corpus_of(words).train
    rows = view.row_numbers(np.arange(view.rows * 3))
    assert np.bincount(rows).tolist() == [3] * view.rows


def test_a_row_can_be_traced(corpus_of, words):
    view = corpus_of(words).train
    where = view.describe_row(3)
    assert where["dataset"].rsplit("tokens-", 1)[1] and sum(where["places"]) <= 16
