"""Blockwise attention against the plain T x S form, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain.nn import blockwise
from localtrain.nn.attend import attend

jax.config.update("jax_default_matmul_precision", "highest")


def plain(q_BTNH, k_BTKH, v_BTKH, segments_BT, scale, window, softcap, sinks_N):
    """The whole matrix, written down as in the papers."""
    batch, length, heads, _ = q_BTNH.shape
    repeat = heads // k_BTKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, repeat, axis=2) for x in (k_BTKH, v_BTKH))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    t, s = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    mask = jnp.broadcast_to(t >= s, (batch, 1, length, length))
    if window is not None:
        mask &= t - s < window
    if segments_BT is not None:
        of_t, of_s = segments_BT[:, None, :, None], segments_BT[:, None, None, :]
        mask &= (of_t == of_s) & (of_s > 0)
    scores = jnp.where(mask, scores, -1e30)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1)[..., :length], 0.0)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v_BSNH)


def draw(batch, length, heads, kv_heads, head_dim, value_dim=None):
    keys = jax.random.split(jax.random.key(length), 4)
    kinds = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
    q, k, v = (
        jax.random.normal(key, (batch, length, *kind))
        for key, kind in zip(keys, kinds, strict=False)
    )
    return q, k, v, jax.random.normal(keys[3], (batch, length, heads, value_dim or head_dim))


def packed(batch, length, documents=3):
    """Rows of some documents with padding at the end."""
    random = np.random.default_rng(0)
    segments_BT = np.zeros((batch, length), np.int32)
    for row in segments_BT:
        cuts = np.sort(random.choice(length, documents, replace=False))
        row[:] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
        row[length - random.integers(1, length // 4) :] = 0
    return jnp.asarray(segments_BT)


def assert_same(shape, segments_BT=None, window=None, softcap=None, sinks_N=None):
    q, k, v, g = draw(*shape)
    scale = shape[4] ** -0.5

    def ours(q, k, v, sinks):
        out = attend(
            q, k, v, segments_BT, scale=scale, window=window, softcap=softcap, sinks_N=sinks
        )
        return jnp.sum(out * g), out

    def oracle(q, k, v, sinks):
        out = plain(q, k, v, segments_BT, scale, window, softcap, sinks)
        return jnp.sum(out * g), out

    inputs = (0, 1, 2) if sinks_N is None else (0, 1, 2, 3)
    results = [
        jax.jit(jax.value_and_grad(f, inputs, has_aux=True))(q, k, v, sinks_N)
        for f in (ours, oracle)
    ]
    ((_, out), grads), ((_, expected), expected_grads) = results
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for ours_grad, theirs in zip(grads, expected_grads, strict=True):
        bound = max(1e-6, 1e-5 * float(jnp.abs(theirs).max()))
        np.testing.assert_allclose(ours_grad, theirs, atol=bound)


@pytest.mark.parametrize("length", [1, 17, 128, 300])
def test_any_length_matches_the_plain_form(length):
    assert_same((2, length, 4, 2, 16))


def test_everything_at_once_matches_the_plain_form():
    sinks_N = jnp.linspace(-1.0, 1.0, 6)
    assert_same((2, 300, 6, 2, 8), packed(2, 300), window=40, softcap=5.0, sinks_N=sinks_N)


def test_packed_documents_match_the_plain_form():
    assert_same((2, 400, 4, 4, 16), packed(2, 400, documents=6))


def test_window_larger_than_a_block_matches_the_plain_form():
    assert_same((1, 500, 2, 1, 16), window=200)


def test_sinks_without_a_mask_match_the_plain_form():
    assert_same((1, 140, 4, 2, 24), sinks_N=jnp.array([3.0, -3.0, 0.0, 1.0]))


def test_values_may_be_narrower_than_keys():
    assert_same((2, 150, 2, 2, 24, 16))


def test_the_path_of_accelerators_matches_too(monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_BLOCK", 64)
    monkeypatch.setattr(blockwise, "CPU_SCORES", None)  # all heads of all rows in one step
    assert_same((3, 200, 4, 2, 16), packed(3, 200), window=90)


def test_padding_sees_nothing_and_gives_no_gradient():
    q, k, v, g = draw(1, 32, 2, 1, 8)
    segments_BT = jnp.array([[0] * 5 + [1] * 20 + [0] * 7])

    def loss(q, k, v):
        out = attend(q, k, v, segments_BT, scale=1.0)
        return jnp.sum(out * g), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    hidden = np.asarray(segments_BT[0] == 0)
    assert not np.asarray(out)[0, hidden].any()
    for grad in grads:
        assert not np.asarray(grad)[0, hidden].any()
        assert np.asarray(grad)[0, ~hidden].any()


def test_bfloat16_stays_near_float32():
    q, k, v, _ = draw(1, 200, 4, 2, 32)
    exact = attend(q, k, v, scale=0.2)
    half = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), scale=0.2)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=0.03)


def test_no_array_of_all_scores_exists():
    """At T = 4096 with 4 heads the T x S matrix would be 268 MB; the loop needs far less."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, n, 32), jnp.float32) for n in (4, 2, 2)]

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, scale=1.0))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40e6


def test_blocks_outside_the_window_are_not_visited():
    def steps(window):
        kernel = blockwise.Kernel(1.0, window, None)
        q, k, v, _ = draw(1, 1024, 2, 1, 8)
        return len(blockwise.Blocks(kernel, 128, None, q, k, v, None, None).pairs().z)

    assert steps(None) == 8 * 9 // 2
    assert steps(128) == 8 + 7
