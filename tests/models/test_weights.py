"""The rule engine by itself: every transform is undone by its inverse, gaps are found."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from localtrain.errors import DataError
from localtrain.models.weights import (
    Rule,
    Table,
    check_tensors,
    expand,
    export_tensors,
    flatten,
    parts_by_leaf,
    put,
    read_from,
    read_leaf,
)


def fake(vocab=7, **shapes):
    """A network of one stack of two layers, or of none, with the given shapes."""
    tree: dict = {}
    for path, shape in shapes.items():
        put(tree, tuple(path.split("__")), jax.ShapeDtypeStruct(shape, np.float32))
    stacks = [SimpleNamespace(repeat=2, period=(None,))] if "stack_0" in tree else []
    spec = SimpleNamespace(vocab=vocab)
    return SimpleNamespace(shapes=tree, stacks=stacks, spec=spec)


def tensors_for(entries):
    random = np.random.default_rng(0)
    return {e.name: random.normal(size=e.shape).astype(np.float32) for e in entries.values()}


def there_and_back(rules, network):
    entries = expand(Table(rules), network)
    hub = tensors_for(entries)
    tree: dict = {}
    for leaf, parts in parts_by_leaf(entries).items():
        shape = flatten(network.shapes)[leaf].shape
        put(tree, leaf, read_leaf(parts, shape, np.float32, hub.__getitem__))
    back = dict(export_tensors(entries, read_from(tree)))
    assert back.keys() == hub.keys()
    for name in hub:
        np.testing.assert_array_equal(back[name], hub[name])
    return hub, tree


def test_heads_are_split_from_rows_and_moved_behind_the_input():
    network = fake(w=(3, 2, 4))
    hub, tree = there_and_back([Rule("q.weight", "w", "(N H) D -> D N H")], network)
    assert hub["q.weight"].shape == (8, 3)
    np.testing.assert_array_equal(tree["w"][1, 1, 2], hub["q.weight"][1 * 4 + 2, 1])


def test_one_tensor_of_the_hub_becomes_several_parameters():
    network = fake(gate=(3, 5), up=(3, 5))
    hub, tree = there_and_back([Rule("both", ("gate", "up"), "(P F) D -> D F")], network)
    assert hub["both"].shape == (10, 3)
    np.testing.assert_array_equal(tree["gate"], hub["both"][:5].T)
    np.testing.assert_array_equal(tree["up"], hub["both"][5:].T)


def test_interleaved_columns_are_split_too():
    network = fake(gate=(4, 3, 5), up=(4, 3, 5))
    hub, tree = there_and_back([Rule("both", ("gate", "up"), "E D (F P) -> E D F")], network)
    np.testing.assert_array_equal(tree["up"], hub["both"][..., 1::2])


def test_one_tensor_for_each_expert_is_stacked():
    network = fake(stack_0__layer_0__up=(2, 4, 3, 5))
    rule = Rule("layers.{layer}.experts.{E}.up", "up", "F D -> E D F")
    hub, tree = there_and_back([rule], network)
    assert len(hub) == 8
    name = "layers.1.experts.3.up"
    np.testing.assert_array_equal(tree["stack_0"]["layer_0"]["up"][1, 3], hub[name].T)


def test_vocabulary_padding_is_zero_and_dropped_again():
    hub, tree = there_and_back([Rule("e", "embed", "V D -> V D")], fake(vocab=7, embed=(8, 3)))
    assert hub["e"].shape == (7, 3)
    assert not tree["embed"][7].any()


def test_a_parameter_without_a_rule_is_our_bug():
    with pytest.raises(AssertionError, match=r"no weight rule writes the parameters \['b'\]"):
        expand(Table([Rule("a", "a", "D -> D")]), fake(a=(3,), b=(3,)))


def test_missing_extra_and_misshaped_tensors_are_named():
    table = Table([Rule(name, name, "D -> D") for name in "abc"], carried=("vision.",))
    entries = expand(table, fake(a=(3,), b=(3,), c=(3,)))
    shapes = {"a": (3,), "b": (4,), "vision.x": (1,), "what.is.this": (2,)}
    with pytest.raises(DataError) as caught:
        check_tensors(entries, shapes, table, "some/folder", tied=True)
    message = str(caught.value)
    assert "some/folder" in message
    assert "1 missing: c" in message
    assert "1 not known: what.is.this" in message
    assert "b is [4], the config gives [3]" in message
    assert "vision" not in message
    check_tensors(entries, {"a": (3,), "b": (3,), "c": (3,)}, table, "some/folder", tied=True)


def test_gradients_go_through_the_rules_like_weights():
    """The rules are linear and orthogonal: <Hub tensor, Hub gradient> is kept."""
    network = fake(w=(3, 2, 4))
    entries = expand(Table([Rule("q", "w", "(N H) D -> D N H")]), network)
    random = np.random.default_rng(0)
    weight, gradient = (random.normal(size=(3, 2, 4)) for _ in range(2))
    ours = np.sum(weight * gradient)
    there = [dict(export_tensors(entries, read_from({"w": x})))["q"] for x in (weight, gradient)]
    assert np.sum(there[0] * there[1]) == pytest.approx(ours)
