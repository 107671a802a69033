"""Decoding: attention of new tokens over a cache of keys and values, and the cache itself.

A layer only reads its cache and returns what is new (an "entry"); `extend` writes the entries of
all layers afterwards, so that a cache that was given away is written in place. A token of row b at
position p lies in slot first_B[b] + p, so that rows of different lengths end in the same slot. Keys
are stored with the slots last, as the product with a query wants them. One new token takes all
slots at once, so whoever decodes keeps the cache not much longer than what is in it (`grow`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from localtrain.nn.core import soft_cap

NEVER = -1e30  # finite, so that a row without any visible key stays finite
BLOCK = 256  # slots at a time against many queries
FEW = 8  # up to so many queries, all slots at once: half the time of blocks, which XLA copies out
# The axis of the slots in each kind of cache array; an array that is not here is a state, whose
# entry replaces it.
SLOT_AXES = {"k_BKHS": -1, "v_BKSH": -2}

Tree = dict[str, Any]


class Slots(NamedTuple):
    """Which part of a cache is in use; the same for all layers."""

    start: jax.Array  # slot of the first new token, int32
    first_B: jax.Array  # slot of each row's position 0, int32; what is before it is padding


def empty(batch: int, kv_heads: int, slots: int, head_dim: int, dtype) -> Tree:
    """The cache of one layer."""
    return {
        "k_BKHS": jnp.zeros((batch, kv_heads, head_dim, slots), dtype),
        "v_BKSH": jnp.zeros((batch, kv_heads, slots, head_dim), dtype),
    }


def extend(cache: Tree, entry: Tree, start: jax.Array) -> Tree:
    """The cache with the entries of new tokens in the slots from `start` on; any tree of layers."""

    def write(path, old: jax.Array, new: jax.Array) -> jax.Array:
        axis = SLOT_AXES.get(path[-1].key)
        if axis is None:
            return new
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis)

    return jax.tree_util.tree_map_with_path(write, cache, entry)


def grow(cache: Tree, slots: int) -> Tree:
    """The same cache with more slots; any tree of layers."""

    def pad(path, old: jax.Array) -> jax.Array:
        axis = SLOT_AXES.get(path[-1].key)
        if axis is None:
            return old
        widths = [(0, 0)] * old.ndim
        widths[axis] = (0, slots - old.shape[axis])
        return jnp.pad(old, widths)

    return jax.tree_util.tree_map_with_path(pad, cache)


def attend_cached(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    cache: Tree,
    slots: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, Tree]:
    """Attention of T new tokens over the cache and themselves: (output [B, T, N, H], entry).

    The same function as `attend`, without a gradient.
    """
    batch, length, heads, head_dim = q_BTNH.shape
    kv_heads, total, v_dim = k_BTKH.shape[2], cache["v_BKSH"].shape[2], v_BTKH.shape[-1]
    group = heads // kv_heads
    q_BKGTH = q_BTNH.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    positions_BT = slots.start + jnp.arange(length) - slots.first_B[:, None]
    entry = {"k_BKHS": k_BTKH.transpose(0, 2, 3, 1), "v_BKSH": v_BTKH.transpose(0, 2, 1, 3)}

    def add(sums: _Sums, keys: Tree, at: jax.Array, end: jax.Array | None = None) -> _Sums:
        """Take in `keys`, the first of which lies in slot `at`; from slot `end` on is nothing."""
        slots_S = at + jnp.arange(keys["v_BKSH"].shape[2])
        mask = _visible(positions_BT, slots_S - slots.first_B[:, None], window)
        if end is not None:
            mask &= slots_S < end
        scores = jnp.einsum(
            "BKGTH,BKHS->BKGTS", q_BKGTH, keys["k_BKHS"], preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, soft_cap(scores * scale, softcap), NEVER)
        return sums.add(scores, mask, keys["v_BKSH"])

    def take(at: jax.Array, size: int) -> Tree:
        return {
            name: jax.lax.dynamic_slice_in_dim(array, at, size, SLOT_AXES[name])
            for name, array in cache.items()
        }

    def add_block(i: jax.Array, sums: _Sums) -> _Sums:
        return add(sums, take(i * size, size), i * size, slots.start)

    sums = _start((batch, kv_heads, group, length), v_dim, sinks_N)
    if length > FEW:
        size = min(BLOCK, total)
        oldest = jnp.min(slots.first_B) if window is None else slots.start - (window - 1)
        first, end = jnp.maximum(oldest, 0) // size, (slots.start + size - 1) // size
        sums = jax.lax.fori_loop(first, end, add_block, sums)
    elif window is None or window > total:
        sums = add(sums, cache, 0, slots.start)
    elif window > 1:
        at = jnp.maximum(slots.start - (window - 1), 0)
        sums = add(sums, take(at, window - 1), at, slots.start)
    sums = add(sums, entry, slots.start)
    out = (sums.out / jnp.maximum(sums.weight, 1e-30)).astype(q_BTNH.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, v_dim), entry


class _Sums(NamedTuple):
    """An online softmax: highest score, sum of weights [..., T, 1], weighted values [..., T, H]."""

    top: jax.Array
    weight: jax.Array
    out: jax.Array

    def add(self, scores: jax.Array, mask: jax.Array, v_BKSH: jax.Array) -> _Sums:
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
        shrink = jnp.exp(self.top - top)
        weight = self.weight * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(v_BKSH.dtype)
        out = jnp.einsum("BKGTS,BKSH->BKGTH", weights, v_BKSH, preferred_element_type=jnp.float32)
        return _Sums(top, weight, self.out * shrink + out)


def _start(shape: tuple[int, ...], v_dim: int, sinks_N: jax.Array | None) -> _Sums:
    """Nothing seen yet; a sink is a key without a value, which only takes its share."""
    top, weight = jnp.full((*shape, 1), NEVER), jnp.zeros((*shape, 1))
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(1, *shape[1:3], 1, 1)
        top, weight = jnp.broadcast_to(sinks, top.shape), weight + 1.0
    return _Sums(top, weight, jnp.zeros((*shape, v_dim)))


def _visible(q_positions_BT: jax.Array, k_positions_BS: jax.Array, window: int | None) -> jax.Array:
    """Which key each query sees, bool [B, 1, 1, T, S]; positions below 0 are padding."""
    distance_BTS = q_positions_BT[:, :, None] - k_positions_BS[:, None, :]
    mask_BTS = (distance_BTS >= 0) & (k_positions_BS >= 0)[:, None, :]
    if window is not None:
        mask_BTS &= distance_BTS < window
    return mask_BTS[:, None, None]
