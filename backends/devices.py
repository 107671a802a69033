"""What vendors say of their devices: the one table behind MFU and `plan`.

A device is what jax counts as one: a chip, but half a chip on TPU7x. Every row names its source; a
device without a row has no figures, and what depends on them is told as unknown, never guessed.

peak FLOP/s: dense bfloat16 products summed in float32 (half of what sheets say "with sparsity").
link: bytes/s that one device sends to its neighbours, one direction, all links together (sheets
give both directions). network: the same to other slices or hosts; None where that is the machine's.
"""

from __future__ import annotations

import re

from localtrain.backend import Facts

GIB = 2**30
_TPU = "docs.cloud.google.com/tpu/docs/"

# name in topologies -> (jax's device_kind, figures of one device, devices a chip)
TPUS: dict[str, tuple[str, Facts, int]] = {
    "v4": (
        "TPU v4",
        # ICI: 6 links of 50 GB/s, "TPU v4", arXiv 2304.01433, table 4
        Facts(275e12, 32 * GIB, 1200e9, 300e9, None, _TPU + "v4, arXiv 2304.01433"),
        1,
    ),
    "v5e": (
        "TPU v5 lite",
        # network: 2 x 100 Gbit/s a host of 8 chips
        Facts(197e12, 16 * GIB, 819e9, 200e9, 3.125e9, _TPU + "v5e"),
        1,
    ),
    "v5p": ("TPU v5p", Facts(459e12, 95 * GIB, 2765e9, 600e9, 6.25e9, _TPU + "tpu7x, v5p"), 1),
    "v6e": ("TPU v6 lite", Facts(918e12, 32 * GIB, 1638e9, 400e9, 12.5e9, _TPU + "tpu7x, v6e"), 1),
    "tpu7x": (
        "TPU7x",
        # a chip has two devices: half of 2307 TFLOP/s, 192 GiB, 7380 GB/s, 1200 GB/s, 100 Gbit/s
        Facts(1153.5e12, 96 * GIB, 3690e9, 300e9, 6.25e9, _TPU + "tpu7x, half a chip"),
        2,
    ),
}

_NV = "nvidia.com/en-us/data-center/"
_AMPERE = "GA102 architecture paper"
_ADA = "Ada architecture paper"
_BLACKWELL = "RTX Blackwell architecture paper"
# The papers' figures are SMs x boost clock x 512 FLOPs on all three (RTX 3090: 82 x 1.695 GHz, 71;
# RTX 4090: 128 x 2.52, 165; RTX 5090: 170 x 2.41, 209.5); so are these, from the product pages.
_SM = "512 FLOPs x SMs x boost clock of nvidia.com/geforce, as in the "
# Laptops run at the clocks their cooling allows: at the highest that NVIDIA names.
_LAPTOP = "at the highest clock of nvidia.com/en-us/geforce/laptops/compare; "


def _gpu(tera: float, gb: float, gbps: float, link: float | None, source: str) -> Facts:
    return Facts(tera * 1e12, int(gb * 1e9), gbps * 1e9, link and link * 1e9, None, source)


# Pattern of jax's device_kind without "NVIDIA " -> figures. NVLink where the board has it, else
# PCIe x16 of its generation (x8: RTX 4060, 4060 Ti, 5060 Ti): 16, 32, 64 GB/s each way for 3, 4, 5.
GPUS: dict[str, Facts] = {
    r"A100-SXM4-40GB": _gpu(312, 42.3, 1555, 300, _NV + "a100"),
    r"A100-SXM4-80GB|A100-SXM-80GB": _gpu(312, 85.1, 2039, 300, _NV + "a100"),
    r"A100-PCI[Ee]-40GB": _gpu(312, 42.3, 1555, 32, _NV + "a100"),
    r"A100 80GB PCIe": _gpu(312, 85.1, 1935, 32, _NV + "a100"),
    r"H100 PCIe": _gpu(756, 85, 2000, 64, _NV + "h100"),
    r"H100 NVL": _gpu(835, 94, 3900, 300, _NV + "h100"),
    r"H100( 80GB HBM3)?": _gpu(989, 84.9, 3352, 450, _NV + "h100"),
    r"H200( 141GB HBM3e)?": _gpu(989, 151.4, 4800, 450, _NV + "h200"),
    r"B200": _gpu(2250, 191.5, 7672, 900, "Blackwell data sheet, nvdam.widen.net/s/wwnsxrhm2w"),
    r"A10": _gpu(125, 24, 600, 32, "data sheet of A10"),
    r"A10G": _gpu(70, 24, 600, 32, "data sheet of A10G, aws.amazon.com/ec2/instance-types/g5"),
    r"A40": _gpu(149.7, 48, 696, 32, "data sheet of A40"),
    r"L4": _gpu(121, 24, 300, 32, _NV + "l4"),
    r"L40S": _gpu(362, 48, 864, 32, "data sheet of L40S, resources.nvidia.com/en-us-l40s"),
    r"GeForce RTX 3060": _gpu(25.5, 12, 360, 32, _SM + _AMPERE),
    r"GeForce RTX 3070": _gpu(40.6, 8, 448, 32, _AMPERE),
    r"GeForce RTX 3080": _gpu(59.5, 10, 760, 32, _AMPERE),
    r"GeForce RTX 3090": _gpu(71, 24, 936, 32, _AMPERE),
    r"GeForce RTX 4060": _gpu(30.2, 8, 272, 16, _SM + _ADA),
    r"GeForce RTX 4060 Ti": _gpu(44.1, 16, 288, 16, _SM + _ADA),
    r"GeForce RTX 4070": _gpu(58.3, 12, 504, 32, _SM + _ADA),
    r"GeForce RTX 4080": _gpu(97.5, 16, 716.8, 32, _ADA),
    r"GeForce RTX 4090": _gpu(165.2, 24, 1008, 32, _ADA),
    r"GeForce RTX 5060 Ti": _gpu(47.4, 16, 448, 32, _SM + _BLACKWELL),
    r"GeForce RTX 5070": _gpu(61.7, 12, 672, 64, _BLACKWELL),
    r"GeForce RTX 5070 Ti": _gpu(87.9, 16, 896, 64, _BLACKWELL),
    r"GeForce RTX 5080": _gpu(112.6, 16, 960, 64, _BLACKWELL),
    r"GeForce RTX 5090": _gpu(209.5, 32, 1792, 64, _BLACKWELL),
    r"GeForce RTX 3060 Laptop GPU": _gpu(26.1, 6, 336, None, _LAPTOP + _SM + _AMPERE),
    r"GeForce RTX 4050 Laptop GPU": _gpu(24.3, 6, 192, None, _LAPTOP + _SM + _ADA),
    r"GeForce RTX 4060 Laptop GPU": _gpu(29.1, 8, 256, None, _LAPTOP + _SM + _ADA),
    r"GeForce RTX 4070 Laptop GPU": _gpu(40.1, 8, 256, None, _LAPTOP + _SM + _ADA),
    r"GeForce RTX 4080 Laptop GPU": _gpu(67.7, 12, 432, None, _LAPTOP + _SM + _ADA),
    r"GeForce RTX 4090 Laptop GPU": _gpu(79.4, 16, 576, None, _LAPTOP + _SM + _ADA),
    r"GeForce RTX 5090 Laptop GPU": _gpu(90.7, 24, 896, None, _LAPTOP + _SM + _BLACKWELL),
}


def facts(device_kind: str) -> Facts | None:
    """Figures of a device by the name that jax gives it, or None without a source."""
    kind = re.sub(r"^NVIDIA\s+", "", device_kind.strip())
    for name, found, _ in TPUS.values():
        # older plugins say "TPU v5" for v5p and "TPU v5e", "TPU v6e" for the lite ones
        if kind in (name, name.replace(" lite", "e")) or (name == "TPU v5p" and kind == "TPU v5"):
            return found
    return next((found for name, found in GPUS.items() if re.fullmatch(name, kind)), None)
