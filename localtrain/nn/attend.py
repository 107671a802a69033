"""Softmax attention of a sequence over itself: the one place that chooses a kernel.

A key is visible to a query of the same segment at the same or a later place, inside the window.
Segment 0 is padding: nothing sees it, and it sees nothing. The T x S scores are never formed; cuDNN
takes documents as a T x S mask (see cudnn.py). A kernel of the machine (`Policy.attention`) is used
where it can do what a layer asks for; the blockwise one in plain JAX can do everything, everywhere.
Decoding is in cached.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from localtrain.nn import cudnn, splash
from localtrain.nn.blockwise import Kernel, blockwise
from localtrain.nn.parallel import gather_length, index, size
from localtrain.nn.spec import Gqa, Model

KERNELS = ("blockwise", "splash", "cudnn")


class Case(NamedTuple):
    """What one layer asks of a kernel on one device."""

    length: int  # of the row, all devices together
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    ways: int = 1  # devices that a row is split over
    dtype: str = "bfloat16"


def choose(kernel: str, case: Case) -> tuple[str, str | None]:
    """The kernel to use where `kernel` is wanted, and why it is not that one (None: it is)."""
    if kernel not in KERNELS:
        raise ValueError(f"attention kernel {kernel!r}: known are {', '.join(KERNELS)}")
    reason = None
    if kernel == "splash":
        reason = splash.unfit(case.length, case.ways)
    elif kernel == "cudnn":
        reason = cudnn.unfit(case)
    return (kernel, None) if reason is None else ("blockwise", reason)


def kernels(
    spec: Model, kernel: str, length: int, ways: int = 1, dtype: str = "bfloat16"
) -> dict[str, str | None]:
    """The kernels that a model's layers use where `kernel` is wanted, and why one is another."""
    cases = (
        Case(length, m.head_dim, m.head_dim, m.window, m.softcap, m.sinks, ways, dtype)
        for m in (layer.mixer for layer in spec.layers)
        if isinstance(m, Gqa)
    )
    return dict(choose(kernel, case) for case in dict.fromkeys(cases))


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    kernel: str = "blockwise",
) -> jax.Array:
    """Causal attention [B, T, N, H] in the dtype of q, differentiable in q, k, v and sinks.

    segments None: one document and no padding. Order and window count places in the row, which
    within a segment is the same as positions. Where devices have a part of the row each (mesh axis
    context, see nn/parallel.py), each gathers all keys and values, in order.
    """
    fixed = Kernel(scale, window, softcap, size("context"))
    device = None
    if fixed.ways > 1:
        device = index("context")
        k_BTKH, v_BTKH = gather_length(k_BTKH), gather_length(v_BTKH)
        segments_BT = None if segments_BT is None else gather_length(segments_BT)
    sizes = k_BTKH.shape[1], k_BTKH.shape[-1], v_BTKH.shape[-1]
    case = Case(*sizes, window, softcap, sinks_N is not None, fixed.ways, q_BTNH.dtype.name)
    name, _ = choose(kernel, case)
    if name == "cudnn":
        return cudnn.flash(fixed, q_BTNH, k_BTKH, v_BTKH, segments_BT)
    run = splash.splash if name == "splash" else blockwise
    return run(fixed, q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, device)
