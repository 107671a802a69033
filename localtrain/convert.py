"""Hugging Face to ours and back, one tensor at a time, each way with a proof.

`import_hub` makes a folder that is read like a run: `checkpoints/0` with the parameters in the type
they had, `model.json`, `tokenizer/` and `carried/` byte for byte. `export_hub` writes a folder that
transformers and others load, from a run, a checkpoint or an imported folder. Both read back what
they wrote and compare logits (parity.py). A conversion that fails leaves nothing behind.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from localtrain import hubdir, storage
from localtrain.arrays import Deferred
from localtrain.checkpoint import Checkpoints
from localtrain.data.byte_files import byte_tokenizer_files
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import ConfigError, DataError, StorageError
from localtrain.models import weights
from localtrain.models.files import DTYPES, NAMES, SHARD_BYTES, write_tensors
from localtrain.parity import (
    Prover,
    compare_with_transformers,
    fingerprint,
    prover,
    require_transformers,
)
from localtrain.source import (
    CARRIED,
    MODEL,
    TOKENIZER,
    CheckpointSource,
    HubSource,
    Source,
    open_source,
)

HUB_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass
class Side:
    """One side of a conversion: what is stored, and the logits that it gives."""

    where: str
    tensors: int
    carried: int
    parameters: int
    dtypes: dict[str, int]  # Hub name of a type -> tensors that have it
    bytes: int
    logits: dict[str, Any]


@dataclass
class Report:
    """What a conversion did. `max_difference` is that of the logits, source against written."""

    source: Side
    written: Side
    tokens: list[int]
    max_difference: float
    notes: list[str] = field(default_factory=list)
    transformers: dict[str, Any] | None = None  # of --check

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_hub(name: str, out: str, progress: Progress | None = None) -> Report:
    """Hugging Face folder, URL or Hub id to a folder of ours; returns the proof.

    Raises ConfigError (config, `out` in use), DataError (weights), StorageError.
    """
    source = open_source(name)
    if not isinstance(source, HubSource):
        raise ConfigError(f"{name} is a run or checkpoint of localtrain already: use it as it is.")
    _watch(source, "reading", progress)
    proof = prover(source.network.spec)
    before = proof.logits(source)
    with hubdir.new_folder(out, source.bytes()) as folder:
        _watch(source, "writing", progress)
        _write_checkpoint(source, folder)
        keep_beside(source, folder)
        written = CheckpointSource(out, folder)
        _watch(written, "reading back", progress)
        after = proof.logits(written)
        report = _report(proof, source, written, before, after, out)
        _check_equal(report)
    return report


def _watch(source: Source, stage: str, progress: Progress | None) -> None:
    """Report how much of a source was read since now."""
    done, total = 0, source.bytes()

    def seen(size: int) -> None:
        nonlocal done
        done += size
        progress(stage, done, total)

    if progress is not None:
        source.seen = seen


def _write_checkpoint(source: HubSource, folder: str) -> None:
    def later(leaf: weights.Leaf) -> Deferred:
        shape, dtype = source.leaves[leaf]
        return Deferred(shape, dtype, lambda: source.read(leaf))

    leaves = {"/".join(("params", *leaf)): later(leaf) for leaf in source.leaves}
    meta = {
        "seed": None,
        "trained_tokens": 0,
        "model": source.hf,
        "stacks": [[len(stack.period), stack.repeat] for stack in source.network.stacks],
        "exceptions": {name: NAMES[dtype] for name, dtype in source.exceptions.items()},
        "source": source.name,
    }
    Checkpoints(storage.join(folder, "checkpoints")).write(0, leaves, meta)
    storage.write_atomic(storage.join(folder, MODEL), hubdir.encode_config(source.hf))


def keep_beside(source: Source, home: str, with_tokenizer: bool = True) -> None:
    """Copy a source's tokenizer, carried tensors and other files into a folder of ours, once."""
    if with_tokenizer:
        hubdir.copy_files(source.tokenizer_files(), storage.join(home, TOKENIZER))
    hubdir.copy_files(source.other_files(), storage.join(home, CARRIED))
    if plan := carried_plan(source):
        write_tensors(storage.join(home, CARRIED), plan, source.read_carried(), SHARD_BYTES)


def export_hub(
    name: str,
    out: str,
    *,
    dtype: str | None = None,
    check: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Report:
    """A run, checkpoint or imported folder to a Hugging Face folder; returns the proof.

    dtype: "float32", "bfloat16" or "float16" for all weights; by default each stays as it is.
    check: compare with transformers as well. Raises as `import_hub` does.
    """
    if check:
        require_transformers()
        if storage.is_url(out):
            raise ConfigError(f"--check needs a local folder; {out} is a URL.")
    if dtype is not None and dtype not in HUB_TYPES:
        raise ConfigError(f"--dtype {dtype}: known are {', '.join(HUB_TYPES)}.")
    source = open_source(name)
    _watch(source, "reading", progress)
    proof = prover(source.network.spec)
    before = proof.logits(source)
    plan = _plan(source, dtype)
    need = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.values())
    with hubdir.new_folder(out, need) as folder:
        _watch(source, "writing", progress)
        hubdir.write_hub_folder(
            folder,
            _config(source, plan),
            plan | carried_plan(source),
            itertools.chain(
                weights.export_tensors(source.entries, source.read), source.read_carried()
            ),
            files_beside(source),
            shard_bytes,
        )
        written = HubSource(out, folder)
        _watch(written, "reading back", progress)
        after = proof.logits(written)
        report = _report(proof, source, written, before, after, out)
        if dtype is None:
            _check_equal(report)
        if check:
            report.transformers = compare_with_transformers(folder, after)
    return report


def _plan(source: Source, dtype: str | None) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of every Hub tensor to write."""
    plan = {}
    for name, entry in source.entries.items():
        kept = source.exceptions.get(name, source.leaves[entry.targets[0][0]][1])
        plan[name] = entry.shape, DTYPES[HUB_TYPES[dtype]] if dtype else kept
    return plan


def carried_plan(source: Source) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    names = source.carried_names()
    stored = {name: source.carried.tensors[name] for name in names}
    return {name: (one.shape, DTYPES[one.dtype]) for name, one in stored.items()}


def _config(source: Source, plan: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict:
    """config.json with the type that most weights have."""
    sizes: Counter = Counter()
    for shape, dtype in plan.values():
        sizes[np.dtype(dtype).name] += math.prod(shape)
    most = sizes.most_common(1)[0][0]
    return hubdir.export_config(source.hf, most, source.network.spec.tied, ends_of(source))


def ends_of(source: Source | None) -> dict[str, Any]:
    """bos_token_id and eos_token_id of a run's own tokenizer, where its config names others."""
    if not isinstance(source, CheckpointSource) or source.is_import:
        return {}
    folder = storage.join(source.home, TOKENIZER)
    if not (source.has_byte_tokenizer() or "tokenizer.json" in source.tokenizer_files()):
        return {}
    tokenizer = load_tokenizer(folder)
    text = source.hf.get("text_config") or source.hf
    named = text.get("eos_token_id", source.hf.get("eos_token_id"))
    if tokenizer.eos_id in (named if isinstance(named, list) else [named]):
        return {}
    return {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}


def files_beside(source: Source) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {**source.other_files(), **source.tokenizer_files()}
    if isinstance(source, CheckpointSource) and source.has_byte_tokenizer():
        files |= byte_tokenizer_files()
    return files


def _report(
    proof: Prover,
    source: Source,
    written: Source,
    before: np.ndarray,
    after: np.ndarray,
    out: str,
) -> Report:
    return Report(
        source=_side(source, source.name, before),
        written=_side(written, out, after),
        tokens=[int(token) for token in proof.tokens],
        max_difference=float(np.abs(before - after).max()),
        notes=source.notes,
    )


def _side(source: Source, where: str, logits: np.ndarray) -> Side:
    if isinstance(source, HubSource):
        stored = [source.files.tensors[name] for name in source.entries]
        kinds = Counter(one.dtype for one in stored)
        size = sum(one.end - one.start for one in stored)
        parameters = sum(math.prod(one.shape) for one in stored)
    else:
        kinds = Counter(NAMES[dtype] for _, dtype in source.leaves.values())
        parameters = sum(math.prod(shape) for shape, _ in source.leaves.values())
        size = source.bytes()
    return Side(
        where=where,
        tensors=sum(kinds.values()),
        carried=len(source.carried_names()),
        parameters=parameters,
        dtypes=dict(kinds.most_common()),
        bytes=size,
        logits=fingerprint(logits),
    )


def _check_equal(report: Report) -> None:
    """Nothing was rounded, so the same program must give the same bits."""
    if report.max_difference != 0:
        raise StorageError(
            f"{report.written.where}: what was written gives other logits than the source "
            f"({report.max_difference:.3g}): the disk or the memory of this machine is not "
            "reliable, or this is a bug of localtrain. Nothing was kept."
        )
    if report.written.parameters != report.source.parameters:
        raise DataError(
            f"{report.written.where}: {report.written.parameters} parameters were written, the "
            f"source has {report.source.parameters}."
        )
