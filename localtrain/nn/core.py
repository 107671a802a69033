"""Parameters with logical axes, the precision policy, norms and the embedding.

A module creates its parameters abstractly: `param` stores a shape, the logical axis names, the
kind and the initial distribution as metadata, never an array. Arrays live in plain nested dicts
outside the modules and are merged in while a step is traced. The metadata key is our own
(`logical_axes`), because Flax acts on its reserved sharding names while modules are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from localtrain.nn.spec import Norm

WEIGHT_STD = 0.02  # GPT-2 and all that followed; the truncated normal below keeps this std
LOGIT_STD = 0.3  # initial std of the logits: the first loss lies 0.3^2 / 2 above ln(vocab)
KINDS = ("matrix", "embedding", "norm", "bias")


@dataclass(frozen=True)
class Policy:
    """Precision and layout: everything about arrays that is not the model's maths."""

    param_dtype: jnp.dtype = jnp.float32
    compute_dtype: jnp.dtype = jnp.float32
    vocab_multiple: int = 1  # the vocabulary axis is padded to a multiple of this
    scan: bool = True  # False: a Python loop over layers (slow to compile; for debugging)
    attention: str = "blockwise"  # which kernel nn/attend.py uses


def param(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    kind: str = "matrix",
    std: float = 0.0,
    value: float = 0.0,
) -> nnx.Param:
    """An abstract parameter; starts as a truncated normal with `std`, or as `value` if std is 0."""
    if len(shape) != len(axes) or kind not in KINDS:
        raise ValueError(f"parameter of shape {shape}: axes {axes}, kind {kind!r}")
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
    return nnx.Param(abstract, logical_axes=axes, kind=kind, std=std, value_at_start=value)


def draw(key: jax.Array, variable: nnx.Param, shape: tuple[int, ...], dtype) -> jax.Array:
    """The initial array of one parameter."""
    std = variable.get_metadata("std")
    if std == 0.0:
        return jnp.full(shape, variable.get_metadata("value_at_start"), dtype)
    # a normal cut at 3 std has 0.98658 of the std
    return (std / 0.98658 * jax.random.truncated_normal(key, -3.0, 3.0, shape)).astype(dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight in float32 ("Root Mean Square Layer Normalization", 1910.07467)."""

    def __init__(self, dim: int, spec: Norm, axis: str = "embed"):
        self.eps = spec.eps
        self.plus_one = spec.plus_one
        self.scale = param((dim,), (axis,), "norm", value=0.0 if spec.plus_one else 1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...].astype(jnp.float32)
        return rms_norm(self.eps, x, scale + 1.0 if self.plus_one else scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rms_norm(eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    """The formula, with a backward pass that keeps only x and one number a row."""
    return _rms_norm_forward(eps, x, scale)[0]


def _rms_norm_forward(eps: float, x: jax.Array, scale: jax.Array):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(eps: float, saved, g: jax.Array):
    x, scale, inverse = saved
    unit, g32 = x.astype(jnp.float32) * inverse, g.astype(jnp.float32)
    d_scale = jnp.sum(g32 * unit, axis=tuple(range(x.ndim - 1)))
    d_unit = g32 * scale
    d_x = inverse * (d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True))
    return d_x.astype(x.dtype), d_scale


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., I] @ w [I, O]; only the gradient of w is our own (see `weight_gradient`)."""
    return jnp.dot(x, w)


def _linear_backward(saved, g: jax.Array):
    x, w = saved
    return jnp.einsum("...O,IO->...I", g, w), weight_gradient(x, g)


linear.defvjp(lambda x, w: (jnp.dot(x, w), (x, w)), _linear_backward)


def weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """[I, O] from x [..., I] and g [..., O]: the product over all tokens.

    On CPU the tokens become one axis first: over two, XLA writes both operands out transposed
    (15% of a training step). Elsewhere they stay apart, as they may be sharded on both.
    """

    def flat(x: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.dot(x.reshape(-1, x.shape[-1]).T, g.reshape(-1, g.shape[-1]))

    def apart(x: jax.Array, g: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        return jax.lax.dot_general(x, g, ((axes, axes), ((), ())))

    return jax.lax.platform_dependent(x, g, cpu=flat, default=apart)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); nothing when cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)
