"""What this machine is and what is missing on it, for users and for bug reports. No network.

A cloud client is never imported: only whether a package is installed is looked at.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from localtrain.config.secret import is_secret_key, mask

PACKAGES = (
    "localtrain",
    "jax",
    "jaxlib",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "tokenizers",
    "safetensors",
    "pydantic",
    "fsspec",
    "tensorboard",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "gcsfs",
    "s3fs",
    "pyarrow",
    "tokamax",
    "pathwaysutils",
)
VARIABLES = ("JAX_", "XLA_", "CUDA_VISIBLE", "TPU_", "LIBTPU_", "HF_", "TF_CPP_", "NVIDIA_VISIBLE")


def examine(backend: str | None = None) -> dict[str, Any]:
    """Everything as plain data; opens the devices of a backend (the best usable one)."""
    from localtrain.backend import choose, survey

    backends = survey()  # before jax is told to use one of them
    environment = _environment()
    chosen, _ = choose(backend)
    notes = chosen.prepare_environment()
    return {
        "system": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "cpus": _cpus(),
            "memory_bytes": _memory(),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": backends,
        "backend": chosen.name,
        "notes": notes,
        "devices": _devices(chosen),
        "disk": [_disk(path) for path in sorted({Path.cwd(), Path(tempfile.gettempdir())})],
        "caches": _caches(),
        "environment": environment,
    }


def write_report(report: dict[str, Any]) -> str:
    """The same as lines to read."""
    system = report["system"]
    installed = {name: found for name, found in report["packages"].items() if found}
    missing = [name for name, found in report["packages"].items() if not found]
    lines = [
        f"system    {system['platform']}, Python {system['python']} ({system['executable']})",
        f"          {system['cpus']} CPUs, {_gib(system['memory_bytes'])} memory",
        "packages  " + ", ".join(f"{name} {found}" for name, found in installed.items()),
        "          not installed: " + ", ".join(missing),
    ]
    for row in report["backends"]:
        mark = "usable" if row["usable"] else f"not usable: {row['reason']}"
        lines.append(f"backend   {row['name']}: {mark}")
    for device in report["devices"]:
        memory = f", {_gib(device['memory_bytes'])}" if device["memory_bytes"] else ""
        peak = device["peak_flops"]
        flops = f", {peak / 1e12:g} TFLOP/s bfloat16" if peak else ""
        lines.append(f"device    {device['id']}: {device['kind']}{memory}{flops}")
    lines += [f"note      {note}" for note in report["notes"]]
    for disk in report["disk"]:
        state = "" if disk["writable"] else ", NOT writable"
        lines.append(f"disk      {disk['path']}: {_gib(disk['free_bytes'])} free{state}")
    lines += [f"cache     {name}: {path}" for name, path in report["caches"].items()]
    lines += [f"variable  {name}={value}" for name, value in report["environment"].items()]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpus() -> int:
    """CPUs that this process may use, which is less than the machine has in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    """Bytes of memory: the machine's, or the container's limit where that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _devices(backend: Any) -> list[dict[str, Any]]:
    import jax

    return [
        {
            "id": device.id,
            "kind": device.device_kind,
            "platform": device.platform,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "peak_flops": backend.peak_flops(device.device_kind),
        }
        for device in jax.local_devices()
    ]


def _disk(path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "free_bytes": shutil.disk_usage(path).free,
        "writable": os.access(path, os.W_OK),
    }


def _caches() -> dict[str, str]:
    home = Path.home()
    hub = os.environ.get("HF_HOME") or str(home / ".cache" / "huggingface")
    return {
        "Hugging Face": hub,
        "jax compilation": os.environ.get("JAX_COMPILATION_CACHE_DIR") or "off",
    }


def _environment() -> dict[str, str]:
    """Variables that change what jax and others do; secrets are named but never shown."""
    found = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {
        name: "***" if is_secret_key(name) else mask(value) for name, value in sorted(found.items())
    }


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
