"""Order: keyed permutations and mixtures, at any position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrain.data.order import MAX_WEIGHT, Mixture, Order, key_of, permute, whole_weights

FAR = [0, 1, 10**9, 10**12]


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_visits_every_row_once(n, key):
    image = permute(np.arange(n), n, key)
    assert sorted(image.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [10**9, 10**12, 2**40, 2**40 + 1])
def test_a_permutation_of_many_rows_needs_no_array_of_them(n):
    index = np.concatenate([np.arange(1000), np.arange(n - 1000, n)])
    image = permute(index, n, 7)
    assert len(np.unique(image)) == len(index)
    assert image.min() >= 0 and image.max() < n
    assert abs(image.mean() / n - 0.5) < 0.05


def test_the_permutation_is_fixed_for_ever():
    """Other numbers here would silently reorder every run that is resumed with a newer version."""
    assert permute(np.arange(8), 8, 1).tolist() == [0, 1, 2, 5, 6, 7, 3, 4]
    assert permute(np.array([0, 1, 10**9]), 10**12, 1).tolist() == [
        63095922399,
        200778999884,
        219091701445,
    ]
    assert key_of(1, 2, 3) == 9812528628958509896


def test_every_place_is_about_equally_likely_even_for_few_rows():
    for n in (2, 3, 5):
        counts = np.zeros((n, n))
        for key in range(600):
            counts[np.arange(n), permute(np.arange(n), n, key_of(key))] += 1
        assert np.abs(counts / 600 - 1 / n).max() < 0.1


def test_neighbours_do_not_stay_neighbours():
    image = permute(np.arange(10_000), 10_000, 3)
    steps = np.abs(np.diff(image))
    assert (steps == 1).mean() < 0.01
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05


def test_each_epoch_is_complete_and_has_its_own_order():
    order = Order(57, seed=3)
    epochs = [order(np.arange(e * 57, (e + 1) * 57)).tolist() for e in (0, 1, 10**7)]
    assert all(sorted(epoch) == list(range(57)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Order(57, seed=4)(np.arange(57)).tolist() != epochs[0]


def test_a_position_does_not_depend_on_what_is_asked_with_it():
    order = Order(57, seed=3)
    together = order(np.arange(200))
    alone = [int(order(np.array([i]))[0]) for i in range(200)]
    assert together.tolist() == alone


def test_without_shuffling_rows_come_as_they_are():
    assert Order(3, 0, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=9),
    seed=st.integers(0, 2**32),
    start=st.sampled_from(FAR),
)
def test_a_mixture_counts_each_source_without_gaps(weights, seed, start):
    source, number = Mixture(weights, seed)(np.arange(start, start + 500))
    for one in np.unique(source):
        numbers = number[source == one]
        assert np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers)))
    if start == 0:
        assert all(number[source == one][0] == 0 for one in np.unique(source))


@pytest.mark.parametrize(
    "weights", [[1, 1], [0.7, 0.3], [0.5, 0.3, 0.2], [10, 1, 1, 1, 5], [1e-3, 1]]
)
def test_shares_are_exact_at_every_prefix(weights):
    whole = np.array(whole_weights(weights))
    share = whole / whole.sum()
    assert np.allclose(share, np.array(weights) / sum(weights), rtol=1e-9)
    mixture = Mixture(weights, seed=5)
    source, _ = mixture(np.arange(20_000))
    counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    expected = np.arange(1, 20_001)[:, None] * share
    assert np.abs(counts - expected).max() <= np.ceil(np.log2(len(weights))) + 1
    for far in FAR[2:]:
        _, number = mixture(np.arange(far, far + 1000))
        source, _ = mixture(np.arange(far, far + 1000))
        for one in np.unique(source):
            assert np.abs(number[source == one][0] - far * share[one]) < 1010


def test_weights_become_whole_numbers_in_the_same_ratio():
    assert whole_weights([0.7, 0.3]) == [7, 3]
    assert whole_weights([1.0, 1.0]) == [1, 1]
    assert whole_weights([5]) == [1]
    assert whole_weights([0.5, 0.25]) == [2, 1]
    odd = whole_weights([np.pi, np.e, 1e-9])
    assert min(odd) == 1 and abs(sum(odd) - MAX_WEIGHT) <= 3
    assert abs(odd[0] / odd[1] - np.pi / np.e) < 1e-5


def test_a_mixture_depends_on_the_seed():
    a, b = (Mixture([3, 2, 2], seed)(np.arange(100))[0].tolist() for seed in (1, 2))
    assert a != b
