"""Texts that a run writes at each evaluation: there, repeatable, and without any effect on it."""

import json
from pathlib import Path

import numpy as np
import pytest

import localtrain
from localtrain import samples
from localtrain.checkpoint import Checkpoints
from localtrain.cli import run as command
from localtrain.config import load_run
from localtrain.data.loader import prepare
from localtrain.data.tokenizer import load_tokenizer
from localtrain.metrics import read_metrics
from localtrain.samples import code_block, make_prompts, sample_rows

KEYS = {
    "model.preset": "null",
    "train.steps": 6,
    "train.batch_size": 4,
    "data.seq_len": 32,
    "data.eval_fraction": 0.3,
    "eval.every": 2,
    "eval.batches": 1,
    "eval.sample_length": 12,
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """Some documents."""
    folder = tmp_path_factory.mktemp("samples")
    for file in sorted(Path(__file__).parent.glob("test_*.py"))[:8]:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(tiny_config))
    return folder


def make_run(folder, **more):
    keys = {
        **KEYS,
        "model.path": folder,
        "data.sources": f"{folder}/*.py",
        "data.cache": str(folder / "cache"),
        **more,
    }
    return load_run("quickstart", [f"{key}={value}" for key, value in keys.items()])


def train(folder, out, **more):
    return localtrain.train(make_run(folder, **more), backend="cpu", out=str(out))


def texts(out):
    return [(row["step"], row["prompt"], row["text"]) for row in sample_rows(read_metrics(out))]


def numbers(out):
    times = {"time", "tokens_per_s", "step_time_s", "flops_per_s", "data_wait_s", "mfu"}
    rows = [row for row in read_metrics(out) if "event" not in row]
    return [{key: value for key, value in row.items() if key not in times} for row in rows]


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    prompts = '["def ", "x"]'
    return out, train(folder, out, **{"eval.prompt": prompts})


def test_every_evaluation_writes_one_text_per_prompt(straight):
    out, result = straight
    assert [(step, prompt) for step, prompt, _ in texts(out)] == [
        (step, prompt) for step in (2, 4, 6) for prompt in ("def ", "x")
    ]
    assert all(0 < len(text) <= 12 for _, _, text in texts(out))
    assert result.sample == "def " + texts(out)[-2][2] and result.prompt == "def "


def test_tensorboard_has_the_texts_the_run_and_every_number(straight):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(straight[0] / "tensorboard"))
    events.Reload()
    scalars = {"loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "data_wait_s", "tokens"}
    assert {f"train/{name}" for name in scalars} | {"eval/loss"} <= set(events.Tags()["scalars"])
    assert {"run", "samples/1", "samples/2"} <= set(events.Tags()["tensors"])
    shown = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/1")]
    assert shown == [code_block(prompt + text) for _, prompt, text in texts(straight[0])[::2]]
    assert b"    seed: 0\n" in events.Tensors("run")[0].tensor_proto.string_val[0]


def test_samples_change_nothing_that_is_trained(folder, straight, tmp_path):
    out = tmp_path / "without"
    result = train(folder, out, **{"eval.sample_length": 0})
    assert texts(out) == [] and result.sample == ""
    assert numbers(out) == numbers(straight[0])
    for ours, theirs in zip(arrays(out), arrays(straight[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def arrays(out, step=6):
    import jax

    from localtrain import arrays as codec

    meta = Checkpoints(out / "checkpoints").read_meta(step)[1]
    template = {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype)
        for name, (dtype, shape) in sorted(meta["arrays"].items())
    }
    read = codec.read(out / "checkpoints" / str(step), meta["arrays"], template)
    return [np.asarray(read[name]) for name in template]


def test_a_resumed_run_writes_the_same_texts_once(folder, straight, tmp_path):
    out, prompt = (
        tmp_path / "resumed",
        {"eval.prompt": '["def ", "x"]', "optim.schedule": "constant"},
    )
    train(folder, out, **prompt, **{"train.steps": 4})
    before = texts(out)
    train(folder, out, **prompt)
    assert texts(out)[:4] == before
    assert [step for step, _, _ in texts(out)] == [2, 2, 4, 4, 6, 6]


def test_a_sampler_that_fails_is_one_line_and_training_goes_on(
    folder, tmp_path, monkeypatch, caplog
):
    def broken(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: no room\nfor this")

    monkeypatch.setattr(samples, "stream_tokens", broken)
    result = train(folder, tmp_path / "run")
    assert result.step == 6 and result.sample == "" and result.eval_loss > 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (
        log.count("no sample text: RESOURCE_EXHAUSTED: no room\n") == 3 and "Traceback" not in log
    )
    assert texts(tmp_path / "run") == []


def test_without_a_prompt_held_out_documents_are_continued(folder):
    tokenizer = load_tokenizer("byte")
    run = make_run(folder, **{"eval.prompt": "[]"})
    corpus = prepare(run, tokenizer, str(folder / "cache"))
    prompts = make_prompts(run.eval.prompt, tokenizer, corpus)
    contents = [file.read_text() for file in folder.glob("*.py")]
    assert len({prompt.text for prompt in prompts}) == 2
    for prompt in prompts:
        assert prompt.ids[0] == tokenizer.bos_id and len(prompt.ids) == samples.PREFIX
        assert any(text.startswith(prompt.text) for text in contents)


def test_prompts_of_a_tokenizer_without_markers_and_without_held_out_text(folder):
    class Bare:
        prefix, stop_ids = (), ()
        encode = staticmethod(load_tokenizer("byte").encode)

    corpus = prepare(
        make_run(folder, **{"data.eval_fraction": 0}), load_tokenizer("byte"), str(folder / "cache")
    )
    assert make_prompts((), Bare(), corpus) == []  # there is nothing to go on from
    assert [p.ids for p in make_prompts(("ab", ""), Bare(), corpus)] == [(97, 98)]
    (prompt,) = make_prompts((), load_tokenizer("byte"), corpus)
    assert (prompt.text, prompt.ids) == ("", (256,))


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("def", ("def",)),
        ('"def "', ("def ",)),
        ('["a", "b"]', ("a", "b")),
        ("[]", ()),
        ("null", ()),
        ('""', ("",)),
    ],
)
def test_one_prompt_or_several(value, prompts):
    assert load_run("quickstart", [f"eval.prompt={value}"]).eval.prompt == prompts


@pytest.mark.parametrize("value", ["3", "[1]", "{a: b}", "true"])
def test_a_prompt_that_is_no_text_is_refused(value, capsys):
    assert command(["train", "quickstart", f"eval.prompt={value}", "--dry-run"]) == 2
    assert "eval.prompt" in capsys.readouterr().err


def test_a_code_block_shows_marks_as_they_are():
    assert code_block("```\n# a\n\n<b>") == "    ```\n    # a\n    \n    <b>\n"
