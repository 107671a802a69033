"""Optimizers and learning-rate schedules, as pure functions over parameter trees.

AdamW (arXiv 1711.05101) and SGD. Written out because both moments must be storable in bfloat16
(optax keeps the second one in the parameters' dtype) and because the update is ten lines.
All arithmetic is float32 whatever the storage. Weight decay is decoupled and touches matrices only.

What is stored in bfloat16 is rounded stochastically: up with the probability of the part that is
cut off, so that the stored value is right on average ("Deep Learning with Limited Numerical
Precision", arXiv 1502.02551; for bfloat16 weights "Revisiting BFloat16 Training", arXiv
2010.06192). To the nearest, a weight would not move at all by less than 1/512 of itself, which is
most updates, and with b2 = 0.999 a second moment could not decay. The random bits are a function of
seed, step, array and place in it: a resumed run draws the same ones on any number of devices.

A learning rate is a pure function of the step, so a resumed run cannot warm up twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from localtrain.config import OptimConfig

Tree = Any


def learning_rate(optim: OptimConfig, steps: int, step: jax.Array) -> jax.Array:
    """The rate that update number `step` (from 0) applies, float32.

    Warm-up is linear: the first update has lr / warmup, the peak is reached exactly at its end.
    The last update (steps - 1) has the minimum. wsd (arXiv 2404.06395) stays at the peak and
    decays linearly over the last `decay_fraction` of the run.
    """
    done = (step + 1).astype(jnp.float32)  # updates including this one
    warmup = min(optim.warmup, steps)
    low = optim.min_lr_ratio
    start = steps - round(steps * optim.decay_fraction) if optim.schedule == "wsd" else warmup
    progress = jnp.clip((done - max(start, warmup)) / max(steps - max(start, warmup), 1), 0, 1)
    match optim.schedule:
        case "constant":
            factor = jnp.ones((), jnp.float32)
        case "linear" | "wsd":
            factor = 1 - (1 - low) * progress
        case "cosine":
            factor = low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        case _:
            raise ValueError(f"unknown schedule {optim.schedule!r}")
    if warmup:
        factor = jnp.where(done < warmup, done / warmup, factor)
    return (optim.lr * factor).astype(jnp.float32)


def init(optim: OptimConfig, params: Tree) -> Tree:
    """Optimizer state: {} for SGD, first and second moments like the parameters for AdamW."""
    if optim.name == "sgd":
        return {}
    dtype = jnp.dtype(optim.state_dtype)

    def zeros(p: jax.Array) -> jax.Array:
        return jnp.zeros(p.shape, dtype)

    return {"m": jax.tree.map(zeros, params), "v": jax.tree.map(zeros, params)}


def global_norm(tree: Tree) -> jax.Array:
    """Euclidean norm over all leaves, float32, over the whole model whatever its sharding."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))


def clip_factor(optim: OptimConfig, norm: jax.Array) -> jax.Array:
    """What gradients are multiplied by so that their norm is at most `optim.clip` (0 = off)."""
    if not optim.clip:
        return jnp.ones((), jnp.float32)
    return jnp.minimum(1.0, optim.clip / jnp.maximum(norm, 1e-12))


def update(
    optim: OptimConfig,
    decay: Tree,
    step: jax.Array,
    lr: jax.Array,
    params: Tree,
    state: Tree,
    grads: Tree,
    *,
    scale: jax.Array | float = 1.0,
    seed: int = 0,
) -> tuple[Tree, Tree]:
    """(new parameters, new optimizer state). `decay` is a tree of bool: weight decay applies there.

    `step` counts updates from 0; `grads` of any float dtype are multiplied by `scale` (clipping);
    `seed` is that of the rounding. Elementwise throughout, so that XLA makes one fused loop over
    each array, in place: no float32 copy of anything.
    """
    draws = _draws(seed, step)

    def decayed(p: jax.Array, yes: bool) -> jax.Array:
        p32 = p.astype(jnp.float32)
        return p32 * (1 - lr * optim.weight_decay) if yes else p32

    if optim.name == "sgd":

        def sgd(path, p, g, yes):
            p32 = decayed(p, yes) - lr * (g.astype(jnp.float32) * scale)
            return store(p32, p.dtype, draws(path, "p"))

        return jax.tree_util.tree_map_with_path(sgd, params, grads, decay), state

    t = (step + 1).astype(jnp.float32)
    m_scale = 1 / (1 - optim.b1**t)
    v_scale = 1 / (1 - optim.b2**t)

    def adamw(path, p, g, m, v, yes):
        g = g.astype(jnp.float32) * scale
        m32 = optim.b1 * m.astype(jnp.float32) + (1 - optim.b1) * g
        v32 = optim.b2 * v.astype(jnp.float32) + (1 - optim.b2) * jnp.square(g)
        move = m32 * m_scale / (jnp.sqrt(v32 * v_scale) + optim.eps)
        p32 = decayed(p, yes) - lr * move
        return tuple(
            store(new32, old.dtype, draws(path, name))
            for name, new32, old in (("p", p32, p), ("m", m32, m), ("v", v32, v))
        )

    trees = params, grads, state["m"], state["v"], decay
    out = jax.tree_util.tree_map_with_path(adamw, *trees)
    new, m, v = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), out)
    return new, {"m": m, "v": v}


def store(x32: jax.Array, dtype: jnp.dtype, draw: jax.Array) -> jax.Array:
    """float32 as it is, or as bfloat16, rounded at random by `draw` (uint32, see `_draws`)."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x32.astype(dtype)
    # The upper half of a float32 is a bfloat16: adding 0 ... 65535 to the lower half carries over
    # with the probability lower / 65536, for either sign.
    bits = lax.bitcast_convert_type(x32, jnp.uint32)
    bits = (bits + (scramble(_places(x32.shape) ^ draw) >> 16)) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _draws(seed: int, step: jax.Array) -> Callable[[Any, str], jax.Array]:
    """(path of a parameter, which of its arrays) -> uint32 that starts its random bits."""
    start = scramble(scramble(jnp.uint32(seed)) ^ step.astype(jnp.uint32))

    def draw(path: Any, name: str) -> jax.Array:
        text = jax.tree_util.keystr(path, simple=True, separator="/") + ":" + name
        return scramble(start ^ jnp.uint32(zlib.crc32(text.encode())))

    return draw


def _places(shape: tuple[int, ...]) -> jax.Array:
    """The number of each element, uint32: 0, 1, 2, ... in row-major order, modulo 2^32."""
    place, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return jnp.broadcast_to(place, shape)


def scramble(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose every output bit depends on every input bit.

    The constants are those of "lowbias32" (github.com/skeeto/hash-prospector). Not jax.random: its
    bits are arrays of their own on GPUs, as large as the parameters.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
