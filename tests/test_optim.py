"""Schedules, AdamW against optax, decay masks, low-precision moments and parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from localtrain import optim
from localtrain.config import OptimConfig


def rates(steps=100, **keys):
    config = OptimConfig(**keys)
    return np.array([optim.learning_rate(config, steps, jnp.int32(t)) for t in range(steps)])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_first_update_moves_and_the_peak_is_reached_exactly_at_the_end_of_warmup(schedule):
    lr = rates(lr=1e-2, warmup=10, schedule=schedule)
    np.testing.assert_allclose(lr[:10], 1e-2 * np.arange(1, 11) / 10, rtol=1e-6)
    assert lr[0] > 0 and lr[9] == np.float32(1e-2) and lr.max() == lr[9]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_update_has_the_minimum_rate(schedule):
    lr = rates(lr=1e-2, warmup=10, schedule=schedule, min_lr_ratio=0.1)
    np.testing.assert_allclose(lr[-1], 1e-3, rtol=1e-6)
    assert np.all(np.diff(lr[9:]) <= 0)


def test_wsd_stays_at_the_peak_until_its_decay():
    lr = rates(lr=1.0, warmup=10, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    assert np.all(lr[9:80] == 1.0) and lr[80] < 1.0
    np.testing.assert_allclose(np.diff(lr[79:]), -1 / 20, rtol=1e-4)


def test_without_warmup_the_first_update_is_at_the_peak():
    assert rates(lr=0.5, warmup=0, schedule="constant")[0] == 0.5


def test_warmup_longer_than_the_run_still_ends_at_the_peak():
    assert rates(steps=5, lr=1.0, warmup=50, schedule="cosine")[-1] == 1.0


def tree(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "matrix": jax.random.normal(keys[0], (8, 4)),
        "norm": jax.random.normal(keys[1], (4,)),
        "embedding": jax.random.normal(keys[2], (16, 4)),
    }


DECAY = {"matrix": True, "norm": False, "embedding": False}


def test_adamw_equals_optax():
    config = OptimConfig(lr=1e-2, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8)
    reference = optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=DECAY)
    ours = theirs = tree(0)
    state, other = optim.init(config, ours), reference.init(theirs)
    for t in range(5):
        grads = tree(t + 1)
        ours, state = optim.update(
            config, DECAY, jnp.int32(t), jnp.float32(1e-2), ours, state, grads
        )
        updates, other = reference.update(grads, other, theirs)
        theirs = optax.apply_updates(theirs, updates)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_with_zero_gradients_only_matrices_shrink(name):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1)
    params = tree(0)
    grads = jax.tree.map(jnp.zeros_like, params)
    new, _ = optim.update(
        config, DECAY, jnp.int32(0), jnp.float32(0.1), params, optim.init(config, params), grads
    )
    np.testing.assert_allclose(new["matrix"], params["matrix"] * 0.99, rtol=1e-6)
    np.testing.assert_array_equal(new["norm"], params["norm"])
    np.testing.assert_array_equal(new["embedding"], params["embedding"])


def test_bfloat16_moments_are_stored_so_and_stay_close_to_float32():
    full = OptimConfig(lr=1e-2)
    half = OptimConfig(lr=1e-2, state_dtype="bfloat16")
    results = []
    for config in (full, half):
        params = tree(0)
        state = optim.init(config, params)
        for t in range(20):
            params, state = optim.update(
                config, DECAY, jnp.int32(t), jnp.float32(1e-2), params, state, tree(t % 4 + 1)
            )
        results.append(params)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    moved = np.abs(results[0]["matrix"] - tree(0)["matrix"]).mean()
    assert np.abs(results[0]["matrix"] - results[1]["matrix"]).mean() < 0.02 * moved


def test_clipping_brings_the_global_norm_to_the_limit_and_leaves_small_gradients_alone():
    grads = tree(0)
    norm = optim.global_norm(grads)
    np.testing.assert_allclose(norm, optax.global_norm(grads), rtol=1e-6)
    factor = optim.clip_factor(OptimConfig(clip=1.0), norm)
    scaled = jax.tree.map(lambda g: g * factor, grads)
    np.testing.assert_allclose(optim.global_norm(scaled), 1.0, rtol=1e-6)
    assert optim.clip_factor(OptimConfig(clip=100.0), norm) == 1
    assert optim.clip_factor(OptimConfig(clip=0.0), norm) == 1


# Neighbours of 1 in bfloat16: 1 - 1/256 and 1 + 1/128.
VALUES = [1.001, -1.001, 0.9995, 3.14159e-5, -2.71828e4, 1.0, 0.0]


@pytest.mark.parametrize("value", VALUES)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(value):
    n = 2**18
    x = np.float32(value)
    stored = optim.store(jnp.full((512, n // 512), x), jnp.bfloat16, jnp.uint32(7))
    found = np.asarray(stored, np.float64)
    low = np.float64((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
    step = np.float64(jnp.nextafter(jnp.bfloat16(low), jnp.bfloat16(np.sign(x) * 1e38))) - low
    assert set(np.unique(found)) <= {low, low + step}
    share = (np.float64(x) - low) / step if step else 0.0
    deviation = abs(step) * np.sqrt(share * (1 - share) / n)
    assert abs(found.mean() - np.float64(x)) <= 4 * deviation


def test_rounding_depends_on_seed_step_and_array_and_on_nothing_else():
    config = OptimConfig(name="sgd", weight_decay=0)
    params = {k: jnp.ones((64, 64), jnp.bfloat16) for k in ("a", "b")}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1.0), params)

    def after(seed, step):
        new, _ = optim.update(
            config,
            {"a": False, "b": False},
            jnp.int32(step),
            jnp.float32(1e-3),
            params,
            {},
            grads,
            seed=seed,
        )
        return {k: np.asarray(v, np.float32) for k, v in new.items()}

    first, again = after(0, 5), after(0, 5)
    np.testing.assert_array_equal(first["a"], again["a"])
    for other in (after(0, 6)["a"], after(1, 5)["a"], first["b"]):
        agree = (first["a"] == other).mean()  # by chance p^2 + (1-p)^2 with p = 0.256
        assert 0.55 < agree < 0.69


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_small_updates_move_bfloat16_parameters_that_rounding_to_the_nearest_would_not(name):
    """1 - 1e-4 is 1 in bfloat16; after 200 such updates the mean must be at 0.98."""
    config = OptimConfig(name=name, weight_decay=0)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    state, grads = optim.init(config, params), {"w": jnp.ones((64, 64), jnp.bfloat16)}
    lr = jnp.float32(1e-4)
    nearest = (params["w"].astype(jnp.float32) - lr).astype(jnp.bfloat16)
    np.testing.assert_array_equal(nearest, params["w"])

    @jax.jit
    def run(params, state):
        def body(t, both):
            return optim.update(config, {"w": False}, t, lr, *both, grads, seed=3)

        return jax.lax.fori_loop(0, 200, body, (params, state))

    new, _ = run(params, state)
    assert new["w"].dtype == jnp.bfloat16
    # standard deviation of one value: sqrt(200 * p (1 - p)) / 256 with p = 0.0256; of the mean / 64
    np.testing.assert_allclose(np.asarray(new["w"], np.float32).mean(), 0.98, atol=6e-4)


def test_a_bfloat16_second_moment_decays_with_a_long_memory():
    """With b2 = 0.999 the nearest bfloat16 of 0.999 v is v itself: it would stay for ever."""
    config = OptimConfig(b2=0.999, state_dtype="bfloat16", weight_decay=0)
    params = {"w": jnp.zeros((64, 64))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"m": zeros, "v": {"w": jnp.full((64, 64), 0.75, jnp.bfloat16)}}
    assert (state["v"]["w"].astype(jnp.float32) * 0.999).astype(jnp.bfloat16)[0, 0] == 0.75
    update = jax.jit(
        lambda t, s: optim.update(config, {"w": False}, t, jnp.float32(0), params, s, zeros)[1]
    )
    for t in range(200):
        state = update(jnp.int32(t), state)
    mean = np.asarray(state["v"]["w"], np.float32).mean()
    np.testing.assert_allclose(mean, 0.75 * 0.999**200, rtol=5e-3)


def test_the_scale_multiplies_the_gradients_whatever_their_dtype():
    config = OptimConfig(weight_decay=0)
    params = tree(0)
    state, lr = optim.init(config, params), jnp.float32(0.1)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), tree(1))
    scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * 0.25, grads)
    a, _ = optim.update(config, DECAY, jnp.int32(0), lr, params, state, grads, scale=0.25)
    b, _ = optim.update(config, DECAY, jnp.int32(0), lr, params, state, scaled)
    jax.tree.map(np.testing.assert_array_equal, a, b)
