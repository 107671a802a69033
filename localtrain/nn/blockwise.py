"""Causal attention in blocks: memory O(T x block), work only where a key can be visible.

The online softmax of "FlashAttention" (arXiv 2205.14135, 2307.08691) in plain JAX, with its own
backward pass that recomputes the weights from the saved log-sum-exp. One scan visits the pairs of a
query block and a key block that the causal order and the window allow, a list known when tracing;
pairs that share no segment are skipped while running. Arrays are rearranged once so that the G
queries of a key/value head and the T positions are rows of one matrix:

    Z = batch x kv heads, R = T * G rows of queries, S keys; blocks of them in the loop.

Where a row is split over n devices (nn/parallel.py), the queries here are two of its 2n chunks: the
i-th from the start and the i-th from the end, which together see as many keys as those of any other
device. The list then is a function of i, of the same length for all i.

On CPU a step takes as many of Z as keep its scores in the cache; elsewhere all of them at once.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from localtrain.nn.core import soft_cap

NEVER = -1e30  # score of an invisible key; finite, so that a row without keys stays finite
CPU_BLOCK, CPU_SCORES = 256, 2**17  # best of 64 .. 512 and 2**16 .. 2**22 at T = 512 and 4096
BLOCK = 256


class Kernel(NamedTuple):
    """What is fixed when tracing."""

    scale: float
    window: int | None
    softcap: float | None
    ways: int = 1  # devices that a row is split over


class Rows(NamedTuple):
    """One step's view: first index in Z, first query, first key, and the query's place in the row.

    live: False at the end of a list that is longer than needed.
    """

    z: jax.Array
    t: jax.Array
    s: jax.Array
    place: jax.Array
    live: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    kernel: Kernel,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BS: jax.Array | None,
    sinks_N: jax.Array | None,
    device: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, T, N, H]; a query of segment 0 sees nothing and gets zeros.

    device: which of the `kernel.ways` devices this is (int32 scalar); its queries are two chunks
    of the row, the keys are those of the row in order. None: T = S.
    """
    return _forward(kernel, q_BTNH, k_BSKH, v_BSKH, segments_BS, sinks_N, device)[0]


def _forward(kernel, q_BTNH, k_BSKH, v_BSKH, segments_BS, sinks_N, device=None):
    def run(block, limit, *args):
        return Blocks(kernel, block, limit, *args).forward()

    args = q_BTNH, k_BSKH, v_BSKH, segments_BS, sinks_N, device
    out_BTNH, lse_BTN = _by_platform(run, args)
    out_BTNH = checkpoint_name(out_BTNH, "attention")
    lse_BTN = checkpoint_name(lse_BTN, "attention_lse")
    return out_BTNH, (*args, out_BTNH, lse_BTN)


def _backward(kernel, saved, g_BTNH):
    def run(block, limit, q, k, v, segments, sinks, device, out, lse, g):
        return Blocks(kernel, block, limit, q, k, v, segments, sinks, device).backward(out, lse, g)

    *_, segments_BS, sinks_N, device, out_BTNH, lse_BTN = saved
    dq, dk, dv = _by_platform(run, (*saved, g_BTNH))
    d_sinks = None
    if sinks_N is not None:
        delta_BTN = _row_sum(out_BTNH, g_BTNH)
        share_BTN = jnp.exp(sinks_N.astype(jnp.float32) - lse_BTN)
        d_sinks = -jnp.sum(share_BTN * delta_BTN, axis=(0, 1)).astype(sinks_N.dtype)
    none, nowhere = (
        None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in (segments_BS, device)
    )
    return dq, dk, dv, none, d_sinks, nowhere


blockwise.defvjp(_forward, _backward)


def _by_platform(run, args):
    """The block sizes of the platform that is compiled for, which need not be this process's."""
    # with one block a row nothing is skipped: half a step slower at 16 x 256 tokens
    block = CPU_BLOCK if args[0].shape[1] >= 2 * CPU_BLOCK else CPU_BLOCK // 2
    return lax.platform_dependent(
        *args, cpu=partial(run, block, CPU_SCORES), default=partial(run, BLOCK, None)
    )


def _row_sum(a_BTNH: jax.Array, b_BTNH: jax.Array) -> jax.Array:
    return jnp.sum(a_BTNH.astype(jnp.float32) * b_BTNH.astype(jnp.float32), axis=-1)


class Blocks:
    """The rearranged inputs and the two loops over them."""

    def __init__(
        self,
        kernel: Kernel,
        block: int,
        limit: int | None,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        segments_BS: jax.Array | None,
        sinks_N: jax.Array | None,
        device: jax.Array | None = None,
    ):
        batch, length, heads, _ = q_BTNH.shape
        self.kernel, self.batch, self.device = kernel, batch, device
        self.length, self.keys_length = length, k_BSKH.shape[1]
        self.kv_heads = k_BSKH.shape[2]
        self.group = heads // self.kv_heads
        self.chunks = 1 if device is None else 2
        self.chunk = length // self.chunks
        self.block = min(block, -(-self.chunk // 16) * 16)
        self.padded, self.keys_padded = map(self.pad, (self.chunk, self.keys_length))
        self.dtype = q_BTNH.dtype
        self.q_ZRH = self.queries_to_rows(q_BTNH)
        self.k_ZSH, self.v_ZSH = map(self.to_rows, (k_BSKH, v_BSKH))
        self.rows = batch * self.kv_heads
        self.step = self.rows if limit is None else self._fitting(limit)
        self.sinks_N = sinks_N
        self.segments_ZS = None
        if segments_BS is not None:
            # room for the last queries' padding too, or their slice would be moved back
            more = self.keys_padded - self.keys_length + self.block
            segments_BS = self.in_place(segments_BS)
            segments_BS = jnp.pad(segments_BS, ((0, 0), (0, more)))
            self.segments_ZS = jnp.repeat(segments_BS, self.kv_heads, axis=0)

    def _fitting(self, limit: int) -> int:
        """The largest divisor of Z whose scores of one step stay within the limit."""
        fit = max(1, limit // (self.block**2 * self.group))
        return max(d for d in range(1, self.rows + 1) if self.rows % d == 0 and d <= fit)

    # between [B, T, heads, H] and rows ----------------------------------------------------------

    def pad(self, length: int) -> int:
        return -(-length // self.block) * self.block

    def to_rows(self, x_BTNH: jax.Array) -> jax.Array:
        batch, length, heads, size = x_BTNH.shape
        group, padded = heads // self.kv_heads, self.pad(length)
        x = x_BTNH.reshape(batch, length, self.kv_heads, group * size).transpose(0, 2, 1, 3)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - length), (0, 0)))
        return x.reshape(batch * self.kv_heads, padded * group, size)

    def from_rows(self, x_ZRH: jax.Array, length: int) -> jax.Array:
        size = x_ZRH.shape[-1]
        x = x_ZRH.reshape(self.batch, self.kv_heads, self.pad(length), -1).transpose(0, 2, 1, 3)
        return x[:, :length].reshape(self.batch, length, -1, size)

    def queries_to_rows(self, x_BTNH: jax.Array) -> jax.Array:
        """Rows of every chunk, padded to whole blocks by itself."""
        x = x_BTNH.reshape(self.batch, self.chunks, self.chunk, *x_BTNH.shape[2:])
        return jnp.concatenate([self.to_rows(x[:, c]) for c in range(self.chunks)], axis=1)

    def queries_from_rows(self, x_ZRH: jax.Array) -> jax.Array:
        chunks = jnp.split(x_ZRH, self.chunks, axis=1)
        return jnp.concatenate([self.from_rows(x, self.chunk) for x in chunks], axis=1)

    # the loop -----------------------------------------------------------------------------------

    def places(self, device: Any) -> Any:
        """The place in the row of the first query of each block, [blocks]."""
        first = 0, (2 * self.kernel.ways - 1) * self.chunk
        step = self.chunk, -self.chunk
        chunk, inside = np.divmod(np.arange(0, self.chunks * self.padded, self.block), self.padded)
        return np.take(first, chunk) + inside + np.take(step, chunk) * device

    def reach(self, place: Any, xp: ModuleType) -> tuple[Any, Any]:
        """First key block that queries from `place` on can see by order and window, and how many;
        of arrays of `xp` (numpy or jax.numpy)."""
        last = xp.minimum(place + self.block, self.keys_padded) - 1
        window = self.kernel.window
        first = 0 * place if window is None else xp.maximum(place - window + 1, 0)
        return first // self.block, last // self.block - first // self.block + 1

    def pairs(self) -> Rows:
        """Every (z, t, s) whose blocks can see one another by order and window."""
        xp, device = (np, 0) if self.device is None else (jnp, self.device)
        place = self.places(device)
        first, count = self.reach(place, xp)
        ends = xp.cumsum(count)
        most = max(self.visits(d) for d in range(self.kernel.ways))
        number = np.arange(most)
        block = xp.minimum(xp.searchsorted(ends, number, side="right"), len(place) - 1)
        s = (first[block] + number - (ends - count)[block]) * self.block
        parts = block * self.block, xp.minimum(s, self.keys_padded - self.block), place[block]
        z = np.arange(0, self.rows, self.step)
        t, s, place, live = (xp.tile(part, len(z)) for part in (*parts, number < ends[-1]))
        rows = (np.repeat(z, most), t, s, place)
        return self.in_place(Rows(*(jnp.asarray(x, jnp.int32) for x in rows), jnp.asarray(live)))

    def visits(self, device: int) -> int:
        """How many pairs of blocks a device takes for each z."""
        return int(self.reach(self.places(device), np)[1].sum())

    def in_place(self, tree: Any) -> Any:
        """The same, made to look as if it depended on the queries.

        What depends on nothing of the layer is moved out of the scan over layers: the masks of all
        pairs together, [pairs, Z, R, S], 3 GB at 8192 tokens and 16 heads (CUDA compiler).
        """
        return lax.optimization_barrier((tree, self.q_ZRH))[0]

    def queries(self, x: jax.Array, at: Rows) -> jax.Array:
        """Rows of a query block of x [Z, R, ...]."""
        start = (at.z, at.t * self.group) + (0,) * (x.ndim - 2)
        return lax.dynamic_slice(x, start, (self.step, self.block * self.group, *x.shape[2:]))

    def keys(self, x: jax.Array, at: Rows) -> jax.Array:
        start = (at.z, at.s) + (0,) * (x.ndim - 2)
        return lax.dynamic_slice(x, start, (self.step, self.block, *x.shape[2:]))

    def put_queries(self, x: jax.Array, part: jax.Array, at: Rows) -> jax.Array:
        return lax.dynamic_update_slice(x, part, (at.z, at.t * self.group) + (0,) * (x.ndim - 2))

    def put_keys(self, x: jax.Array, part: jax.Array, at: Rows) -> jax.Array:
        return lax.dynamic_update_slice(x, part, (at.z, at.s) + (0,) * (x.ndim - 2))

    def mask(self, at: Rows) -> jax.Array:
        """bool [Z or 1, rows, keys] of one step."""
        t_R = lax.broadcasted_iota(jnp.int32, (self.block, self.group), 0).reshape(-1, 1)
        t_R = at.place + t_R
        s_S = at.s + lax.broadcasted_iota(jnp.int32, (1, self.block), 1)
        mask = s_S <= t_R
        if self.kernel.window is not None:
            mask &= t_R - s_S < self.kernel.window
        mask = mask[None]
        if self.segments_ZS is not None:
            of_q, of_k = self._segments(at)
            of_q = jnp.repeat(of_q, self.group, axis=1)[:, :, None]
            mask = mask & (of_q == of_k[:, None, :]) & (of_q > 0)
        return mask

    def _segments(self, at: Rows) -> tuple[jax.Array, jax.Array]:
        of_q = self.keys(self.segments_ZS, at._replace(s=at.place))
        return of_q, self.keys(self.segments_ZS, at)

    def when_near(self, at: Rows, compute, otherwise):
        """compute() unless the segments of the two blocks are all different, or nothing is left."""
        same = len({self.visits(d) for d in range(self.kernel.ways)}) == 1
        if self.segments_ZS is None and same:
            return compute()
        near = at.live
        if self.segments_ZS is not None:
            of_q, of_k = self._segments(at)
            low = jnp.where(of_k > 0, of_k, np.iinfo(np.int32).max).min(1)  # 0 is no segment
            near &= ((of_q.max(1) >= low) & (of_q.min(1) <= of_k.max(1))).any()
        return lax.cond(near, compute, lambda: otherwise)

    def forward(self) -> tuple[jax.Array, jax.Array]:
        """Output [B, T, N, H] and log-sum-exp [B, T, N]."""
        z, r = self.q_ZRH.shape[:2]
        top_ZR = jnp.full((z, r), NEVER, jnp.float32)
        total_ZR = jnp.zeros((z, r), jnp.float32)
        out_ZRH = jnp.zeros((z, r, self.v_ZSH.shape[-1]), jnp.float32)
        carry, _ = lax.scan(self._forward_step, (top_ZR, total_ZR, out_ZRH), self.pairs())
        top_ZR, total_ZR, out_ZRH = carry
        if self.sinks_N is not None:
            sinks = self.sinks_N.astype(jnp.float32).reshape(1, self.kv_heads, 1, self.group)
            shape = (self.batch, self.kv_heads, self.chunks * self.padded, self.group)
            sinks_ZR = jnp.broadcast_to(sinks, shape).reshape(z, r)
            new_ZR = jnp.maximum(top_ZR, sinks_ZR)
            shrink_ZR = jnp.exp(top_ZR - new_ZR)
            total_ZR = total_ZR * shrink_ZR + jnp.exp(sinks_ZR - new_ZR)
            out_ZRH, top_ZR = out_ZRH * shrink_ZR[..., None], new_ZR
        total_ZR = jnp.maximum(total_ZR, 1e-30)
        out_ZRH = out_ZRH / total_ZR[..., None]
        lse_ZR1 = (top_ZR + jnp.log(total_ZR))[..., None]
        out_BTNH = self.queries_from_rows(out_ZRH).astype(self.dtype)
        return out_BTNH, self.queries_from_rows(lse_ZR1)[..., 0]

    def _forward_step(self, carry, at: Rows):
        top, total, out = (self.queries(x, at) for x in carry)

        def compute():
            mask = self.mask(at)
            scores = _product(
                "zrh,zsh->zrs", self.queries(self.q_ZRH, at), self.keys(self.k_ZSH, at)
            )
            scores = soft_cap(scores * self.kernel.scale, self.kernel.softcap)
            scores = jnp.where(mask, scores, NEVER)
            new = jnp.maximum(top, scores.max(-1))
            weights = jnp.where(mask, jnp.exp(scores - new[..., None]), 0.0)
            shrink = jnp.exp(top - new)
            values = self.keys(self.v_ZSH, at)
            more = _product("zrs,zsh->zrh", weights.astype(values.dtype), values)
            return new, total * shrink + weights.sum(-1), out * shrink[..., None] + more

        parts = self.when_near(at, compute, (top, total, out))
        return tuple(self.put_queries(x, p, at) for x, p in zip(carry, parts, strict=True)), None

    def backward(self, out_BTNH, lse_BTN, g_BTNH) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of q, k and v."""
        g_ZRH = self.queries_to_rows(g_BTNH)
        lse_ZR = self.queries_to_rows(lse_BTN[..., None])[..., 0]
        delta_ZR = self.queries_to_rows(_row_sum(out_BTNH, g_BTNH)[..., None])[..., 0]
        step = partial(self._backward_step, g_ZRH, lse_ZR, delta_ZR)
        start = (
            jnp.zeros(self.q_ZRH.swapaxes(1, 2).shape, jnp.float32),
            jnp.zeros(self.k_ZSH.shape, jnp.float32),
            jnp.zeros(self.v_ZSH.shape, jnp.float32),
        )
        (dq_ZHR, dk_ZSH, dv_ZSH), _ = lax.scan(step, start, self.pairs())
        dq = self.queries_from_rows(dq_ZHR.swapaxes(1, 2))
        dk, dv = (self.from_rows(x, self.keys_length) for x in (dk_ZSH, dv_ZSH))
        return tuple(x.astype(self.dtype) for x in (dq, dk, dv))

    def _backward_step(self, g_ZRH, lse_ZR, delta_ZR, carry, at: Rows):
        dq_ZHR, dk_ZSH, dv_ZSH = carry
        here = at.z, 0, at.t * self.group
        size = self.step, dq_ZHR.shape[1], self.block * self.group
        old = lax.dynamic_slice(dq_ZHR, here, size), self.keys(dk_ZSH, at), self.keys(dv_ZSH, at)

        def compute():
            q, k = self.queries(self.q_ZRH, at), self.keys(self.k_ZSH, at)
            g, v = self.queries(g_ZRH, at), self.keys(self.v_ZSH, at)
            # Keys as rows here and dq transposed: no product below then has a transposed large
            # operand, which takes XLA's CPU products three times as long.
            scores = soft_cap(
                _product("zsh,zrh->zsr", k, q) * self.kernel.scale, self.kernel.softcap
            )
            weights = jnp.exp(scores - self.queries(lse_ZR, at)[:, None])
            weights = jnp.where(self.mask(at).swapaxes(1, 2), weights, 0.0)
            slope = _product("zsh,zrh->zsr", v, g) - self.queries(delta_ZR, at)[:, None]
            slope = weights * slope * self.kernel.scale
            if self.kernel.softcap is not None:
                slope = slope * (1.0 - (scores / self.kernel.softcap) ** 2)
            slope, weights = slope.astype(q.dtype), weights.astype(g.dtype)
            return (
                old[0] + _product("zsh,zsr->zhr", k, slope),
                old[1] + _product("zsr,zrh->zsh", slope, q),
                old[2] + _product("zsr,zrh->zsh", weights, g),
            )

        dq, dk, dv = self.when_near(at, compute, old)
        dq_ZHR = lax.dynamic_update_slice(dq_ZHR, dq, here)
        return (dq_ZHR, self.put_keys(dk_ZSH, dk, at), self.put_keys(dv_ZSH, dv, at)), None


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
