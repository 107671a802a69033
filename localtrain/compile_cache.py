"""Compiled programs kept between processes, so that the second start takes seconds less.

jax's persistent cache does the work; its key covers the program, jaxlib's version, compiler flags
and options, so a changed one never meets a stale program. What it does not cover is the CPU that a
program was compiled for: a home directory may be shared between machines, so the folder is named
after jaxlib's version and the CPU's features.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import jax

from localtrain import storage

log = logging.getLogger(__name__)

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@dataclass
class CacheUse:
    """How many programs of this process came from the cache, and how many were compiled."""

    hits: int = 0
    misses: int = 0

    def __call__(self, event: str, **_: object) -> None:
        self.hits += event == HIT
        self.misses += event == MISS


_use: CacheUse | None = None


def enable() -> CacheUse:
    """Turn the cache on (once a process); a folder that cannot be written turns it off.

    A cache folder that the user gave jax (JAX_COMPILATION_CACHE_DIR) is used as it is.
    """
    global _use
    if _use is None:
        _use = CacheUse()
        jax.monitoring.register_event_listener(_use)
        if not jax.config.jax_compilation_cache_dir and (folder := _usable(cache_folder())):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return _use


def cache_folder() -> Path:
    """The user's cache folder for compiled programs, as the platform names such folders."""
    machine = hashlib.sha256(_cpu().encode()).hexdigest()[:8]
    programs = storage.user_cache() / "localtrain" / "programs"
    return programs / f"jaxlib-{jax.lib.__version__}-{machine}"


def _cpu() -> str:
    """What of the CPU decides which instructions may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _usable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.debug("no compile cache: %s", error)
    return None
