"""Fingerprints: a changed source is named."""

import json
import os
import shutil

import pytest

from localtrain.data import fingerprint
from localtrain.data.fingerprint import explain_difference


@pytest.fixture
def folder(tmp_path):
    top = tmp_path / "texts"
    top.mkdir()
    for n in range(6):
        (top / f"{n}.txt").write_text(f"text of file {n}, long enough to make a row or two")
    return top


def test_the_same_data_have_the_same_fingerprint(corpus_of, folder):
    first, again = corpus_of(str(folder)).fingerprint, corpus_of(str(folder)).fingerprint
    assert first == again == json.loads(json.dumps(first))
    assert explain_difference(first, again) == ""


def test_moving_and_touching_files_changes_nothing(corpus_of, folder, tmp_path):
    first = corpus_of(str(folder)).fingerprint
    os.utime(folder / "3.txt", ns=(1, 1))
    assert explain_difference(first, corpus_of(str(folder)).fingerprint) == ""
    shutil.copytree(folder, tmp_path / "elsewhere")
    moved = corpus_of(str(tmp_path / "elsewhere")).fingerprint
    assert explain_difference(first, moved) == ""


def test_a_changed_new_or_missing_file_is_named(corpus_of, folder):
    first = corpus_of(str(folder)).fingerprint
    (folder / "3.txt").write_text("another text that is long enough for a row or two as well")
    changed = explain_difference(first, corpus_of(str(folder)).fingerprint)
    assert changed.startswith(f"{folder / '3.txt'} changed: it was 48 bytes, crc32c ")
    second = corpus_of(str(folder)).fingerprint
    (folder / "4.txt").unlink()
    gone = explain_difference(second, corpus_of(str(folder)).fingerprint)
    assert gone == f"{folder / '4.txt'} is gone"
    third = corpus_of(str(folder)).fingerprint
    (folder / "7.txt").write_text("new text")
    (folder / "8.txt").write_text("newer text")
    new = explain_difference(third, corpus_of(str(folder)).fingerprint)
    assert new == f"{folder / '7.txt'} is new (and 1 more)"


def test_a_changed_setting_source_or_weight_is_named(corpus_of, folder, write_jsonl):
    base = corpus_of(str(folder)).fingerprint

    def difference(*args, **settings):
        return explain_difference(base, corpus_of(*args, **settings).fingerprint)

    assert difference(str(folder), seq_len=32) == "data setting seq_len was 16 and is 32 now"
    assert difference(str(folder), seed=1) == "data setting seed was 0 and is 1 now"
    other = write_jsonl("a.jsonl", ["some other text"] * 9)
    assert difference([str(folder), other]) == "there were 1 data sources and there are 2 now"
    weighted = [{"path": str(folder), "weight": 2}, {"path": other, "weight": 1}]
    two = corpus_of(weighted).fingerprint
    weighted[0]["weight"] = 3
    message = explain_difference(two, corpus_of(weighted).fingerprint)
    assert message == f"the weight of {folder} was 2.0 and is 3.0 now"


def test_many_files_are_recorded_by_folder(corpus_of, folder, monkeypatch):
    monkeypatch.setattr(fingerprint, "MAX_FILES", 3)
    first = corpus_of(str(folder)).fingerprint
    assert list(first["sources"][0]["files"]) == [f"{folder}/"]
    (folder / "3.txt").write_text("another text that is long enough for a row or two")
    message = explain_difference(first, corpus_of(str(folder)).fingerprint)
    assert message.startswith(f"{folder}/ changed: it was 6 files")


def test_an_old_or_foreign_record_is_a_difference_and_no_crash(corpus_of, folder):
    now = corpus_of(str(folder)).fingerprint
    assert explain_difference({}, now)
    assert explain_difference({"hash": "x", "settings": now["settings"]}, now)
