#!/usr/bin/env python3
"""Runs of two processes under a real SLURM, a real mpirun, and on two hosts whose link is cut.

Usage, as root, with the Python that localtrain is installed for: python .ci/slurm.py

Installs slurm-wlm, munge, openmpi-bin and iproute2 when they are missing. A SLURM of two nodes is
started in a temporary folder (nothing in /etc, no systemd); the two hosts are network namespaces.
A run is trained under srun until one of its two tasks is killed, ended once by a signal to all
tasks, finished under mpirun, and must have trained like one process. Exit codes: 0 everything held,
1 something did not, 3 this machine cannot do it (the last line says why).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import proof
from proof import CannotRun, outcome, prepare, say

TOOLS = {"slurmctld": "slurm-wlm", "munged": "munge", "mpirun": "openmpi-bin", "ip": "iproute2"}
STEPS, SILENT_S = 40, 8
run = partial(proof.run, timeout=300)
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
RUN = """
name: tiny
model: {path: MODEL}
data: {sources: "python:stdlib", seq_len: 64, cache: CACHE}
train: {steps: 100000, batch_size: 8, log_every: 1}
optim: {name: sgd, lr: 0.3, warmup: 2, schedule: constant}
eval: {every: 0}
checkpoint: {every: 5}
"""
SLURM = """
ClusterName=t
SlurmctldHost=@HOST@(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16817
AuthInfo=socket=WORK/munge/sock
StateSaveLocation=WORK/state
SlurmdSpoolDir=WORK/spool-%n
SlurmctldPidFile=WORK/ctld.pid
SlurmdPidFile=WORK/slurmd-%n.pid
SlurmctldLogFile=WORK/log/ctld.log
SlurmdLogFile=WORK/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
NodeName=n1 NodeHostname=@HOST@ NodeAddr=127.0.0.1 Port=17001 CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname=@HOST@ NodeAddr=127.0.0.1 Port=17002 CPUs=2 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# The program with a shorter bound for silence, so that the proof of a cut takes seconds.
SHORT = (
    f"from localtrain import heartbeat; heartbeat.SILENT_S = {SILENT_S}; "
    "from localtrain.cli import main; main()"
)


def wait_until(what: str, ready: Callable[[], bool], process: Started | None = None) -> None:
    end = time.monotonic() + 240
    while not ready():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > end:
            said = process.said() if process is not None else ""
            raise AssertionError(f"{what}: not within 240 s, or ended before. {said}")
        time.sleep(0.05)


class Started(subprocess.Popen):
    """A command in the background that writes into one file."""

    def __init__(self, log: Path, *command: str | Path):
        self.log = log
        with open(log, "w") as file:
            super().__init__([str(part) for part in command], stdout=file, stderr=file)

    def said(self) -> str:
        return self.log.read_text()

    def ends_with(self, *codes: int) -> str:
        code = self.wait(timeout=240)
        if code not in codes:
            raise AssertionError(f"exit code {code}, not {codes}: {self.said()}")
        return self.said()


@contextlib.contextmanager
def slurm(work: Path) -> Iterator[None]:
    """A controller and two nodes on this machine, as `SLURM_CONF` says."""
    for name in ("state", "log", "munge"):
        (work / name).mkdir()
    (work / "munge" / "key").write_bytes(os.urandom(128))
    (work / "munge" / "key").chmod(0o600)
    host = run("hostname", "-s").strip()
    text = SLURM.replace("@HOST@", host).replace("WORK", str(work))
    (work / "slurm.conf").write_text(text)
    hosts = Path("/etc/hosts").read_text() + "\n127.0.0.1 n1\n127.0.0.1 n2\n"
    (work / "hosts").write_text(hosts)
    os.environ["SLURM_CONF"] = str(work / "slurm.conf")
    names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log"}
    names["seed-file"] = "seed"
    files = [f"--{option}={work}/munge/{name}" for option, name in names.items()]
    daemons: list[subprocess.Popen] = []
    try:
        daemons.append(Started(work / "log" / "munge", "munged", "-F", *files, "--num-threads=2"))
        wait_until("munged", (work / "munge" / "sock").exists, daemons[-1])
        daemons.append(Started(work / "log" / "ctld", "slurmctld", "-D", "-c"))
        for node in ("n1", "n2"):  # jax and we take the coordinator's host from the nodes' names
            inner = f"mount --bind {work}/hosts /etc/hosts && exec slurmd -D -N {node}"
            daemons.append(Started(work / "log" / node, "unshare", "-m", "sh", "-c", inner))
        try:
            idle = lambda: "n[1-2] idle" in run("sinfo", "-h", "-o", "%N %T", check=False)  # noqa: E731
            wait_until("two idle nodes", idle)
        except AssertionError as error:
            raise CannotRun(f"SLURM does not start here: {error}") from error
        yield
    finally:
        run("scancel", "-f", "-s", "KILL", "--user=root", check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()


def rows(out: Path, key: str = "loss") -> list[dict]:
    """Rows of metrics.jsonl that have a key; a torn last line is none."""
    path = out / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if key in row]


def reached(out: Path, step: int) -> Callable[[], bool]:
    return lambda: any(row["step"] >= step for row in rows(out))


def saved(out: Path) -> int:
    found = [int(p.parent.name) for p in (out / "checkpoints").glob("[0-9]*/commit.json")]
    return max(found, default=0)


def task(rank: int, name: str = "SLURM_PROCID") -> int:
    """The pid of a task of the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
            if f"{name}={rank}".encode() in environment and b"train" in words[1:5]:
                return int(folder.name)
    raise AssertionError(f"no task {rank}")


def check_slurm(work: Path, program: list[str]) -> None:
    out = work / "out"
    srun = ("srun", "-N2", "-n2", "--ntasks-per-node=1", "--kill-on-bad-exit=0")
    command = [*srun, *program, "--out", str(out)]

    say("srun: two tasks, one is killed")
    job = Started(work / "log" / "srun1", *command)
    wait_until("a checkpoint", lambda: saved(out) >= 5, job)
    os.kill(task(1), signal.SIGKILL)
    told = job.ends_with(137)  # srun's is the highest of its tasks'
    assert "process 1 of 2" in told and "died or was killed" in told, told
    assert "task 0: Exited with exit code 7" in told, told
    first = saved(out)
    assert first >= 5, told

    say("srun: the same command goes on; a signal to one task saves in all")
    job = Started(work / "log" / "srun2", *command)
    wait_until("more steps", reached(out, first + 8), job)
    os.kill(task(0), signal.SIGTERM)
    told = job.ends_with(75)
    assert re.search(r"exit code 75", told) and "by SLURM" in told, told
    assert saved(out) == rows(out)[-1]["step"] > first, told

    say("one task is one process, and finishes it")
    last = saved(out) + 4
    srun_one = ("srun", "-N1", "-n1", *program, "--out", str(out), f"train.steps={last}")
    told = Started(work / "log" / "srun3", *srun_one).ends_with(0)
    assert "by SLURM" not in told and rows(out)[-1]["step"] == last, told


def check_mpirun(work: Path, program: list[str]) -> None:
    """From the checkpoint that SLURM left to the end, and compared with one process."""
    say("mpirun: two processes train like one")
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = ("mpirun", "-n", "2", "--oversubscribe", *program)
    told = Started(
        work / "log" / "mpi", *mpirun, "--out", work / "mpi", f"train.steps={STEPS}"
    ).ends_with(0)
    assert "by Open MPI" in told, told
    run(*program, "--out", work / "alone", f"train.steps={STEPS}")
    runs = [rows(work / name) for name in ("mpi", "alone", "out")]
    for a, b, c in zip(*runs, strict=False):
        # rounding adds up from step to step; the loss of other rows differs by 1e-2 and more
        bound = 1e-5 if b["step"] <= 10 else 1e-3
        for other in (a, c):
            assert abs(other["loss"] - b["loss"]) <= bound * b["loss"], (a, b, c)
            assert other["trained_tokens"] == b["trained_tokens"], (a, b, c)
    assert [row["step"] for row in rows(work / "mpi")] == list(range(1, STEPS + 1))


@contextlib.contextmanager
def two_hosts() -> Iterator[Callable[[str], tuple[str, ...]]]:
    """Two network namespaces with a link; what starts a program on one of them."""
    addresses = {"lta": "10.77.0.1", "ltb": "10.77.0.2"}
    try:
        for name in addresses:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "lta0", "type", "veth", "peer", "name", "ltb0")
        for name, address in addresses.items():
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            known = "".join(f"{a} {n}\n" for n, a in addresses.items())
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            run("ip", "link", "set", f"{name}0", "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"{name}0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", f"{name}0", "up")
        yield lambda name: (
            *("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"),
            f'hostname {name}; exec "$@"',
            "sh",
        )
    finally:
        for name in addresses:
            for pid in run("ip", "netns", "pids", name, check=False).split():
                with contextlib.suppress(ValueError, ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def check_cut(work: Path, program: list[str]) -> None:
    out = work / "hosts-out"
    with two_hosts() as on:

        def start(number: int, *more: str) -> list[Started]:
            flags = ["--coordinator", f"10.77.0.1:{12340 + number}", "--num-processes", "2"]
            return [
                Started(
                    work / "log" / f"host{rank}-{number}",
                    *(*on(name), *program, "--out", str(out), *flags, "--process-id", str(rank)),
                    *more,
                )
                for rank, name in enumerate(("lta", "ltb"))
            ]

        say("two hosts: the link between them is cut")
        pair = start(1)
        wait_until("a checkpoint", lambda: saved(out) >= 5, pair[0])
        run("ip", "-n", "lta", "link", "set", "lta0", "down")
        for rank, process in enumerate(pair):
            told = process.ends_with(7)
            assert f"process {1 - rank} of 2" in told, told
            assert f"gave no sign of life for {SILENT_S} s" in told, told
        say("the link is there again, and the same command goes on to the end")
        run("ip", "-n", "lta", "link", "set", "lta0", "up")
        last = saved(out) + 4
        for process in start(2, f"train.steps={last}"):
            process.ends_with(0)
        assert rows(out)[-1]["step"] == last and any(
            row["event"] == "resume" and row["step"] > 0 for row in rows(out, "event")
        )


def prove() -> None:
    prepare(TOOLS)
    work = Path(tempfile.mkdtemp(prefix="lt-slurm-"))
    work.chmod(0o755)  # munged wants to be seen
    os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(work / "cache")}
    try:
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(MODEL))
        text = RUN.replace("MODEL", str(work / "model")).replace("CACHE", str(work / "tokens"))
        (work / "run.yaml").write_text(text)
        arguments = ["train", str(work / "run.yaml"), "--backend", "cpu"]
        with slurm(work):
            check_slurm(work, [sys.executable, "-m", "localtrain", *arguments])
        check_mpirun(work, [sys.executable, "-m", "localtrain", *arguments])
        if subprocess.run(["ip", "netns", "add", "ltprobe"], stderr=subprocess.DEVNULL).returncode:
            raise CannotRun("no network namespaces for the two hosts; SLURM and mpirun held")
        run("ip", "netns", "del", "ltprobe")
        check_cut(work, [sys.executable, "-c", SHORT, *arguments])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say("several processes: everything held")


if __name__ == "__main__":
    sys.exit(outcome("slurm", prove))
