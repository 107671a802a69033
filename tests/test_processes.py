"""Real processes of one run on this machine: they train as one, and when one dies all end."""

import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from localtrain import arrays, heartbeat, launcher, processes, shared_rundir, together
from localtrain.checkpoint import Checkpoints
from localtrain.commit import Damaged
from localtrain.errors import ConfigError, PeerError, StorageError
from localtrain.metrics import read_metrics

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and gloo of Linux")
# The program, with another bound for silence and for the coordinator.
PROGRAM = (
    "from localtrain import heartbeat, rendezvous; heartbeat.SILENT_S = {silent}; "
    "rendezvous.JOIN_S = {join}; from localtrain.cli import main; main()"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A tiny model, some text and a run file of plain SGD that saves every 4 steps."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(tiny_config))
    (folder / "text").mkdir()
    for file in sorted(Path(__file__).parent.glob("test_*.py"))[:6]:
        (folder / "text" / file.name).write_bytes(file.read_bytes())
    (folder / "run.yaml").write_text(
        f"""
name: tiny
model: {{path: {folder / "model"}}}
data: {{sources: "{folder}/text/*.py", seq_len: 32, eval_fraction: 0.2, cache: {folder}/cache}}
train: {{steps: 8, batch_size: 8, log_every: 1}}
optim: {{name: sgd, lr: 0.3, warmup: 2, schedule: constant}}
eval: {{every: 8, batches: 2, sample_length: 8}}
checkpoint: {{every: 4, keep: 10}}
"""
    )
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments, count=1, silent=30.0, join=180.0, first=0, port=None):
    """`count` processes of one run, or its program alone."""
    program = [sys.executable, "-c", PROGRAM.format(silent=silent, join=join), *arguments]
    flags = [[]]
    if count > 1:
        group = ["--coordinator", f"127.0.0.1:{port or free_port()}", "--num-processes", str(count)]
        flags = [[*group, "--process-id", str(i)] for i in range(first, count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*program, *more], **pipes) for more in flags]


def train(folder, out, *more):
    return ["train", str(folder / "run.yaml"), "--backend", "cpu", "--out", str(out), *more]


def finish(started, timeout=240):
    """(exit code, stdout, stderr) of each; nobody is left behind."""
    try:
        ends = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        (process.returncode, out, err) for process, (out, err) in zip(started, ends, strict=True)
    ]


def run(folder, out, *more, count=1, codes=None):
    done = finish(start(train(folder, out, *more), count))
    assert [code for code, _, _ in done] == (codes or [0] * count), done
    return done


def steps(out):
    return [row for row in read_metrics(out) if "loss" in row]


def wait_for(out, step, process, timeout=180):
    end = time.monotonic() + timeout
    while not (out.exists() and any(row["step"] >= step for row in read_metrics(out))):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def params(out, step):
    import jax

    reader = Checkpoints(out / "checkpoints")
    meta = reader.read_meta(step)[1]
    named = {name: kind for name, kind in meta["arrays"].items() if name.startswith("params")}
    template = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in named.items()}
    return {k: np.asarray(v) for k, v in arrays.read(reader.local(step), named, template).items()}


def assert_same_training(left, right):
    """Loss and gradient norm of every step under SGD: the same rows in the same order."""
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for a, b in zip(left, right, strict=True):
        assert a["trained_tokens"] == b["trained_tokens"]
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=2e-5)


@pytest.fixture(scope="module")
def alone(folder):
    """The same run in one process: what all others must equal."""
    run(folder, folder / "alone")
    return folder / "alone"


@pytest.fixture(scope="module")
def pair(folder, alone):
    """It in two processes."""
    return folder / "pair", run(folder, folder / "pair", count=2)


def test_two_processes_train_as_one_does(alone, pair):
    out, _ = pair
    assert_same_training(steps(out), steps(alone))
    for name, value in params(alone, 8).items():
        np.testing.assert_allclose(params(out, 8)[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    held = [
        [row["eval_loss"] for row in read_metrics(at) if "eval_loss" in row] for at in (out, alone)
    ]
    np.testing.assert_allclose(*held, rtol=1e-5)
    start_row = next(row for row in read_metrics(out) if row.get("event") == "start")
    assert (start_row["processes"], start_row["devices"]) == (2, 2)


def test_one_of_them_writes_and_speaks(pair):
    out, (lead, other) = pair
    assert "step 8, loss" in lead[1] and "sample" in lead[1]
    assert "step 8/8" in lead[2] and lead[2].count("eval loss") == 1
    assert other[1] == ""
    assert not [line for line in other[2].splitlines() if not line.startswith("[Gloo]")]
    rows = [row["step"] for row in steps(out)]
    assert rows == sorted(set(rows)) and Checkpoints(out / "checkpoints").steps() == [4, 8]
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert not list((out / "checkpoints").glob("tmp-*"))


def test_each_process_wrote_its_part_and_all_are_checked(pair):
    """Half of a matrix each; a flipped bit in either is named."""
    out, _ = pair
    saved = out / "checkpoints" / "8"
    record = json.loads((saved / "commit.json").read_bytes())["files"]
    files = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert files == record.keys() | {"commit.json"}
    parts = [name for name in record if re.fullmatch(r"params\.embed.*/\d+\.\d+", name)]
    assert len(parts) == 2 and len({record[name]["size"] for name in parts}) == 1
    for name in parts:
        path = saved / name
        raw = path.read_bytes()
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
        with pytest.raises(Exception, match=re.escape(name)):
            Checkpoints(out / "checkpoints").read_meta(8)
        path.write_bytes(raw)
    assert Checkpoints(out / "checkpoints").read_meta(8)[0] == 8


def test_a_run_goes_on_in_another_number_of_processes(folder, alone, tmp_path):
    """1 -> 2: the rows of every step are those of the uninterrupted run."""
    out = tmp_path / "moved"
    run(folder, out, "train.steps=4")
    run(folder, out, count=2)
    assert_same_training(steps(out), steps(alone))
    assert [row["step"] for row in read_metrics(out) if row.get("event") == "resume"] == [4]


def test_damage_that_only_one_process_can_see_takes_all_to_the_step_before(folder, pair, tmp_path):
    """Or ends all with 3, by --strict."""
    out = tmp_path / "damaged"
    shutil.copytree(pair[0], out)
    parts = (out / "checkpoints" / "8").glob("params.embed*/*")
    (path,) = [part for part in parts if re.fullmatch(r"0\.1|1\.0", part.name)]
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    for _, _, err in run(folder, out, "train.steps=10", "--strict", count=2, codes=[3, 3]):
        assert f"{path} is damaged" in one_paragraph(err)
    for _, _, err in run(folder, out, "train.steps=10", count=2):
        assert f"{path} is damaged" in err and "Falling back to step 4" in err
    assert [row["step"] for row in read_metrics(out) if row.get("event") == "resume"] == [4]
    assert Checkpoints(out / "checkpoints").steps() == [4, 8, 10]


@pytest.mark.slow
def test_four_processes_train_as_one_does_and_hand_over_to_two(folder, alone, tmp_path):
    out = tmp_path / "four"
    run(folder, out, "train.steps=4", count=4)
    run(folder, out, count=2)
    assert_same_training(steps(out), steps(alone))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.tensor=2", "mesh.context=2", "mesh.replica=2"])
def test_meshes_over_two_processes_train_as_one_does(folder, alone, tmp_path, mesh):
    """Every process needs all rows (tensor), half of each (context), or half of them (replica)."""
    out = tmp_path / "mesh"
    run(folder, out, mesh, "mesh.fsdp=1", count=2)
    assert_same_training(steps(out), steps(alone))
    run(folder, out, "train.steps=10")


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_trains_the_same(folder, pair, tmp_path):
    """Either process, also in the middle of a save; the others always end with 7."""
    out, moments = tmp_path / "anywhere", random.Random(3)
    goal = ["train.steps=24", "checkpoint.every=1"]
    for attempt in range(6):
        started = start(train(folder, out, *goal), 2)
        wait_for(out, 4 * attempt + 1, started[0])
        time.sleep(moments.random())
        victim = attempt % 2
        started[victim].kill()
        codes = [code for code, _, _ in finish(started)]
        assert codes[victim] in (-signal.SIGKILL, 0) and codes[1 - victim] in (7, 0), codes
    run(folder, out, *goal, count=2)
    run(folder, tmp_path / "once", *goal)
    assert_same_training(steps(out), steps(tmp_path / "once"))
    assert not list((out / "checkpoints").glob("tmp-*"))


STATE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from localtrain import processes
from localtrain.checkpoint import Checkpoints

count, index, address, source, target = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_platforms", "cpu")
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    processes.join(address, count, index)
mesh = jax.make_mesh((count,), ("x",))
places = {"rows": P("x"), "columns": P(None, "x"), "narrow": P("x"), "all": P(), "step": P()}
places["no"] = P("x")
random = np.random.default_rng(0)
values = {
    "rows": random.normal(size=(8, 3)).astype(np.float32),
    "columns": random.normal(size=(3, 2, 8)).astype(np.float32)[:, 0],
    "narrow": random.normal(size=(4, 5)).astype(jnp.bfloat16),
    "all": random.normal(size=(7,)).astype(np.float32),
    "step": np.int32(5),
    "no": np.zeros((0, 3), np.float32),
}
def place(name):
    value, at = np.asarray(values[name]), NamedSharding(mesh, places[name])
    return jax.make_array_from_callback(value.shape, at, lambda index: value[index])
state = {name: place(name) for name in values}
if source != "-":
    state, _ = Checkpoints(source).restore(None, state)  # the shapes and places of these
for name, value in state.items():
    for shard in value.addressable_shards:
        expected = np.asarray(values[name])[shard.index]
        assert np.asarray(shard.data).tobytes() == expected.tobytes(), name
checkpoints = Checkpoints(target)
checkpoints.save(5, state, {}, block=True)
checkpoints.close()
processes.leave()
print("equal", count)
"""


@pytest.mark.parametrize(
    "counts", [(2, 1), pytest.param((4, 2, 1, 2, 4), marks=pytest.mark.slow)], ids=str
)
def test_what_is_restored_is_bitwise_what_was_saved(tmp_path, counts):
    """Each number of processes checks its own parts against the values, and saves them again."""
    before = "-"
    for number, count in enumerate(counts):
        address, after = f"127.0.0.1:{free_port()}", str(tmp_path / str(number))
        started = [
            subprocess.Popen(
                [sys.executable, "-c", STATE, str(count), str(i), address, before, after],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]
        for code, out, err in finish(started):
            assert code == 0 and f"equal {count}" in out, err
        before = after


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others_with_7_and_the_run_goes_on(
    folder, pair, tmp_path, victim
):
    out = tmp_path / "killed"
    started = start(train(folder, out, "train.steps=100000"), 2)
    wait_for(out, 6, started[0])
    while Checkpoints(out / "checkpoints").latest() is None:
        time.sleep(0.02)
    started[victim].kill()
    done = finish(started)
    assert done[victim][0] == -signal.SIGKILL
    code, _, err = done[1 - victim]
    assert code == 7, err
    told = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(told) == 1 and f"process {victim} of 2" in told[0] and "step " in told[0]
    assert socket.gethostname() in told[0] and "died or was killed" in told[0]
    saved = Checkpoints(out / "checkpoints").latest()
    assert saved is not None
    run(folder, out, f"train.steps={saved + 2}")  # alone
    resumed = [row["step"] for row in read_metrics(out) if row.get("event") == "resume"]
    assert resumed == [saved] and [row["step"] for row in steps(out)] == list(range(1, saved + 3))


def test_a_signal_to_one_saves_in_all_at_the_same_step(folder, pair, tmp_path):
    out = tmp_path / "stopped"
    started = start(train(folder, out, "train.steps=100000"), 2)
    wait_for(out, 5, started[0])
    started[1].send_signal(signal.SIGTERM)
    done = finish(started)
    assert [code for code, _, _ in done] == [75, 75], done
    told = [re.search(r"stopped by (.+) at step (\d+) of 100000", err) for _, _, err in done]
    assert told[0][2] == told[1][2] and told[1][1] == "SIGTERM"
    assert Checkpoints(out / "checkpoints").latest() == int(told[0][2])
    assert steps(out)[-1]["step"] == int(told[0][2])


def test_a_process_that_stands_still_ends_the_others_within_the_bound(folder, pair, tmp_path):
    out = tmp_path / "still"
    started = start(train(folder, out, "train.steps=100000"), 2, silent=5.0)
    wait_for(out, 5, started[0])
    started[1].send_signal(signal.SIGSTOP)
    try:
        _, err = started[0].communicate(timeout=60)
    finally:
        started[1].kill()
        finish(started[1:])
    assert started[0].returncode == 7
    told = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(told) == 1 and "process 1 of 2" in told[0]
    assert "gave no sign of life for 5 s" in told[0] and "step " in told[0]


def test_what_only_the_lead_can_know_ends_all_in_the_same_way(folder, pair):
    """The directory holds another run: one of them looked."""
    out, _ = pair
    before = (out / "metrics.jsonl").read_bytes()
    done = run(folder, out, "seed=7", count=2, codes=[2, 2])
    for _, _, err in done:
        assert "differs in a way that matters: seed" in err and "Traceback" not in err
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_coordinator_that_nobody_answers_for_is_one_paragraph(folder, tmp_path):
    (done,) = finish(start(train(folder, tmp_path / "x"), 2, join=1.0, first=1))
    assert done[0] == 7 and "Traceback" not in done[2]
    assert "did not answer within 1 s" in done[2] and "--coordinator names it" in done[2]


def one_paragraph(err):
    """No traceback of Python, no stack of C++."""
    assert "Traceback" not in err and "***" not in err and err.count("error: ") == 1, err
    return err


def test_who_waits_in_vain_for_the_others_says_who_is_missing(folder, tmp_path):
    """Process 0 and 2 of 4; both are told."""
    port = free_port()
    first = start(train(folder, tmp_path / "x"), 4, join=4.0, port=port)
    for process in (first[1], first[3]):
        process.kill()
    done = finish(first)
    for code, _, err in (done[0], done[2]):
        assert code == 7, err
        assert re.search(r"did not come to .* within 4 s: 1, 3\.", one_paragraph(err))
    assert "process 2 of 4" in done[2][2]


def test_who_is_lost_between_roll_call_and_jax_ends_the_wait(folder, tmp_path):
    """Somebody says to be process 1 and goes: jaxlib itself would abort."""
    port = free_port()
    started = start(train(folder, tmp_path / "x"), 2, join=5.0, port=port)
    started[1].kill()
    with reach(port) as link:
        link.sendall(b"localtrain-hello 1 2\n")
        assert link.makefile().readlines() == ["localtrain-wait\n", "localtrain-go\n"]
    ((code, _, err), _) = finish(started)
    assert code == 7, err
    assert "not all processes came to" in one_paragraph(err)


def reach(port):
    """A connection to a port that opens some time."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_second_start_with_the_same_port_leaves_the_run_alone(folder, pair, tmp_path):
    out, port = tmp_path / "first", free_port()
    started = start(train(folder, out, "train.steps=100000"), 2, port=port)
    wait_for(out, 3, started[0])
    lead, other = finish(start(train(folder, tmp_path / "second"), 2, port=port))
    assert lead[0] == 2 and "another program uses it" in one_paragraph(lead[2])
    assert other[0] == 2 and "a run that has already begun" in one_paragraph(other[2])
    wait_for(out, steps(out)[-1]["step"] + 3, started[0])
    started[0].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in finish(started)] == [75, 75]


def test_a_number_twice_and_another_count_are_refused(folder, tmp_path):
    """And what is no process of a run does not disturb."""
    port = free_port()
    started = start(train(folder, tmp_path / "x"), 3, join=6.0, port=port)
    for process in started[1:]:
        process.kill()
    said = []
    with reach(port) as stays:
        stays.sendall(b"localtrain-hello 1 3\n")
        assert stays.recv(100) == b"localtrain-wait\n"
        lines = ("hello 1 3", "hello 2 4", "hello 0 3", "hello x y", "[" * 5000)
        for line in lines:
            with reach(port) as link:
                link.sendall(f"localtrain-{line}\n".encode())
                with contextlib.suppress(ConnectionError):
                    said.append(link.makefile().read())
    assert "process 1 is already there" in said[0] and "--num-processes 3" in said[1]
    assert "--num-processes 3" in said[2] and set(said[3:]) <= {""}
    assert finish(started)[0][0] == 7


@pytest.mark.parametrize(("name", "after"), [("save", False), ("stop", True)])
def test_a_late_save_is_asked_for_once(monkeypatch, name, after):
    """An answer comes one step late; the vote of that step asks for the save that is made in it."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "_ballots", {})
    votes = [False, True, True, False, False, True, False]
    answers = [processes.any_of(vote, name) for vote in votes]
    assert answers == [False, False, True, after, False, False, True]


def test_an_error_that_errors_py_does_not_have_is_told_as_its_nearest():
    found = together.outcome(lambda: (_ for _ in ()).throw(together.Refused(Damaged("bad"))))
    assert found == {"refused": "DataError", "error": "bad"}
    assert processes.kind_of(PeerError("x")) == "PeerError"


def test_what_another_host_shows_late_is_waited_for(monkeypatch, tmp_path):
    """An empty .lock, then its owner's; a folder of somebody else stays refused."""
    (tmp_path / ".lock").write_text("")
    late = threading.Timer(1.0, (tmp_path / ".lock").write_text, ['{"token": "t"}'])
    late.start()
    shared_rundir._check_same(str(tmp_path), "t")
    late.join()
    monkeypatch.setattr(shared_rundir, "_SEEN_S", 0.1)
    with pytest.raises(StorageError, match="does not see the run directory"):
        shared_rundir._check_same(str(tmp_path), "other")


@pytest.fixture
def heart(monkeypatch):
    """The lead's of a run of 3, its key, and how it would have ended the process."""
    ends = queue.Queue()
    monkeypatch.setattr(heartbeat, "end", lambda code, why: ends.put((code, why)))
    monkeypatch.setattr(heartbeat, "_KNOWN_S", 1.0)
    lead = heartbeat.Heart(0, 3)
    port, token = lead.listen().split()
    yield int(port), token, ends
    lead.close()


def hello(index, token):
    return json.dumps({"token": token, "index": index, "host": "h", "pid": 1, "at": "x"}) + "\n"


def test_strangers_at_the_heartbeats_port_are_turned_away(heart):
    """Garbage, numbers that do not exist, silence; a process that is connected keeps its place."""
    port, token, ends = heart
    lines = ["[" * 4000 + "\n", "[" * 5000, "\x00\xff\n", "{}\n", "7\n", "null\n", "\n", ""]
    lines += [hello(1, "wrong"), hello(1, None), hello(1, "\u00e9")]
    lines += [hello(i, token) for i in (0, -1, 3, 10**30, "1", None, 1.0)]
    with reach(port) as member:
        member.sendall(hello(1, token).encode())
        assert b'"index": 0' in member.recv(1000)  # a sign of life
        for line in [*lines, hello(1, token)]:
            with reach(port) as link, contextlib.suppress(ConnectionError):
                link.sendall(line.encode())
                assert link.recv(1000) == b"", line
        member.sendall(hello(1, token).encode())
        assert member.recv(1000) and ends.empty()
    code, why = ends.get(timeout=60)
    assert code == 7 and "process 1 of 3 (pid 1 on h) died or was killed" in why


def test_a_heartbeat_that_cannot_be_reached_is_one_paragraph():
    with pytest.raises(PeerError, match=r"port (\d+) of 127\.0\.0\.1.* must be reachable too"):
        heartbeat.Heart(1, 2).connect("127.0.0.1", f"{free_port()} key")


def test_a_port_in_use_is_refused(folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = finish(start(train(folder, tmp_path / "x"), 2, join=2.0, port=port)[:1])
    assert (
        done[0][0] == 2 and f"port {port}" in done[0][2] and "another program uses it" in done[0][2]
    )


WRONG = [
    (("h:1", None, None), "--coordinator without --num-processes and --process-id"),
    ((None, 2, 0), "--num-processes, --process-id without --coordinator"),
    (("host", 2, 0), "--coordinator host is not HOST:PORT"),
    (("host:0", 2, 0), "--coordinator host:0 is not HOST:PORT"),
    (("h:1", 2, 2), "--process-id 2 must be from 0 to 1"),
    (("h:1", 2, -1), "--process-id -1 must be from 0 to 1"),
    (("h:1", 0, 0), "--num-processes 0 must be at least 1"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_or_half_given_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        launcher.find_place(*flags, environment={})


def test_wrong_flags_end_the_program_with_2(folder, tmp_path):
    from localtrain.cli import run as program

    flags = ["--coordinator", "127.0.0.1:1", "--num-processes", "2"]
    assert program(train(folder, tmp_path / "x", *flags)) == 2
    assert not (tmp_path / "x").exists()


def test_the_flags_of_a_single_process_are_no_group():
    assert launcher.find_place(environment={}) is None
    assert launcher.find_place("host:1", 1, 0, environment={}) is None


SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def test_what_srun_and_mpirun_say_is_understood():
    found = launcher.find_place(environment=SLURM)
    assert found == launcher.Place(f"gpu007:{61440 + 31 * 41}", 4, 3, "SLURM", 1, 2)
    assert launcher.find_place(environment=SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "4"}
    assert launcher.find_place(environment=batch) is None  # the script itself, not under srun
    found = launcher.find_place(environment=OMPI)
    assert (found.count, found.index, found.source) == (2, 1, "Open MPI")
    assert found.coordinator.startswith("10.96.0.1:6")
    found = launcher.find_place("other:99", environment=OMPI)
    assert (found.coordinator, found.count, found.index) == ("other:99", 2, 1)
    newer = {k: v for k, v in OMPI.items() if "orte" not in k}
    with pytest.raises(ConfigError, match="does not say where process 0 is: add --coordinator"):
        launcher.find_place(environment=newer)
