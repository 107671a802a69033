"""Softmax attention of a sequence over itself: the one place that chooses a kernel.

A key is visible to a query of the same segment at the same or a later place, inside the window.
Segment 0 is padding: nothing sees it, and it sees nothing. The T x S matrix is never formed; the
blockwise kernel in plain JAX runs on every platform. Decoding is in cached.py.
"""

from __future__ import annotations

import jax

from localtrain.nn.blockwise import Kernel, blockwise
from localtrain.nn.parallel import gather_length, index, size

KERNELS = ("blockwise",)


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
    if kernel not in KERNELS:
        raise ValueError(f"attention kernel {kernel!r}: known are {', '.join(KERNELS)}")
    fixed = Kernel(scale, window, softcap, size("context"))
    device = None
    if fixed.ways > 1:
        device = index("context")
        k_BTKH, v_BTKH = gather_length(k_BTKH), gather_length(v_BTKH)
        segments_BT = None if segments_BT is None else gather_length(segments_BT)
    return blockwise(fixed, q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, device)
