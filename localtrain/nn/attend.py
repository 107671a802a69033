"""Softmax attention over visible keys, behind one function.

A key is visible to a query of the same segment at the same or a later position, inside the window.
Segment 0 is padding: nothing sees it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from localtrain.nn.core import soft_cap

NEVER = -1e30  # finite, so that a row without any visible key stays finite


class Keys(NamedTuple):
    """What the queries need to know to see the right keys; None = one document without padding."""

    q_positions_BT: jax.Array
    k_positions_BS: jax.Array
    q_segments_BT: jax.Array | None = None
    k_segments_BS: jax.Array | None = None


def visible(keys: Keys, window: int | None) -> jax.Array:
    """Which key each query sees, bool [B, T, S]."""
    distance_BTS = keys.q_positions_BT[:, :, None] - keys.k_positions_BS[:, None, :]
    mask_BTS = distance_BTS >= 0
    if window is not None:
        mask_BTS &= distance_BTS < window
    if keys.q_segments_BT is not None:
        segments_BS = keys.k_segments_BS[:, None, :]
        mask_BTS &= (keys.q_segments_BT[:, :, None] == segments_BS) & (segments_BS > 0)
    return mask_BTS


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    keys: Keys,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention output [B, T, N, H] in the dtype of q; a query that sees no key gets zeros."""
    return attend_plain(
        q_BTNH, k_BSKH, v_BSKH, keys, scale=scale, window=window, softcap=softcap, sinks_N=sinks_N
    )


def attend_plain(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    keys: Keys,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """The whole T x S matrix at once."""
    batch, length, heads, head_dim = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores = soft_cap(scores * scale, softcap)
    mask = visible(keys, window)[:, None, None]
    scores = jnp.where(mask, scores, NEVER)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        top = jnp.maximum(top, sinks)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks_N is not None:
        total = total + jnp.exp(sinks - top)
    weights = (weights / jnp.maximum(total, 1e-30)).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH)
    return out_BTKGH.reshape(batch, length, heads, v_BSKH.shape[-1])
