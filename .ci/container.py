#!/usr/bin/env python3
"""The Dockerfile, built and used for real on a bare Debian 12 machine without a Docker engine.

Usage, as root: python3 .ci/container.py [--full] [--extras gcs,s3]

Installs buildah, podman, runc and debootstrap when they are missing, pulls the base image or, where
its registry cannot be reached, makes one of the same name (Debian by debootstrap and a CPython
3.12 of this machine), builds the Dockerfile unchanged and runs the image with no network. Needs
only the standard library; everything lies in one temporary folder, which goes at the end.

--full trains the whole quickstart in the image instead of 30 steps of it. Exit codes: 0 everything
held, 1 something did not, 3 this machine cannot run containers (the last line says why).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from proof import CannotRun, outcome, prepare, run, say

ROOT = Path(__file__).resolve().parent.parent
BASE, IMAGE = "docker.io/library/python:3.12-slim", "localhost/localtrain:ci"
TOOLS = {name: name for name in ("buildah", "podman", "runc", "debootstrap")}
# What CPython's extension modules link to, and what the official image has of Debian.
PACKAGES = (
    "ca-certificates,netbase,tzdata,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,"
    "libreadline8,libncursesw6,libuuid1,libexpat1,libgdbm6,libdb5.3"
)
HARD = ("--cap-drop=all", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp")
HARD = (*HARD, "--user=4242:4242")  # an id without an entry in /etc/passwd, as on OpenShift


def overlay_works(work: Path) -> bool:
    for name in ("lower", "upper", "inner", "merged"):
        (work / "probe" / name).mkdir(parents=True)
    options = "lowerdir=lower,upperdir=upper,workdir=inner"
    mount = ("mount", "-t", "overlay", "overlay", "-o", options, "merged")
    if subprocess.run(mount, cwd=work / "probe", stderr=subprocess.DEVNULL).returncode:
        return False
    run("umount", work / "probe" / "merged")
    return True


def configure(work: Path) -> None:
    """Storage, registries and limits of our own, so that the machine's stay as they are."""
    driver = "overlay" if overlay_works(work) else "vfs"  # vfs: twice the disk, works anywhere
    files = {
        "storage": f'[storage]\ndriver="{driver}"\ngraphroot="{work}/st"\nrunroot="{work}/run"\n',
        "registries": 'unqualified-search-registries=["docker.io"]\nshort-name-mode="permissive"\n',
        "containers": '[containers]\ndefault_ulimits=["nofile=1024:1024","nproc=4096:4096"]\n'
        'http_proxy=false\n[engine]\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
        f'lock_type="file"\ntmp_dir="{work}/tmp"\n',
    }
    for name, text in files.items():
        (work / f"{name}.conf").write_text(text)
    (work / "policy.json").write_text('{"default":[{"type":"insecureAcceptAnything"}]}')
    os.environ["CONTAINERS_STORAGE_CONF"] = str(work / "storage.conf")
    os.environ["CONTAINERS_REGISTRIES_CONF"] = str(work / "registries.conf")
    os.environ["CONTAINERS_CONF"] = str(work / "containers.conf")
    os.environ["BUILDAH_ISOLATION"] = "chroot"  # needs nothing of the kernel


def relocatable_python() -> Path | None:
    """The prefix of a CPython 3.12 that can be copied; one of a distribution cannot."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which("python3.12"), *pyenv.glob("versions/3.12.*/bin/python3.12")]
    code = "import sys, ssl, sqlite3, ctypes, lzma, bz2; print(sys.base_prefix)"
    for candidate in filter(None, candidates):
        found = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() != "/usr":
            return Path(found.stdout.strip())
    return None


def debian_mirror(suite: str) -> str:
    """Where this machine's apt has the suite from."""
    targets = run("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", check=False)
    found = [line.split()[1] for line in targets.splitlines() if line.startswith(f"{suite} ")]
    return next((uri for uri in found if uri.rstrip("/").endswith("/debian")), "")


def make_base(policy: str) -> None:
    """Debian 12 with a CPython at /usr/local, as the official image is built."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    if release.get("VERSION_CODENAME") != "bookworm":
        raise CannotRun("the base image cannot be pulled, and is made here on Debian 12 only")
    prefix = relocatable_python()
    extra = "" if prefix else ",python3,python3-pip,python3-venv"
    if not prefix:
        say("no CPython 3.12 to copy: the base image has Debian's python3 (3.11) despite its tag")
    container = run("buildah", "from", "scratch").strip()
    root = Path(run("buildah", "mount", container).strip())
    minbase = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}{extra}")
    run(*minbase, "bookworm", root, *filter(None, [debian_mirror("bookworm")]))
    local = root / "usr/local"
    name = "python3"
    if prefix:
        name = "python3.12"
        skip = shutil.ignore_patterns("__pycache__", "site-packages", "test")
        for part in ("bin", "lib", "include"):
            shutil.copytree(prefix / part, local / part, True, skip, dirs_exist_ok=True)
        (local / "lib/python3.12/site-packages").mkdir()
        for script in list((local / "bin").iterdir()):  # pip's and others' name the old place
            if not script.is_symlink() and script.read_bytes()[:2] == b"#!":
                script.unlink()
        (local / "bin/python3").unlink(missing_ok=True)
        (local / "bin/python3").symlink_to(name)
        run("chroot", root, "ldconfig")
        run("chroot", root, "/usr/local/bin/python3", "-m", "ensurepip")
        (local / "bin/pip").unlink(missing_ok=True)
        (local / "bin/pip").symlink_to("pip3.12")
    (local / "bin/python").unlink(missing_ok=True)
    (local / "bin/python").symlink_to(name if prefix else "/usr/bin/python3")
    run("chroot", root, "/usr/local/bin/python", "-c", "import ssl, sqlite3, ctypes, lzma, bz2")
    for folder in ("var/lib/apt/lists", "var/cache/apt/archives"):
        for path in (root / folder).iterdir():
            if path.is_file():
                path.unlink()
    run("buildah", "umount", container)
    path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    run("buildah", "config", "--env", path, "--env", "LANG=C.UTF-8", container)
    run("buildah", "commit", policy, "--rm", container, BASE)


def base_image(policy: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        run("buildah", "pull", policy, BASE, check=False, timeout=180)
    if subprocess.run(["podman", "image", "exists", BASE]).returncode:
        say("the base image cannot be pulled: making one of the same name")
        make_base(policy)


def pip_settings(work: Path) -> list[str]:
    """This machine's pip configuration and certificates, mounted while the image is built."""
    listed = run(sys.executable, "-m", "pip", "config", "list", check=False)
    values: dict[str, str] = {}
    for line in listed.splitlines():  # files first, then the environment, which wins
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if equals and section in ("global", "install", ":env:"):
            values[name] = ast.literal_eval(value)
    bundles = [os.environ.get("SSL_CERT_FILE", ""), "/etc/ssl/certs/ca-certificates.crt"]
    if "cert" not in values and (known := [path for path in bundles if os.path.isfile(path)]):
        values["cert"] = known[0]
    lines = [f"{name} = {' '.join(value.split())}\n" for name, value in values.items()]
    (work / "pip.conf").write_text("[global]\n" + "".join(lines))
    mounts = {f"{work}/pip.conf:/etc/pip.conf:ro"}
    for word in " ".join(values.values()).split():
        # a local index links to files beside its folder
        path = str(Path(word.removeprefix("file://")).parent) if "file://" in word else word
        if path.startswith("/") and os.path.exists(path):
            mounts.add(f"{path}:{path}:ro")
    return [part for mount in sorted(mounts) for part in ("-v", mount)]


def build(work: Path, policy: str, extras: str) -> None:
    settings = pip_settings(work)
    common = ("buildah", "bud", policy, "--pull-never", "--layers=false", *settings)
    refused = run(*common, "--build-arg=EXTRAS=nonsense", "-t", "none", ROOT, check=False)
    assert "EXTRAS=nonsense: ['nonsense'] not in [" in refused, refused[-3000:]
    begun = time.monotonic()
    run(*common, f"--build-arg=EXTRAS={extras}", "-t", IMAGE, ROOT)
    size = int(run("podman", "image", "inspect", "--format", "{{.Size}}", IMAGE))
    base = int(run("podman", "image", "inspect", "--format", "{{.Size}}", BASE))
    took = time.monotonic() - begun
    say(f"built in {took:.0f} s: {size / 1e6:.0f} MB, of which the base is {base / 1e6:.0f} MB")


def podman(volume: str, *options: str) -> list[str]:
    fixed = ["podman", "--runtime=runc", "run", "--pull=never", "--network=none"]
    return [*fixed, f"--volume={volume}:/workspace", *options]


def fresh_volume(name: str) -> Path:
    run("podman", "volume", "create", name)
    return Path(run("podman", "volume", "inspect", "--format", "{{.Mountpoint}}", name).strip())


def read_rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}


def check_quickstart(full: bool) -> None:
    """The default user, a fresh volume, no network: train, then look at what lies there."""
    volume = fresh_volume("quickstart")
    keys = () if full else ("train.steps=30",)
    begun = time.monotonic()
    printed = run(*podman("quickstart", "--rm"), IMAGE, "train", "quickstart", *keys)
    took = time.monotonic() - begun
    out = volume / "runs/quickstart"
    losses = [row["loss"] for row in read_rows(out) if "loss" in row]
    assert losses[-1] < losses[0] - 1, losses
    assert owners(volume) == {(1000, 1000)}, owners(volume)
    steps = 250 if full else 30
    assert (out / f"checkpoints/{steps}").is_dir() and any((out / "tensorboard").iterdir())
    assert not any(word in printed.lower() for word in ("warn", "traceback")), printed
    say(f"{steps} steps in {took:.0f} s as uid 1000: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    if full:
        print(printed)


def check_doctor() -> None:
    """Another user, read-only root, no capabilities; and that the container really is like that."""
    fresh_volume("doctor")
    said = run(*podman("doctor", "--rm", *HARD), IMAGE, "doctor")
    assert "cpu: usable" in said, said
    code = (
        "import os, socket; assert os.getuid() == os.getgid() == 4242\n"
        "assert [name for _, name in socket.if_nameindex()] == ['lo']\n"
        "for path in ('/opt/localtrain/x', '/x', '/usr/x'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError: continue\n"
        "    raise SystemExit(path + ' can be written')\n"
        "open('/workspace/x', 'w'), open('/tmp/x', 'w'); import localtrain; print('inside: ok')"
    )
    inside = run(*podman("doctor", "--rm", *HARD, "--entrypoint=python"), IMAGE, "-c", code)
    assert "inside: ok" in inside, inside
    say("doctor, read-only root, no capabilities, no network, unknown uid: ok")


def check_stop_and_resume() -> None:
    """SIGTERM to process 1 saves and gives 75; a new container on the volume goes on."""
    volume = fresh_volume("stopped")
    out, steps = volume / "runs/stopped", 300
    train = [IMAGE, "train", "quickstart", "name=stopped", f"train.steps={steps}"]
    train += ["train.batch_size=2", "data.seq_len=128", "checkpoint.every=5", "train.log_every=1"]
    run(*podman("stopped", "--detach", "--name=first", *HARD), *train)
    end = time.monotonic() + 300
    while not (out / "checkpoints/10").is_dir():
        assert time.monotonic() < end, run("podman", "logs", "first")
        time.sleep(0.05)
    run("podman", "stop", "--time=120", "first")
    state = json.loads(run("podman", "inspect", "--format", "{{json .State}}", "first"))
    logs = run("podman", "logs", "first")
    assert state["ExitCode"] == 75, f"exit code {state['ExitCode']}, not 75:\n{logs[-3000:]}"
    saved = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    assert 10 <= saved < steps, saved
    run(*podman("stopped", "--rm", *HARD), *train)
    rows = read_rows(out)
    assert [row["step"] for row in rows if row.get("event") == "resume"] == [saved], rows[-1]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
    assert owners(volume) == {(4242, 4242)}, owners(volume)
    say(f"SIGTERM: exit code 75 at step {saved}; the next container went on to {steps}")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that goes at the end, after the containers and mounts in it."""
    work = Path(tempfile.mkdtemp(prefix="lt-"))
    work.chmod(0o711)
    try:
        yield work
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        if "CONTAINERS_STORAGE_CONF" in os.environ and shutil.which("podman"):
            run("podman", "--runtime=runc", "rm", "--all", "--force", "--time=0", check=False)
            run("buildah", "umount", "--all", check=False)
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in reversed(mounted):
            if path.startswith(f"{work}/"):
                run("umount", path, check=False)
        shutil.rmtree(work)


def prove(full: bool, extras: str) -> None:
    prepare(TOOLS)
    with workplace() as work:
        configure(work)
        policy = f"--signature-policy={work}/policy.json"
        base_image(policy)
        try:
            run("podman", "--runtime=runc", "run", "--rm", "--network=none", BASE, "python", "-V")
        except AssertionError as error:
            raise CannotRun(f"podman cannot start a container here: {error}") from error
        say("base image ready")
        build(work, policy, extras)
        check_doctor()
        check_quickstart(full)
        check_stop_and_resume()
    say("container: everything held")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="the whole quickstart, 250 steps")
    parser.add_argument("--extras", default="", help="build the image with these extras")
    options = parser.parse_args()
    return outcome("container", lambda: prove(options.full, options.extras))


if __name__ == "__main__":
    sys.exit(main())
