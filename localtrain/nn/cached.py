"""Attention of a few new tokens over the keys and values of all tokens so far.

A cache of one kind of layer is one array over all of its layers, so that a step writes into it in
place: k_LBKSH and v_LBKSH, L layers, S slots. A token of row b at position p lies in slot
first_B[b] + p, so that rows of different lengths end in the same slot. Only blocks of slots that
hold something visible are read; the rest of a long cache costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from localtrain.nn.core import soft_cap

NEVER = -1e30  # finite, so that a row without any visible key stays finite
BLOCK = 256  # slots read at a time


class Slots(NamedTuple):
    """Which part of a cache is in use; the same for all layers."""

    start: jax.Array  # slot of the first new token, int32
    first_B: jax.Array  # slot of each row's position 0, int32; what is before it is padding
    layer: jax.Array | int = 0  # which entry of a stacked cache, set per layer


def empty(layers: int, batch: int, kv_heads: int, length: int, head_dim: int, dtype) -> jax.Array:
    """Zeros for `length` slots or a little more (a multiple of BLOCK when above it)."""
    slots = length if length <= BLOCK else -(-length // BLOCK) * BLOCK
    return jnp.zeros((layers, batch, kv_heads, slots, head_dim), dtype)


def write(cache_LBKSH: jax.Array, new_BTKH: jax.Array, slots: Slots) -> jax.Array:
    """The cache with new tokens in the slots from `start` on."""
    new_LBKTH = new_BTKH.swapaxes(1, 2)[None]
    return jax.lax.dynamic_update_slice(cache_LBKSH, new_LBKTH, (slots.layer, 0, 0, slots.start, 0))


def attend_cached(
    q_BTNH: jax.Array,
    k_LBKSH: jax.Array,
    v_LBKSH: jax.Array,
    slots: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention output [B, T, N, H] of T tokens whose keys are written already.

    The same function as `attend`, with an online softmax over blocks of slots (no gradient).
    """
    batch, length, heads, head_dim = q_BTNH.shape
    kv_heads, v_dim = k_LBKSH.shape[2], v_LBKSH.shape[-1]
    size = min(BLOCK, k_LBKSH.shape[3])
    group = heads // kv_heads
    q_BKGTH = q_BTNH.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    positions_BT = slots.start + jnp.arange(length) - slots.first_B[:, None]

    def take(cache_LBKSH: jax.Array, at: jax.Array) -> jax.Array:
        shape = (1, batch, kv_heads, size, cache_LBKSH.shape[-1])
        return jax.lax.dynamic_slice(cache_LBKSH, (slots.layer, 0, 0, at, 0), shape)[0]

    def add_block(i: jax.Array, carry):
        top, total, out = carry
        at = i * size
        k_BKSH, v_BKSH = take(k_LBKSH, at), take(v_LBKSH, at)
        scores = jnp.einsum(
            "BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32
        )
        mask = _visible(positions_BT, at + jnp.arange(size) - slots.first_B[:, None], window)
        scores = jnp.where(mask, soft_cap(scores * scale, softcap), NEVER)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(mask, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        add = jnp.einsum(
            "BKGTS,BKSH->BKGTH",
            weights.astype(v_BKSH.dtype),
            v_BKSH,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, out * shrink + add

    shape = (batch, kv_heads, group, length)
    top, total = jnp.full((*shape, 1), NEVER), jnp.zeros((*shape, 1))
    if sinks_N is not None:  # a key without a value: it only takes its share of the weights
        sinks = sinks_N.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
        top, total = jnp.broadcast_to(sinks, top.shape), total + 1.0
    oldest = jnp.min(slots.first_B) if window is None else slots.start - (window - 1)
    first, end = jnp.maximum(oldest, 0) // size, (slots.start + length - 1) // size + 1
    start = (top, total, jnp.zeros((*shape, v_dim)))
    _, total, out = jax.lax.fori_loop(first, end, add_block, start)
    out = (out / jnp.maximum(total, 1e-30)).astype(q_BTNH.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, v_dim)


def _visible(q_positions_BT: jax.Array, k_positions_BS: jax.Array, window: int | None) -> jax.Array:
    """Which key each query sees, bool [B, 1, 1, T, S]; positions below 0 are padding."""
    distance_BTS = q_positions_BT[:, :, None] - k_positions_BS[:, None, :]
    mask_BTS = (distance_BTS >= 0) & (k_positions_BS >= 0)[:, None, :]
    if window is not None:
        mask_BTS &= distance_BTS < window
    return mask_BTS[:, None, None]
