"""What a compiled program does, read from its text: collectives and FLOPs, loops multiplied out.

XLA's own `cost_analysis` counts the body of a loop once, so a model of 28 scanned layers costs it
one layer. Here every instruction counts as often as it runs: the loops around it have known trip
counts in the text (`Compiled.as_text()`) of the CPU, GPU and TPU compilers. Of a conditional the
branch with most FLOPs counts. No jax here: the text may come from anywhere.

Names as in "XLA: operation semantics" (openxla.org/xla/operation_semantics).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from localtrain.hlo.text import ARRAY, Instruction, numbers, parse, replica_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_CALLED = re.compile(r"\b(?:calls|to_apply|body|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'"?known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACT = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')


@dataclass(frozen=True)
class Use:
    """An instruction as it runs: how often, and in which loops (names of their bodies)."""

    instruction: Instruction
    computation: str
    times: int
    loops: tuple[str, ...]
    fused: bool  # inside a fusion: its values are never written to memory


@dataclass(frozen=True)
class Collective:
    """One exchange. bytes: of the whole array that is gathered, summed or moved, on one device."""

    kind: str
    bytes: int
    group_size: int  # devices that talk to one another
    groups: tuple[tuple[int, ...], ...]  # their numbers; () = all together, or not said
    times: int
    loops: tuple[str, ...]
    type: str
    op_name: str  # where it comes from in the traced program
    between_slices: bool = False  # TPU: by the hosts, over the network; one of each slice


@dataclass
class Program:
    """The computations of a module; `walk` goes through them as they run."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    devices: int = 1

    def walk(
        self, name: str | None = None, times: int = 1, loops=(), fused: bool = False
    ) -> Iterator[Use]:
        """Every instruction that runs, inner computations included."""
        name = name or self.entry
        for one in self.computations.get(name, ()):
            yield Use(one, name, times, loops, fused)
            if one.op.endswith(("-done", "-update")):  # names the computation of its start again
                continue
            if one.op == "conditional":
                yield from self._largest_branch(one, times, loops, fused)
                continue
            for called in _CALLED.findall(one.rest):
                if one.op == "while":
                    inner = (*loops, called)
                    yield from self.walk(called, times * (self.trips(one) or 1), inner, fused)
                elif one.op in ("call", "call-start", "async-start"):
                    yield from self.walk(called, times, loops, fused)
                elif one.op in ("fusion", "custom-call"):
                    yield from self.walk(called, times, loops, True)

    def trips(self, one: Instruction) -> int | None:
        """How often a loop runs: as noted, else what its counter is compared with; None: unknown,
        and it counts once."""
        if found := _TRIPS.search(one.rest):
            return int(found[1])
        condition = re.search(r"\bcondition=%?([\w.\-]+)", one.rest)
        body = self.computations.get(condition[1] if condition else "", [])
        known = {
            i.name: int(value[1])
            for i in body
            if i.op == "constant" and (value := re.match(r"(\d+)\)", i.rest))
        }
        for last in body:
            if last.op == "compare" and "direction=LT" in last.rest:
                return next((known[name] for name in last.operands if name in known), None)
        return None

    def unknown_loops(self) -> int:
        """Loops whose length the text does not say, as of one that runs until it converges."""
        uses = (use.instruction for use in self.walk())
        return sum(one.op == "while" and self.trips(one) is None for one in uses)

    def _largest_branch(self, one: Instruction, times: int, loops, fused: bool) -> Iterator[Use]:
        found = _BRANCHES.findall(one.rest)
        names = [n.strip(" %") for many, single in found for n in (many or single).split(",")]
        branches = [list(self.walk(name, times, loops, fused)) for name in names]
        yield from max(branches, key=lambda uses: sum(map(self._flops, uses)), default=[])

    def collectives(self) -> list[Collective]:
        """Every exchange between devices, in the order of the text."""
        found, begun = [], set()
        for use in self.walk():
            rest = use.instruction.rest
            if "async_collective_fusion_config" in rest:  # TPU: begin, go on and end, one channel
                channel = re.search(r"channel_id=\d+", rest)
                key = channel[0] if channel else use.instruction.name, use.loops
                if key in begun:
                    continue
                begun.add(key)
            if (one := self._collective(use)) is not None:
                found.append(one)
        return found

    def _collective(self, use: Use) -> Collective | None:
        one = use.instruction
        kind = one.op.removesuffix("-start")
        if one.op == "send" and (sent := one.attribute("_xla_megascale_transfer_type")):
            kind, count = sent.lower().replace("_", "-"), one.arrays[0].bytes
            name = one.attribute("_xla_host_transfer_rendezvous")
            return Collective(kind, count, 0, (), use.times, use.loops, one.type, name, True)
        if kind not in KINDS:
            return None
        groups = replica_groups(one.rest)
        size = len(groups[0]) if groups else self.devices
        arrays = [array.bytes for array in one.results]
        if kind == "all-reduce" and use.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU: fused with the cut of a device's part, and run as one
        elif kind == "reduce-scatter":
            arrays = [part * size for part in arrays]
        count = sum(arrays)
        name = one.attribute("op_name")
        return Collective(kind, count, size, groups, use.times, use.loops, one.type, name)

    def flops(self) -> int:
        """FLOPs of the matrix products on one device, 2 a multiply-add."""
        return sum(map(self._flops, self.walk()))

    def _flops(self, use: Use) -> int:
        one = use.instruction
        if one.op == "convolution":  # what the TPU compiler makes of a product
            return 2 * use.times * self._convolution(use)
        is_product = one.op == "dot" or (one.op == "custom-call" and "gemm" in one.rest)
        contract = _CONTRACT.search(one.rest) if is_product else None
        if contract is None:
            return 0
        dims = self._operand_dims(use)[0]
        inner = math.prod(dims[d] for d in numbers(contract[1].replace('"', "")))
        return 2 * math.prod(one.arrays[0].dims) * inner * use.times

    def _operand_dims(self, use: Use) -> list[tuple[int, ...]]:
        written = use.instruction.rest.split("), ")[0]
        if typed := ARRAY.findall(written):  # older texts repeat the types
            return [numbers(dims) for _, dims, _ in typed]
        types = {i.name: i for i in self.computations[use.computation]}
        return [types[name].arrays[0].dims for name in use.instruction.operands]

    def _convolution(self, use: Use) -> int:
        """Multiply-adds, without those on padding and on the holes of a dilated input."""
        one = use.instruction
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
        lhs, rhs = (
            dict(zip(labels[n], dims, strict=True))
            for n, dims in zip((1, 2), self._operand_dims(use), strict=False)
        )
        out = dict(zip(labels[3], one.arrays[0].dims, strict=True))
        count = out["b"] * out["f"] * rhs["i"]
        written = _WINDOW.search(one.rest)  # absent without spatial axes
        window = dict(re.findall(r"(\w+)=([\dx_\-]+)", written[1] if written else ""))
        for axis in (label for label in labels[3] if label.isdigit()):

            def of(key: str, default: str, axis: str = axis) -> str:
                return window[key].split("x")[int(axis)] if key in window else default

            stride, holes = int(of("stride", "1")), int(of("lhs_dilate", "1"))
            low, spread = int(of("pad", "0_0").split("_")[0]), int(of("rhs_dilate", "1"))
            end = (lhs[axis] - 1) * holes + 1
            places = (
                o * stride + k * spread - low for o in range(out[axis]) for k in range(rhs[axis])
            )
            count *= sum(0 <= place < end and place % holes == 0 for place in places)
        return count


def read(text: str) -> Program:
    """A program from `Compiled.as_text()`."""
    return Program(*parse(text))


def by_kind(collectives: list[Collective]) -> dict[str, dict[str, int]]:
    """kind -> {count, bytes} on one device in one run of the program; between slices apart."""
    found: dict[str, dict[str, int]] = {}
    for one in collectives:
        kind = f"{one.kind} between slices" if one.between_slices else one.kind
        row = found.setdefault(kind, {"count": 0, "bytes": 0})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
    return found
