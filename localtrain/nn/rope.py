"""Rotary position embeddings: frequency tables and one function that rotates.

"RoFormer" (arXiv 2104.09864), in the half-split layout of transformers' `apply_rotary_pos_emb`:
channel i is paired with channel i + R/2. Tables are float32 and computed once per distinct Rope
of a model, outside the scan over layers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.nn.spec import LinearScaling, Llama3Scaling, Rope, YarnScaling


def frequencies(rope: Rope) -> np.ndarray:
    """Angle per position of each channel pair, float64 [R/2]."""
    freq = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    scaling = rope.scaling
    match scaling:
        case None:
            return freq
        case LinearScaling():
            return freq / scaling.factor
        case Llama3Scaling():
            return _llama3(freq, scaling)
        case YarnScaling():
            return _yarn(freq, rope, scaling)
    raise TypeError(f"no rotary scaling of type {type(scaling).__name__}")


def _llama3(freq: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """transformers `_compute_llama3_parameters`."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * freq / (2 * math.pi)  # rotations over the old context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def _yarn(freq: np.ndarray, rope: Rope, scaling: YarnScaling) -> np.ndarray:
    """transformers `_compute_yarn_parameters`: fast channels kept, slow ones interpolated."""

    def channel_of(turns: float) -> float:
        wavelengths = scaling.original_length / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first, last = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    if first == last:
        last += 0.001  # as the reference does: no division by zero
    ramp = np.clip((np.arange(rope.dim // 2) - first) / (last - first), 0.0, 1.0)
    return freq / scaling.factor * ramp + freq * (1.0 - ramp)


def rope_tables(rope: Rope, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, R/2], float32."""
    freq = jnp.asarray(frequencies(rope), jnp.float32)
    angles_BT1R = positions_BT[:, :, None, None].astype(jnp.float32) * freq
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return jnp.cos(angles_BT1R) * factor, jnp.sin(angles_BT1R) * factor


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first R channels of every head; the rest passes."""
    cos, sin = tables
    half = cos.shape[-1]
    x32 = x_BTNH.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest)
    return jnp.concatenate(parts, axis=-1).astype(x_BTNH.dtype)
