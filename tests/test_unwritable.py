"""Places that cannot be written or read, with the real program: one paragraph, nothing is lost.

Root may write anything, so a read-only mount in a namespace of its own does it; and there root may
not read what belongs to a user that the namespace does not know.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localtrain.checkpoint import Checkpoints
from localtrain.metrics import read_metrics

SEAL = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
PROGRAM = [sys.executable, "-m", "localtrain"]


@pytest.fixture(scope="module", autouse=True)
def namespaces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sealed")
    try:
        tried = subprocess.run(
            ["unshare", "-rm", "sh", "-c", SEAL, str(folder), "true"], capture_output=True
        )
    except OSError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip("a mount of one's own is not allowed here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A tiny run, stopped at step 4 of 8."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(tiny_config))
    (folder / "text" / "below").mkdir(parents=True)
    for file in sorted(Path(__file__).parent.glob("test_*.py"))[:4]:
        (folder / "text" / file.name).write_bytes(file.read_bytes())
    (folder / "tiny.yaml").write_text(
        f"""
name: tiny
model: {{path: {folder / "model"}}}
data: {{sources: {folder / "text"}, seq_len: 32, eval_fraction: 0.2, cache: {folder / "cache"}}}
train: {{steps: 4, batch_size: 4, log_every: 1}}
eval: {{every: 0, batches: 2, sample_length: 0}}
checkpoint: {{every: 2}}
"""
    )
    assert start(folder, folder / "out").returncode == 0
    return folder


def start(folder, out, *more, sealed=None, **options):
    """`localtrain train`, with one folder sealed against writing."""
    return program(
        *("train", folder / "tiny.yaml", "--backend", "cpu", "--out", out, *more),
        **{"sealed": sealed, **options},
    )


def program(*arguments, sealed=None, **options):
    seal = ["unshare", "-rm", "sh", "-c", SEAL, str(sealed)] if sealed else []
    done = subprocess.run(
        [*seal, *PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def refused(done, *words):
    """Exit code 6 with one paragraph, the last line, that has these words."""
    assert done.returncode == 6, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and all(word in last for word in words), last
    return True


def contents(top):
    return {
        path.relative_to(top): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in top.rglob("*")
        if path.is_file()
    }


def test_a_run_directory_that_became_read_only_is_refused_and_goes_on_when_it_is_not(folder):
    out = folder / "out"
    before = contents(out)
    done = start(folder, out, "train.steps=8", sealed=out)
    assert refused(done, f"{out} cannot be written: Read-only file system", "--out")
    assert contents(out) == before
    assert start(folder, out, "train.steps=8").returncode == 0
    assert [row["step"] for row in read_metrics(out) if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in read_metrics(out) if row.get("event") == "resume"] == [4]


def mount(image, folder):
    done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True)
    return done.returncode == 0


def unmount(folder):
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path):
    """(image, folder where it is mounted) of a disk of its own."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True).returncode == 0
    except OSError:
        made = False
    if not made or not mount(image, folder):
        pytest.skip("needs mkfs.ext4 and the right to mount a disk image")
    yield image, folder
    if os.path.ismount(folder):
        unmount(folder)


def test_a_disk_that_turns_read_only_in_the_middle_of_a_run_ends_it_with_6(folder, disk):
    """As the kernel does it after an error of the disk: under files that are open for writing,
    where `mount -o remount,ro` is refused."""
    image, top = disk
    out = top / "run"
    command = ("train", folder / "tiny.yaml", "--backend", "cpu", "--out", out)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*PROGRAM, *map(str, command), "train.steps=100000"], **pipes)
    try:
        while not Checkpoints(out / "checkpoints").steps():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        subprocess.run(["mount", "-o", "remount,abort", str(top)], check=True)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    refused(subprocess.CompletedProcess(command, process.returncode, "", said), str(out))
    assert "Read-only file system" in said.splitlines()[-1] and said.count("error: ") == 1
    assert "Traceback" not in said and "Logging error" not in said
    steps = Checkpoints(out / "checkpoints").steps()
    before = contents(out / "checkpoints" / str(steps[-1]))
    unmount(top)
    assert mount(image, top)  # repaired
    assert contents(out / "checkpoints" / str(steps[-1])) == before
    assert program(*command, f"train.steps={steps[-1] + 2}", "checkpoint.keep=9").returncode == 0
    rows = read_metrics(out)
    assert [row["step"] for row in rows if row.get("event") == "resume"] == [steps[-1]]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps[-1] + 3))
    assert Checkpoints(out / "checkpoints").steps()[-2:] == [steps[-1], steps[-1] + 2]


def test_a_new_run_directory_on_a_read_only_disk_is_refused(folder, tmp_path):
    done = start(folder, tmp_path / "new", sealed=tmp_path)
    assert refused(done, f"{tmp_path / 'new'} cannot be created: Read-only file system", "--out")


def test_a_data_cache_that_is_read_only_is_used_as_it_is_and_named_where_it_must_grow(
    folder, tmp_path
):
    cache = folder / "cache"
    assert start(folder, tmp_path / "a", sealed=cache).returncode == 0
    (tmp_path / "empty").mkdir()
    where = tmp_path / "empty" / "data"
    done = start(folder, tmp_path / "b", f"data.cache={where}", sealed=tmp_path / "empty")
    assert refused(done, f"could not create {where}: Read-only file system", "can be written")
    done = program("data", "build", folder / "text", "--out", where, sealed=tmp_path / "empty")
    assert refused(done, "Read-only file system")


def test_a_read_only_folder_for_compiled_programs_only_costs_time(folder, tmp_path):
    (tmp_path / "user").mkdir()
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "user")}
    done = start(folder, tmp_path / "out", "train.steps=2", sealed=tmp_path / "user", env=env)
    assert done.returncode == 0 and Checkpoints(tmp_path / "out" / "checkpoints").steps() == [2]


@pytest.mark.slow
def test_a_finished_run_on_a_read_only_disk_can_be_used(folder, tmp_path):
    out = folder / "out"
    used = ("generate", out, "--prompt", "def ", "--max-new-tokens", "3", "--backend", "cpu")
    assert program(*used, sealed=out).returncode == 0
    assert refused(program("report", out, sealed=out), "report.html", "Read-only file system")
    assert program("report", out, "--out", tmp_path / "page.html", sealed=out).returncode == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("what", "sources"), [("file", "text"), ("folder", "text"), ("folder", "text/**/*.py")]
)
def test_data_that_may_not_be_read_are_named_and_never_left_out(folder, tmp_path, what, sources):
    hidden = folder / "text" / "below" / ("secret.py" if what == "file" else "secret")
    if what == "file":
        hidden.write_text("x = 1\n" * 100)
    else:
        hidden.mkdir()
        (hidden / "a.py").write_text("x = 1\n" * 100)
    os.chown(hidden, 4321, 4321)
    hidden.chmod(0o700)
    try:
        data = f"data.sources={folder / sources}"
        done = start(folder, tmp_path / "out", data, "data.cache=null", sealed=folder / "model")
        assert refused(done, str(hidden), "Permission denied", "permissions")
    finally:
        os.chown(hidden, 0, 0)
        subprocess.run(["rm", "-r", str(hidden)], check=True)
