"""How many processes a run has and where they meet, by flags or by what started them.

SLURM's srun and Open MPI's mpirun say it in the environment of each process; anybody else gives
--coordinator, --num-processes and --process-id. No jax, nothing is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from localtrain.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """This process among the others of its run."""

    coordinator: str  # host:port of process 0
    count: int
    index: int
    source: str  # who said so: "--coordinator", "SLURM", "Open MPI"
    local_index: int = 0  # among the processes of this host
    local_count: int = 1


def find_place(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Place | None:
    """What flags and launcher say; None when this process is alone.

    A flag that is not given is taken from the launcher, where there is one. Raises ConfigError.
    """
    found = _from_launcher(os.environ if environment is None else environment)
    given = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    if all(value is None for value in given.values()):
        if found is not None and not found.coordinator:
            raise ConfigError(
                f"{found.source} started {found.count} processes but does not say where process 0 "
                f"is: add --coordinator HOST:PORT, the same for all, with the host of process 0 "
                f"and a free port."
            )
        return found
    if found is not None:
        coordinator = coordinator or found.coordinator
        num_processes = found.count if num_processes is None else num_processes
        process_id = found.index if process_id is None else process_id
    if num_processes == 1 and process_id in (None, 0):
        return None
    missing = [
        name
        for name, value in zip(given, (coordinator, num_processes, process_id), strict=True)
        if value in (None, "")
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(name for name in given if given[name] is not None)} without "
            f"{' and '.join(missing)}: a run of several processes needs --coordinator HOST:PORT "
            f"(process 0's host and a free port, the same for all), --num-processes N, and "
            f"--process-id I from 0 to N - 1. Under srun and mpirun they are found by themselves."
        )
    assert coordinator is not None and num_processes is not None and process_id is not None
    split_address(coordinator)
    if num_processes < 1:
        raise ConfigError(f"--num-processes {num_processes} must be at least 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id {process_id} must be from 0 to {num_processes - 1}: the run has "
            f"--num-processes {num_processes}, and process 0 is on the coordinator's host."
        )
    local = (found.local_index, found.local_count) if found is not None else (0, 1)
    return Place(coordinator, num_processes, process_id, "--coordinator", *local)


def _from_launcher(env: Mapping[str, str]) -> Place | None:
    """What srun or mpirun set for this process, when they started several.

    srun(1) "OUTPUT ENVIRONMENT VARIABLES"; a batch script itself has no SLURM_STEP_NUM_TASKS.
    Open MPI: docs.open-mpi.org, "Environment variables set for MPI processes"; up to version 4 the
    address of mpirun, which runs on the first host, is in OMPI_MCA_orte_hnp_uri.
    """
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in env:
        node = re.match(r"([^\[,]*)(?:\[([^-,\]]+))?", env.get("SLURM_STEP_NODELIST", ""))
        host = "".join(part or "" for part in node.groups()) if node else ""
        job, step = int(env.get("SLURM_JOB_ID", 0)), int(env.get("SLURM_STEP_ID", 0))
        address = f"{host}:{_port(31 * job + step)}" if host else ""
        node_index = int(env.get("SLURM_NODEID", 0))
        there = _expand(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        local = there[node_index] if node_index < len(there) else 1
        tasks, rank = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_PROCID"])
        return Place(address, tasks, rank, "SLURM", int(env.get("SLURM_LOCALID", 0)), local)
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1 and "OMPI_COMM_WORLD_RANK" in env:
        uri = env.get("OMPI_MCA_orte_hnp_uri", "")
        host = re.search(r"tcp6?://\[?([^,:\]]+)", uri)
        address = f"{host[1]}:{_port(int(uri.split('.')[0]) >> 12)}" if host else ""
        size, rank = int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_RANK"])
        local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0))
        return Place(
            address, size, rank, "Open MPI", local, int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
        )
    return None


def _port(number: int) -> int:
    """A port above those that Linux hands out by itself, another one for another job."""
    return 61440 + number % 4096


def _expand(counts: str) -> list[int]:
    """SLURM's "2(x3),1" is [2, 2, 2, 1]."""
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(number)] * int(times or 1)
    return found


def split_address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--coordinator {coordinator} is not HOST:PORT; for example --coordinator "
            f"10.0.0.1:12321, the host of process 0 and a port that is free there."
        )
    return host.strip("[]"), int(port)
