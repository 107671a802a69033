"""Training with everything stored in bfloat16, as the run files for small GPUs do."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import localtrain
from localtrain import arrays as codec
from localtrain.checkpoint import Checkpoints
from localtrain.cli import run as command
from localtrain.config import load_run
from localtrain.metrics import read_metrics

SMALL = (
    "model.dtype=bfloat16",
    "train.param_dtype=bfloat16",
    "optim.state_dtype=bfloat16",
    "train.remat=full",
)
RATES = {"tokens_per_s", "step_time_s", "mfu", "flops_per_s", "data_wait_s", "time"}


def make_run(home: Path, *more: str, model: str = ""):
    keys = (
        model or f"model.path={home / 'model'}",
        f"data.sources={home / 'text.py'}",
        f"data.cache={home / 'cache'}",
        "data.seq_len=32",
        "data.eval_fraction=0",
        "train.batch_size=8",
        "train.steps=60",
        "train.log_every=1",
        "optim.warmup=5",
        "optim.lr=2e-2",
        "checkpoint.every=40",
    )
    return load_run("quickstart", [*keys, *SMALL, *more])


def read(out: Path, step: int) -> dict[str, np.ndarray]:
    import jax

    meta = Checkpoints(out / "checkpoints").read_meta(step)[1]
    template = {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype)
        for name, (dtype, shape) in meta["arrays"].items()
    }
    return codec.read(out / "checkpoints" / str(step), meta["arrays"], template)


def rows(out: Path) -> list[dict]:
    found = [row for row in read_metrics(out) if "event" not in row]
    return [{k: v for k, v in row.items() if k not in RATES} for row in found]


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_config):
    """A tiny model and a text."""
    home = tmp_path_factory.mktemp("laptop")
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(tiny_config))
    shutil.copy(localtrain.__file__, home / "text.py")
    return home


@pytest.fixture(scope="module")
def trained(home):
    out = home / "run"
    localtrain.train(make_run(home), backend="cpu", out=str(out))
    return out


def test_a_model_stored_in_bfloat16_learns(trained):
    losses = [row["loss"] for row in rows(trained) if "loss" in row]
    assert len(losses) == 60 and losses[0] > 5.4
    assert np.mean(losses[-5:]) < 3.5


def test_parameters_and_moments_are_saved_in_bfloat16(trained):
    kinds = {str(v.dtype) for k, v in read(trained, 60).items() if k != "step"}
    assert kinds == {"bfloat16"}


def test_a_resumed_run_is_bitwise_the_same(trained, home, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(trained, again)
    shutil.rmtree(again / "checkpoints" / "60")
    localtrain.train(make_run(home), backend="cpu", out=str(again))
    assert any(row.get("event") == "resume" for row in read_metrics(again))
    assert rows(again) == rows(trained)
    ours, theirs = read(again, 60), read(trained, 60)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes(), name


def test_the_type_of_the_parameters_is_part_of_the_run(trained, capfd):
    line = ["train", str(trained / "run.yaml"), "--backend", "cpu", "--out", str(trained)]
    assert command([*line, "train.param_dtype=float32"]) == 2
    assert "train.param_dtype" in capfd.readouterr().err


def test_export_and_warm_start_keep_the_stored_values(trained, home, tmp_path, capfd):
    assert command(["export", str(trained), str(tmp_path / "hub")]) == 0
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == "bfloat16"
    start = f"model.init_from={tmp_path / 'hub'}"
    run = make_run(home, "train.steps=1", "optim.warmup=0", "optim.lr=1e-30", model=start)
    localtrain.train(run, backend="cpu", out=str(tmp_path / "tuned"))
    before, after = read(trained, 60), read(tmp_path / "tuned", 1)
    names = [name for name in after if name.startswith("params/")]
    assert names
    for name in names:  # an update of 1e-30 rounds back to the stored value
        assert after[name].dtype == "bfloat16"
        np.testing.assert_array_equal(after[name], before[name], name)
    capfd.readouterr()
