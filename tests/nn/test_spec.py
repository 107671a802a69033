"""What is derived from a spec: stacks, counts, FLOPs."""

import dataclasses

import pytest

from localtrain.nn.spec import Glu, Gqa, Layer, Model, Norm, Rope, find_stacks

LAYER = Layer(Gqa(4, 2, 16, Rope(1e4, 16), 0.25), Glu(64), Norm())


def windowed(window: int | None) -> Layer:
    return dataclasses.replace(LAYER, mixer=dataclasses.replace(LAYER.mixer, window=window))


def shape(pattern: str) -> list[tuple[int, int]]:
    layers = tuple(windowed(None if c == "F" else ord(c)) for c in pattern)
    stacks = find_stacks(layers)
    assert tuple(x for s in stacks for x in s.period * s.repeat) == layers
    return [(len(s.period), s.repeat) for s in stacks]


@pytest.mark.parametrize(
    ("pattern", "stacks"),
    [
        ("F" * 28, [(1, 28)]),
        ("SF" * 18, [(2, 18)]),
        ("SSSSSF" * 4 + "SS", [(6, 4), (1, 2)]),  # Gemma 3 1B
        ("DDD" + "F" * 58, [(1, 3), (1, 58)]),  # DeepSeek V3
        ("SSSF" * 12, [(4, 12)]),
        ("F", [(1, 1)]),
        ("SFDAB", [(1, 1)] * 5),
    ],
)
def test_stacks_are_the_shortest_period_that_covers_most(pattern, stacks):
    assert shape(pattern) == stacks


def test_flops_per_token_by_hand():
    """One layer: 2 FLOPs a multiply-add, backward twice forward, causal attention at half."""
    model = Model(vocab=100, dim=32, layers=(LAYER,), final_norm=Norm(), tied=True, max_length=512)
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32  # q, k and v, o
    ffn = 3 * 32 * 64
    head = 100 * 32
    scores = 12 * 4 * 16 * (256 / 2)
    assert model.model_flops_per_token(256) == 6 * (attention + ffn + head) + scores


def test_a_window_reduces_attention_flops_exactly():
    full, narrow = windowed(None).mixer, windowed(64).mixer
    assert full.keys_per_query(256) == 128
    mean = sum(min(t + 0.5, 64) for t in range(256)) / 256  # the half counts the diagonal
    assert narrow.keys_per_query(256) == pytest.approx(mean, rel=1e-6)
    assert windowed(10_000).mixer.keys_per_query(256) == 128


def test_tied_embeddings_count_once():
    tied = Model(vocab=100, dim=32, layers=(LAYER,), final_norm=Norm(), tied=True, max_length=8)
    untied = dataclasses.replace(tied, tied=False)
    assert untied.parameters() - tied.parameters() == 100 * 32
    assert tied.active_parameters() == tied.parameters()
