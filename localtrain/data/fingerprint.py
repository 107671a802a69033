"""What a run was trained on, small enough for a checkpoint, and how two such records differ.

A fingerprint is JSON-able: {"hash", "settings", "sources": [{"path", "weight", "hash", "files"}]}.
`files` maps each file to its size and checksum; above MAX_FILES the entries are those of folders.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from localtrain.config.secret import mask
from localtrain.data.shards import DatasetIndex
from localtrain.data.sources import Source

Fingerprint = dict[str, Any]
MAX_FILES = 2000


def make_fingerprint(
    settings: dict[str, Any],
    sources: list[Source],
    indexes: list[DatasetIndex],
    rows: list[str],
) -> Fingerprint:
    """settings: what decides the rows besides the sources. rows: hashes of the packed rows."""
    listed = [
        {
            "path": source.path,
            "weight": source.weight,
            "hash": index.hash,
            "files": _files(index.files),
        }
        for source, index in zip(sources, indexes, strict=True)
    ]
    # where the files lie and what they are called is told, but is no part of the identity
    identity = [settings, [(entry["weight"], entry["hash"]) for entry in listed], rows]
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"hash": digest, "settings": settings, "sources": mask(listed)}


def _files(files: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    if len(files) <= MAX_FILES:
        return {name: f"{size} bytes, crc32c {crc:08x}" for name, size, crc in files}
    folders: dict[str, list] = {}
    for name, size, crc in files:
        folders.setdefault(name.rsplit("/", 1)[0] + "/", []).append((name, size, crc))
    if len(folders) > MAX_FILES:
        folders = {"all files": [entry for entries in folders.values() for entry in entries]}
    return {
        folder: f"{len(entries)} files, {hashlib.sha256(str(entries).encode()).hexdigest()[:16]}"
        for folder, entries in folders.items()
    }


def explain_difference(before: Fingerprint, now: Fingerprint) -> str:
    """One sentence that names what differs, the file first of all; "" when nothing does."""
    if before.get("hash") == now["hash"]:
        return ""
    for name, value in now["settings"].items():
        old = before.get("settings", {}).get(name)
        if old != value and not name.endswith("_rows"):
            return f"data setting {name} was {old} and is {value} now"
    old_sources, new_sources = before.get("sources", []), now["sources"]
    if len(old_sources) != len(new_sources):
        return f"there were {len(old_sources)} data sources and there are {len(new_sources)} now"
    for old, new in zip(old_sources, new_sources, strict=True):
        if old["hash"] != new["hash"]:
            return _explain_files(old, new)
        if old["weight"] != new["weight"]:
            return f"the weight of {new['path']} was {old['weight']} and is {new['weight']} now"
    return "the split into training and evaluation documents differs"


def _explain_files(old: dict, new: dict) -> str:
    """Which files of one source changed, came or went."""
    before, now = old["files"], new["files"]
    changed = [name for name in now if name in before and before[name] != now[name]]
    gone = [name for name in before if name not in now]
    come = [name for name in now if name not in before]
    for names, what in ((changed, "changed"), (gone, "is gone"), (come, "is new")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            was = f": it was {before[names[0]]}, now {now[names[0]]}" if what == "changed" else ""
            return f"{names[0]} {what}{more}{was}"
    if list(before) != list(now):
        return f"the files of {new['path']} come in another order"
    return f"the tokens of {new['path']} differ"
