"""The command line as users meet it: processes, exit codes, one paragraph on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localtrain import cli
from localtrain.errors import BusyError, ConfigError, DataError, StorageError

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "model_type": "qwen3",
    "eos_token_id": 256,
}
CLEAN = dict(os.environ)  # with the flags of conftest.py that make compiling fast


def localtrain(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """The real program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "localtrain", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=CLEAN,
        timeout=180,
    )


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(here, capfd):
    """The program in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def is_one_paragraph(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


def test_help_takes_less_than_a_third_of_a_second():
    best = min(timed("--help") for _ in range(3))
    assert best < 0.3 * slowness()


def test_a_config_mistake_takes_less_than_a_second():
    assert min(timed("train", "quickstart", "optim.lrr=3") for _ in range(2)) < 1.0 * slowness()


def timed(*arguments: str) -> float:
    began = time.perf_counter()
    localtrain(*arguments)
    return time.perf_counter() - began


def slowness() -> float:
    """1 on an idle machine: a bare interpreter starts in 30 ms. Keeps loaded machines green."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return max(1.0, (time.perf_counter() - began) / 0.03)


def test_help_lists_what_is_built_and_nothing_else(call):
    code, out, _ = call("--help")
    listed = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()]
    assert code == 0
    assert (
        " ".join(listed)
        == "train plan report generate chat eval import export data models backends config doctor"
    )
    for command in listed:
        assert call(command, "--help")[0] == 0
    assert call()[0] == 0 and call("data")[0] == 0
    assert call("--version")[1].startswith("localtrain 0.")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("train", ["Missing argument 'RUN'"]),
        ("train nope", ["'nope' is no packaged run", "localtrain models"]),
        ("train quickstart optim.lrr=3", ["argument 'optim.lrr=...'", "did you mean optim.lr?"]),
        ("train quickstart train.steps=yes", ["train.steps = 'yes' must be an integer"]),
        ("train quickstart --train.steps=5", ["without dashes: train.steps=VALUE"]),
        ("train quickstart --steps 5", ["No such option '--steps'", "dashes: train.steps=VALUE"]),
        ("train quickstart --learning-rate 1", ["without dashes: optim.lr=VALUE"]),
        ("train quickstart --qqq 5", ["No such option '--qqq'", "localtrain train --help"]),
        ("generate out --prompt \udcff", ["argument '\\udcff' is not valid Unicode"]),
        ("train quickstart --backend moon", ["there is no backend 'moon'"]),
        ("train quickstart --devices 0", ["--devices"]),
        ("train quickstart hf_token=hf_abcdefgh1234", ["hf_token looks like a secret"]),
        ("train quickstart train.batch_size=6 train.micro_batch=4", ["does not divide"]),
        ("sft quickstart", ["task sft is not part of this version yet"]),
        ("train quickstart task=rl", ["task rl is not part of this version yet"]),
        ("trian quickstart", ["did you mean 'train'?"]),
        ("models show qwen3-06b", ["did you mean qwen3-0.6b?"]),
        ("config optmi", ["did you mean 'optim'?"]),
        ("data build x.txt --out y --tokenizer byte --train-tokenizer 500", ["choose one"]),
    ],
)
def test_bad_usage_is_exit_2_and_one_paragraph(call, arguments, parts):
    code, out, err = call(*arguments.split())
    assert code == 2 and out == "" and is_one_paragraph(err)
    for part in parts:
        assert part in err
    assert "abcdefgh" not in err


def test_a_bad_run_file_through_the_real_program(tmp_path):
    (tmp_path / "bad.yaml").write_text("model: {preset: qwen3-tiny}\nlearning_rate: 2e-5\n")
    done = localtrain("train", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and is_one_paragraph(done.stderr)
    assert "bad.yaml line 2: learning_rate is not a key" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]  # nothing was started


def test_debug_shows_the_traceback_anywhere_on_the_line(call):
    for arguments in (("--debug", "train", "nope"), ("train", "nope", "--debug")):
        code, _, err = call(*arguments)
        assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(ConfigError("x"), 2), (DataError("x"), 3), (StorageError("x"), 6), (BusyError("x"), 8)],
)
def test_every_error_has_its_exit_code(call, monkeypatch, raised, code):
    monkeypatch.setattr("localtrain.config.load_run", lambda *_: (_ for _ in ()).throw(raised))
    assert call("train", "quickstart") == (code, "", "error: x\n")


def test_a_bug_is_exit_1_with_traceback_and_a_hint(call, monkeypatch):
    monkeypatch.setattr("localtrain.config.load_run", lambda *_: 1 / 0)
    code, _, err = call("train", "quickstart")
    assert code == 1 and "ZeroDivisionError" in err and "this is a bug of localtrain" in err


def test_an_interrupt_before_training_is_exit_75(call, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("localtrain.config.load_run", interrupted)
    code, _, err = call("train", "quickstart")
    assert code == 75 and is_one_paragraph(err)


AMID_IMPORT = """
import gc, os, signal, sys

def interrupt(phase, _):
    if "jax" in sys.modules:
        gc.callbacks.remove(interrupt)
        os.kill(os.getpid(), signal.SIGINT)  # what is raised in a callback, Python only prints

gc.callbacks.append(interrupt)
from localtrain.cli import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT of this kind on Windows")
@pytest.mark.parametrize(
    "line", ["plan quickstart", "train quickstart", "generate x", "export x y"]
)
def test_ctrl_c_in_the_import_of_jax_is_not_swallowed(line, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AMID_IMPORT, *line.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 75 and done.stdout == ""
    assert "Traceback" not in done.stderr and "tart the same command again" in done.stderr


def test_an_import_that_ctrl_c_made_fail_is_exit_75(call, monkeypatch):
    def half_imported(*_):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr("localtrain.config.load_run", half_imported)
    code, _, err = call("train", "quickstart")
    assert code == 75 and is_one_paragraph(err)


def test_errors_never_show_a_password(call, monkeypatch):
    raised = StorageError("s3://key:hunter2@bucket/x: denied")
    monkeypatch.setattr("localtrain.config.load_run", lambda *_: (_ for _ in ()).throw(raised))
    assert call("train", "quickstart")[2] == "error: s3://***@bucket/x: denied\n"


@pytest.mark.skipif(os.name == "nt", reason="no SIGPIPE on Windows")
def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m localtrain config | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_models_and_show(call):
    code, out, _ = call("models")
    assert code == 0 and "qwen3-0.6b" in out and "596,049,920" in out  # presets.csv, both counts
    rows = json.loads(call("models", "--json")[1])
    assert {row["name"]: row["parameters"] for row in rows}["qwen3-8b"] == 8_190_735_360
    shown = json.loads(call("models", "show", "qwen3-0.6b", "--json")[1])
    assert shown["layers"] == 28 and shown["parameters"] == 596_049_920
    assert "28 x 1" in call("models", "show", "qwen3-0.6b")[1]


def test_models_show_reads_a_folder(call, here):
    (here / "config.json").write_text(json.dumps(TINY))
    assert json.loads(call("models", "show", str(here), "--json")[1])["dim"] == 32


def test_backends_and_config_and_doctor_as_json(call):
    rows = json.loads(call("backends", "--json")[1])
    assert {"name", "usable", "reason", "summary"} == set(rows[0])
    assert {"cpu", "local-gpu"} <= {row["name"] for row in rows}
    keys = json.loads(call("config", "--json")[1])
    assert {"key": "optim.lr", "type": "number", "default": 3e-4}.items() <= next(
        row for row in keys if row["key"] == "optim.lr"
    ).items()
    assert "peak learning rate" in call("config", "optim")[1]


def test_doctor_reports_this_machine_and_hides_secrets(monkeypatch):
    monkeypatch.setitem(CLEAN, "HF_TOKEN", "hf_abcdefghijkl")
    done = localtrain("doctor", "--json", "--backend", "cpu")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["devices"][0]["platform"] == "cpu" and report["packages"]["jax"]
    assert report["environment"]["HF_TOKEN"] == "***"
    from localtrain.doctor import write_report

    plain = write_report(report)
    assert "device    0: cpu" in plain and "abcdefghijkl" not in plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a tiny model, a run file for it, and a finished run in out/."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("".join(f"line {i} of a text\n\n" for i in range(2000)))
    (folder / "tiny.yaml").write_text(
        "model: {path: model}\ndata: {sources: '*.txt', seq_len: 32, eval_fraction: 0.2}\n"
        "train: {steps: 3, batch_size: 2, log_every: 1}\noptim: {warmup: 1}\n"
    )
    for part in range(8):
        (folder / f"part{part}.txt").write_text(f"document {part}: " + "more of it. " * 50)
    done = localtrain("train", "tiny.yaml", "--out", "out", "--backend", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out: step 3, loss ")
    return folder


def test_dry_run_prints_a_run_file_and_starts_nothing(folder, tmp_path):
    done = localtrain("train", "quickstart", "train.steps=7", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "# parameters: 821,632" in done.stdout and "# tokens: 28,672" in done.stdout
    (tmp_path / "again.yaml").write_text(done.stdout)
    from localtrain.config import load_run

    assert load_run(str(tmp_path / "again.yaml"), ["optim.warmup=2"]).train.steps == 7


def test_a_finished_run_says_so(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert cli.run(["train", "tiny.yaml", "--out", "out", "--json", "--backend", "cpu"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["step"] == 3 and result["out"] == "out" and result["end_loss"] > 0


def test_generate_streams_the_same_text_as_json(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    options = ["out", "--prompt", "line", "--max-new-tokens", "12", "--seed", "4"]
    assert cli.run(["generate", *options]) == 0
    plain = capfd.readouterr()
    assert "backend cpu" in plain.err
    assert cli.run(["generate", *options, "--json"]) == 0
    (written,) = json.loads(capfd.readouterr().out)["completions"]
    assert plain.out == "line" + written["text"] + "\n"
    assert 1 <= written["tokens"] <= 12


def test_eval_counts_every_token_once_whatever_the_batch(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    facts = []
    for size in ("1", "3", "64"):
        assert cli.run(["eval", "out", "--batch-size", size, "--json"]) == 0
        facts.append(json.loads(capfd.readouterr().out))
    assert len({f["tokens"] for f in facts}) == 1
    assert facts[0]["loss"] == pytest.approx(facts[2]["loss"], rel=1e-6)
    assert cli.run(["eval", "out", "--data", "text.txt", "--seq-len", "16"]) == 0
    assert "rows of 16" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ("generate nowhere", 3, "nowhere: there is no such folder here"),
        ("generate model", 3, "holds no tokenizer.json"),
        ("eval model --tokenizer byte", 2, "name documents with --data"),
        ("generate out --dtype float64", 2, "Invalid value for '--dtype'"),
        ("train tiny.yaml data.sources=no/such/*.txt", 3, "no/such/*.txt: no file matches"),
        ("train tiny.yaml train.batch_size=100000", 3, "Set train.batch_size to at most"),
        ("data build no-such.txt --out y", 3, "no file matches"),
    ],
)
def test_what_cannot_be_used_is_said(folder, monkeypatch, capfd, arguments, code, part):
    monkeypatch.chdir(folder)
    assert cli.run(arguments.split()) == code
    assert part in capfd.readouterr().err.splitlines()[-1]


def test_data_build_says_how_to_use_it(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    build = ["data", "build", "*.txt", "--out", "shards", "--train-tokenizer", "300"]
    assert cli.run([*build, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["documents"] == 9 and facts["vocabulary"] <= 300
    assert (folder / "shards" / "tokenizer" / "tokenizer.json").is_file()
    assert cli.run(build) == 0
    assert "data.sources=shards data.tokenizer=shards/tokenizer" in capfd.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_is_exit_75(folder, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "localtrain", "train", "quickstart", "--out", f"sig{number}"],
        cwd=folder,
        env=CLEAN,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if "compiling" in line:
            break
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(60) == 75 and "Traceback" not in rest


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "part"),
    [
        ("config >&-", 0, ""),
        ("config 2>&-", 0, ""),
        ("train nope 2>&-", 2, ""),
        pytest.param(
            "config > /dev/full",
            6,
            "error: the output could not be written: the disk is full",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux"),
        ),
    ],
)
def test_a_closed_or_full_output_is_no_traceback(command, code, part):
    line = f"{sys.executable} -m localtrain {command}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stderr.strip() == part


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not PAGES.exists() or "[madvise]" not in PAGES.read_text(),
    reason="huge pages are given to nobody, or without asking",
)
def test_training_starts_itself_again_with_huge_pages_and_the_rest_of_the_command(here):
    """In the same process, with the same arguments, other tunables of the caller kept."""
    script = (
        "import os, sys\n"
        "from localtrain import train\n"
        "def told(*_, **__):\n"
        "    print(os.getpid(), os.environ['GLIBC_TUNABLES'], *sys.argv[1:])\n"
        "    sys.exit()\n"
        "train.train = told\n"
        "from localtrain.cli import main\n"
        "main()\n"
    )
    command = "train", "quickstart", "--backend", "cpu", "data.sources=a b.txt"
    child = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=CLEAN | {"GLIBC_TUNABLES": "glibc.malloc.check=0"},
    )
    told, _ = child.communicate(timeout=120)
    tunables = "glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    assert told == f"{child.pid} {tunables} {' '.join(command)}\n"


def test_a_call_within_another_program_does_not_start_that_again(call):
    code, out, _ = call("train", "quickstart", "--backend", "cpu", "--dry-run")
    assert code == 0 and "nothing was started" in out
