"""One NVIDIA GPU of this machine, through jax's CUDA plugin."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import shutil
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from localtrain.backend import Backend, Defaults, Facts, jax_runs_on, set_jax
from localtrain.backends import devices as table
from localtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from localtrain.config import RunConfig

MEMORY_FRACTION = 0.9  # XLA's own default of 0.75 leaves 2 GB of an 8 GB card unused

# Both names set at once is an error in jax 0.10, so a value of the user's own is left alone.
_MEMORY_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


class LocalGpu(Backend):
    """The first visible NVIDIA GPU."""

    name = "local-gpu"
    summary = "one NVIDIA GPU of this machine"
    priority = 20

    def check(self) -> str | None:
        """Driver and plugin, without opening the device."""
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
            return f"JAX_PLATFORMS={platforms} in the environment excludes it; unset it"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1", "none", "NoDevFiles"):
            return f"CUDA_VISIBLE_DEVICES='{hidden}' in the environment hides every GPU; unset it"
        if reason := _missing_driver():
            return reason
        if not _plugins():
            return (
                "an NVIDIA driver is here but jax's CUDA plugin is not: looked for the packages "
                "jax_cuda13_plugin and jax_cuda12_plugin; pip install 'localtrain[cuda13]', or "
                "[cuda12] with a driver older than 580"
            )
        return None

    def prepare_environment(
        self, run: RunConfig | None = None, devices: int | None = None
    ) -> list[str]:
        """Platform, one device, and how much of its memory jax takes at the start."""
        if devices not in (None, 1):
            raise ConfigError(f"--devices {devices}: backend local-gpu uses one GPU")
        if jax_runs_on("gpu", self.name):
            return []
        set_jax(jax_platforms="cuda,cpu", jax_cuda_visible_devices="0")
        return [set_memory()]

    def compiler_options(self, run: RunConfig) -> dict[str, bool | int | str]:
        """Determinism: docs.jax.dev and XLA's xla.proto name this flag for run-to-run equality."""
        return {"xla_gpu_deterministic_ops": True} if run.train.deterministic else {}

    def defaults(self) -> Defaults:
        """bfloat16: what tensor cores are made for, with float32's range; cuDNN's attention."""
        return Defaults(dtype="bfloat16", attention="cudnn")

    def facts(self, device_kind: str) -> Facts | None:
        """By the device's name, as jax gives it."""
        return table.facts(device_kind)

    def topologies(self) -> list[str]:
        """Cards that programs can be compiled for without having one."""
        entries = files("localtrain.configs").joinpath("cards").iterdir()
        return sorted(e.name.removesuffix(".txt") for e in entries if e.name.endswith(".txt"))

    def topology(self, name: str, devices: int | None = None, slices: int = 1) -> list[Any]:
        """Compile-only devices of that card: the CUDA compiler runs without a driver or a GPU."""
        text = _card(name, self.topologies())
        if slices > 1:
            raise ConfigError(f"--slices {slices}: {name} is a card; --devices N takes N of them")
        if missing := [package for package in _COMPILER if not _installed(package)]:
            raise ConfigError(
                f"compiling for {name} needs NVIDIA's compiler, which runs without a GPU: looked "
                f"for the Python modules {', '.join(_COMPILER)} and found no "
                f"{', '.join(missing)}; pip install 'localtrain[plan-gpu]' (about 3 GB on disk)"
            )
        from jax.experimental import topologies

        return topologies.get_topology_desc(
            platform="cuda", topology_name=name, topology=f"1x1x{devices or 1}", target_config=text
        ).devices

    def usable_memory(self, name: str) -> tuple[int, str]:
        """What `set_memory` reserves; the CUDA context has to live in the rest."""
        text = _card(name, self.topologies())
        size = int(re.search(r"device_memory_size:\s*(\d+)", text)[1])
        return int(size * MEMORY_FRACTION), (
            f"{MEMORY_FRACTION:.0%} of {size / 1e9:.1f} GB, what local-gpu reserves; the rest is "
            "for the CUDA context, libraries and the desktop"
        )


# What the compiler consists of: jax's plugin, ptxas with libdevice, and cuDNN.
_COMPILER = ("jax_plugins.xla_cuda12", "jax_cuda12_plugin", "nvidia.cuda_nvcc", "nvidia.cudnn")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


def _card(name: str, known: list[str]) -> str:
    if name not in known:
        close = nearest(name.lower(), known)
        hint = f"did you mean '{close}'? " if close else ""
        raise ConfigError(
            f"there is no card '{name}' to compile for; {hint}known: {', '.join(known)}"
        )
    return files("localtrain.configs").joinpath("cards", f"{name}.txt").read_text("utf-8")


def _missing_driver() -> str | None:
    """None when a device node and the driver's library are here, else what was looked for."""
    library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    found = {library: _loads(library), "nvidia-smi": shutil.which("nvidia-smi") is not None}
    needed = [library]
    if os.name != "nt":
        nodes = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")  # dxg: Windows' WSL
        found = {"/dev/nvidia*": bool(nodes), **found}
        needed.append("/dev/nvidia*")
    if all(found[name] for name in needed):
        return None
    seen = [name for name, there in found.items() if there]
    return (
        f"no NVIDIA driver: looked for {', '.join(found)} and found "
        f"{'only ' + ', '.join(seen) if seen else 'none of them'}; install the driver, or start "
        "the container with --gpus all"
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def visible_gpus() -> int:
    """How many GPUs a program of this environment sees, without opening one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _plugins() -> list[str]:
    names = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return [name for name in names if importlib.util.find_spec(name) is not None]


def set_memory() -> str:
    given = [name for name in _MEMORY_VARIABLES if name in os.environ]
    if given:
        return "GPU memory: as the environment says, " + ", ".join(
            f"{name}={os.environ[name]}" for name in given
        )
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)
    return (
        f"GPU memory: {MEMORY_FRACTION:.0%} is reserved at the start, so nvidia-smi shows it as "
        "used; XLA_CLIENT_MEM_FRACTION changes that"
    )
