"""Attention on TPUs: jax's own Pallas kernel, "Splash" (sparse flash) attention.

The kernel (jax.experimental.pallas.ops.tpu.splash_attention; the algorithm of "FlashAttention-2",
arXiv 2307.08691) walks over blocks of keys for each block of queries, by lists of which blocks see
one another, and makes the mask within a block from the queries' places in the row. jax finds those
lists by looking at every pair of places (98 s at 32768 tokens on a CPU); here they follow from the
first and last key a query sees. The queries may lie anywhere in the row: where it is split over
devices (nn/parallel.py), each device has its own lists and picks them while running.
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from localtrain.nn.blockwise import Kernel

LANES = 128  # of a TPU's registers: blocks are multiples of it
BLOCKS = (512, 384, 256, 128)  # 512: MaxText's default (configs/base.yml, sa_block_q and others)


def block_size(length: int) -> int | None:
    """The block that `length` places are walked over by; None when they are no whole blocks."""
    return next((block for block in BLOCKS if length % block == 0), None)


def unfit(length: int, ways: int) -> str | None:
    """Why rows of this length, split over `ways` devices, cannot be walked over in blocks."""
    chunk = length if ways == 1 else length // (2 * ways)
    if chunk % LANES == 0:
        return None
    split = "" if ways == 1 else f" in {2 * ways} chunks on {ways} devices"
    return f"rows of {length} tokens{split} are no multiple of {LANES}"


def splash(
    fixed: Kernel,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BS: jax.Array | None,
    sinks_N: jax.Array | None,
    device: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, H], arguments as those of `blockwise`. Lengths: multiples of LANES.

    The kernel has no scale: q is multiplied by it in its own dtype, one more rounding than in
    `blockwise`. interpret: run as plain JAX, on any platform.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    length, keys = q_BTNH.shape[1], k_BSKH.shape[1]
    places_WT = query_places(length, fixed.ways)
    kernel = _kernel(places_WT.tobytes(), fixed, keys, interpret)
    of_this = 0 if device is None else device
    kernel = jax.tree.map(partial(_pick, of_this), kernel)
    segments, of_q_BT = None, segments_BS
    if segments_BS is not None:
        if device is not None:
            of_q_BT = jnp.take(segments_BS, _pick(device, places_WT), axis=1)
        segments = SegmentIds(of_q_BT, segments_BS)
    q_BNTH = (q_BTNH * fixed.scale).astype(q_BTNH.dtype).swapaxes(1, 2)
    sinks_N = None if sinks_N is None else sinks_N.astype(q_BTNH.dtype)
    run = jax.vmap(kernel, (0, 0, 0, None if segments is None else 0, None))
    out_BNTH = run(q_BNTH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segments, sinks_N)
    out_BTNH = out_BNTH.swapaxes(1, 2)
    if of_q_BT is None:
        return out_BTNH
    return jnp.where(of_q_BT[:, :, None, None] > 0, out_BTNH, 0)  # to it, padding is a document


def query_places(length: int, ways: int) -> np.ndarray:
    """The places in the row of each device's queries, int32 [ways, T]; see `parallel.balance`."""
    if ways == 1:
        return np.arange(length, dtype=np.int32)[None]
    chunks = np.arange(ways * length, dtype=np.int32).reshape(2 * ways, -1)
    return np.concatenate([chunks[:ways], chunks[: ways - 1 : -1]], axis=1)


def _pick(device: jax.Array | int, x: np.ndarray) -> jax.Array | np.ndarray:
    if x.shape[0] == 1:
        return x[0]
    return lax.dynamic_index_in_dim(jnp.asarray(x), device, 0, keepdims=False)


@lru_cache(maxsize=64)  # one object for equal masks: jit compares mask functions by identity
def _sees(window: int | None):
    def sees(t, s):
        seen = s <= t
        return seen if window is None else seen & (t - s < window)

    return sees


@lru_cache(maxsize=64)
def _kernel(places: bytes, fixed: Kernel, keys: int, interpret: bool):
    """The kernel of all devices: its arrays have a leading axis of devices."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask_info as masks,
    )

    places_WT = np.frombuffer(places, np.int32).reshape(fixed.ways, -1)
    chunk = places_WT.shape[1] // (1 if fixed.ways == 1 else 2)
    block_q, block_k = block_size(chunk), block_size(keys)
    seen_WIJ = _blocks_seen(places_WT, keys, block_q, block_k, fixed.window)
    by_q = _walk(seen_WIJ)
    by_k = (x.swapaxes(1, 2) for x in _walk(seen_WIJ.swapaxes(1, 2)))
    # [device, 1 mask for all heads, ...]
    by_q, by_k = (
        masks.MaskInfo(
            data_next=block[:, None],
            block_mask=live[:, None],
            mask_next=None,
            partial_mask_blocks=None,
            q_sequence=places_WT,
        )
        for block, live in (by_q, by_k)
    )
    sizes = library.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    return library.SplashAttentionKernel(
        by_q,
        by_q,
        by_k,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=fixed.softcap,
        residual_checkpoint_name="attention",  # output and log-sum-exp, for remat=matmuls
        mask_function=_sees(fixed.window),
        interpret=interpret,
    )


def _blocks_seen(places_WT, keys: int, block_q: int, block_k: int, window: int | None):
    """Which blocks of queries see anything of which blocks of keys, bool [W, I, J]."""
    first_J = np.arange(0, keys, block_k)
    t_WT1 = places_WT[..., None]
    seen_WTJ = t_WT1 >= first_J
    if window is not None:
        seen_WTJ &= t_WT1 - window < first_J + block_k - 1
    return seen_WTJ.reshape(len(places_WT), -1, block_q, len(first_J)).any(2)


def _walk(seen_WIJ) -> tuple[np.ndarray, np.ndarray]:
    """For each i the j to visit, and whether it is: every list is as long as the longest.

    What is left of a list repeats its last j, which fetches nothing. Small types: the lists live in
    a TPU's scalar memory, 1 MB or less.
    """
    count_WI1 = seen_WIJ.sum(-1)[..., None]
    order_WIJ = np.argsort(~seen_WIJ, axis=-1, kind="stable")  # those seen come first, in order
    step_L = np.arange(max(1, count_WI1.max()))
    j_WIL = np.take_along_axis(order_WIJ, np.minimum(step_L, np.maximum(count_WI1 - 1, 0)), -1)
    small = np.int8 if seen_WIJ.shape[-1] <= 128 else np.int16
    return j_WIL.astype(small), (step_L < count_WI1).astype(np.int8)
