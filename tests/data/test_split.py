"""The split: by the text, about as much as asked, and never nothing without a word."""

import pytest

from localtrain.data.loader import prepare


@pytest.fixture
def texts_of(byte, documents_of):
    """texts_of(view) -> the set of its document texts."""
    import numpy as np

    def read(view):
        found = []
        for row in range(view.rows):
            found += documents_of(view.assemble(np.array([row])))
        return [byte.decode(tokens, skip_special=True) for tokens in found]

    return read


def test_the_held_out_share_is_about_the_fraction(corpus_of, write_jsonl):
    path = write_jsonl("a.jsonl", [f"document {n} " * 5 for n in range(3000)])
    corpus = corpus_of(path, eval_fraction=0.1, seq_len=128)
    share = corpus.eval.tokens / (corpus.eval.tokens + corpus.train.tokens)
    assert 0.08 < share < 0.12 and not corpus.notes


def test_equal_documents_land_on_one_side_across_files_and_sources(
    corpus_of, write_jsonl, texts_of
):
    a = write_jsonl("a.jsonl", [f"text {n}" for n in range(100)])
    b = write_jsonl("b.jsonl", [f"text {n}" for n in range(50, 150)] * 2)
    corpus = corpus_of([a, b], eval_fraction=0.3, seq_len=32)
    train, held = texts_of(corpus.train), texts_of(corpus.eval)
    assert len(train) + len(held) == 300
    assert held and not set(train) & set(held)


def test_adding_documents_moves_none_of_the_others(corpus_of, write_jsonl, texts_of):
    few = write_jsonl("few.jsonl", [f"text {n}" for n in range(400)])
    more = write_jsonl("more.jsonl", [f"text {n}" for n in range(800)])
    before = set(texts_of(corpus_of(few, eval_fraction=0.25, seq_len=32).eval))
    after = set(texts_of(corpus_of(more, eval_fraction=0.25, seq_len=32).eval))
    assert before < after


@pytest.mark.parametrize("count", [2, 3, 5, 10])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.5])
def test_a_few_documents_leave_something_on_both_sides(corpus_of, write_jsonl, count, fraction):
    path = write_jsonl("a.jsonl", [f"{n} document of some length" for n in range(count)])
    corpus = corpus_of(path, eval_fraction=fraction, batch_size=1)
    assert corpus.train.rows and corpus.eval.rows
    assert corpus.train.tokens >= corpus.eval.tokens * 0.5
    assert fraction == 0.5 or any("few documents" in line for line in corpus.report())


def test_one_document_is_cut_at_its_end(corpus_of, tmp_path, texts_of):
    path = tmp_path / "a.txt"
    text = "".join(f"line {n}\n" for n in range(500))
    path.write_text(text)
    corpus = corpus_of(str(path), eval_fraction=0.1, seq_len=8192, batch_size=1)
    (train,), (held,) = texts_of(corpus.train), texts_of(corpus.eval)
    assert train + held == text
    assert 0.09 < len(held) / len(text) < 0.11


def test_copies_of_one_document_do_not_leak(corpus_of, write_jsonl, texts_of):
    path = write_jsonl("a.jsonl", ["abcdefghij" * 20] * 4)
    corpus = corpus_of(path, eval_fraction=0.1, seq_len=256, batch_size=1)
    train, held = set(texts_of(corpus.train)), set(texts_of(corpus.eval))
    assert len(train) == len(held) == 1
    assert train.pop() + held.pop() == "abcdefghij" * 20


def test_small_files_beside_a_big_one_are_not_all_held_out(corpus_of, tmp_path):
    (tmp_path / "big.txt").write_text("".join(f"line {n}\n" for n in range(4000)))
    for n in range(20):
        (tmp_path / f"small{n}.txt").write_text(f"small {n}")
    corpus = corpus_of(str(tmp_path / "*.txt"), eval_fraction=0.05, seq_len=256)
    share = corpus.eval.tokens / (corpus.eval.tokens + corpus.train.tokens)
    assert 0.03 < share < 0.08


def test_two_tokens_are_trained_on_and_nothing_is_held_out(corpus_of, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    corpus = corpus_of(str(tmp_path / "a.txt"), eval_fraction=0.01, batch_size=1)
    assert corpus.train.rows == 1 and corpus.eval.rows == 0
    assert list(corpus.eval.eval_batches(4)) == []


def test_without_a_fraction_nothing_is_held_out_and_that_is_said(corpus_of, write_jsonl):
    path = write_jsonl("a.jsonl", [f"text {n}" for n in range(50)])
    corpus = corpus_of(path, eval_fraction=0.0)
    assert corpus.eval.rows == 0
    assert any("nothing is held out" in line for line in corpus.report())


def test_evaluation_sources_leave_the_training_documents_whole(
    make_run, byte, tmp_path, write_jsonl, texts_of
):
    a = write_jsonl("a.jsonl", [f"train {n}" for n in range(30)])
    b = write_jsonl("b.jsonl", [f"eval {n}" for n in range(10)])
    run = make_run(a, eval_sources=b, eval_fraction=0.3, seq_len=32)
    corpus = prepare(run, byte, str(tmp_path / "cache"))
    assert len(texts_of(corpus.train)) == 30
    assert sorted(texts_of(corpus.eval)) == sorted(f"eval {n}" for n in range(10))


def test_a_change_of_the_fraction_builds_nothing_again(corpus_of, write_jsonl, tmp_path):
    import os

    path = write_jsonl("a.jsonl", [f"text {n}" for n in range(500)])
    corpus_of(path, eval_fraction=0.1)
    before = os.listdir(tmp_path / "cache")
    corpus_of(path, eval_fraction=0.2)
    assert os.listdir(tmp_path / "cache") == before
