"""Every dense family matches transformers: logits, loss, gradients, greedy tokens."""

import json

import numpy as np
import pytest

from localtrain.models import spec_from
from localtrain.models.files import HubFiles

FAMILIES = ["qwen3", "qwen2_5", "llama2", "llama3_1", "mistral", "gemma3_text"]
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_logits_match(golden, family):
    g = golden(family)
    logits = g.model().logits(g.tensors["input_ids"], g.tensors["attention_mask"])
    assert logits.dtype == np.float32
    assert np.abs(np.asarray(logits) - g.tensors["logits"])[g.mask].max() <= g.atol


@every_family
def test_loss_and_every_gradient_match(golden, family):
    g = golden(family)
    loss, grads = g.loss_and_grads()
    assert loss == pytest.approx(float(g.tensors["loss"][0]), rel=1e-5)
    assert set(grads) == set(g.facts["grad_norms"])
    for name, norm in g.facts["grad_norms"].items():
        assert np.linalg.norm(grads[name]) == pytest.approx(norm, rel=1e-3, abs=1e-6), name
    whole = {k[5:]: v for k, v in g.tensors.items() if k.startswith("grad.")}
    assert whole
    for name, expected in whole.items():
        bound = max(1e-6, max(1e-3, 10 * g.atol) * np.abs(expected).max())
        assert grads[name].shape == expected.shape
        assert np.abs(grads[name] - expected).max() <= bound, name


@every_family
def test_greedy_tokens_match_with_the_cache(golden, family):
    g = golden(family)
    expected = g.tensors["greedy_tokens"]
    new = g.model().generate(g.tensors["prompt.input_ids"], max_new_tokens=len(expected))
    assert new.dtype == np.int32
    assert new.tolist() == [expected.tolist()]


@every_family
def test_both_config_dialects_give_the_same_spec(golden, family):
    folder = golden(family).folder
    old = json.loads((folder / "config.json").read_text())
    new = json.loads((folder / "config.transformers5.json").read_text())
    assert spec_from(old) == spec_from(new)


@every_family
def test_export_then_import_is_identity(golden, family, tmp_path):
    g = golden(family)
    g.model().save_hub(str(tmp_path))
    before = HubFiles(str(g.folder))
    after = HubFiles(str(tmp_path))
    assert set(before.tensors) == set(after.tensors)
    for name in before.tensors:
        np.testing.assert_array_equal(before.read(name), after.read(name))
    hf = json.loads((tmp_path / "config.json").read_text())
    assert spec_from(hf) == g.model().spec


def test_left_padding_changes_nothing(golden):
    g = golden("llama3_1")
    length = int(g.mask[1].sum())
    ids, mask = np.zeros((1, 40), np.int32), np.zeros((1, 40), np.int32)
    ids[0, -length:], mask[0, -length:] = g.tensors["input_ids"][1, :length], 1
    logits = np.asarray(g.model().logits(ids, mask))[0, -length:]
    assert np.abs(logits - g.tensors["logits"][1, :length]).max() <= g.atol


def test_vision_tensors_are_carried_and_written_back(golden, tmp_path):
    g = golden("gemma3_mm")
    model = g.model()
    model.save_hub(str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    before, after = HubFiles(str(g.folder)), HubFiles(str(tmp_path))
    assert set(before.tensors) == set(after.tensors)
    for name in before.tensors:
        np.testing.assert_array_equal(before.read(name), after.read(name))
