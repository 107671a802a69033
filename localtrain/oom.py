"""Turns "out of memory" of the compiler or the device into advice.

The raw message names an allocation that means nothing to a user; what helps is who needs how much
and which keys of the run file lower it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localtrain.errors import OutOfMemoryError

_CLASSES = ("parameters", "optimizer", "temporaries", "code")
_BYTES = re.compile(r"allocat\w*\s+(?:of\s+)?([\d.]+)\s*([KMGT]?)i?(?:bytes|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """True for XLA's RESOURCE_EXHAUSTED (compile or run time) and Python's MemoryError."""
    if isinstance(error, MemoryError):
        return True
    name = type(error).__name__
    return name in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def memory_advice(
    run: Any, memory: Mapping[str, int] | Callable[[], Mapping[str, int]] | None = None
) -> Iterator[None]:
    """Around compile and step: raises OutOfMemoryError (exit 5) in place of XLA's error.

    memory: bytes per device by class (`parameters`, `optimizer`, `temporaries`, `total`,
    `available`), or a function that gives it; what is not known is left out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        known = memory() if callable(memory) else memory
        raise OutOfMemoryError(explain(error, run, known or {})) from error


def explain(error: BaseException, run: Any, memory: Mapping[str, int]) -> str:
    """One paragraph: what was asked for, what is there, by class, and which keys help."""
    parts = ["The device ran out of memory"]
    if (asked := _asked(str(error))) is not None:
        parts[0] += f" allocating {gigabytes(asked)}"
    limit, in_use = _device_memory()
    available = memory.get("available") or limit
    if available:
        parts[0] += f" on a device with {gigabytes(available)}"
        if in_use is not None:
            parts[0] += f", of which {gigabytes(max(0, available - in_use))} were free"
    classes = [f"{name} {gigabytes(memory[name])}" for name in _CLASSES if memory.get(name)]
    if classes:
        total = memory.get("total") or sum(memory.get(name, 0) for name in _CLASSES)
        parts.append(f"The step needs {gigabytes(total)} per device: {', '.join(classes)}")
    parts.append(f"Try, in this order: {'; '.join(remedies(run))}")
    parts.append("`localtrain plan` says beforehand whether a run fits")
    return ". ".join(parts) + "."


def gigabytes(count: float) -> str:
    """Bytes for humans: 1.5 GiB, 300 MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def needed_bytes(message: str) -> int | None:
    """What a program would need, where a compiler that refused it says so (libtpu's does)."""
    found = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    found = found or re.search(r"memory required for [^(]*\(([\d.]+)([KMGT]?)\)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _asked(message: str) -> int | None:
    match = _BYTES.search(message)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2].upper()]) if match else None


def _device_memory() -> tuple[int | None, int | None]:
    """(bytes that the allocator may use, bytes in use) of the first device, where it says so."""
    import jax

    try:
        stats = jax.local_devices()[0].memory_stats() or {}
    except Exception:  # a device that is out of memory may not answer
        return None, None
    return stats.get("bytes_limit"), stats.get("bytes_in_use")


def remedies(run: Any) -> list[str]:
    """The keys that lower memory, cheapest for the result first, without those already used.

    Pieces of a batch (micro_batch) cost a float32 sum of all gradients, so a run without pieces
    is told what they cost; a run that has them only needs smaller ones.
    """
    train, optim, tips = run.train, run.optim, []
    rows = train.micro_batch or train.batch_size
    pieces = train.batch_size > rows
    if rows > 1:
        smaller = f"train.micro_batch={_divisor_below(train.batch_size, rows)} (now {rows}; the "
        smaller += f"batch stays {train.batch_size}, the result too"
        tips.append(smaller + (")" if pieces else "; costs 4 bytes a parameter)"))
    if train.remat != "full":
        tips.append("train.remat=full (about a third slower, same result)")
    if optim.state_dtype != "bfloat16" and optim.name != "sgd":
        tips.append("optim.state_dtype=bfloat16 (halves the optimizer's memory)")
    if train.param_dtype != "bfloat16":
        tips.append(
            "train.param_dtype=bfloat16 (halves the parameters' memory; rounded stochastically)"
        )
    if rows > 1 and not pieces:
        tips.append(f"train.batch_size={rows // 2} (now {rows}; no pieces, other batches)")
    tips.append(f"data.seq_len={max(1, run.data.seq_len // 2)} (now {run.data.seq_len})")
    tips.append("a smaller model.preset")
    return tips


def _divisor_below(batch: int, rows: int) -> int:
    return next(n for n in range(max(1, rows // 2), 0, -1) if batch % n == 0)
