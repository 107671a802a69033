"""Layers with a window keep the last tokens: the same results, in memory that does not grow."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import localtrain
from localtrain import api, decode, generate
from localtrain.chat import Chat
from localtrain.complete import Settings, Writer
from localtrain.data.template import encode_chat, find_template
from localtrain.decode import Decoder
from localtrain.models import spec_from
from localtrain.models.describe import describe
from localtrain.nn import cached
from localtrain.nn.cached import capacity, empty, extend
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Context, Network, Params, build
from localtrain.nn.spec import Glu, Gqa, Layer, Model, Norm, Rope

TESTS = Path(__file__).parent
GOLDEN = TESTS.parent.parent / "shared" / "golden" / "mistral"
VOCAB = 61
STACKS = {  # windows of the layers
    "window": (9, 9, 9),
    "mixed": (9, None, 9, None, 9),
    "two windows": (40, 9, 40, 9),
    "longer than all": (500, None, 500, None),
}


def spec_of(windows: tuple[int | None, ...]) -> Model:
    def layer(window: int | None) -> Layer:
        mixer = Gqa(4, 2, 8, Rope(1e4, 8), 8**-0.5, window, qk_norm=Norm(), sinks=window == 40)
        return Layer(mixer, Glu(48), Norm())

    return Model(VOCAB, 32, tuple(map(layer, windows)), Norm(), True, max_length=4096)


@cache
def params_of(windows) -> Params:
    params = jax.jit(build(spec_of(windows)).init)(jax.random.key(0))
    return jax.tree.map(lambda a: a * 8 if a.ndim > 2 else a, params)  # attention that chooses


@cache
def network_of(windows, block: int) -> Network:
    """Kept with its compiled programs, which depend on the size of a block as well."""
    return build(spec_of(windows), Policy())


def model_of(windows) -> tuple[Network, Params]:
    return network_of(windows, cached.BLOCK), params_of(windows)


@pytest.fixture(params=[False, True], ids=["by_period", "whole"])
def path(request, monkeypatch) -> None:
    if request.param:  # what runs on accelerators: all layers in one program, caches stacked
        monkeypatch.setattr(decode, "_only_device", lambda params: None)


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Slots come round often."""
    monkeypatch.setattr(cached, "BLOCK", 16)
    monkeypatch.setattr(cached, "SPARE", 4)
    monkeypatch.setattr(decode, "SHORTEST_CACHE", 512)  # one size, one set of programs
    monkeypatch.setattr(decode, "PIECES", (64,))  # padding longer than what is spare


@partial(jax.jit, static_argnums=0)
def full_hidden(network: Network, params, tokens_BT, first_B):
    columns_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = columns_T - first_B[:, None]
    segments_BT = (positions_BT >= 0).astype(jnp.int32)
    ctx = Context(tokens_BT, jnp.maximum(positions_BT, 0), segments_BT)
    return network.hidden(params, ctx)


def draw(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCAB, (batch, length)).astype(np.int32)


def feed(decoder: Decoder, tokens_BT: np.ndarray) -> None:
    """As `stream` does with one token, else as a prompt."""
    if tokens_BT.shape[1] > 1:
        decoder.read(tokens_BT)
    else:
        decoder._make_room(1)
        decoder._advance(tokens_BT, 1)


def assert_decodes(windows, counts: list[int], first_B: list[int]) -> Decoder:
    """The state after each piece is that of the full forward pass."""
    network, params = model_of(windows)
    first_B = np.array(first_B, np.int32)
    tokens_BT = draw(len(first_B), sum(counts))
    full_BTD = np.asarray(full_hidden(network, params, tokens_BT, first_B))
    decoder, at = Decoder(network, params, first_B), 0
    for count in counts:
        feed(decoder, tokens_BT[:, at : at + count])
        at += count
        np.testing.assert_allclose(decoder._h_BD, full_BTD[:, at - 1], atol=5e-5)
    return decoder


def slots_of(decoder: Decoder) -> set[int]:
    leaves = jax.tree_util.tree_leaves_with_path(decoder._place.cache)
    return {a.shape[-2] for path, a in leaves if getattr(path[-1], "key", "") == "v_BKSH"}


@pytest.mark.parametrize("windows", STACKS.values(), ids=STACKS)
def test_decoding_over_many_turns_of_the_slots_equals_the_full_pass(windows, path, small_blocks):
    """A prompt longer than the slots, single tokens, pieces that go on past the end."""
    counts = [70, *[1] * 40, 5, 30, *[1] * 20, 64, 3]
    decoder = assert_decodes(windows, counts, [0, 0, 0])
    expected = {capacity(window, decoder.slots) for window in windows}
    assert slots_of(decoder) == expected
    assert all(capacity(w, 10**6) < w + 64 for w in windows if w)


def test_rows_of_different_lengths_equal_the_full_pass(path, small_blocks):
    windows = STACKS["mixed"]
    assert_decodes(windows, [75, *[1] * 40, 20, 1, 1], [0, 60, 7])
    assert_decodes(windows, [2, *[1] * 40], [0, 1, 0])


def test_slots_of_the_usual_size_come_round(path):
    decoder = assert_decodes((200, None, 200, None), [700, 1, 1, 40, 1], [0, 450])
    assert slots_of(decoder) == {512, 1024} and decoder.slots == 1024


def test_a_cache_that_grows_to_its_window_keeps_what_it_holds(path, small_blocks, monkeypatch):
    monkeypatch.setattr(decode, "SHORTEST_CACHE", 16)
    monkeypatch.setattr(decode, "PIECES", (32,))
    decoder = assert_decodes(STACKS["two windows"], [10, 20, *[1] * 33], [0, 0, 0])
    assert capacity(40, 32) == 32 and slots_of(decoder) == {48, 16} and decoder.slots == 64


def test_the_cache_of_a_window_does_not_grow(path, small_blocks):
    decoder = Decoder(*model_of(STACKS["mixed"]), np.zeros(3, np.int32))
    for length in (70, 500):
        decoder.read(draw(3, length))
    assert decoder.slots == 1024 and slots_of(decoder) == {16, 1024}
    decoder = Decoder(*model_of(STACKS["window"]), np.zeros(3, np.int32))
    sizes = []
    for _ in range(3):
        decoder.read(draw(3, 600))
        sizes.append(sum(a.nbytes for a in jax.tree.leaves(decoder._place.cache)))
    assert sizes[0] == sizes[1] == sizes[2] and slots_of(decoder) == {16}


@pytest.mark.parametrize("total", [8, 16])
def test_every_slot_holds_the_last_real_token_that_goes_there(total):
    slots, numbers = empty(1, 1, total, 1, jnp.int32), np.full(total, -1)
    end = 0
    write = jax.jit(extend)
    for count, length in ((3, 3), (1, 1), (7, 12), (1, 1), (5, 8), (20, 32), (1, 1), (16, 16)):
        new_S = np.pad(np.arange(end, end + count), (0, length - count), constant_values=-9)
        entry = {
            "k_BKHS": jnp.asarray(new_S, jnp.int32).reshape(1, 1, 1, -1),
            "v_BKSH": jnp.asarray(new_S, jnp.int32).reshape(1, 1, -1, 1),
        }
        slots = write(slots, entry, end, count)
        for number in range(end, end + count):
            numbers[number % total] = number
        end += count
        used = numbers >= 0
        for array in slots.values():
            np.testing.assert_array_equal(np.asarray(array).ravel()[used], numbers[used])


@pytest.mark.parametrize("side", ["left", "right"])
def test_generated_tokens_are_those_of_the_full_pass(side, path, small_blocks):
    windows = STACKS["mixed"]
    network, params = model_of(windows)
    rows = [draw(1, n)[0].tolist() for n in (50, 3, 12)]
    longest, steps = 50, 30
    pads = [[0] * (longest - len(row)) for row in rows]
    pairs = list(zip(pads, rows, strict=True))
    ids = np.array([p + r if side == "left" else r + p for p, r in pairs])
    masks = [[0] * len(p) + [1] * len(r) for p, r in pairs]
    mask = np.array(masks if side == "left" else [m[::-1] for m in masks])
    new = generate.generate(network, params, ids, mask, max_new_tokens=steps)
    texts = np.array([p + r + n for (p, r), n in zip(pairs, new.tolist(), strict=True)])
    first_B = np.array([len(p) for p in pads])
    logits = network.logits(params, full_hidden(network, params, texts, first_B))
    np.testing.assert_array_equal(new, np.argmax(logits, -1)[:, longest - 1 : -1])


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the large fixtures are not here")
def test_greedy_tokens_of_a_model_of_windows_are_those_of_transformers(path, small_blocks):
    tensors = load_file(GOLDEN / "golden.safetensors")
    model = localtrain.load(str(GOLDEN))
    assert all(layer.mixer.window for layer in model.spec.layers)
    expected = tensors["greedy_tokens"].tolist()
    new = model.generate(tensors["prompt.input_ids"], max_new_tokens=len(expected))
    assert new.tolist() == [expected]


def test_a_window_forgets_what_it_still_holds_and_says_when_it_cannot(path, small_blocks):
    windows = STACKS["mixed"]
    network, params = model_of(windows)
    assert capacity(9, 10**6) == 16
    ids, others, first_B = draw(3, 100), draw(3, 50), np.zeros(3, np.int32)
    used = Decoder(network, params, first_B)
    used.read(ids)
    assert [n for n in range(101) if used.rewinds(n)] == [0, *range(92, 101)]
    for length in (95, 93, 92):
        assert used.rewinds(length)
        used.rewind(length)
        used.read(others[:, :5])
        fresh = Decoder(network, params, first_B)
        fresh.read(np.concatenate([ids[:, :length], others[:, :5]], axis=1))
        np.testing.assert_allclose(used._h_BD, fresh._h_BD, atol=2e-5)
    used.rewind(0)
    used.read(others)
    fresh = Decoder(network, params, first_B)
    fresh.read(others)
    np.testing.assert_allclose(used._h_BD, fresh._h_BD, atol=2e-5)
    assert not used.rewinds(20) and used.rewinds(42)


@pytest.mark.parametrize(("block", "holds"), [(16, False), (128, True)])
def test_a_conversation_goes_on_as_a_fresh_one(block, holds, small_blocks, tmp_path, monkeypatch):
    """What was written reads as other tokens, so a turn goes back into the last answer: further
    than small slots hold, which then are read again."""
    monkeypatch.setattr(cached, "BLOCK", block)
    went_back, rewinds = [], Decoder.rewinds

    def record(decoder: Decoder, length: int) -> bool:
        went_back.append(rewinds(decoder, length))
        return went_back[-1]

    monkeypatch.setattr(Decoder, "rewinds", record)
    hf = json.loads((TESTS / "golden_small" / "gemma3_text" / "config.json").read_text())
    hf |= {"vocab_size": 512, "max_position_embeddings": 2000}
    network = build(spec_from(hf))
    assert {layer.mixer.window for layer in network.spec.layers} == {8, None}
    model = api.LanguageModel(hf, network, jax.jit(network.init)(jax.random.key(3)))
    model.save_hub(str(tmp_path / "hub"))
    for file in (TESTS / "data" / "tokenizer").iterdir():
        shutil.copy(file, tmp_path / "hub")
    writer = Writer.open(str(tmp_path / "hub"))
    template = find_template(writer.tokenizer)
    kept = Chat(writer, template, Settings(max_new_tokens=30, temperature=1.5, seed=9))
    for turn, text in enumerate(["Hello", "Hello again", "And again", "The last"]):
        fresh = Chat(writer, template, kept.settings)
        fresh.messages, fresh.turns = list(kept.messages), turn
        answer = "".join(kept.answer(text))
        assert "".join(fresh.answer(text)) == answer
    ids, _ = encode_chat(template, writer.tokenizer, kept.messages)
    assert len(ids) > 100 and set(went_back) == {holds}


def test_a_token_more_adds_nothing_to_the_cache_of_a_window():
    """Gemma 3 1B: 22 of 26 layers have windows; 1 kv head of 256, keys and values, 2 bytes."""
    assert describe("gemma-3-1b-it")["cache_bytes_per_token"] == 4 * 2 * 1 * 256 * 2 == 4096
