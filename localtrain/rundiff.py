"""In what two runs differ, and whether that makes one another run."""

from __future__ import annotations

from typing import Any

HARMLESS = (
    "name",
    "train.steps",
    "train.log_every",
    "train.profile",
    "train.micro_batch",
    "train.remat",
    "train.deterministic",
    "data.cache",
    "data.prefetch",
    "data.bad_rows",
    "eval.",
    "checkpoint.",
    "mesh.",
)


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys in which two runs (nested dicts) differ: dotted key -> (old, new)."""
    before, after = _flat(old), _flat(new)
    keys = [*after, *(key for key in before if key not in after)]
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def matters(key: str) -> bool:
    """Whether a difference in this key makes it another run."""
    return not any(key == one or (one[-1] == "." and key.startswith(one)) for one in HARMLESS)


def show(changed: dict[str, tuple[Any, Any]], most: int = 6) -> str:
    """A difference in words, for one line."""
    shown = [f"{key} {old!r} -> {new!r}" for key, (old, new) in list(changed.items())[:most]]
    more = f" and {len(changed) - most} more" if len(changed) > most else ""
    return ", ".join(text if len(text) < 200 else text[:200] + "..." for text in shown) + more


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
