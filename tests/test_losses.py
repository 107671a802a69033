"""The chunked loss head against full logits, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain import losses
from localtrain.losses import Head, token_logprobs, weighted_nll_sum

B, T, D, V = 3, 200, 16, 48


def plain(head: Head, w, h_BTD, labels_BT, weights_BT):
    """The same objective from full logits, left to autodiff."""
    w_VD = w if head.layout == "vd" else w.T
    logits_BTV = jnp.einsum("btd,vd->btv", h_BTD, w_VD)
    if head.softcap:
        logits_BTV = head.softcap * jnp.tanh(logits_BTV / head.softcap)
    if head.vocab:
        logits_BTV = logits_BTV.at[..., head.vocab :].set(-jnp.inf)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    logp_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0] - lse_BT
    nll = -jnp.sum(weights_BT * logp_BT)
    return nll + head.z_loss * jnp.sum(weights_BT * lse_BT**2), nll, logp_BT


@pytest.fixture
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    w_VD = jax.random.normal(keys[0], (V, D))
    h_BTD = jax.random.normal(keys[1], (B, T, D))
    labels_BT = jax.random.randint(keys[2], (B, T), 0, 40)
    weights_BT = (jax.random.uniform(keys[3], (B, T)) < 0.7).astype(jnp.float32)
    return w_VD, h_BTD, labels_BT, weights_BT


HEADS = [
    Head("vd"),
    Head("dv"),
    Head("vd", softcap=5.0),
    Head("dv", z_loss=1e-3),
    Head("vd", vocab=40),
    Head("dv", softcap=3.0, z_loss=1e-2, vocab=41),
]


@pytest.mark.parametrize("chunk", [64, 4096], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_chunked_loss_and_gradients_equal_full_logits(inputs, head, chunk, monkeypatch):
    monkeypatch.setattr(losses, "chunk_size", lambda vocab: chunk)
    w, h, labels, weights = inputs
    w = w if head.layout == "vd" else w.T

    def ours(w, h):
        return weighted_nll_sum(head, w, h, labels, weights)

    def oracle(w, h):
        return plain(head, w, h, labels, weights)[:2]

    (a, a_nll), a_grads = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(w, h)
    (b, b_nll), b_grads = jax.value_and_grad(oracle, argnums=(0, 1), has_aux=True)(w, h)
    np.testing.assert_allclose([a, a_nll], [b, b_nll], rtol=1e-6)
    np.testing.assert_allclose(ours(w, h), (b, b_nll), rtol=1e-6)
    for x, y in zip(a_grads, b_grads, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("head", [Head("vd"), Head("dv", softcap=4.0, vocab=40)], ids=str)
def test_token_logprobs_equal_full_logits(inputs, head, monkeypatch):
    monkeypatch.setattr(losses, "chunk_size", lambda vocab: 64)
    w, h, labels, weights = inputs
    w = w if head.layout == "vd" else w.T
    out = token_logprobs(head, w, h, labels)
    np.testing.assert_allclose(out, plain(head, w, h, labels, weights)[2], atol=1e-5)

    def objective(f):
        return jax.grad(lambda w, h: jnp.sum(jnp.sin(f(w, h))), argnums=(0, 1))(w, h)

    ours = objective(lambda w, h: token_logprobs(head, w, h, labels))
    oracle = objective(lambda w, h: plain(head, w, h, labels, weights)[2])
    for x, y in zip(ours, oracle, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.max(jnp.abs(y))))


def test_tokens_without_weight_change_nothing(inputs):
    w, h, labels, weights = inputs

    def loss_and_grad(h, labels):
        f = jax.value_and_grad(weighted_nll_sum, argnums=(1, 2), has_aux=True)
        return f(Head("vd"), w, h, labels, weights)

    noise = jax.random.normal(jax.random.key(9), h.shape) * (1 - weights[..., None])
    (a, _), (a_w, a_h) = loss_and_grad(h, labels)
    (b, _), (b_w, b_h) = loss_and_grad(h + noise, jnp.where(weights > 0, labels, 0))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a_w, b_w)
    np.testing.assert_array_equal(a_h, b_h)
    assert np.all(np.asarray(a_h)[np.asarray(weights) == 0] == 0)


def test_a_batch_with_nothing_to_train_is_zero_not_nan(inputs):
    w, h, labels, weights = inputs
    (loss, nll), grad = jax.value_and_grad(weighted_nll_sum, argnums=1, has_aux=True)(
        Head("vd"), w, h, labels, weights * 0
    )
    assert loss == 0 and nll == 0 and not np.any(np.asarray(grad))


def test_no_array_of_all_logits_exists_in_the_compiled_loss():
    """8192 tokens x 32000 ids: full float32 logits would be 1 GB; a chunk of 256 is 33 MB."""
    tokens, vocab, dim = 8192, 32000, 64
    shapes = (
        jax.ShapeDtypeStruct((vocab, dim), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens, dim), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    )

    def f(w, h, labels, weights):
        loss = lambda w, h: weighted_nll_sum(Head("vd"), w, h, labels, weights)[0]  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(w, h)

    memory = jax.jit(f).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.15 * tokens * vocab * 4
