"""Generation: the cache, sampling, rows of different lengths, stop texts, the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import localtrain
from localtrain import api, decode, generate, sampling
from localtrain.complete import Completion, Line, Settings, Writer, encode_prompt, load_in_use
from localtrain.data.tokenizer import load_tokenizer
from localtrain.decode import Decoder
from localtrain.errors import ConfigError, DataError
from localtrain.models import spec_from
from localtrain.nn.attend import attend
from localtrain.nn.cached import Slots, attend_cached, empty, extend, grow
from localtrain.nn.core import Policy
from localtrain.nn.decoder import build
from localtrain.sampling import Sampling, choose, row_keys

TESTS = Path(__file__).parent
FULL, SMALL = TESTS.parent.parent / "shared" / "golden", TESTS / "golden_small"
TOKENIZER = TESTS / "data" / "tokenizer"
FAMILIES = ["qwen3", "llama3_1", "gemma3_text"]  # plain, scaled positions, windows


def golden_folder(family: str) -> Path:
    return FULL / family if (FULL / family).is_dir() else SMALL / family


@cache
def model_of(family: str) -> api.LanguageModel:
    return localtrain.load(str(golden_folder(family)))


@pytest.fixture(scope="session")
def hub(tmp_path_factory) -> Path:
    """A Hub folder with the golden tokenizer and more rows in the matrix than that has ids."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    hf = json.loads((SMALL / "qwen3" / "config.json").read_text()) | {"vocab_size": 520}
    network = build(spec_from(hf))
    api.LanguageModel(hf, network, jax.jit(network.init)(jax.random.key(3))).save_hub(str(folder))
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    return folder


def run_command(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "localtrain", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)


# the cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [False, True], ids=["by_period", "whole"])
def test_greedy_tokens_are_those_of_transformers(family, whole, monkeypatch):
    if whole:  # what runs on accelerators: all layers in one program, caches stacked
        monkeypatch.setattr(decode, "_only_device", lambda params: None)
    tensors = load_file(golden_folder(family) / "golden.safetensors")
    expected = tensors["greedy_tokens"]
    new = model_of(family).generate(tensors["prompt.input_ids"], max_new_tokens=len(expected))
    assert new.dtype == np.int32 and new.tolist() == [expected.tolist()]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_cached_decoding_equals_the_full_forward_pass(family):
    """Over piece ends, a cache that grows, and single tokens; gemma3 has windows of 8."""
    model = model_of(family)
    ids = np.random.default_rng(0).integers(3, 250, (2, 260)).astype(np.int32)
    full = np.asarray(model.logits(ids))
    decoder = Decoder(model.network, model.params, np.zeros(2, np.int32))
    at = 0
    with jax.default_matmul_precision("highest"):
        for count in (70, 1, 1, 186, 1, 1):
            tokens_BT = ids[:, at : at + count]
            if count > 1:
                decoder.read(tokens_BT)
            else:  # as `stream` does
                decoder._make_room(1)
                decoder._advance(tokens_BT, 1)
            at += count
            got = model.network.logits(model.params, decoder._h_BD)
            np.testing.assert_allclose(got, full[:, at - 1], atol=2e-4)
    assert decoder.slots == 512 and decoder.length == 260


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 7, "softcap": 2.0}, {"window": 100, "sinks_N": np.array([0.3, -1, 2, 0])}],
    ids=str,
)
def test_attention_over_a_cache_equals_attention_over_the_sequence(length, options):
    batch, total, heads, kv_heads, head_dim = 2, 300, 4, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    q_BTNH = jax.random.normal(keys[0], (batch, total, heads, head_dim))
    k_BTKH, v_BTKH = jax.random.normal(keys[1], (2, batch, total, kv_heads, head_dim))
    first_B = np.array([0, 13])
    segments_BT = (np.arange(total) >= first_B[:, None]).astype(np.int32)
    expected = attend(q_BTNH, k_BTKH, v_BTKH, segments_BT, scale=0.3, **options)
    start = total - length
    cache = {
        "k_BKHS": jnp.full((batch, kv_heads, head_dim, 512), 9.0),  # what is stale must not count
        "v_BKSH": jnp.full((batch, kv_heads, 512, head_dim), 9.0),
    }
    cache["k_BKHS"] = cache["k_BKHS"].at[..., :start].set(k_BTKH[:, :start].transpose(0, 2, 3, 1))
    cache["v_BKSH"] = cache["v_BKSH"].at[:, :, :start].set(v_BTKH[:, :start].transpose(0, 2, 1, 3))
    slots = Slots(jnp.int32(start), jnp.asarray(first_B))
    out, entry = attend_cached(
        q_BTNH[:, start:], k_BTKH[:, start:], v_BTKH[:, start:], cache, slots, scale=0.3, **options
    )
    np.testing.assert_allclose(out, expected[:, start:], atol=2e-6)
    larger = jax.eval_shape(lambda: empty(batch, kv_heads, 768, head_dim, jnp.float32))
    whole = extend(grow(cache, larger), entry, slots.start, length)
    assert whole["k_BKHS"].shape == larger["k_BKHS"].shape
    np.testing.assert_array_equal(whole["v_BKSH"][:, :, :total], v_BTKH.transpose(0, 2, 1, 3))


def test_a_step_writes_the_cache_in_place_and_reads_the_weights_where_they_are():
    model = model_of("qwen3")
    decoder = Decoder(model.network, model.params)
    decoder.read(np.array([[5, 6, 7]]))

    def places() -> list[int]:
        return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(decoder._place.cache["stacks"])]

    before = places()
    for _ in decoder.stream(5, Sampling(), row_keys(0, [np.array([5])])):
        pass
    assert places() == before
    stacked = model.params["stack_0"]["layer_0"]["ffn"]["w_up_DF"]
    apart = [period["layer_0"]["ffn"]["w_up_DF"] for period in decoder._place.stacks[0]]
    size = stacked[0].nbytes
    assert [a.unsafe_buffer_pointer() - stacked.unsafe_buffer_pointer() for a in apart] == [
        n * size for n in range(len(apart))
    ]


def test_a_cache_that_was_rewound_forgets():
    model = model_of("qwen3")
    used = Decoder(model.network, model.params)
    used.read(np.array([[9, 8, 7, 6, 5, 4]]))
    assert used.rewinds(2)
    used.rewind(2)
    used.read(np.array([[3, 2]]))
    fresh = Decoder(model.network, model.params)
    fresh.read(np.array([[9, 8, 3, 2]]))
    np.testing.assert_allclose(used._h_BD, fresh._h_BD, atol=1e-5)


def test_caches_come_in_few_sizes():
    assert [decode.slots_for(n) for n in (1, 256, 257, 4096, 4097, 9000)] == [
        *(256, 256, 512, 4096, 8192, 12288)
    ]
    assert [decode.padded_length(n) for n in (1, 64, 65, 300, 512, 513)] == [
        *(16, 64, 128, 512, 512, 528)
    ]


# rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 11, "top_p": 0.95}], ids=str)
def test_a_row_gets_what_it_gets_alone_whatever_is_beside_it(options):
    model = model_of("llama3_1")
    rows = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [100, 3, 77, 12]]
    longest = max(map(len, rows))
    left = [[0] * (longest - len(row)) + row for row in rows]
    right = [row + [0] * (longest - len(row)) for row in rows]
    gaps = [row[:1] + [0] * (longest - len(row)) + row[1:] for row in rows]

    def write(ids, mask=None):
        new = generate.generate(
            model.network, model.params, np.array(ids), mask, max_new_tokens=9, **options
        )
        return new.tolist()

    alone = [write([row])[0] for row in rows]
    for padded in (left, right, gaps):
        assert write(padded, np.array(padded) != 0) == alone
    assert write(left[:2], np.array(left[:2]) != 0) == alone[:2]


def test_seeds_decide_and_equal_prompts_differ():
    model = model_of("qwen3")

    def write(rows, **options):
        return generate.generate(
            model.network,
            model.params,
            np.array(rows),
            max_new_tokens=12,
            temperature=1.5,
            **options,
        ).tolist()

    twice = write([[5, 6], [5, 6]], seed=1)
    assert twice[0] != twice[1]
    assert write([[5, 6], [5, 6]], seed=1) == twice
    assert write([[5, 6]], seed=1) == twice[:1] != write([[5, 6]], seed=2)
    assert write([[5, 6], [5, 6]], seed=[2, 1])[1] == twice[0]
    with pytest.raises(ConfigError, match="1 seeds for 2 rows"):
        write([[5, 6], [5, 6]], seed=[2])


def test_a_stopped_row_goes_on_with_its_stop_id_and_all_stopped_ends():
    model = model_of("qwen3")
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    options = {"max_new_tokens": 8, "temperature": 2.0, "seed": 3}
    free = model.generate(ids, **options)
    for stops in ([free[0, 2]], [free[0, 2], free[1, 4]], []):
        ends = [next((i for i, t in enumerate(row) if t in stops), 8) for row in free]
        length = min(max(ends) + 1, 8)
        expected = [
            [*row[: end + 1], *[row[min(end, 7)]] * 8][:length]
            for row, end in zip(free.tolist(), ends, strict=True)
        ]
        assert model.generate(ids, **options, stop_ids=stops).tolist() == expected
    assert length == 8 and model.generate(ids, max_new_tokens=0).shape == (2, 0)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[]], None, "at least one token"),
        ([[1.5]], None, "whole numbers"),
        ([[1, 300]], None, r"input_ids\[0, 1\] is 300; this model knows the ids 0 to 255"),
        ([[1, 2]], [[0, 0]], "at least one token in each row"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(ids, mask, message):
    with pytest.raises(DataError, match=message):
        model_of("qwen3").generate(ids, mask, max_new_tokens=1)


# sampling ---------------------------------------------------------------------------------------


def kept(logits, **settings) -> set[int]:
    how = Sampling(temperature=1.0, **settings)
    cut = sampling.cut(how.kind, jnp.asarray([logits], jnp.float32), how.numbers())
    return set(np.flatnonzero(np.isfinite(np.asarray(cut)[0])).tolist())


def test_cuts_keep_the_tokens_that_sorting_would():
    logits = np.random.default_rng(1).normal(size=500) * 3
    order = np.argsort(-logits)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    for k in (1, 7, 499, 500, 10**6):
        assert kept(logits, top_k=k) == set(order[:k].tolist())
    for share in (1e-6, 0.3, 0.9, 0.999):
        count = int(np.searchsorted(np.cumsum(p[order]), share) + 1)
        assert kept(logits, top_p=share) == set(order[:count].tolist())
    assert kept(logits, top_p=1.0) == set(range(500))
    for share in (0.0, 0.05, 1.0):
        assert kept(logits, min_p=share) == set(np.flatnonzero(p >= share * p.max()).tolist())
    # top-p measures what top-k left
    inside = p[order[:5]] / p[order[:5]].sum()
    count = int(np.searchsorted(np.cumsum(inside), 0.8) + 1)
    assert kept(logits, top_k=5, top_p=0.8) == set(order[:count].tolist())


def test_draws_follow_the_distribution():
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    how = Sampling(temperature=1.0, top_k=3)
    keys = row_keys(list(range(4000)), [np.zeros(1)] * 4000)
    tokens = choose(how.kind, jnp.tile(logits, (4000, 1)), how.numbers(), keys, 0)
    counts = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(counts, [5 / 9, 2.5 / 9, 1.5 / 9, 0], atol=0.03)


def test_greedy_takes_the_lowest_of_equal_ids_and_no_padding_id():
    logits = jnp.array([[0.0, 2.0, 2.0, 9.0]])
    greedy, hot = Sampling(), Sampling(temperature=5.0)
    keys = row_keys(0, [np.zeros(1)])
    assert choose(greedy.kind, logits, {}, keys, 0, vocab=3).tolist() == [1]
    for turn in range(50):
        assert choose(hot.kind, logits, hot.numbers(), keys, turn, vocab=3)[0] < 3


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"min_p": 2}],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Settings(**settings)


# text -------------------------------------------------------------------------------------------


def test_text_comes_in_whole_characters_and_ends_before_a_stop_text():
    byte = load_tokenizer("byte")
    text = "na\u00efve \U0001f642 caf\u00e9 END of it"
    line = Line(byte, byte.stop_ids, stop=["END", "never"])
    pieces = []
    for token in byte.encode(text):
        pieces.append(line.push(int(token)))
        if line.finish:
            break
    assert "".join(pieces) == text[: text.index("END")]
    assert "\ufffd" not in "".join(pieces) and line.finish == "stop" and line.close() == ""
    # the beginning of a stop text is held back, and given out when it is not one
    line = Line(byte, byte.stop_ids, stop=["END"])
    assert [line.push(ord(c)) for c in "aENE"] == ["a", "", "", "EN"]
    assert line.push(256) == "E" and line.finish == "stop" and line.tokens == 5


def test_a_prompt_begins_with_one_begin_token():
    byte = load_tokenizer("byte")
    assert encode_prompt(byte, "a").tolist() == [256, 97]
    assert encode_prompt(byte, "<|endoftext|>a").tolist() == [256, 97]
    assert encode_prompt(byte, "").tolist() == [256]
    with pytest.raises(ConfigError, match="the prompt is empty"):
        encode_prompt(load_tokenizer(str(TOKENIZER)), "")


def test_ids_that_the_tokenizer_does_not_have_are_never_written(hub):
    writer = Writer.open(str(hub))
    writer.model.params["embed_VD"] = writer.model.params["embed_VD"].at[512:].mul(100.0)
    done: list[Completion] = []
    for _ in writer.write(["Hello"], Settings(max_new_tokens=20, temperature=3.0), done):
        pass
    assert done[0].tokens > 0
    tokens = generate.generate(
        writer.model.network,
        writer.model.params,
        np.array([[43, 72]]),
        max_new_tokens=40,
        temperature=3.0,
    )
    assert (tokens >= 512).any(), "without the limit they would have come"


def test_a_tokenizer_that_is_larger_than_the_model_is_refused():
    with pytest.raises(DataError, match="has 264 tokens, but the model knows 256"):
        Writer.open(str(golden_folder("qwen3")), tokenizer=load_tokenizer("byte"))


def test_code_in_a_folder_is_not_run_and_that_is_said(hub, tmp_path, caplog, capsys):
    from localtrain.cli import run

    folder = tmp_path / "coded"
    shutil.copytree(hub, folder)
    hf = json.loads((folder / "config.json").read_text())
    hf["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    Writer.open(str(folder))
    assert "is not run" in caplog.text and not (tmp_path / "ran").exists()
    assert run(["generate", str(folder), "--prompt", "Hello", "--max-new-tokens", "3"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "is not run" in line and line.startswith("warning: ")]
    assert lines[-1].startswith("3 tokens in ") and "tokens/s" not in lines[-1]


# a reader that lost its files leaves exceptions in Orbax's threads, after it was told
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_may_be_read_while_it_is_training(tmp_path):
    from localtrain.checkpoint import Checkpoints

    model = model_of("qwen3")
    (tmp_path / "model.json").write_text(json.dumps(model.hf))
    checkpoints, stop = Checkpoints(tmp_path / "checkpoints", keep=1), threading.Event()

    def train() -> None:
        step = 0
        while not stop.wait(0.5):  # without a pause the reader may lose every race
            step += 1
            checkpoints.save(step, {"params": model.params}, {}, block=True)

    thread = threading.Thread(target=train)
    checkpoints.save(0, {"params": model.params}, {}, block=True)
    thread.start()
    try:
        for _ in range(6):
            loaded = load_in_use(str(tmp_path))
            np.testing.assert_array_equal(loaded.params["embed_VD"], model.params["embed_VD"])
    finally:
        stop.set()
        thread.join()
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.json"]


# the command ------------------------------------------------------------------------------------


def test_the_command_writes_rows_of_a_batch_as_it_writes_them_alone(hub):
    options = ["--max-new-tokens", "8", "--seed", "5", "--temperature", "1.2", "--top-k", "40"]
    prompts = ["Hello, world", "The capital of France is the city of"]
    both = run_command(
        "generate", str(hub), "--prompt", prompts[0], "--prompt", prompts[1], *options, "--json"
    )
    assert both.returncode == 0, both.stderr
    written = json.loads(both.stdout)["completions"]
    assert [one["prompt"] for one in written] == prompts
    for one in written:
        alone = run_command("generate", str(hub), "--prompt", one["prompt"], *options)
        assert alone.returncode == 0, alone.stderr
        assert alone.stdout == one["prompt"] + one["text"] + "\n"
        assert "tokens" in alone.stderr and one["finish"] in ("stop", "length")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["HUB"], 2, "error: the prompt is empty"),
        (["HUB", "--prompt", "a", "--top-p", "0"], 2, "--top-p"),
        (["HUB", "--prompt", "a", "--stop", ""], 2, "error: a stop text is empty"),
        (["no/such/place/here"], 3, "error: no/such/place/here: there is no such folder"),
        (["HUB", "--prompt", "a", "--tokenizer", "nothing"], 3, "there is no such file or folder"),
    ],
)
def test_the_command_says_in_one_paragraph_what_is_wrong(hub, capsys, arguments, code, message):
    from localtrain.cli import run

    assert run(["generate", *[str(hub) if a == "HUB" else a for a in arguments]]) == code
    errors = capsys.readouterr().err.splitlines()
    assert message in errors[-1] and "Traceback" not in "\n".join(errors)


def test_the_folder_says_how_it_is_sampled(hub, tmp_path):
    from localtrain.complete import sampling_defaults

    folder = tmp_path / "with"
    shutil.copytree(hub, folder)
    assert sampling_defaults(str(folder)) == {"temperature": 0.8}
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    assert sampling_defaults(str(folder)) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampling_defaults(str(folder)) == {"temperature": 0.8}


def test_generation_works_in_bfloat16():
    model = localtrain.load(str(golden_folder("qwen3")), dtype="bfloat16")
    assert model.network.policy == Policy(jnp.bfloat16, jnp.bfloat16)
    assert model.generate([[5, 6, 7]], max_new_tokens=4).shape == (1, 4)
