"""Rotary tables against the formulas of the papers, written a second time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from localtrain.nn.rope import frequencies, rope_tables, rotate
from localtrain.nn.spec import LinearScaling, Llama3Scaling, Rope, YarnScaling


def test_plain_frequencies_are_powers_of_theta():
    assert frequencies(Rope(10000.0, 4)).tolist() == [1.0, 0.01]


def test_linear_scaling_divides_frequencies():
    plain, scaled = frequencies(Rope(1e4, 8)), frequencies(Rope(1e4, 8, LinearScaling(4.0)))
    np.testing.assert_allclose(scaled, plain / 4)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    rope = Rope(500000.0, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain, scaled = frequencies(Rope(500000.0, 128)), frequencies(rope)
    for f, s in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            assert s == pytest.approx(f)
        elif wavelength > 8192 / 1.0:
            assert s == pytest.approx(f / 8)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            assert s == pytest.approx((1 - smooth) * f / 8 + smooth * f)


def test_yarn_keeps_fast_channels_interpolates_slow_ones_and_scales_cos():
    """arXiv 2309.00071, section 3.2, with the integer bounds of the reference code."""
    rope = Rope(1e6, 128, YarnScaling(4.0, 32768, attention_factor=0.1 * math.log(4) + 1))
    plain, scaled = frequencies(Rope(1e6, 128)), frequencies(rope)
    turns = 32768 * plain / (2 * math.pi)
    fast = turns > 40
    slow = turns < 0.7
    np.testing.assert_allclose(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 4)
    assert ((scaled <= plain) & (scaled >= plain / 4)).all()
    cos, _ = rope_tables(rope, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1, rtol=1e-6)


def test_rotation_keeps_norms_and_depends_on_distance_only():
    rope = Rope(10000.0, 16)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 16)), jnp.float32)
    k = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 1, 16)), jnp.float32)

    def at(x, position):
        return rotate(x, rope_tables(rope, jnp.array([[position]])))

    near, far = jnp.sum(at(q, 7) * at(k, 3)), jnp.sum(at(q, 1007) * at(k, 1003))
    assert float(near) == pytest.approx(float(far), abs=1e-3)
    assert float(jnp.linalg.norm(at(q, 99))) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


def test_channels_beyond_the_rotary_dim_pass():
    x = jnp.arange(24.0).reshape(1, 1, 1, 24)
    rotated = rotate(x, rope_tables(Rope(10000.0, 8), jnp.array([[5]])))
    np.testing.assert_array_equal(rotated[..., 8:], x[..., 8:])
    assert not np.allclose(rotated[..., :8], x[..., :8])
