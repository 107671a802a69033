"""The train step: what must not depend on how a batch is cut, and what a bad update may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain import optim, steps
from localtrain.config import RunConfig
from localtrain.losses import Head, weighted_nll_sum
from localtrain.models import read_hub_config, spec_from
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Context, build

B, T = 8, 48
TINY = {
    **read_hub_config("qwen3-tiny"),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def make_run(**train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": "qwen3-tiny"},
            "data": {"sources": "unused", "seq_len": T},
            "train": {"batch_size": B, "steps": 100, **train},
            "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant", "clip": 0},
        }
    )


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows with very different numbers of trained tokens (5 to 47), two documents in each."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, (B, T + 1), dtype=np.int32)
    weights = np.zeros((B, T), np.float32)
    for row in range(B):
        weights[row, : 5 + 6 * row] = 1
    segments = np.where(np.arange(T) < 20, 1, 2).astype(np.int32) * np.ones((B, 1), np.int32)
    positions = np.where(np.arange(T) < 20, np.arange(T), np.arange(T) - 20).astype(np.int32)
    weights[:, 19] = 0  # the last token of the first document predicts nothing
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": np.tile(positions, (B, 1)),
        "segments": segments,
        "weights": weights,
    }


@pytest.fixture(scope="module")
def network():
    return build(spec_from(TINY), Policy())


@pytest.fixture(scope="module")
def params(network):
    return jax.jit(network.init)(jax.random.key(0))


def grads_of(network, params, batch, **train):
    f = jax.jit(lambda p, b: steps.loss_and_grads(network, make_run(**train), p, b))
    loss, grads, trained = f(params, batch)
    return loss, optim.global_norm(grads), grads, trained


@pytest.fixture(scope="module")
def whole(network, params):
    return grads_of(network, params, make_batch())


def assert_same(a, b, rtol=1e-5):
    np.testing.assert_allclose(a[0], b[0], rtol=rtol)
    np.testing.assert_allclose(a[1], b[1], rtol=rtol)
    assert a[3] == b[3]
    for x, y in zip(jax.tree.leaves(a[2]), jax.tree.leaves(b[2]), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("micro", [4, 2, 1], ids=["2x4", "4x2", "8x1"])
def test_accumulation_gives_the_loss_and_gradients_of_the_whole_batch(
    network, params, whole, micro
):
    assert_same(grads_of(network, params, make_batch(), micro_batch=micro), whole)


@pytest.mark.parametrize("remat", ["matmuls", "full"])
def test_rematerialisation_changes_nothing(network, params, whole, remat):
    assert_same(grads_of(network, params, make_batch(), remat=remat), whole)


def test_the_loss_is_the_mean_over_trained_tokens_not_over_rows(network, params, whole):
    rows = [
        grads_of(network, params, {k: v[i : i + 1] for k, v in make_batch().items()})
        for i in (0, 7)
    ]
    both = {k: v[[0, 7]] for k, v in make_batch().items()}
    loss = grads_of(network, params, both)[0]
    counts = [float(r[3]) for r in rows]
    assert counts[0] < counts[1] / 4
    expected = sum(n * float(r[0]) for n, r in zip(counts, rows, strict=True)) / sum(counts)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert whole[3] == make_batch()["weights"].sum()


def test_padded_rows_change_nothing(network, params, whole):
    batch = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in make_batch().items()}
    assert_same(grads_of(network, params, batch), whole)


@pytest.fixture(scope="module")
def stepper(network):
    return jax.jit(lambda s, b, t: steps.train_step(network, make_run(), s, b, t))


@pytest.fixture(scope="module")
def state(network):
    return jax.jit(lambda: steps.init_state(network, make_run(), jnp.uint32(0)))()


def test_a_step_moves_the_parameters_and_counts(stepper, state):
    new, metrics = stepper(state, make_batch(), jnp.int32(0))
    assert new["step"] == 1 and metrics["applied"] and metrics["lr"] == np.float32(0.1)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), new["params"], state["params"])
    assert all(jax.tree.leaves(moved))


def test_an_update_that_is_not_finite_is_not_applied_nor_anything_after_it(stepper, state):
    good, _ = stepper(state, make_batch(), jnp.int32(0))
    poisoned = make_batch(1)
    poisoned["weights"][0, 0] = np.inf
    bad, metrics = stepper(good, poisoned, jnp.int32(1))
    assert not metrics["applied"] and not np.isfinite(metrics["loss"])
    later, metrics = stepper(bad, make_batch(2), jnp.int32(2))
    assert not metrics["applied"] and np.isfinite(metrics["loss"])
    for x, y in zip(jax.tree.leaves(good), jax.tree.leaves(later), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_batch_with_nothing_to_train_has_loss_zero(stepper, state):
    empty = make_batch()
    empty["weights"][:] = 0
    new, metrics = stepper(state, empty, jnp.int32(0))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["applied"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new))


def test_z_loss_adds_its_gradient_but_not_to_the_reported_loss(network, params, whole):
    loss, norm, _, _ = grads_of(network, params, make_batch(), z_loss=0.1)
    np.testing.assert_allclose(loss, whole[0], rtol=1e-6)
    assert abs(norm - whole[1]) > 1e-3


@pytest.fixture(scope="module")
def half():
    return build(spec_from(TINY), Policy(compute_dtype=jnp.bfloat16))


def is_product(path) -> bool:
    """Whether a parameter is a matrix of a layer, whose gradient is one product over the tokens."""
    return path[0].key.startswith("stack_") and "norm" not in jax.tree_util.keystr(path)


def test_in_bfloat16_arithmetic_the_loss_is_close_and_its_gradients_are_stored_as_they_come_out(
    half, params, whole
):
    """Those that JAX gives without our dtypes, rounded once. (XLA's CPU compiler keeps the float32
    of a bfloat16 product that is cast to float32.) Of the tied embedding the head's part is one."""
    batch = make_batch()
    loss, _, grads, trained = grads_of(half, params, batch)
    np.testing.assert_allclose(loss, whole[0], rtol=5e-3)

    @jax.jit
    def plain(params):
        context = Context(batch["tokens"], batch["positions"], batch["segments"])
        w, layout = half.head(params)
        h_BTD = half.hidden(params, context)
        weights = batch["weights"] / trained
        return weighted_nll_sum(Head(layout), w, h_BTD, batch["labels"], weights)[0]

    expected = jax.jit(jax.grad(plain))(params)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert g.dtype == (jnp.bfloat16 if is_product(path) else jnp.float32), path
    most = 2.0**-9 * float(jnp.abs(expected["embed_VD"]).max())
    np.testing.assert_allclose(grads.pop("embed_VD"), expected.pop("embed_VD"), rtol=0, atol=most)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y.astype(x.dtype))


def test_sums_over_micro_batches_are_float32(half, params):
    batch = make_batch()
    _, norm, grads, _ = grads_of(half, params, batch, micro_batch=2)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(norm, grads_of(half, params, batch)[1], rtol=5e-3)


def test_bfloat16_parameters_give_the_gradients_of_the_same_values_in_float32(half, params):
    """Storage in bfloat16 changes nothing but the values: products and sums are the same."""
    policy = Policy(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    stored = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    same = jax.tree.map(lambda p: p.astype(jnp.float32), stored)
    a = grads_of(build(spec_from(TINY), policy), stored, make_batch())
    b = grads_of(half, same, make_batch())
    assert a[0] == b[0]
    for x, y in zip(jax.tree.leaves(a[2]), jax.tree.leaves(b[2]), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))


def test_eval_loss_does_not_depend_on_the_batch_size(network, params):
    batch = make_batch()
    evaluate = jax.jit(lambda b: steps.eval_step(network, make_run(), params, b))
    whole = evaluate(batch)
    parts = np.zeros(2)
    for first in (0, 3, 6):
        piece = {k: v[first : first + 3] for k, v in batch.items()}
        short = 3 - piece["tokens"].shape[0]
        piece = {k: np.pad(v, ((0, short), (0, 0))) for k, v in piece.items()}
        parts += np.asarray(evaluate(piece), np.float64)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert parts[1] == batch["weights"].sum()


def test_evaluation_takes_micro_batches_too(network, params):
    """In less memory, then: the run that `plan` calls fitting must fit when it evaluates."""
    batch, run, small = make_batch(), make_run(), make_run(micro_batch=2)
    programs = [
        jax.jit(lambda b, run=run: steps.eval_step(network, run, params, b)).lower(batch).compile()
        for run in (run, small)
    ]
    whole, pieces = (np.asarray(program(batch)) for program in programs)
    np.testing.assert_allclose(pieces, whole, rtol=1e-6)
    room = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert room[1] < 0.6 * room[0]
