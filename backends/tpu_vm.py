"""Cloud TPUs: the chips of this host, of every worker of a slice, or of several slices.

On each worker the same command is started; they find one another through what Cloud TPU and GKE
put into the environment. libtpu, the compiler, also compiles for slices that are not here.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localtrain.backend import Backend, Defaults, Facts, jax_runs_on, set_jax
from localtrain.backends import devices as table
from localtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from localtrain.config import RunConfig

# Shapes that can be had: docs.cloud.google.com/tpu/docs/ v4, v5e, v5p, v6e, tpu7x.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_CUBE += ("8x16x16", "16x16x16")
SHAPES = {"v4": _CUBE, "v5e": _FLAT, "v5p": (*_CUBE, "16x16x24"), "v6e": _FLAT, "tpu7x": _CUBE}

# GiB of a device that libtpu keeps: with less, its compiler (0.0.42) refuses. On v5p it would
# allow 0.74 more than the data sheet's 95.
RESERVE_GIB = {"v4": 1.25, "v5e": 0.25, "v5p": 0.25, "v6e": 0.75, "tpu7x": 1.25}

# PCI numbers, as in jax's hardware_utils.py: Google makes network cards and disks as well.
_GOOGLE = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")


class TpuVm(Backend):
    """All chips that this process and its fellow workers have."""

    name = "tpu-vm"
    summary = "Cloud TPU: this host, every worker of a slice, or several slices"
    priority = 30

    def check(self) -> str | None:
        """Chips and libtpu, without opening a device: only one process at a time may."""
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and "tpu" not in platforms.split(","):
            return f"JAX_PLATFORMS={platforms} in the environment excludes it; unset it"
        if not (nodes := _nodes()):
            return (
                "no TPU: looked for /dev/accel*, and for /dev/vfio/* beside a Google chip in "
                "/sys/bus/pci/devices, and found neither; create a TPU VM, or in a container pass "
                "the devices through (--privileged, or google.com/tpu in Kubernetes). `localtrain "
                "plan --topology v5e:4x4` needs no TPU"
            )
        if not _installed():
            return (
                f"a TPU is here ({nodes[0]}) but its library is not: looked for the Python module "
                "libtpu; pip install 'localtrain[tpu]'"
            )
        return None

    def prepare_environment(
        self, run: RunConfig | None = None, devices: int | None = None
    ) -> list[str]:
        """The platform. Every chip of the slice is used: a slice cannot be taken in part."""
        if devices is not None:
            raise ConfigError(
                f"--devices {devices}: backend tpu-vm uses every chip of the slice; leave it out"
            )
        if jax_runs_on("tpu", self.name):
            return []
        set_jax(jax_platforms="tpu,cpu")
        return []

    def initialize(
        self,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> str | None:
        """Join the other workers of the slice, and of the other slices of the run.

        jax finds them in what Cloud TPU (its metadata server) and GKE (TPU_WORKER_HOSTNAMES,
        MEGASCALE_*) say; only where that names this host alone is nothing to be joined. To take a
        worker for one that is alone would train as many separate models as there are workers.
        """
        from localtrain import processes

        if {coordinator, num_processes, process_id} != {None}:
            return processes.join(coordinator, num_processes, process_id)
        hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
        several_slices = os.environ.get("MEGASCALE_NUM_SLICES", "1") not in ("", "1")
        if hosts and "," not in hosts and not several_slices:
            return None
        return processes.join(auto=True)

    def defaults(self) -> Defaults:
        """bfloat16: what the matrix units are made for; jax's attention kernel for TPUs."""
        return Defaults(dtype="bfloat16", attention="splash")

    def compiler_options(self, run: RunConfig) -> dict[str, bool | int | str]:
        """The pass that is off (a flag of libtpu, without public documentation) casts the float32
        weights of all layers to bfloat16 before the loop over them, since the loop uses them so:
        1.1 of 14.3 GB of temporaries of Llama-3.1-8B on v5p:2x2x2, which a layer's cast saves."""
        return {"xla_jf_bf16_propagation": False}

    def facts(self, device_kind: str) -> Facts | None:
        """By the device's name, as jax gives it."""
        return table.facts(device_kind)

    def topologies(self) -> list[str]:
        """Slices that programs can be compiled for: generation:shape, as v5e:4x4."""
        return [f"{generation}:{shape}" for generation in SHAPES for shape in SHAPES[generation]]

    def topology(self, name: str, devices: int | None = None, slices: int = 1) -> list[Any]:
        """Compile-only devices of one or more slices; libtpu compiles without a TPU."""
        generation, shape = self._named(name)
        if not _installed():
            raise ConfigError(
                f"compiling for {name} needs the TPU compiler, which runs without a TPU: looked "
                "for the Python module libtpu; pip install 'localtrain[tpu]'"
            )
        for variable, value in _COMPILE_ONLY.items():
            os.environ.setdefault(variable, value)
        from jax.experimental import topologies

        options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
        if shape == "1x1":
            options["chips_per_host_bounds"] = (1, 1, 1)
        if generation == "v4":  # one device a chip, as on a v4 VM
            options["chip_config_name"] = "megacore"
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        if devices not in (None, len(found)):
            many = f"{slices} slices of {name} have" if slices > 1 else f"{name} has"
            raise ConfigError(f"--devices {devices}: {many} {len(found)} devices; leave it out")
        return list(found)

    def usable_memory(self, name: str) -> tuple[int, str]:
        """The data sheet's memory without what libtpu keeps for itself."""
        generation, _ = self._named(name)
        _, facts, per_chip = table.TPUS[generation]
        reserve = RESERVE_GIB[generation]
        size = f"{facts.memory / table.GIB:.0f} GiB of {generation}"
        size += " (half a chip, a device)" if per_chip > 1 else ""
        usable = facts.memory - int(reserve * table.GIB)
        return usable, f"{size} without {reserve} GiB that libtpu keeps"

    def _named(self, name: str) -> tuple[str, str]:
        if name not in self.topologies():
            close = nearest(name.lower(), self.topologies())
            hint = f"did you mean '{close}'? " if close else ""
            known = "; ".join(f"{kind}: {', '.join(shapes)}" for kind, shapes in SHAPES.items())
            raise ConfigError(f"there is no TPU topology '{name}'; {hint}known: {known}")
        generation, _, shape = name.partition(":")
        return generation, shape


# Where there is no TPU, libtpu would ask a metadata server what it runs on, complain about what it
# does not find, and let one process in at a time.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _nodes() -> list[str]:
    """Device nodes of TPU chips: v2 to v4 have a driver of their own, later ones use vfio."""
    if found := sorted(glob.glob("/dev/accel[0-9]*")):
        return found
    for device in glob.glob("/sys/bus/pci/devices/*"):
        try:
            vendor, kind = (Path(device, name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and kind in _CHIPS:
            return sorted(glob.glob("/dev/vfio/[0-9]*"))
    return []
