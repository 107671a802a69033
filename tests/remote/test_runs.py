"""Whole runs whose directory is a URL: train, be killed anywhere, go on exactly, use the result."""

import json
import os
import signal
import subprocess

import pytest
from program import (
    all_rows,
    arrays,
    cli,
    command,
    committed,
    place,
    rows,
    start,
    train,
    wait_for,
)

from localtrain import storage


@pytest.mark.slow
def test_the_same_run_gives_the_same_numbers_on_every_store(folder, reference, remote):
    out = place(remote)
    done = train(folder, out)
    assert rows(out) == reference[0]
    assert arrays(out, 20) == reference[1]
    assert done.stdout.startswith(f"{out}: step 20")
    names = storage.find_below(out)
    assert {"run.yaml", "model.json", "metrics.jsonl", "log.txt"} <= set(names)
    assert "lease.json" not in names  # given back
    assert sum(name.startswith("tensorboard/") for name in names) == 1
    assert committed(out) == [5, 10, 15, 20]
    again = train(folder, out)
    assert "is finished (step 20 of 20)" in again.stderr
    longer = train(folder, out, "train.steps=22")
    assert "resuming" in longer.stderr and rows(out)[-1]["step"] == 22


def test_a_killed_run_goes_on_exactly(folder, reference, s3):
    out = place(s3)
    process = start(folder, out)
    wait_for(lambda: 5 in committed(out), process)
    process.kill()
    process.wait()
    assert storage.exists(storage.join(out, "lease.json"))
    before = committed(out)[-1]
    done = train(folder, out)
    assert f"resuming {out} at step" in done.stderr
    assert rows(out) == reference[0]
    assert arrays(out, 20) == reference[1]
    events = [row for row in all_rows(out) if row.get("event") == "resume"]
    assert len(events) == 1 and events[0]["step"] >= before
    names = storage.find_below(out)
    assert sum(name.startswith("tensorboard/") for name in names) == 2  # one for each attempt


@pytest.mark.slow
def test_a_kill_in_the_middle_of_an_upload_loses_nothing(folder, reference, s3):
    out = place(s3)
    s3.proxy.rule(("delay", 30), "PUT", r"checkpoints/10/.*", times=1000)
    process = start(folder, out)
    wait_for(lambda: any("/10/" in path for _, path in s3.proxy.requests), process)
    process.kill()
    process.wait()
    s3.proxy.clear()
    assert committed(out) == [5]
    train(folder, out)
    assert rows(out) == reference[0]
    assert arrays(out, 20) == reference[1]


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(folder, reference, gs):
    out = place(gs)
    process = start(folder, out)
    wait_for(lambda: 5 in committed(out), process)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 75, error[-2000:]
    assert not storage.exists(storage.join(out, "lease.json"))
    train(folder, out)
    assert rows(out) == reference[0]


@pytest.mark.slow
def test_a_fifth_of_all_requests_failing_changes_nothing(folder, reference, s3):
    out = place(s3)
    s3.proxy.chance(0.2, ("status", 503), ("status", 429))
    s3.proxy.chance(0.02, ("cut", 7))
    done = train(folder, out)
    faults = s3.proxy.faults
    s3.proxy.clear()
    assert faults > 10
    assert rows(out) == reference[0]
    assert arrays(out, 20) == reference[1]
    assert "requests were repeated" in done.stderr
    assert "requests were repeated" in storage.read_text(storage.join(out, "log.txt"))


@pytest.mark.slow
def test_a_second_run_on_the_same_url_is_turned_away(folder, s3):
    out = place(s3)
    first = start(folder, out, "train.steps=100000")
    wait_for(lambda: storage.exists(storage.join(out, "metrics.jsonl")), first)
    second = train(folder, out, "train.steps=100000", code=8)
    assert f"{out} is in use by process {first.pid} on" in second.stderr
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode == 75


@pytest.mark.slow
def test_a_store_that_fails_for_good_ends_the_run_and_keeps_what_was_saved(folder, s3):
    out = place(s3)
    process = start(folder, out, "train.steps=100000", "checkpoint.every=5")
    wait_for(lambda: 5 in committed(out), process)
    s3.proxy.rule(("status", 403), "PUT", times=10**6)
    error = process.communicate(timeout=200)[1]
    s3.proxy.clear()
    assert process.returncode == 6, error[-2000:]
    assert "credentials" in error and "Traceback" not in error
    assert committed(out)


@pytest.mark.slow
def test_a_run_at_a_url_is_used_like_a_local_one(folder, s3, tmp_path):
    out, hub = place(s3), place(s3)
    train(folder, out, "train.steps=10")
    said = cli("generate", out, "--prompt", "def ", "--max-new-tokens", 4)
    assert said.stdout.startswith("def ") or said.stdout
    assert json.loads(cli("eval", out, "--json").stdout)["loss"] > 0
    cli("export", out, hub)
    cli("export", out, tmp_path / "hub")
    for name in os.listdir(tmp_path / "hub"):
        assert storage.read_bytes(storage.join(hub, name)) == (tmp_path / "hub" / name).read_bytes()
    imported = place(s3)
    report = json.loads(cli("import", hub, imported, "--json").stdout)
    assert report["max_difference"] == 0
    assert committed(imported) == [0]
    assert (
        cli("generate", imported, "--prompt", "def ", "--max-new-tokens", 4).stdout == said.stdout
    )
    again = place(s3)
    warm = train(folder, again, f"model.init_from={imported}", "model.path=null", "train.steps=3")
    assert f"weights from {imported}" in warm.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_finite_keeps_the_last_good_state(folder, s3):
    import numpy as np

    out = place(s3)
    train(folder, out, "optim.lr=1e15", "optim.warmup=0", "optim.clip=0", code=4)
    saved = arrays(out, committed(out)[-1])
    floats = [data for name, data in saved.items() if name.startswith("params/")]
    assert floats and all(np.isfinite(np.frombuffer(data, np.float32)).all() for data in floats)
    assert all(row["loss"] is not None for row in rows(out) if "loss" in row)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_trained_again(folder, reference, s3):
    out = place(s3)
    train(folder, out, "train.steps=10")
    names = storage.find_below(storage.join(out, "checkpoints", "10"))
    path = storage.join(out, "checkpoints", "10", max(n for n in names if n.endswith("meta.json")))
    data = bytearray(storage.read_bytes(path))
    data[len(data) // 2] ^= 1
    storage.write_atomic(path, bytes(data))
    done = train(folder, out, "train.steps=12")
    assert f"{path} is damaged" in done.stderr and "Falling back to step 5" in done.stderr
    assert committed(out) == [5, 10, 12]
    assert arrays(out, 10) and rows(out)[-1]["step"] == 12


@pytest.mark.slow
def test_an_owner_that_slept_too_long_writes_nothing_when_it_wakes(folder, reference, s3):
    """Two hosts (by their names); the first stands still for three beats and wakes up later."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("another host name cannot be had here")
    out = place(s3)
    seldom = ["checkpoint.every=1000000", "checkpoint.every_minutes=0.1"]  # idle after a commit
    first = start(folder, out, "train.steps=1000000", *seldom)
    wait_for(lambda: committed(out), first)
    first.send_signal(signal.SIGSTOP)
    steps = f"train.steps={committed(out)[-1] + 5}"
    shell = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh"]
    done = subprocess.run(
        [*shell, *command(folder, out, steps)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "seems to be in use by process" in done.stderr and "taking over" in done.stderr
    before = {n: storage.read_bytes(storage.join(out, n)) for n in storage.find_below(out)}
    first.send_signal(signal.SIGCONT)
    error = first.communicate(timeout=200)[1]
    assert first.returncode == 8, error[-2000:]
    assert "was taken over" in error and "Traceback" not in error
    after = {n: storage.read_bytes(storage.join(out, n)) for n in storage.find_below(out)}
    unfinished = {n for n in after.keys() - before.keys() if n.count("/") > 2}  # never believed
    assert {n: data for n, data in after.items() if n not in unfinished} == before
