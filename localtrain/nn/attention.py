"""Grouped-query attention with its small options (biases, q/k norm, window, sinks, soft cap).

"GQA" (arXiv 2305.13245). Matches the attention classes of transformers' Llama, Mistral, Qwen2,
Qwen3 and Gemma 3 models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from localtrain.nn.attend import attend
from localtrain.nn.cached import Slots, attend_cached, empty
from localtrain.nn.core import WEIGHT_STD, Policy, RMSNorm, linear, param
from localtrain.nn.parallel import enter, leave, own_kv_heads
from localtrain.nn.rope import rotate
from localtrain.nn.spec import Gqa, Rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every block may know besides its input; nothing else goes from layer to layer.

    `segments_BT` None means one document and no padding; segment 0 is padding. The last two fields
    are filled in by the decoder.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    segments_BT: jax.Array | None = None
    tables: dict[Rope, tuple[jax.Array, jax.Array]] | None = None
    slots: Slots | None = None  # where the tokens go in a cache


class Attention(nnx.Module):
    def __init__(self, spec: Gqa, dim: int, policy: Policy, out_std: float):
        heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.spec = spec
        self.dtype = policy.compute_dtype
        self.kernel = policy.attention
        q_axes, kv_axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.wq_DNH = param((dim, heads, head_dim), ("embed", *q_axes), std=WEIGHT_STD)
        self.wk_DKH = param((dim, kv_heads, head_dim), ("embed", *kv_axes), std=WEIGHT_STD)
        self.wv_DKH = param((dim, kv_heads, head_dim), ("embed", *kv_axes), std=WEIGHT_STD)
        self.wo_NHD = param((heads, head_dim, dim), (*q_axes, "embed"), std=out_std)
        if spec.qkv_bias:
            self.bq_NH = param((heads, head_dim), q_axes, "bias")
            self.bk_KH = param((kv_heads, head_dim), kv_axes, "bias")
            self.bv_KH = param((kv_heads, head_dim), kv_axes, "bias")
        if spec.out_bias:
            self.bo_D = param((dim,), ("embed",), "bias")
        if spec.qk_norm is not None:
            self.q_norm = RMSNorm(head_dim, spec.qk_norm, "head_dim")
            self.k_norm = RMSNorm(head_dim, spec.qk_norm, "head_dim")
        if spec.sinks:
            self.sinks_N = param((heads,), ("heads",), "bias")

    def __call__(
        self, x_BTD: jax.Array, ctx: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict | None]:
        """The output and, when a cache is given, what this input adds to it."""
        spec = self.spec
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, ctx)
        sinks_N = self.sinks_N[...] if spec.sinks else None
        options = {
            "scale": spec.scale,
            "window": spec.window,
            "softcap": spec.softcap,
            "sinks_N": sinks_N,
        }
        if cache is None:
            segments_BT = ctx.segments_BT
            out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, segments_BT, kernel=self.kernel, **options)
        else:
            out_BTNH, cache = attend_cached(q_BTNH, k_BTKH, v_BTKH, cache, ctx.slots, **options)
        # heads and their channels as one axis: over two, XLA's CPU compiler copies the weight first
        wo_AD = self.wo_NHD[...].astype(self.dtype).reshape(-1, x_BTD.shape[-1])
        out_BTD = leave(linear(out_BTNH.reshape(*out_BTNH.shape[:2], -1), wo_AD))
        if spec.out_bias:
            out_BTD = out_BTD + self.bo_D[...].astype(self.dtype)
        return checkpoint_name(out_BTD, "mixer_out"), cache

    def _project(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_BTD = enter(x_BTD)
        q_BTNH = self._heads(x_BTD, self.wq_DNH, "bq_NH")
        own = partial(own_kv_heads, kv_heads=self.spec.kv_heads)
        k_BTKH = self._heads(x_BTD, self.wk_DKH, "bk_KH", own)
        v_BTKH = self._heads(x_BTD, self.wv_DKH, "bv_KH", own)
        q_BTNH, k_BTKH = checkpoint_name(q_BTNH, "q"), checkpoint_name(k_BTKH, "k")
        v_BTKH = checkpoint_name(v_BTKH, "v")
        if self.spec.qk_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.spec.rope is not None:
            tables = ctx.tables[self.spec.rope]
            q_BTNH, k_BTKH = rotate(q_BTNH, tables), rotate(k_BTKH, tables)
        return q_BTNH, k_BTKH, v_BTKH

    def _heads(self, x_BTD: jax.Array, weight: nnx.Param, bias: str, own=lambda w: w) -> jax.Array:
        w_DNH = own(weight[...].astype(self.dtype))
        y_BTA = linear(x_BTD, w_DNH.reshape(w_DNH.shape[0], -1))
        y_BTNH = y_BTA.reshape(*y_BTA.shape[:2], *w_DNH.shape[1:])
        if self.spec.qkv_bias:
            y_BTNH = y_BTNH + own(getattr(self, bias)[...].astype(self.dtype))
        return y_BTNH


def init_cache(spec: Gqa, batch: int, slots: int, dtype) -> dict[str, jax.Array]:
    """An empty cache of one layer."""
    return empty(batch, spec.kv_heads, slots, spec.head_dim, dtype, spec.window)
