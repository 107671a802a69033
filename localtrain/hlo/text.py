"""The text of a compiled program: computations, their instructions, and groups of devices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}  # others: in the name

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_MESH = re.compile(r"replica_groups=@?mesh\w*\[([^\]]*)\](?:[^{]*)\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """One array as a type writes it: f32[8,16]{1,0:T(8,128)S(1)}."""

    kind: str
    dims: tuple[int, ...]
    space: int  # 0: the device's main memory; on TPU 1 is VMEM

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.kind)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.kind)  # f32, s8, f8e4m3fn
            bits = int(digits[1]) if digits else 0
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str  # as written: f32[8,16]{1,0}, or a tuple of these
    op: str
    rest: str  # operands and attributes, as written
    is_root: bool = False

    @property
    def arrays(self) -> list[Array]:
        """Each array of the result."""
        return arrays(self.type)

    @property
    def results(self) -> list[Array]:
        """As `arrays`, but of what an asynchronous start has, (inputs, outputs, counters), the
        outputs; a copy has (to, from, counter)."""
        if not self.op.endswith("-start") or self.op == "all-reduce-start":
            return self.arrays
        whole = [a for a in self.arrays if a.dims or a.kind not in ("u32", "s32")]
        half = len(whole) // 2
        return whole[:half] if self.op == "copy-start" else whole[half:]

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(element type, dims) of each array of the result."""
        return [(array.kind, array.dims) for array in self.arrays]

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def attribute(self, name: str) -> str:
        """What a quoted attribute says, empty without it: op_name, custom_call_target."""
        found = re.search(rf'\b{name}="([^"]*)"', self.rest)
        return found[1] if found else ""


def arrays(written: str) -> list[Array]:
    """The arrays of a type, in order. Memory spaces are those of TPUs, whose layouts have tiles:
    on GPUs space 1 is main memory that collectives use."""

    def space(layout: str) -> int:
        found = _SPACE.search(layout) if "T(" in layout else None
        return int(found[1]) if found else 0

    return [Array(k, numbers(dims), space(layout)) for k, dims, layout in ARRAY.findall(written)]


def parse(text: str) -> tuple[dict[str, list[Instruction]], str, int]:
    """(computations, name of the entry, number of devices) of `Compiled.as_text()`."""
    found, entry, current = {}, "", []
    devices = re.search(r"\bnum_partitions=(\d+)", text[:100_000])
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif one := _LINE.match(line):
            root, *parts = one.groups()
            current.append(Instruction(*parts, is_root=bool(root)))
    return found, entry, int(devices[1]) if devices else 1


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a collective, in any of the ways that XLA writes them."""
    if found := _IOTA.search(attributes):
        shape, dims = numbers(found[1]), numbers(found[2])
        order = numbers(found[3]) if found[3] else tuple(range(len(dims)))
        flat = _transposed(dims, order)
        width = shape[-1]
        return tuple(tuple(flat[i : i + width]) for i in range(0, len(flat), width))
    if found := _LISTS.search(attributes):
        return tuple(numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    if found := _MESH.search(attributes):
        sizes = {n: int(s) for n, s in re.findall(r"'([^']+)'=(\d+)", found[1])}
        inside = set(re.findall(r"'([^']+)'", found[2]))
        names = list(sizes)
        last = [n for n in names if n not in inside] + [n for n in names if n in inside]
        order = tuple(names.index(n) for n in last)
        flat = _transposed(tuple(sizes.values()), order)
        width = math.prod(sizes[n] for n in inside)
        return tuple(tuple(flat[i : i + width]) for i in range(0, len(flat), width))
    return ()


def _transposed(dims: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """0, 1, 2, ... as an array of `dims`, transposed, as a flat list."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for axis in order:
        flat = [base + k * strides[axis] for base in flat for k in range(dims[axis])]
    return flat


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
