"""What a compiled program does, read from its text: exchanges, FLOPs, memory traffic, kernels."""

from localtrain.hlo.program import KINDS, Collective, Program, Use, by_kind, read
from localtrain.hlo.text import Array, Instruction, replica_groups
from localtrain.hlo.traffic import kernels, memory_bytes

__all__ = [
    "KINDS",
    "Array",
    "Collective",
    "Instruction",
    "Program",
    "Use",
    "by_kind",
    "kernels",
    "memory_bytes",
    "read",
    "replica_groups",
]
