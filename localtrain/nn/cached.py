"""Decoding: attention of new tokens over a cache of keys and values, and the cache itself.

A layer only reads its cache and returns what is new (an "entry"); `extend` writes the entries of
all layers afterwards, so that a cache that was given away is written in place. A token of row b at
position p has the number first_B[b] + p, so that rows of different lengths end at the same number.
Number n lies in slot n modulo the slots of the layer, and which number a slot holds follows from
how many there are. A layer that sees a window keeps not much more than that (`capacity`): there new
tokens take the slots of those that nobody will see again. Keys are stored with the slots last, as
the product with a query wants them. One new token takes all slots at once, so whoever decodes keeps
the cache not much longer than what is in it (`grow`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from localtrain.nn.core import soft_cap

NEVER = -1e30  # finite, so that a row without any visible key stays finite
BLOCK = 256  # slots at a time against many queries
SPARE = 128  # a window keeps at least so many tokens more, so that the last ones can be taken back
FEW = 8  # up to so many queries, all slots at once: half the time of blocks, which XLA copies out
# The axis of the slots in each kind of cache array; an array that is not here is a state, whose
# entry replaces it.
SLOT_AXES = {"k_BKHS": -1, "v_BKSH": -2}

Tree = dict[str, Any]


class Slots(NamedTuple):
    """Which part of a cache is in use; the same for all layers."""

    start: jax.Array  # number of the first new token, int32
    first_B: jax.Array  # number of each row's position 0, int32; what is before it is padding


def capacity(window: int | None, slots: int) -> int:
    """The slots of a layer in a cache for `slots` tokens: for a window it and SPARE, in blocks."""
    if window is None:
        return slots
    return min(slots, -(-(window + SPARE) // BLOCK) * BLOCK)


def empty(
    batch: int, kv_heads: int, slots: int, head_dim: int, dtype, window: int | None = None
) -> Tree:
    """The cache of one layer for `slots` tokens: less than a block, or whole blocks."""
    slots = capacity(window, slots)
    return {
        "k_BKHS": jnp.zeros((batch, kv_heads, head_dim, slots), dtype),
        "v_BKSH": jnp.zeros((batch, kv_heads, slots, head_dim), dtype),
    }


def extend(cache: Tree, entry: Tree, start: jax.Array, count: jax.Array | int) -> Tree:
    """The cache with the first `count` tokens of the entries, numbers `start` on; any tree of
    layers."""

    def write(path, old: jax.Array, new: jax.Array) -> jax.Array:
        axis = SLOT_AXES.get(path[-1].key)
        if axis is None:
            return new
        total, length = old.shape[axis], new.shape[axis]
        if length == 1:
            return jax.lax.dynamic_update_slice_in_dim(old, new, start % total, axis)
        size = min(length, total)
        # from the slot of the first on, and once more from slot 0 for those past the end
        for at in (jnp.minimum(start % total, total - size), 0):
            columns = _numbers(start + count, at + jnp.arange(size), total) - start
            shape = [1] * old.ndim
            shape[axis] = size
            part = jnp.where(
                (columns >= 0).reshape(shape),
                jnp.take(new, jnp.maximum(columns, 0), axis),
                jax.lax.dynamic_slice_in_dim(old, at, size, axis),
            )
            old = jax.lax.dynamic_update_slice_in_dim(old, part, at, axis)
        return old

    return jax.tree_util.tree_map_with_path(write, cache, entry)


def grow(cache: Tree, larger: Tree) -> Tree:
    """The same cache in the shapes of an empty one for more tokens; any tree of layers. No layer
    that grows has used a slot twice: those that did have their full size."""

    def pad(old: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
        if old.shape == new.shape:
            return old
        return jnp.pad(old, [(0, n - o) for o, n in zip(old.shape, new.shape, strict=True)])

    return jax.tree.map(pad, cache, larger)


def _numbers(end: jax.Array, slots_S: jax.Array, total: int) -> jax.Array:
    """The number in each slot when `end` is the next: the last one that goes there, < 0: none."""
    return end - 1 - (end - 1 - slots_S) % total


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

    def add(sums: _Sums, keys: Tree, numbers_S: jax.Array) -> _Sums:
        """Take in the keys with these numbers; none is below 0."""
        mask = _visible(positions_BT, numbers_S - slots.first_B[:, None], window)
        scores = jnp.einsum(
            "BKGTH,BKHS->BKGTS", q_BKGTH, keys["k_BKHS"], preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, soft_cap(scores * scale, softcap), NEVER)
        return sums.add(scores, mask, keys["v_BKSH"])

    def add_block(i: jax.Array, sums: _Sums) -> _Sums:
        """Numbers i * size on. What was overwritten among them is outside of all windows."""
        keys = {
            name: jax.lax.dynamic_slice_in_dim(array, i * size % total, size, SLOT_AXES[name])
            for name, array in cache.items()
        }
        numbers_S = i * size + jnp.arange(size)
        return add(sums, keys, jnp.where(numbers_S < slots.start, numbers_S, -1))

    sums = _start((batch, kv_heads, group, length), v_dim, sinks_N)
    if length > FEW:
        size = min(BLOCK, total)
        oldest = jnp.min(slots.first_B) if window is None else slots.start - (window - 1)
        first, end = jnp.maximum(oldest, 0) // size, (slots.start + size - 1) // size
        sums = jax.lax.fori_loop(first, end, add_block, sums)
    else:
        sums = add(sums, cache, _numbers(slots.start, jnp.arange(total), total))
    sums = add(sums, entry, slots.start + jnp.arange(length))
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
