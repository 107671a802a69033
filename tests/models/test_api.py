"""The Python API beyond parity: presets, types, and arguments that cannot be used."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import localtrain
from localtrain import api
from localtrain.errors import ConfigError, DataError

IDS = np.array([[1, 2, 3, 4]])


@pytest.fixture(scope="module")
def tiny():
    return localtrain.load("qwen3-tiny", seed=3)


def test_load_is_the_public_name(tiny):
    assert localtrain.load is api.load
    assert tiny.spec.vocab == 264


def test_a_preset_starts_from_its_seed_near_ln_vocab(tiny):
    loss, grads = tiny.loss_and_grads(np.arange(200)[None] % 97, np.arange(200)[None] % 97)
    assert loss == pytest.approx(math.log(264), abs=0.15)
    assert grads["model.layers.3.self_attn.k_proj.weight"].shape == (64, 128)
    assert all(np.isfinite(g).all() and g.any() for g in grads.values())
    other = localtrain.load("qwen3-tiny", seed=4)
    assert not np.allclose(other.logits(IDS), tiny.logits(IDS))


def test_bfloat16_is_held_and_computed_when_asked(tiny):
    half = localtrain.load("qwen3-tiny", dtype="bfloat16", seed=3)
    assert half.params["embed_VD"].dtype == jnp.bfloat16
    logits = half.logits(IDS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.logits(IDS), atol=0.1)


def test_labels_that_are_ignored_do_not_count(tiny):
    labels = np.array([[-100, -100, 7, -100]])
    loss, _ = tiny.loss_and_grads(IDS, labels)
    logits = np.asarray(tiny.logits(IDS))[0, 1]  # position 1 predicts label 2
    assert loss == pytest.approx(np.log(np.exp(logits).sum()) - logits[7], rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[1, 2]], r"labels have the shape \[1, 2\], input_ids \[1, 4\]"),
        ([[5, -100, -100, -100]], "no label is trained"),
        ([[1, 2, 264, 3]], "a label is outside of 0 to 263"),
        ([[1, -7, 3, 3]], "a label is outside of 0 to 263"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tiny, labels, message):
    with pytest.raises(DataError, match=message):
        tiny.loss_and_grads(IDS, labels)


def test_an_unknown_dtype_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="dtype is 'int8'; known are float32"):
        localtrain.load("qwen3-tiny", dtype="int8")
    with pytest.raises(ConfigError, match="dtype is 'fp8'"):
        tiny.save_hub(str(tmp_path / "out"), dtype="fp8")
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean qwen3-tiny"):
        localtrain.load("qwen3-tinny")
