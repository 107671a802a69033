"""Norms and feed-forward: their hand-written backward passes against automatic ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain.nn.core import rms_norm, soft_cap
from localtrain.nn.mlp import ACTIVATIONS, glu_down

jax.config.update("jax_default_matmul_precision", "highest")


def draw(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def assert_same_gradients(ours, theirs, inputs):
    values = [jax.value_and_grad(f, tuple(range(len(inputs))))(*inputs) for f in (ours, theirs)]
    assert float(values[0][0]) == pytest.approx(float(values[1][0]), rel=1e-5)
    for a, b in zip(values[0][1], values[1][1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-7)


def test_rms_norm_gradient_matches_the_automatic_one():
    x, scale, g = draw((2, 5, 16), (16,), (2, 5, 16))

    def plain(x, scale):
        mean = jnp.mean(x**2, axis=-1, keepdims=True)
        return jnp.sum(x / jnp.sqrt(mean + 0.1) * scale * g)

    assert_same_gradients(lambda x, s: jnp.sum(rms_norm(0.1, x, s) * g), plain, (x, scale))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_gradient_matches_the_automatic_one(name):
    gate, up, w_FD, g = draw((2, 5, 12), (2, 5, 12), (12, 8), (2, 5, 8))
    act = ACTIVATIONS[name]

    def plain(gate, up, w):
        return jnp.sum(((act(gate) * up) @ w) * g)

    def ours(gate, up, w):
        return jnp.sum(glu_down(act, gate, up, w) * g)

    assert_same_gradients(ours, plain, (gate, up, w_FD))


def test_rms_norm_keeps_the_dtype_and_works_in_float32():
    x = jnp.full((1, 4), 300.0, jnp.float16)  # 300^2 is more than float16 holds
    y = rms_norm(1e-6, x, jnp.ones(4))
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, 1.0, rtol=1e-3)


def test_soft_cap_bounds_and_none_passes():
    x = jnp.array([-1e4, 0.1, 1e4])
    np.testing.assert_allclose(soft_cap(x, 30.0), [-30.0, 0.1, 30.0], rtol=1e-4)
    assert soft_cap(x, None) is x
