"""What the proofs that install and start real programs as root share: container.py and slurm.py.

Only the standard library. Exit codes: 0 everything held, 1 something did not, 3 this machine cannot
do it (the last line says why).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STARTED = time.monotonic()


class CannotRun(Exception):
    """This machine cannot do it: exit code 3."""


def say(text: str) -> None:
    print(f"== {text} ({time.monotonic() - STARTED:.0f}s)", flush=True)


def run(*command: str | Path, check: bool = True, timeout: float = 900) -> str:
    """Output of a command; a failure shows the end of what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    if check and done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
        raise AssertionError(f"exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def prepare(tools: Mapping[str, str]) -> None:
    """Linux, root, mount namespaces, and programs (name -> Debian package) or CannotRun."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotRun("needs Linux and root")
    missing = [package for tool, package in tools.items() if not shutil.which(tool)]
    if missing and not shutil.which("apt-get"):
        raise CannotRun(f"{', '.join(missing)} not installed, and there is no apt-get")
    if missing:
        say(f"apt-get install {' '.join(missing)}")
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120")
        try:
            run(*apt, "update")
            run(*apt, "install", "-y", "--no-install-recommends", *missing)
        except AssertionError as error:
            raise CannotRun(f"the tools cannot be installed: {error}") from error
    if subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode:
        raise CannotRun("the kernel or this container does not allow new mount namespaces")


def outcome(name: str, prove: Callable[[], None]) -> int:
    """The exit code of a proof, told in one line where it is not 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        prove()
    except CannotRun as reason:
        print(f"{name}: cannot run here: {reason}", file=sys.stderr)
        return 3
    except AssertionError as failure:
        print(f"{name}: FAILED: {str(failure)[-6000:]}", file=sys.stderr)
        return 1
    return 0
