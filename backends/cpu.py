"""The CPU of this machine: always there, needs nothing, the reference for everything else."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from localtrain import processes
from localtrain.backend import Backend, Defaults, jax_runs_on, set_jax
from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.config import RunConfig

_FORCED = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


class Cpu(Backend):
    """One process on the CPU; `--devices N` splits it into N devices, to try sharding."""

    name = "cpu"
    summary = "the CPU of this machine; --devices N makes N devices of it"
    priority = 0

    def process_environment(self) -> dict[str, str]:
        """Huge pages for what glibc maps, where the kernel gives them to those who ask.

        XLA maps its temporary buffer anew for every step: 1.6 million page faults at Qwen3-0.6B and
        1 x 512 tokens, 26,000 with this, for 31 and 24 CPU seconds (benchmarks/README.md). A
        tunable is read before the program starts ("Memory Allocation Tunables", glibc manual).
        """
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        try:
            modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        except OSError:  # not Linux, or a kernel without
            return {}
        if "[madvise]" not in modes or "glibc.malloc.hugetlb" in tunables:
            return {}
        return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}

    def prepare_environment(
        self, run: RunConfig | None = None, devices: int | None = None
    ) -> list[str]:
        """Platform and number of devices. Two settings name the number; ours replaces both."""
        if devices is not None and devices < 1:
            raise ConfigError(f"--devices {devices} must be at least 1")
        if jax_runs_on("cpu", self.name):
            _check_running(devices)
            return []
        set_jax(jax_platforms="cpu")
        if devices is None:
            return []
        flags = os.environ.get("XLA_FLAGS", "")
        if _FORCED.search(flags):
            os.environ["XLA_FLAGS"] = _FORCED.sub("", flags).strip()
        set_jax(jax_num_cpu_devices=devices)
        return [f"{devices} CPU devices share {os.cpu_count()} cores"] if devices > 1 else []

    def initialize(
        self,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> str | None:
        """Several processes exchange through gloo (docs.jax.dev, "Multi-process programming")."""
        joined = processes.join(coordinator, num_processes, process_id)
        if joined is not None:
            set_jax(jax_cpu_collectives_implementation="gloo")
            _keep_stdout_clean()
        return joined

    def defaults(self) -> Defaults:
        """float32: CPUs have no fast bfloat16 in general, and it is the reference."""
        return Defaults(dtype="float32")


def _keep_stdout_clean() -> None:
    """gloo writes a line to the descriptor of stdout for each connection: to stderr with it."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    if sys.stdout is sys.__stdout__:  # else it is not the descriptor
        sys.stdout = open(results, "w", encoding=sys.stdout.encoding)  # noqa: SIM115


def _check_running(devices: int | None) -> None:
    jax = sys.modules["jax"]
    if devices is not None and jax.local_device_count() != devices:
        raise ConfigError(
            f"--devices {devices}: jax already runs with {jax.local_device_count()} CPU devices in "
            "this process; set the number before any other use of jax, or in a new process"
        )
