"""Bytes that a program moves between a device's memory and its arithmetic, and its kernels.

What is fused is never written out, so only arguments and results of whole fusions count, each read
or written once. Of an array that is only sliced the slice counts, of one that is updated in place
the update: a loop over stacked layers reads one layer each time. What the TPU compiler keeps in
VMEM (memory space 1) costs nothing here. Caches are not modelled.
"""

from __future__ import annotations

from collections import Counter

from localtrain.hlo.program import KINDS, Program, Use
from localtrain.hlo.text import Array, Instruction

# Names, no work: values that exist already, or control flow whose contents count by themselves.
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "while",
    "call",
    "conditional",
    "opt-barrier",
    "optimization-barrier",
    "async-start",
    "call-start",
}
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "convert", "copy"}
# Custom calls that the compilers put there for themselves.
_INTERNAL = (
    "AllocateBuffer",
    "ConcatBitcast",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked",
    "AsyncCollective",
    "PrepareAsyncCall",
    "Sharding",
    "SPMD",
    "X64",
    "LayoutConstraint",
    "annotate_device_placement",
    "MoveToHost",
    "MoveToDevice",
    "SliceId",
    "ZeroCrop",
)


def memory_bytes(program: Program) -> int:
    """Bytes read from and written to one device's memory in one run of a program."""
    return sum(
        use.times * _traffic(program, use)
        for use in program.walk()
        if not use.fused and use.instruction.op not in _FREE
    )


def kernels(program: Program) -> dict[str, int]:
    """Hand-written kernels and library calls: name -> how often it runs in a step."""
    found: Counter[str] = Counter()
    for use in program.walk():
        one = use.instruction
        target = one.attribute("custom_call_target")
        if one.op == "custom-call" and target and not target.startswith(_INTERNAL):
            # Pallas names the instruction after the kernel: splash_mha_fwd_residuals.5
            name = one.name.split(".")[0] if target == "tpu_custom_call" else target
            found[name] += use.times
    return dict(found)


def _traffic(program: Program, use: Use) -> int:
    one, here = use.instruction, program.computations[use.computation]
    types = {other.name: other for other in here}
    taken = [types[name] for name in one.operands if name in types]
    if one.op.endswith(("-done", "-update")):
        return 0
    if one.op in ("send", "recv"):  # (array, flag, token)
        return _size(one.arrays[:1])
    if one.op == "copy-start":  # (to, from, flag)
        return _size(one.arrays[:2])
    if one.op == "slice-start":
        return one.results[0].bytes + _size(one.results)
    if one.op.startswith(KINDS):
        return _size(one.results) + sum(_size(other.arrays) for other in taken)
    if one.op in _SLICES:
        part = sum(array.bytes for array in one.arrays)
        return _size(one.arrays) + (part if _size(taken[0].arrays) else 0)
    if one.op == "dynamic-update-slice":
        part = sum(array.bytes for array in taken[1].arrays)
        return _size(taken[1].arrays) + (part if _size(one.arrays) else 0)
    if one.op == "custom-call" and one.attribute("custom_call_target").startswith(_INTERNAL):
        return 0
    if one.op == "custom-call" and "gemm" in one.rest:  # its last result is scratch memory
        return _size(one.arrays[:1]) + sum(_size(other.arrays) for other in taken)
    if one.op != "fusion":
        return _size(one.arrays) + sum(_size(other.arrays) for other in taken)
    body = program.computations.get(_called(one), [])
    read = sum(_read(program, body, n, other) for n, other in enumerate(taken))
    return read + _written(body, one)


def _size(arrays: list[Array]) -> int:
    return sum(array.bytes for array in arrays if array.space == 0)


def _called(one: Instruction) -> str:
    return one.rest.split("calls=")[-1].split(",")[0].strip("% ") if "calls=" in one.rest else ""


def _read(program: Program, body: list[Instruction], number: int, given: Instruction) -> int:
    """Bytes that a fusion reads of its argument of that number."""
    whole = _size(given.arrays)
    parameter = next(
        (i for i in body if i.op == "parameter" and i.rest.startswith(f"{number})")), None
    )
    if parameter is None or whole == 0:
        return whole
    return min(whole, _needed(program, body, parameter, whole))


def _needed(program: Program, body: list[Instruction], value: Instruction, whole: int) -> int:
    """Bytes of a value that its users inside a fusion look at."""
    needed = 0
    for user in body:
        if value.name not in user.operands:
            continue
        if user.op in _SLICES and user.operands[0] == value.name:
            needed += sum(array.bytes for array in user.arrays)
        elif user.op == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif _is_view(program, user) and not user.is_root:
            needed += _needed(program, body, user, whole)
        elif user.op == "fusion":
            inner = program.computations.get(_called(user), [])
            needed += _read(program, inner, user.operands.index(value.name), value)
        else:
            return whole
    return needed


def _is_view(program: Program, one: Instruction) -> bool:
    """Whether, inside a fusion, it is the same values in another shape, type or tiling."""
    if one.op != "fusion":
        return one.op in _VIEWS
    body = program.computations.get(_called(one), [])
    return all(inner.op in ("parameter", *_VIEWS) for inner in body)


def _written(body: list[Instruction], one: Instruction) -> int:
    """Bytes that a fusion writes: of an update in place, the update."""
    by_name = {i.name: i for i in body}
    root = next((i for i in body if i.is_root), None)
    if root is None:
        return _size(one.arrays)
    results = [by_name[n] for n in root.operands if n in by_name] if root.op == "tuple" else [root]
    total, arrays = 0, one.arrays
    if len(results) != len(arrays):
        return _size(arrays)
    for result, array in zip(results, arrays, strict=True):
        while result.op in _VIEWS and result.operands and result.operands[0] in by_name:
            result = by_name[result.operands[0]]
        if result.op == "dynamic-update-slice" and array.space == 0:
            update = by_name[result.operands[1]]
            total += sum(part.bytes for part in update.arrays)
        else:
            total += _size([array])
    return total
