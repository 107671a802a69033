"""Whole runs of the program: train, be killed anywhere, go on exactly, refuse mistakes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from localtrain import runtime
from localtrain.checkpoint import Checkpoints
from localtrain.metrics import read_metrics

RATES = {"tokens_per_s", "step_time_s", "mfu", "flops_per_s", "data_wait_s", "time"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A tiny model, some text (the tests' own sources) and a run file that saves every 5 steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(tiny_config))
    text = folder / "text"
    text.mkdir()
    for file in sorted(Path(__file__).parent.glob("test_*.py"))[:8]:
        (text / file.name).write_bytes(file.read_bytes())
    (folder / "tiny.yaml").write_text(
        f"""
name: tiny
model: {{path: {folder / "model"}}}
data: {{sources: "{text}/*.py", seq_len: 32, eval_fraction: 0.2, cache: {folder / "cache"}}}
train: {{steps: 20, batch_size: 4, log_every: 1}}
optim: {{lr: 3e-3, warmup: 5}}
eval: {{every: 7, batches: 2}}
checkpoint: {{every: 5, keep: 10}}
"""
    )
    return folder


def command(folder, out, *more):
    base = [sys.executable, "-m", "localtrain", "train", str(folder / "tiny.yaml")]
    return [*base, "--backend", "cpu", "--out", str(out), *more]


def run(folder, out, *more, code=0, **options):
    done = subprocess.run(
        command(folder, out, *more), capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def start(folder, out, *more):
    return subprocess.Popen(
        command(folder, out, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rows(out):
    """Logged rows without times and rates, events apart."""
    return [
        {k: v for k, v in row.items() if k not in RATES}
        for row in read_metrics(out)
        if "event" not in row
    ]


def events(out):
    return [row for row in read_metrics(out) if "event" in row]


def arrays(out, step):
    """Every file of a checkpoint's arrays as restored, by name."""
    import jax

    from localtrain import arrays as codec

    meta = Checkpoints(out / "checkpoints").read_meta(step)[1]
    template = {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype)
        for name, (dtype, shape) in meta["arrays"].items()
    }
    read = codec.read(out / "checkpoints" / str(step), meta["arrays"], template)
    return {name: np.asarray(value) for name, value in read.items()}


def assert_equal_runs(a, b, step=20):
    assert rows(a) == rows(b)
    left, right = arrays(a, step), arrays(b, step)
    assert left.keys() == right.keys() and len(left) > 10
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.fixture(scope="module")
def straight(folder):
    """The uninterrupted run that all others must equal."""
    out = folder / "straight"
    done = run(folder, out)
    return out, done


def wait_for(out, step, process, timeout=120):
    """Until the log has a row of that step (or the process ended)."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if out.exists() and any(row["step"] >= step for row in read_metrics(out)):
            return
        time.sleep(0.02)


def test_a_run_learns_logs_evaluates_and_saves(straight):
    out, done = straight
    logged = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 21))
    assert abs(logged[0]["loss"] - np.log(264)) < 0.5
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.5
    assert [row["step"] for row in rows(out) if "eval_loss" in row] == [7, 14, 20]
    assert logged[0]["lr"] == pytest.approx(3e-3 / 5) and logged[4]["lr"] == pytest.approx(3e-3)
    assert logged[-1]["lr"] == pytest.approx(3e-4)
    assert [row["tokens"] for row in logged] == [128 * n for n in range(1, 21)]
    trained = [row["trained_tokens"] for row in logged]
    assert 0 < trained[0] <= 128 and np.all(np.diff(trained) > 0)
    needed = {"grad_norm", "tokens_per_s", "step_time_s", "mfu", "data_wait_s", "time"}
    assert all(needed <= row.keys() for row in read_metrics(out) if "loss" in row)
    assert Checkpoints(out / "checkpoints").steps() == [5, 10, 15, 20]
    assert ", loss 5." in done.stdout and "sample" in done.stdout
    assert f"localtrain generate {out}" in done.stdout
    assert list((out / "tensorboard").iterdir()) and (out / "log.txt").stat().st_size > 1000
    assert "warning" not in done.stderr.lower()


def test_a_finished_run_says_so_and_how_to_extend_it(folder, straight):
    before = rows(straight[0])
    done = run(folder, straight[0])
    assert "finished" in done.stderr and "train.steps=" in done.stderr
    assert rows(straight[0]) == before


def test_what_a_stop_left_out_after_the_last_step_is_done_at_the_next_start(
    folder, straight, tmp_path
):
    out = tmp_path / "left"
    shutil.copytree(straight[0], out)
    logged = (out / "metrics.jsonl").read_text().splitlines()
    short = [line for line in logged if json.loads(line).get("event") != "end"]
    short = [x for x in short if not ("eval_loss" in x and json.loads(x)["step"] == 20)]
    (out / "metrics.jsonl").write_text("\n".join(short) + "\n")
    done = run(folder, out)
    assert "only the last evaluation" in done.stderr and "sample" in done.stdout
    assert rows(out) == rows(straight[0])
    assert "finished" in run(folder, out).stderr


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_anywhere_and_started_again_it_equals_the_uninterrupted_run(
    folder, straight, tmp_path, seed
):
    """kill -9 at random moments, the first surely after a save, until the run is through."""
    out, moments = tmp_path / "killed", random.Random(seed)
    resumed = 0
    for attempt in range(8):
        process = start(folder, out)
        if attempt < 3:
            wait_for(out, min(19, 6 + 5 * attempt), process)
            time.sleep(moments.uniform(0, 0.15))
            process.kill()
        _, stderr = process.communicate(timeout=300)
        resumed += any(e["event"] == "resume" and e["step"] > 0 for e in events(out))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, stderr[-2000:]
    assert process.returncode == 0 and resumed >= 1
    assert_equal_runs(out, straight[0])


def test_the_account_of_a_run_that_was_killed_twice_adds_up(folder, tmp_path):
    out, lost, began = tmp_path / "account", 0, time.time()
    more = ["train.steps=300", "eval.every=0", "eval.sample_length=0"]
    for reach in (8, 33):
        process = start(folder, out, *more)
        wait_for(out, reach, process)
        process.kill()
        process.communicate()
        reached = max(row["step"] for row in rows(out))
        lost += reached - (Checkpoints(out / "checkpoints").latest() or 0)
    done = run(folder, out, *more)
    report = [sys.executable, "-m", "localtrain", "report", str(out), "--json"]
    found = json.loads(subprocess.run(report, capture_output=True, check=True).stdout)["time"]
    assert found["attempts"] == 3 and found["lost_steps"] == lost
    spent = {one["what"]: one["seconds"] for one in found["parts"]}
    assert {"steps", "import", "init", "data", "compile", "restore", "save", "idle"} <= spent.keys()
    first = next(row for row in events(out) if "began" in row)
    last = read_metrics(out)[-1]
    assert first["began"] > began - 0.05 and last["event"] == "end"
    assert sum(spent.values()) == pytest.approx(last["time"] - first["began"], abs=0.05)
    assert spent["other"] < 0.25 * found["wall_s"]  # the rest that nothing recorded
    assert (spent.get("lost", 0) > 0) == (lost > 0)
    assert f"(3 attempts, {lost} steps repeated)" in done.stderr


def test_a_clock_that_jumps_changes_no_number_and_no_account_is_negative(
    folder, straight, tmp_path
):
    """The wall clock goes back an hour, on two, back: at every third look at it."""
    script = (
        "import itertools, time\n"
        "looks, now = itertools.count(), time.time\n"
        "time.time = lambda: now() + (0, -3600, 7200)[next(looks) % 3]\n"
        "from localtrain.cli import main\n"
        "main()\n"
    )
    out = tmp_path / "jumps"
    program = [sys.executable, "-c", script, *command(folder, out)[3:]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert_equal_runs(out, straight[0])
    steps = [row for row in read_metrics(out) if "loss" in row]
    assert all(0 < row["step_time_s"] < 60 and row["data_wait_s"] >= 0 for row in steps)
    saves = [event for event in events(out) if event["event"] == "save"]
    assert len(saves) == 4 and all(0 <= event["save_block_s"] < 60 for event in saves)
    report = [sys.executable, "-m", "localtrain", "report", str(out), "--json"]
    parts = json.loads(subprocess.run(report, capture_output=True, check=True).stdout)["time"]
    assert all(one["seconds"] > 0 and 0 < one["share"] <= 1 for one in parts["parts"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_exits_75_and_the_same_command_goes_on(folder, straight, tmp_path, number):
    out = tmp_path / "stopped"
    process = start(folder, out, "train.log_every=1", "data.prefetch=0")
    wait_for(out, 3, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr[-2000:]
    saved = Checkpoints(out / "checkpoints").latest()
    assert saved and 3 <= saved < 20 and "same command" in stderr
    run(folder, out)
    assert [e["step"] for e in events(out) if e["event"] == "resume"] == [saved]
    assert_equal_runs(out, straight[0])


def test_an_evaluation_that_a_signal_cuts_is_done_again_at_the_resume(folder, straight, tmp_path):
    """No step may come between: later ones would be evaluated with other weights."""
    script = (
        "import os, signal\n"
        "from localtrain import train\n"
        "whole = train.evaluate\n"
        "def cut(job, params, corpus, stop):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop.event.wait(60)\n"
        "    return whole(job, params, corpus, stop)\n"
        "train.evaluate = cut\n"
        "from localtrain.cli import main\n"
        "main()\n"
    )
    out = tmp_path / "cut"
    program = [sys.executable, "-c", script, *command(folder, out)[3:]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 75, done.stderr[-2000:]
    assert Checkpoints(out / "checkpoints").latest() == 7  # of `eval.every`
    run(folder, out)
    assert_equal_runs(out, straight[0])


def test_a_signal_during_the_first_compile_ends_at_once(folder, tmp_path):
    out = tmp_path / "early"
    process = start(folder, out, "train.remat=full")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (out / "log.txt").exists() and "compiling" in (out / "log.txt").read_text():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75 and time.monotonic() - begin < 10, stderr
    assert "nothing to save" in stderr


def test_the_last_step_is_saved_once_whatever_the_interval(folder, tmp_path):
    out = tmp_path / "seven"
    run(folder, out, "train.steps=7")
    assert Checkpoints(out / "checkpoints").steps() == [5, 7]


def test_keep_bounds_the_checkpoints_and_extending_goes_on(folder, tmp_path):
    out = tmp_path / "extend"
    run(folder, out, "train.steps=6", "checkpoint.every=2", "checkpoint.keep=2")
    assert Checkpoints(out / "checkpoints").steps() == [4, 6]
    done = run(folder, out, "train.steps=9", "checkpoint.every=2", "checkpoint.keep=2")
    assert "resuming" in done.stderr
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, 10))
    marks = [(e["event"], e["step"]) for e in events(out) if e["event"] in ("resume", "end")]
    assert marks == [("end", 6), ("resume", 6), ("end", 9)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(folder, straight, tmp_path):
    out = tmp_path / "damaged"
    run(folder, out, "train.steps=12", "checkpoint.every=4", "eval.every=0")
    victim = max((out / "checkpoints" / "12").rglob("*"), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    more = ["train.steps=14", "checkpoint.every=4", "eval.every=0"]
    rows_before = (out / "metrics.jsonl").read_bytes()
    assert victim.name in run(folder, out, *more, "--strict", code=3).stderr
    assert (out / "metrics.jsonl").read_bytes() == rows_before
    done = run(folder, out, *more)
    assert victim.name in done.stderr and "Falling back to step 8" in done.stderr
    assert [e["step"] for e in events(out) if e["event"] == "resume"] == [8]


def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_it_again(
    folder, straight, tmp_path
):
    out = tmp_path / "again"
    shutil.copytree(straight[0], out)
    victim = max((out / "checkpoints" / "20").rglob("*"), key=lambda f: f.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    assert victim.name in run(folder, out, "--strict", code=3).stderr
    assert victim.name in run(folder, out).stderr
    assert_equal_runs(out, straight[0])


def test_the_default_tokenizer_by_its_name_is_the_same_run(folder, straight):
    assert "finished" in run(folder, straight[0], "data.tokenizer=byte").stderr


def test_a_loss_that_is_not_finite_stops_with_4_and_keeps_the_last_good_state(folder, tmp_path):
    out = tmp_path / "nan"
    more = ["optim.lr=1e15", "optim.warmup=0", "optim.clip=0", "checkpoint.keep=2"]
    done = run(folder, out, *more, code=4)
    assert "not applied" in done.stderr and "optim.lr" in done.stderr
    step = Checkpoints(out / "checkpoints").latest()
    assert step is not None and all(np.isfinite(a).all() for a in arrays(out, step).values())
    assert all(np.isfinite(row["loss"]) for row in rows(out) if "loss" in row)


def test_another_run_in_the_same_directory_is_refused_and_nothing_changes(folder, straight):
    before = (straight[0] / "run.yaml").read_bytes()
    done = run(folder, straight[0], "optim.lr=1e-4", code=2)
    assert "optim.lr" in done.stderr and "--override" in done.stderr
    assert (straight[0] / "run.yaml").read_bytes() == before


def test_without_out_a_different_run_gets_the_next_name(folder, tmp_path):
    base = [sys.executable, "-m", "localtrain", "train", str(folder / "tiny.yaml")]
    base += ["--backend", "cpu", "train.steps=2"]
    for more, expected in (([], "runs/tiny"), (["optim.lr=1e-4"], "runs/tiny-2")):
        done = subprocess.run(
            base + more, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / expected / "metrics.jsonl").exists() and expected in done.stdout
    assert "runs/tiny-2" in done.stderr


def test_a_second_process_on_the_directory_exits_8_and_harms_nothing(folder, tmp_path):
    out = tmp_path / "busy"
    process = start(folder, out, "train.steps=100000")
    wait_for(out, 1, process)
    done = run(folder, out, "train.steps=100000", code=8)
    assert str(process.pid) in done.stderr
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr[-2000:]
    assert rows(out)[-1]["step"] >= Checkpoints(out / "checkpoints").latest() - 1


def test_two_devices_train_like_one(folder, straight, tmp_path):
    out = tmp_path / "two"
    run(folder, out, "train.steps=3", "--devices", "2")
    ours, one = ([r for r in rows(o) if "loss" in r] for o in (out, straight[0]))
    np.testing.assert_allclose(ours[0]["loss"], one[0]["loss"], rtol=1e-5)
    np.testing.assert_allclose(ours[0]["grad_norm"], one[0]["grad_norm"], rtol=1e-5)
    assert "resuming" in run(folder, out, "train.steps=4").stderr  # and opens on one device


def test_a_full_disk_ends_with_6_and_the_checkpoints_before_are_good(folder, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(small)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        done = run(folder, small / "run", "checkpoint.every=2", code=6)
        assert "error: " in done.stderr and "full" in done.stderr.splitlines()[-1]
        steps = Checkpoints(small / "run" / "checkpoints").steps()
        assert steps and steps[-1] < 20
        for step in steps:
            assert all(np.isfinite(a).all() for a in arrays(small / "run", step).values())
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_profile_of_the_asked_steps_is_written(folder, tmp_path):
    out = tmp_path / "profile"
    run(folder, out, "train.steps=4", "train.profile=[2,3]")
    assert list((out / "profile").rglob("*.xplane.pb"))


def cached(done) -> int:
    found = re.search(r"compiled in \S+ s(?: \((\d) of 3 programs from the cache\))?", done.stderr)
    return int(found[1] or 0)


def test_the_second_start_takes_programs_from_the_cache_and_a_changed_one_does_not(
    folder, tmp_path
):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    short = ["train.steps=2", "train.micro_batch=2"]
    first = run(folder, tmp_path / "first", *short, env=env)
    second = run(folder, tmp_path / "second", *short, env=env)
    assert cached(first) == 0 and cached(second) >= 1
    assert rows(tmp_path / "first") == rows(tmp_path / "second")
    changed = run(folder, tmp_path / "changed", *short, "train.z_loss=1e-4", env=env)
    assert cached(changed) < cached(second)
    for file in (tmp_path / "cache").rglob("*-cache"):
        file.write_bytes(file.read_bytes()[:100])
    torn = run(folder, tmp_path / "torn", *short, env=env)
    assert rows(tmp_path / "first") == rows(tmp_path / "torn") and cached(torn) == 0


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["train.batch_size=100000"], 3, ["rows", "train.batch_size"]),
        (["data.sources=/nowhere/*.txt"], 3, ["/nowhere/*.txt"]),
        (["train.step=3"], 2, ["train.step", "train.steps"]),
        (["model.path=/nowhere"], 2, ["/nowhere"]),
        (["mesh.fsdp=3"], 2, ["fsdp", "1 device"]),
        (["mesh.fsdp=3", "--dry-run"], 2, ["fsdp", "1 device"]),
        (["data.tokenizer=/nowhere"], 3, ["/nowhere"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_end_in_one_paragraph_before_anything_is_trained(
    folder, tmp_path, more, code, words
):
    out = tmp_path / "never"
    done = run(folder, out, *more, code=code)
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words)
    assert not (out / "checkpoints").exists()
    assert code != 2 or not out.exists()  # nothing was started, no data were read


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(folder, tmp_path, tiny_config):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**tiny_config, "vocab_size": 100}))
    done = run(folder, tmp_path / "out", f"model.path={model}", code=2)
    assert "264" in done.stderr and "100" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
def test_a_directory_that_cannot_be_written_is_one_paragraph(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    done = run(folder, tmp_path / "file", code=2)
    assert "is a file" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="an open file cannot be moved on Windows")
@pytest.mark.parametrize("what", ["moved", "deleted"])
def test_a_run_directory_that_goes_away_ends_the_run_loudly(folder, tmp_path, what):
    out = tmp_path / "out"
    process = start(folder, out, "train.steps=100000", "checkpoint.every=10")
    wait_for(out, 21, process)  # step 10 is saved
    out.rename(tmp_path / "moved")
    if what == "deleted":
        shutil.rmtree(tmp_path / "moved", ignore_errors=True)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 6, said[-2000:]
    assert f"{out} was moved, deleted or replaced" in said and "Traceback" not in said
    if what == "moved":  # and back again it goes on
        shutil.rmtree(out, ignore_errors=True)
        (tmp_path / "moved").rename(out)
        step = Checkpoints(out / "checkpoints").latest()
        run(folder, out, f"train.steps={step + 1}")
        assert [e["step"] for e in events(out) if e["event"] == "resume"] == [step]


def test_what_a_failed_save_leaves_behind_is_not_printed(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    runtime.quiet_third_parties()
    runtime.quiet_third_parties()
    for text in ("Event loop is closed", "anything else"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(one.exc_value) for one in seen] == ["anything else"]


def test_a_late_second_signal_does_not_spoil_the_exit_code():
    code = (
        "import os, signal, time, localtrain.cli as cli\n"
        "from localtrain.errors import Stopped\n"
        "def stopped(*_):\n    raise Stopped('saved')\n"
        "cli.app.invoke = stopped\n"
        "code = cli.run(['backends'])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 75 and "saved" in done.stderr
