"""How long a step takes at best: the roofline of a compiled program.

"Roofline: an insightful visual performance model" (Williams, Waterman, Patterson, CACM 52-4): the
arithmetic at the vendor's peak or the memory traffic at its bandwidth, whichever is longer; then
the exchanges between devices, as if nothing overlapped with them. Real kernels reach less than
the peak and schedulers hide exchanges, so it is a scale for comparing settings, not a promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localtrain import hlo
from localtrain.backend import Facts

# Attention kernels hide their products from the reader. A product of all queries with all keys is
# 2 x T x S x H FLOPs a head; so many of them are in the kernels of "FlashAttention-2" (arXiv
# 2307.08691): forward scores and values; dq scores, dp, dq; dkv scores, dp, dv, dk; or all at once.
_PRODUCTS = {"fwd": 2, "forward": 2, "dq": 3, "dkv": 4, "backward": 5, "bwd": 5}
_ATTENTION = ("splash", "flash", "mha", "attention")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by what they go into, and how they were found."""

    arithmetic_s: float
    memory_s: float
    link_s: float
    network_s: float
    how: str

    @property
    def total_s(self) -> float:
        return max(self.arithmetic_s, self.memory_s) + self.link_s + self.network_s


def kernel_flops(program: hlo.Program, keys: float) -> float:
    """FLOPs of attention kernels on one device, where a query sees so many keys in the mean."""
    total = 0.0
    separate = any("_dq" in name for name in hlo.kernels(program))
    for use in program.walk():
        one = use.instruction
        target = one.attribute("custom_call_target")
        name = (one.name if target == "tpu_custom_call" else target).lower()
        if one.op != "custom-call" or not any(word in name for word in _ATTENTION):
            continue
        kind = (
            "bwd"
            if "dkv" in name and not separate
            else next((word for word in _PRODUCTS if word in name), "fwd")
        )
        types = {i.name: i for i in program.computations[use.computation]}
        taken = [a for n in one.operands if n in types for a in types[n].arrays]
        wide = (a.dims for a in taken if len(a.dims) > 2 and _is_floating(a.kind))
        queries = math.prod(next(wide, (0,)))  # B x N x T x H: before keys, values and a mask
        total += use.times * _PRODUCTS[kind] * 2 * queries * keys
    return total


def step_time(flops: float, moved: int, sent: tuple[float, float], facts: Facts) -> StepTime:
    """The estimate for so many FLOPs, bytes to and from memory, and `wire_bytes` of one device."""
    link, network = sent
    how = [
        f"the longer of {flops / 1e12:.3g} TFLOP at {facts.peak_flops / 1e12:.4g} TFLOP/s and "
        f"{moved / 1e9:.3g} GB at {facts.memory_bandwidth / 1e9:.4g} GB/s"
    ]
    link_s = network_s = 0.0
    if link and facts.link:
        link_s = link / facts.link
        how.append(f"{link / 1e9:.3g} GB sent to neighbours at {facts.link / 1e9:.4g} GB/s")
    elif link:
        how.append("exchanges between devices not counted, as their speed is not known")
    if network and facts.network:
        network_s = network / facts.network
        how.append(f"{network / 1e9:.3g} GB to other slices at {facts.network / 1e9:.4g} GB/s")
    elif network:
        how.append("exchanges between slices not counted, as their speed is not known")
    return StepTime(
        flops / facts.peak_flops,
        moved / facts.memory_bandwidth,
        link_s,
        network_s,
        " + ".join(how) + f"; nothing overlaps, every rate is the vendor's ({facts.source})",
    )


def wire_bytes(collectives: list[hlo.Collective], slices: int) -> tuple[float, float]:
    """Bytes that one device sends in a step (to its neighbours, to other slices), rings assumed."""
    link = network = 0.0
    for one in collectives:
        n = slices if one.between_slices else one.group_size
        factor = 1.0 if one.kind.startswith("collective") else (n - 1) / max(n, 1)
        factor *= 2 if one.kind == "all-reduce" else 1
        if one.between_slices:
            network += one.times * one.bytes * factor
        else:
            link += one.times * one.bytes * factor
    return link, network


def _is_floating(kind: str) -> bool:
    return kind.startswith(("f", "bf"))
