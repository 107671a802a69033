"""The attention kernels against the plain T x S form, values and gradients."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain.nn import blockwise, cudnn, splash
from localtrain.nn.attend import Case, attend, choose

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


def assert_same(
    shape, segments_BT=None, window=None, softcap=None, sinks_N=None, kernel="blockwise"
):
    q, k, v, g = draw(*shape)
    scale = shape[4] ** -0.5

    def ours(q, k, v, sinks):
        options = {"window": window, "softcap": softcap, "sinks_N": sinks, "kernel": kernel}
        out = attend(q, k, v, segments_BT, scale=scale, **options)
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


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU kernel as plain JAX on this machine."""
    monkeypatch.setattr(splash, "splash", partial(splash.splash, interpret=True))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 256, 2, 2, 64), {}),
        ((2, 640, 4, 2, 64), {"segments_BT": packed(2, 640), "softcap": 5.0}),  # blocks of 128
        ((1, 640, 6, 2, 128), {"segments_BT": packed(1, 640, 5), "window": 200}),
        ((1, 384, 2, 1, 256), {"window": 70}),
        ((1, 256, 2, 1, 64, 128), {"segments_BT": packed(1, 256), "sinks_N": jnp.array([2.0, -1])}),
    ],
    ids=["causal", "packed, soft cap, grouped", "packed, window", "head_dim 256", "sinks, values"],
)
@pytest.mark.usefixtures("interpreted")
def test_splash_matches_the_plain_form(shape, options):
    assert_same(shape, kernel="splash", **options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("window", [None, 300])
def test_each_device_of_a_split_row_matches_its_part_of_the_plain_form(window):
    """Three devices with two chunks of the row each: queries here and there, keys in order."""
    ways, shape = 3, (1, 768, 2, 1, 64)
    q, k, v, g = draw(*shape)
    segments_BT = packed(1, 768)
    places_WT = splash.query_places(shape[1] // ways, ways)
    assert sorted(places_WT.ravel()) == list(range(shape[1]))
    fixed = blockwise.Kernel(0.125, window, None, ways)

    def ours(q, k, v, places, g, device):
        out = splash.splash(fixed, q[:, places], k, v, segments_BT, None, device)
        return jnp.sum(out * g[:, places]), out

    def oracle(q, k, v, g):
        out = plain(q, k, v, segments_BT, 0.125, window, None, None)
        return jnp.sum(out * g), out

    step = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))
    results = [step(q, k, v, places_WT[d], g, jnp.int32(d)) for d in range(ways)]
    (_, out), grads = jax.value_and_grad(oracle, (0, 1, 2), has_aux=True)(q, k, v, g)
    for device, ((_, part), _) in enumerate(results):
        np.testing.assert_allclose(part, out[:, places_WT[device]], atol=2e-6)
    for number, expected in enumerate(grads):
        total = sum(part_grads[number] for _, part_grads in results)
        np.testing.assert_allclose(total, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_rows_that_are_no_whole_blocks_get_the_blockwise_kernel_and_the_reason():
    assert choose("splash", Case(2048, 128, 128)) == ("splash", None)
    name, reason = choose("splash", Case(1000, 128, 128))
    assert name == "blockwise"
    assert "1000 tokens" in reason and "128" in reason
    name, reason = choose("splash", Case(2048, 128, 128, ways=16))
    assert name == "blockwise"
    assert "32 chunks on 16 devices" in reason
    with pytest.raises(ValueError, match="known are blockwise, splash, cudnn"):
        choose("flash", Case(2048, 128, 128))


def test_splash_does_not_visit_blocks_outside_the_window():
    places_WT = splash.query_places(4096, 1)
    assert splash._blocks_seen(places_WT, 4096, 512, 512, None).sum() == 8 * 9 // 2
    seen, live = splash._walk(splash._blocks_seen(places_WT, 4096, 512, 512, 512))
    assert seen.shape == live.shape == (1, 8, 2)
    assert live.sum() == 8 + 7


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 140, 4, 2, 64), {"segments_BT": packed(2, 140), "window": 40}),
        ((1, 96, 2, 1, 128), {}),
    ],
    ids=["packed, window, grouped", "causal"],
)
def test_what_cudnn_is_asked_for_is_the_plain_form(monkeypatch, shape, options):
    """Masks, window, scale and padding, in jax's own implementation of the same call."""
    monkeypatch.setattr(cudnn, "flash", partial(cudnn.flash, implementation="xla"))
    monkeypatch.setattr(cudnn, "unfit", lambda case: None)  # of float32
    assert_same(shape, kernel="cudnn", **options)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (Case(8192, 128, 128), None),
        (Case(16384, 128, 128), "longer than 8192"),
        (Case(2048, 256, 256), "head_dim 256"),
        (Case(2048, 192, 128), "128 wide"),
        (Case(2048, 64, 64, sinks=True), "sinks"),
        (Case(2048, 64, 64, softcap=50.0), "soft cap"),
        (Case(2048, 64, 64, ways=2), "mesh.context"),
        (Case(2048, 64, 64, dtype="float32"), "float32"),
    ],
)
def test_cudnn_is_used_where_it_can_and_the_reason_is_told_where_not(case, word):
    name, reason = choose("cudnn", case)
    assert name == ("cudnn" if word is None else "blockwise")
    assert reason is None if word is None else word in reason


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ("7.5", "blockwise"),
        ("7.0", "blockwise"),
        ("8.0", "cudnn"),
        ("12.0", "cudnn"),
        (None, "cudnn"),
    ],
)
def test_gpus_before_ampere_do_not_get_cudnn(monkeypatch, capability, name):
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    chosen, reason = choose("cudnn", Case(2048, 64, 64))
    assert chosen == name
    assert name == "cudnn" or f"this GPU has {capability}" in reason
