"""Which directory a run goes to, who may write it, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest
import yaml

from localtrain import lock as lock_module
from localtrain.config import RunConfig
from localtrain.errors import BusyError, ConfigError, DataError, StorageError
from localtrain.lock import FolderLock
from localtrain.rundiff import HARMLESS, differences, matters
from localtrain.rundir import RunDirectory


def make_run(**changes):
    """A valid run; changes are dotted keys with "__" for the dot."""
    values = {
        "name": "tiny",
        "model": {"preset": "qwen3-0.6b"},
        "data": {"sources": ["a.txt"]},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        *sections, last = key.split("__")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return RunConfig.model_validate(values)


def train_until(step, out=None, run=None, override=False):
    """Open, save a checkpoint of `step`, and close; returns the directory."""
    with RunDirectory.open(out, run or make_run(), override) as opened:
        opened.checkpoints(keep=3).save(step, {"x": jnp.ones(2)}, {}, block=True)
    return opened


def reopen(out=None, override=False, **changes):
    with RunDirectory.open(out, make_run(**changes), override) as opened:
        return opened


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- without --out


def test_a_new_run_goes_to_runs_name_and_stores_the_resolved_run():
    opened = reopen()
    assert (str(opened.path), opened.step) == (os.path.join("runs", "tiny"), 0)
    assert not opened.resumed and not opened.finished and opened.notes == []
    stored = RunConfig.model_validate(yaml.safe_load((opened.path / "run.yaml").read_text()))
    assert stored == make_run()


def test_the_same_run_resumes_where_it_was():
    train_until(4)
    opened = reopen()
    assert (opened.path.name, opened.step, opened.resumed) == ("tiny", 4, True)
    assert opened.notes == [f"resuming {opened.path} at step 4 of 10"]


def test_a_run_that_differs_in_a_way_that_matters_goes_to_the_next_name_and_says_so():
    train_until(4)
    opened = train_until(3, run=make_run(optim__lr=0.01))
    assert opened.path.name == "tiny-2"
    assert len(opened.notes) == 1
    assert "optim.lr 0.0003 -> 0.01" in opened.notes[0] and "tiny-2" in opened.notes[0]
    assert reopen(optim__lr=0.01).step == 3  # resumes tiny-2
    assert reopen(optim__lr=0.02).path.name == "tiny-3"
    assert reopen().step == 4  # tiny is untouched


def test_a_finished_run_says_so_and_how_to_go_on():
    train_until(10)
    before = (reopen().path / "run.yaml").stat().st_mtime_ns
    opened = reopen(train__log_every=3)
    assert opened.finished
    assert "is finished (step 10 of 10)" in opened.notes[0]
    assert "train.steps=20" in opened.notes[0]
    assert (opened.path / "run.yaml").stat().st_mtime_ns == before  # nothing written


def test_more_steps_extend_a_finished_run_and_the_schedule_is_mentioned():
    train_until(10)
    opened = reopen(train__steps=20)
    assert (opened.finished, opened.step) == (False, 10)
    assert "train.steps 10 -> 20: the learning-rate schedule now spans 20 steps" in opened.notes
    assert "steps: 20" in (opened.path / "run.yaml").read_text()


def test_what_does_not_matter_resumes_and_is_stored():
    train_until(4)
    harmless = {
        "train__log_every": 7,
        "train__micro_batch": 4,
        "train__remat": "full",
        "eval__every": 3,
        "checkpoint__keep": 9,
        "data__prefetch": 5,
        "data__cache": "elsewhere",
    }
    opened = reopen(**harmless)
    assert (opened.path.name, opened.step) == ("tiny", 4)
    stored = yaml.safe_load((opened.path / "run.yaml").read_text())
    assert stored["train"]["log_every"] == 7
    assert stored["checkpoint"]["keep"] == 9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("data__sources", ["b.txt"]),
        ("data__seq_len", 64),
        ("data__tokenizer", "t.json"),
        ("train__batch_size", 16),
        ("optim__warmup", 3),
        ("optim__state_dtype", "bfloat16"),
        ("model__dtype", "bfloat16"),
        ("task", "sft"),
    ],
)
def test_what_changes_the_updates_matters(key, value):
    train_until(4)
    assert reopen(**{key: value}).path.name == "tiny-2"


def test_every_harmless_key_exists():
    nothing = {key: None for key in make_run().to_dict()}
    known = [*differences(nothing, make_run(train__profile=[1, 2]).to_dict()), "data.cache"]
    known += ["train.micro_batch"]
    assert not matters("train.steps") and not matters("eval.every") and matters("optim.lr")
    for entry in HARMLESS:
        assert any(key == entry or key.startswith(entry) for key in known), entry


def test_a_directory_in_which_nothing_was_trained_is_used_again():
    reopen()
    opened = reopen(optim__lr=0.01)
    assert opened.path.name == "tiny"
    assert "lr: 0.01" in (opened.path / "run.yaml").read_text()


def test_override_goes_on_in_place():
    train_until(4)
    opened = reopen(optim__lr=0.01, override=True)
    assert (opened.path.name, opened.step) == ("tiny", 4)
    assert "--override: optim.lr 0.0003 -> 0.01" in opened.notes
    assert reopen(optim__lr=0.01).step == 4


# ---- with --out


def test_with_out_a_difference_that_matters_is_refused_with_the_keys_named():
    train_until(4, out="here")
    before = (reopen("here").path / "run.yaml").read_bytes()
    with pytest.raises(ConfigError) as raised:
        reopen("here", optim__lr=0.01, seed=3)
    message = str(raised.value)
    assert "optim.lr 0.0003 -> 0.01" in message and "seed 0 -> 3" in message
    assert "--override" in message and "\n" not in message
    assert (reopen("here").path / "run.yaml").read_bytes() == before
    assert reopen("here", override=True, optim__lr=0.01, seed=3).step == 4


def test_with_out_a_new_or_empty_directory_is_used():
    assert reopen("a/b/c").step == 0
    os.makedirs("mount/lost+found")
    assert reopen("mount").step == 0
    assert reopen(f"file://{os.getcwd()}/d").path.exists()


def test_a_directory_that_is_not_ours_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not a run directory: it holds chapter1\.txt"):
        reopen("thesis")
    with pytest.raises(ConfigError):
        reopen("thesis", override=True)
    assert os.listdir("thesis") == ["chapter1.txt"]
    os.makedirs("runs/tiny")
    open("runs/tiny/x", "w").close()
    with pytest.raises(ConfigError, match="it holds x"):
        reopen()


def test_a_file_instead_of_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        with pytest.raises(ConfigError, match="file"):
            reopen(out)


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs Linux")
def test_a_place_that_cannot_be_written_is_a_storage_error():
    with pytest.raises(StorageError, match=r"/sys/run cannot be created.*--out"):
        reopen("/sys/run")
    with pytest.raises(StorageError, match=r"/sys/kernel/.* cannot be"):
        reopen("/sys/kernel/run")


def test_a_read_only_directory_is_a_storage_error(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock_module.os, "open", refuse)
    with pytest.raises(StorageError, match=r"here cannot be written: Permission denied.*--out"):
        reopen("here")


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "just text", "\x00\x01"])
def test_a_damaged_run_file_is_named(text):
    opened = train_until(4)
    (opened.path / "run.yaml").write_text(text)
    with pytest.raises(DataError, match=r"run\.yaml is damaged"):
        reopen()


def test_a_run_file_of_another_version_is_compared_key_by_key():
    opened = train_until(4, out="here")
    path = opened.path / "run.yaml"
    values = yaml.safe_load(path.read_text())
    del values["optim"]["eps"]  # older: today's default is meant
    path.write_text(yaml.safe_dump(values))
    assert reopen("here").step == 4
    values["optim"]["new_key"] = 3  # newer
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"optim\.new_key 3 -> None"):
        reopen("here")


def test_unreadable_checkpoints_are_never_a_fresh_start():
    opened = train_until(4)
    (opened.path / "checkpoints" / "4" / "commit.json").write_text("{}")
    with pytest.raises(DataError, match="can be used"):
        reopen()
    reopen(train__steps=11, name="other")  # and the lock is free


def test_model_json_is_written_once():
    with RunDirectory.open("here", make_run()) as opened:
        opened.write_model({"model_type": "qwen3", "hidden_size": 8})
        path = opened.path / "model.json"
        before = path.stat().st_mtime_ns
        opened.write_model({"model_type": "qwen3", "hidden_size": 8})
        assert path.stat().st_mtime_ns == before
        assert json.loads(path.read_text())["hidden_size"] == 8


# ---- the lock

HOLD = """
import os, sys, time
from localtrain.lock import FolderLock
lock = FolderLock(sys.argv[1])
if len(sys.argv) > 2:  # a forked child that outlives its parent
    if os.fork() == 0:
        os.close(1)
        time.sleep(float(sys.argv[2]))
        os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold(folder, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return process


def test_a_directory_in_use_names_process_host_and_start(tmp_path):
    reopen("here")
    process = hold(tmp_path / "here")
    try:
        with pytest.raises(BusyError) as raised:
            reopen("here")
    finally:
        process.kill()
        process.communicate()
    message = str(raised.value)
    assert raised.value.exit_code == 8
    assert f"process {process.pid} on {socket.gethostname()} since 20" in message
    assert "--out" in message and "\n" not in message


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_a_killed_owner_is_taken_over_at_once(tmp_path):
    reopen("here")
    process = hold(tmp_path / "here")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    assert reopen("here").path.name == "here"
    assert time.monotonic() - began < 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    process = hold(tmp_path, "3")
    process.kill()
    process.communicate()
    began = time.monotonic()
    FolderLock(tmp_path).release()
    assert time.monotonic() - began < 2


def test_a_lock_is_free_again_after_release_and_its_file_stays(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(BusyError):
        FolderLock(tmp_path)
    first.release()
    first.release()
    second = FolderLock(tmp_path)
    assert second.token != first.token
    second.release()
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("text", ["", "garbage", "[]", '{"pid": "x"}', '{"pid": 99999999}'])
def test_what_the_lock_file_says_never_locks_anyone_out(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    FolderLock(tmp_path).release()


def test_a_run_that_differs_does_not_wait_for_a_busy_directory(tmp_path):
    train_until(4)
    process = hold(tmp_path / "runs" / "tiny")
    try:
        assert reopen(optim__lr=0.01).path.name == "tiny-2"
    finally:
        process.kill()
        process.communicate()


def test_a_kill_before_run_yaml_leaves_a_usable_directory(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".lock").write_text("{}")
    (tmp_path / "here" / ".run.yaml.tmp-0123456789ab").write_text("seed: ")
    assert reopen("here").step == 0
