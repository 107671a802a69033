"""metrics.jsonl, TensorBoard and console lines, across kills and resumes."""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from localtrain.errors import StorageError
from localtrain.metrics import MetricsWriter, read_metrics
from localtrain.progress import Progress, duration, eval_line, quantity, train_line


def write(folder, steps, restored=0):
    with MetricsWriter(folder, restored) as metrics:
        for step in steps:
            metrics.log({"step": step, "loss": 10.0 / step, "lr": 0.1 * restored})


def steps_of(folder):
    return [
        (row["step"], row["event"]) if "event" in row else row["step"]
        for row in read_metrics(folder)
    ]


def tensorboard(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


# ---- metrics.jsonl


def test_rows_are_plain_json_with_a_time(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.log({"step": 1, "loss": jnp.float32(2.5), "tokens": np.int64(7), "mfu": None})
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row.pop("time") > 1.7e9
    assert row == {"step": 1, "loss": 2.5, "tokens": 7, "mfu": None}


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    metrics = MetricsWriter(tmp_path)
    metrics.log({"step": 1, "loss": 2.5})
    assert steps_of(tmp_path) == [1]
    assert len(tensorboard(tmp_path).Scalars("train/loss")) == 1
    metrics.close()
    metrics.close()


def test_what_json_does_not_have_is_null(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "more": [math.nan]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(tensorboard(tmp_path).Scalars("train/loss")[0].value)


def test_a_first_start_has_no_resume_row(tmp_path):
    write(tmp_path, [1, 2])
    assert steps_of(tmp_path) == [1, 2]


def test_on_resume_rows_after_the_restored_step_go_and_the_place_is_marked(tmp_path):
    write(tmp_path, range(1, 18))
    write(tmp_path, [11, 12, 13], restored=10)
    assert steps_of(tmp_path) == [*range(1, 11), (10, "resume"), 11, 12, 13]
    write(tmp_path, [12], restored=11)  # the mark of the first resume stays
    assert steps_of(tmp_path) == [*range(1, 11), (10, "resume"), 11, (11, "resume"), 12]
    write(tmp_path, [6], restored=5)  # and goes when training falls back behind it
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, (5, "resume"), 6]


def test_a_start_over_removes_every_row_but_counts_what_went(tmp_path):
    write(tmp_path, [1, 2, 3])
    for starts in (1, 2):
        write(tmp_path, [1], restored=0)
        assert steps_of(tmp_path) == [(0, "resume")] * starts + [1]
    assert [row["lost_steps"] for row in read_metrics(tmp_path) if "event" in row] == [3, 1]


def test_rows_that_stay_keep_their_bytes(tmp_path):
    write(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    write(tmp_path, [], restored=2)
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:2] == before[:2]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_last_line_torn_by_a_kill_is_tolerated(tmp_path, cut, caplog):
    write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(tmp_path)[:2] == [1, 2]
    write(tmp_path, [3], restored=2)
    assert steps_of(tmp_path) == [1, 2, (2, "resume"), 3]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[]", b'{"loss": 1}', b'{"step": "x"}'])
def test_a_line_that_is_not_a_row_is_removed_with_a_warning(tmp_path, caplog, line):
    write(tmp_path, [1])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    write(tmp_path, [], restored=1)
    assert steps_of(tmp_path) == [1, (1, "resume")]
    assert "not valid" in caplog.text


def test_a_killed_writer_loses_no_row(tmp_path):
    code = """
import os, signal, sys
from localtrain.metrics import MetricsWriter
metrics = MetricsWriter(sys.argv[1])
for step in range(1, 51):
    metrics.log({"step": step, "loss": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert steps_of(tmp_path) == list(range(1, 51))
    assert len(tensorboard(tmp_path).Scalars("train/loss")) == 50


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path):
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    (tmp_path / "tensorboard").mkdir()
    metrics = MetricsWriter.__new__(MetricsWriter)
    metrics.path = tmp_path / "metrics.jsonl"
    metrics._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(StorageError, match=r"disk is full.*metrics\.jsonl"):
        metrics.event("x", 1)
    metrics._file.close()


# ---- TensorBoard


def test_each_attempt_has_its_own_event_file_and_the_curves_do_not_overlap(tmp_path):
    write(tmp_path, range(1, 18))
    write(tmp_path, range(11, 15), restored=10)
    assert len(os.listdir(tmp_path / "tensorboard")) == 2
    points = tensorboard(tmp_path).Scalars("train/lr")
    assert [point.step for point in points] == list(range(1, 15))
    assert [point.value > 0 for point in points] == [False] * 10 + [True] * 4


def test_a_start_over_purges_everything(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [1], restored=0)
    assert [point.step for point in tensorboard(tmp_path).Scalars("train/loss")] == [1]


def test_many_attempts_in_one_second_keep_their_order(tmp_path):
    for attempt in range(5):
        write(tmp_path, [attempt * 2 + 1, attempt * 2 + 2, attempt * 2 + 3], restored=attempt * 2)
    points = tensorboard(tmp_path).Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 12))


def test_eval_rows_and_texts_have_their_own_names(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.log({"step": 5, "eval_loss": 2.0})
        metrics.text("run", "```yaml\nseed: 0\n```")
        metrics.text("sample", "caf\u00e9 \ud800", step=5)
    events = tensorboard(tmp_path)
    assert events.Tags()["scalars"] == ["eval/loss"]
    assert events.SummaryMetadata("run").plugin_data.plugin_name == "text"
    assert b"seed: 0" in events.Tensors("run")[0].tensor_proto.string_val[0]
    assert events.Tensors("sample")[0].tensor_proto.string_val[0] == "caf\u00e9 ?".encode()


def test_writing_metrics_imports_no_tensorflow_and_warns_nothing(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = """
import sys
from localtrain.metrics import MetricsWriter
with MetricsWriter(sys.argv[1]) as metrics:
    metrics.log({"step": 1, "loss": 1.0})
    metrics.text("a", "b")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- the console


def row(step, **more):
    base = {"loss": 3.14159, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_s": 12345.6}
    return {"step": step, **base, "step_time_s": 0.123, "data_wait_s": 0.0004, **more}


def test_plain_lines_are_aligned_and_tell_what_matters(caplog):
    with caplog.at_level(logging.INFO, "localtrain"), Progress(1000, tty=False) as progress:
        progress.update(row(1, flops_per_s=3.4e10, loss=11.0))
        progress.update(row(10, flops_per_s=3.4e9))
        progress.update(row(1000, flops_per_s=3.4e11, loss=None))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step    1/1000  loss  11.0000  norm   1.500  lr 3.00e-04")
    assert "12.3k tok/s" in lines[0] and "GFLOP/s" in lines[0] and "wait" in lines[0]
    assert "eta" in lines[1]
    assert lines[0].index("tok/s") == lines[1].index("tok/s")
    assert "loss nan" in lines[2]


def test_an_eval_line_has_loss_and_perplexity():
    line = eval_line({"step": 5, "eval_loss": 2.0, "eval_tokens": 20480}, 100)
    assert line == "step   5/100  eval loss 2.0000  perplexity 7.39  on 20.5k tokens"
    assert "perplexity" not in eval_line({"step": 5, "eval_loss": None}, 100)


def test_missing_columns_are_left_out():
    assert train_line({"step": 3, "loss": 1.0}, 9) == "step 3/9  loss   1.0000"
    assert "mfu 41.0%" in train_line({"step": 3, "loss": 1.0, "mfu": 0.41}, 9)


def test_on_a_terminal_one_live_line_and_every_line_in_the_log(monkeypatch, tmp_path):
    from localtrain import runtime

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    runtime.setup_logging(tmp_path)
    try:
        with Progress(10) as progress:
            for step in range(1, 6):
                progress.update(row(step))
            progress.update({"step": 5, "eval_loss": 2.0})
        assert sys.stderr is terminal
    finally:
        runtime.close_logging()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "5/10" in shown and "loss" in shown
    assert "eval loss 2.0000" in shown
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")
    log = (tmp_path / "log.txt").read_text()
    assert log.count(" loss   3.1416") == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (4.56e6, "4.56M"),
        (1e13, "10.0T"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0031, "3ms"),
        (0.9999, "1.00s"),
        (1.25, "1.25s"),
        (59.97, "1m00s"),
        (245, "4m05s"),
        (3599.6, "1h00m"),
        (8000, "2h13m"),
        (275000, "3d04h"),
    ],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
