"""Optimizers and learning-rate schedules, as pure functions over parameter trees.

AdamW (arXiv 1711.05101) and SGD. Written out because both moments must be storable in bfloat16
(optax keeps the second one in the parameters' dtype) and because the update is ten lines.
All arithmetic is float32 whatever the storage. Weight decay is decoupled and touches matrices only.

A learning rate is a pure function of the step, so a resumed run cannot warm up twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

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
) -> tuple[Tree, Tree]:
    """(new parameters, new optimizer state). `decay` is a tree of bool: weight decay applies there.

    `step` counts updates from 0; `grads` are already clipped.
    """

    def decayed(p32: jax.Array, yes: bool) -> jax.Array:
        return p32 * (1 - lr * optim.weight_decay) if yes else p32

    if optim.name == "sgd":

        def sgd(p, g, yes):
            return (decayed(p.astype(jnp.float32), yes) - lr * g).astype(p.dtype)

        return jax.tree.map(sgd, params, grads, decay), state

    t = (step + 1).astype(jnp.float32)
    m_scale = 1 / (1 - optim.b1**t)
    v_scale = 1 / (1 - optim.b2**t)

    def adamw(p, g, m, v, yes):
        g = g.astype(jnp.float32)
        m32 = optim.b1 * m.astype(jnp.float32) + (1 - optim.b1) * g
        v32 = optim.b2 * v.astype(jnp.float32) + (1 - optim.b2) * jnp.square(g)
        move = m32 * m_scale / (jnp.sqrt(v32 * v_scale) + optim.eps)
        p32 = decayed(p.astype(jnp.float32), yes) - lr * move
        return p32.astype(p.dtype), m32.astype(m.dtype), v32.astype(v.dtype)

    out = jax.tree.map(adamw, params, grads, state["m"], state["v"], decay)
    new, m, v = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), out)
    return new, {"m": m, "v": v}
