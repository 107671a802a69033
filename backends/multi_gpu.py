"""All NVIDIA GPUs of this host, and of other hosts through SLURM, Open MPI or flags.

The same command is started on every host: one process for all GPUs of a host, or one for each GPU
where the launcher starts as many. NCCL, which comes with jax's CUDA plugin, connects them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localtrain import launcher, processes
from localtrain.backend import jax_runs_on, set_jax
from localtrain.backends.local_gpu import LocalGpu, set_memory, visible_gpus
from localtrain.errors import ConfigError

if TYPE_CHECKING:
    from localtrain.config import RunConfig


class MultiGpu(LocalGpu):
    """Every visible GPU; `--devices N` takes the first N of each host."""

    name = "multi-gpu"
    summary = "all NVIDIA GPUs of this host; several hosts by srun, mpirun or --coordinator"

    @property
    def priority(self) -> int:  # type: ignore[override]
        """Before local-gpu only where there is more than one GPU to be used."""
        try:
            several = visible_gpus() > 1 or launcher.find_place() is not None
        except ConfigError:  # several were started, but not where they meet: `initialize` says so
            several = True
        return LocalGpu.priority + (5 if several else -5)

    def prepare_environment(
        self, run: RunConfig | None = None, devices: int | None = None
    ) -> list[str]:
        """Platform, the first GPUs of those that are visible, and memory as local-gpu sets it."""
        there = visible_gpus()
        if devices is not None and not 1 <= devices <= there:
            raise ConfigError(
                f"--devices {devices}: backend multi-gpu sees {there} GPUs of this host; take at "
                f"most that, or leave --devices out for all of them"
            )
        if jax_runs_on("gpu", self.name):
            return []
        self._devices = devices or there
        chosen = ",".join(map(str, range(self._devices)))
        set_jax(jax_platforms="cuda,cpu", jax_cuda_visible_devices=chosen)
        return [f"{self._devices} of {there} GPUs of this host", set_memory()]

    def initialize(
        self,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> str | None:
        """Several processes of one host share its GPUs evenly, in the order of their numbers.

        A launcher that gave each task its own (srun --gpus-per-task=1) shows one to each.
        """
        place = launcher.find_place(coordinator, num_processes, process_id)
        mine = None
        there = getattr(self, "_devices", visible_gpus())
        if place is not None and place.local_count > 1 and there > 1:
            share = there // place.local_count
            if share == 0:
                raise ConfigError(
                    f"{place.source} started {place.local_count} processes on this host, which has "
                    f"{there} GPUs for them; start at most one process per GPU"
                )
            mine = list(range(place.local_index * share, (place.local_index + 1) * share))
        return processes.join(coordinator, num_processes, process_id, local_devices=mine)
