"""Properties of the whole network, on tiny models."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain.nn.core import Policy
from localtrain.nn.decoder import Context, build
from localtrain.nn.spec import Glu, Gqa, Layer, LinearScaling, Model, Norm, Rope

jax.config.update("jax_default_matmul_precision", "highest")


def make_layer(window: int | None = None, sandwich: bool = False) -> Layer:
    mixer = Gqa(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=Rope(1e4, 8) if window else Rope(1e6, 8, LinearScaling(2.0)),
        scale=8**-0.5,
        window=window,
        qk_norm=Norm(),
    )
    kind = "sandwich" if sandwich else "plain"
    return Layer(mixer, Glu(48), Norm(plus_one=sandwich), kind)


def make_model(layers, vocab=61, tied=True, **more) -> Model:
    return Model(vocab, 32, tuple(layers), Norm(), tied, max_length=512, **more)


PLAIN = make_model([make_layer()] * 3)
# two kinds of layers in a period of three, twice, and one left over: two stacks
MIXED = make_model([make_layer(5, True), make_layer(5, True), make_layer(None, True)] * 2
                   + [make_layer(5, True)], embed_scale=5.6, softcap=20.0)  # fmt: skip


@cache
def network_and_params(spec: Model, **policy):
    network = build(spec, Policy(**policy))
    return network, jax.jit(network.init)(jax.random.key(0))


def tokens_like(*shape, vocab=61):
    return jax.random.randint(jax.random.key(1), shape, 0, vocab)


def positions_like(tokens_BT):
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)


def run(network, params, tokens_BT, positions_BT=None, segments_BT=None, remat="none"):
    positions_BT = positions_like(tokens_BT) if positions_BT is None else positions_BT
    ctx = Context(tokens_BT, positions_BT, segments_BT)
    return network.logits(params, network.hidden(params, ctx, remat))


def mean_loss(network, params, tokens_BT, remat="none"):
    logp_BTV = jax.nn.log_softmax(run(network, params, tokens_BT, remat=remat)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1))


def grads_of(network, params, tokens_BT, remat="none"):
    return jax.jit(jax.value_and_grad(partial(mean_loss, network), 0), static_argnums=2)(
        params, tokens_BT, remat
    )


def assert_trees_close(a, b, rtol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=rtol * float(jnp.abs(y).max()) + 1e-9)


@pytest.mark.parametrize("spec", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_scan_equals_unrolled(spec):
    network, params = network_and_params(spec)
    unrolled = build(spec, Policy(scan=False))
    tokens_BT = tokens_like(2, 24)
    loss, grads = grads_of(network, params, tokens_BT)
    loss_2, grads_2 = grads_of(unrolled, params, tokens_BT)
    assert float(loss) == pytest.approx(float(loss_2), rel=1e-6)
    assert_trees_close(grads, grads_2, 1e-5)


@pytest.mark.parametrize("remat", ["matmuls", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    network, params = network_and_params(PLAIN)
    tokens_BT = tokens_like(2, 24)
    expected = grads_of(network, params, tokens_BT)
    assert_trees_close(grads_of(network, params, tokens_BT, remat), expected, 1e-5)


def test_rematerialisation_saves_memory():
    network, _ = network_and_params(make_model([make_layer()] * 16))
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)

    def temporary_bytes(remat):
        step = jax.jit(jax.grad(partial(mean_loss, network, remat=remat)))
        compiled = step.lower(network.shapes, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary_bytes(remat) for remat in ("none", "matmuls", "full")]
    assert sizes[0] > 1.2 * sizes[1] > 1.5 * sizes[2]


@pytest.mark.parametrize("spec", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_no_token_depends_on_a_later_one(spec):
    """Causality by gradient: towards every input embedding, of one position's output."""
    network, params = network_and_params(spec)
    tokens_BT = tokens_like(1, 12)

    def output_at(shift_TD, t):
        table_VD = jnp.concatenate([params["embed_VD"][tokens_BT[0]] + shift_TD])
        moved = params | {"embed_VD": table_VD}  # token i is now row i of the table
        ctx = Context(jnp.arange(12)[None], positions_like(tokens_BT))
        return jnp.sum(network.hidden(moved, ctx)[0, t] ** 2 * jnp.arange(32))

    gradient = jax.jit(jax.grad(output_at))
    for t in (0, 5, 11):
        reach = np.abs(gradient(jnp.zeros((12, 32)), t)).max(axis=1)
        assert (reach[: t + 1] > 0).all()
        assert (reach[t + 1 :] == 0).all()


@pytest.mark.parametrize("spec", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_packed_documents_are_isolated(spec):
    network, params = network_and_params(spec)
    a, b = tokens_like(1, 9), tokens_like(1, 14) + 1
    packed = jnp.concatenate([a, b, jnp.zeros((1, 4), jnp.int32)], axis=1)
    positions = jnp.concatenate([jnp.arange(9), jnp.arange(14), jnp.zeros(4, jnp.int32)])[None]
    segments = jnp.array([[1] * 9 + [2] * 14 + [0] * 4])
    together = jax.jit(partial(run, network))(params, packed, positions, segments)
    alone = jax.jit(partial(run, network))
    np.testing.assert_allclose(together[:, :9], alone(params, a), atol=2e-6)
    np.testing.assert_allclose(together[:, 9:23], alone(params, b), atol=2e-6)


def test_gradients_of_packed_documents_add_up():
    network, params = network_and_params(PLAIN)
    a, b = tokens_like(1, 9), tokens_like(1, 14) + 1
    positions = jnp.concatenate([jnp.arange(9), jnp.arange(14)])[None]
    segments = jnp.array([[1] * 9 + [2] * 14])

    def total(params, tokens, positions, segments):
        return jnp.sum(jnp.sin(run(network, params, tokens, positions, segments)))

    grad = jax.jit(jax.grad(total))
    ones = jnp.ones_like
    together = grad(params, jnp.concatenate([a, b], axis=1), positions, segments)
    apart = jax.tree.map(
        jnp.add,
        grad(params, a, positions_like(a), ones(a)),
        grad(params, b, positions_like(b), ones(b)),
    )
    assert_trees_close(together, apart, 1e-5)


def test_a_row_of_padding_changes_nothing():
    network, params = network_and_params(PLAIN)
    tokens_BT = tokens_like(2, 10)
    segments_BT = jnp.array([[1] * 10, [0] * 10])

    def loss(params, row_1):
        tokens = tokens_BT.at[1].set(row_1)
        logits_BTV = run(network, params, tokens, segments_BT=segments_BT)
        return jnp.sum(jnp.where(segments_BT[..., None] > 0, jnp.sin(logits_BTV), 0.0))

    step = jax.jit(jax.value_and_grad(loss))
    first, second = step(params, 0), step(params, tokens_BT[1])
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(first))
    assert_trees_close(first, second, 0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_padding_changes_no_logit(tied):
    spec = make_model([make_layer()] * 2, tied=tied)
    network, params = network_and_params(spec)
    padded = build(spec, Policy(vocab_multiple=64))
    assert padded.vocab == 64
    grown = dict(params)
    grown["embed_VD"] = jnp.pad(params["embed_VD"], ((0, 3), (0, 0)), constant_values=9.0)
    if not tied:
        grown["head_DV"] = jnp.pad(params["head_DV"], ((0, 0), (0, 3)), constant_values=9.0)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(lambda s: s.shape, padded.shapes)
    tokens_BT = tokens_like(1, 8)
    np.testing.assert_allclose(
        run(padded, grown, tokens_BT), run(network, params, tokens_BT), atol=1e-6
    )


@pytest.mark.parametrize(
    ("vocab", "dim", "depth", "tied"),
    [
        (264, 64, 2, True),
        (264, 128, 4, False),
        (2000, 512, 3, False),
        (2000, 1024, 2, True),  # qwen3-0.6b's width, heads and hidden; fewer layers and words
    ],
)
def test_the_first_loss_is_near_ln_vocab(vocab, dim, depth, tied):
    mixer = Gqa(dim // 64, max(1, dim // 128), 128, Rope(1e6, 128), 128**-0.5, qk_norm=Norm())
    layers = (Layer(mixer, Glu(3 * dim), Norm()),) * depth
    spec = Model(vocab, dim, layers, Norm(), tied, max_length=64)
    network, params = network_and_params(spec)
    tokens_BT = tokens_like(2, 32, vocab=vocab)
    loss = float(jax.jit(partial(mean_loss, network))(params, tokens_BT))
    assert loss == pytest.approx(math.log(vocab), abs=0.15)


def test_initial_parameters_depend_on_the_key_only():
    network, params = network_and_params(PLAIN)
    again = jax.jit(network.init)(jax.random.key(0))
    other = jax.jit(network.init)(jax.random.key(1))
    assert_trees_close(params, again, 0.0)
    assert not np.allclose(params["embed_VD"], other["embed_VD"])
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_matrices_decay_and_nothing_else_does():
    layer = make_layer()
    mixer = dataclasses.replace(layer.mixer, qkv_bias=True, sinks=True, out_bias=True)
    spec = make_model([dataclasses.replace(layer, mixer=mixer)] * 2, tied=False)
    network = build(spec)
    decayed = {
        jax.tree_util.keystr(path[-1:], simple=True)
        for path, value in jax.tree_util.tree_leaves_with_path(network.decay)
        if value
    }
    assert decayed == {"wq_DNH", "wk_DKH", "wv_DKH", "wo_NHD", "w_gate_DF", "w_up_DF", "w_down_FD"}


def test_axes_name_every_dimension():
    network, _ = network_and_params(MIXED)
    shapes = jax.tree.leaves(network.shapes)
    axes = jax.tree.leaves(network.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert all(len(s.shape) == len(a) for s, a in zip(shapes, axes, strict=True))
    words = {word for a in axes for word in a}
    assert words == {"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"}


def test_parameter_count_of_the_spec_is_that_of_the_arrays():
    mixer = dataclasses.replace(make_layer().mixer, qkv_bias=True, out_bias=True, sinks=True)
    odd = Layer(mixer, Glu(48, "gelu", bias=True), Norm(), "sandwich")
    for spec in (PLAIN, MIXED, make_model([odd] * 2, tied=False)):
        sizes = [math.prod(s.shape) for s in jax.tree.leaves(build(spec).shapes)]
        assert sum(sizes) == spec.parameters()


def test_bfloat16_compute_stays_near_float32():
    network, params = network_and_params(PLAIN)
    half = build(PLAIN, Policy(compute_dtype=jnp.bfloat16))
    tokens_BT = tokens_like(2, 24)
    logits = run(half, params, tokens_BT)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, run(network, params, tokens_BT), atol=0.05)


def test_the_loop_over_layers_is_traced_once():
    """The program must not grow with depth."""

    def size(depth):
        network = build(make_model([make_layer()] * depth))
        tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        lowered = jax.jit(jax.grad(partial(mean_loss, network))).lower(network.shapes, tokens)
        return len(lowered.as_text().splitlines())

    assert size(3) == size(24)
