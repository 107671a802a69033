"""The run file: what is read, and what every mistake is answered with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrain.config import RunConfig, explain, load_run, packaged_presets, packaged_runs
from localtrain.config.alias import ALIASES
from localtrain.config.explain import to_markdown
from localtrain.config.schema import Source
from localtrain.config.secret import mask
from localtrain.config.yamlfile import parse_yaml
from localtrain.errors import ConfigError, LocaltrainError

BASE = "model: {preset: qwen3-0.6b}\ndata: {sources: text.txt}\n"
SMALL = {"model": {"preset": "qwen3-0.6b"}, "data": {"sources": "text.txt"}}


@pytest.fixture
def load(tmp_path):
    """Load a run file made of BASE and more text, with KEY=VALUE arguments."""

    def from_text(text: str = "", *overrides: str) -> RunConfig:
        path = tmp_path / "mine.yaml"
        path.write_text(BASE + text)
        return load_run(str(path), list(overrides))

    return from_text


def message(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and "pydantic" not in text
    return text


def test_every_packaged_run_loads_and_starts_with_a_comment():
    for name in packaged_runs():
        overrides = ["model.preset=qwen3-0.6b"] if name == "pretrain" else []
        assert load_run(name, overrides).name == name
    from importlib.resources import files

    for entry in files("localtrain.configs").iterdir():
        if entry.name.endswith(".yaml"):
            assert entry.read_text().startswith("# ")


def test_a_preset_is_the_pretrain_run_with_that_model():
    run = load_run("qwen3-0.6b", ["train.steps=7"])
    assert (run.name, run.model.preset, run.train.steps) == ("qwen3-0.6b", "qwen3-0.6b", 7)
    base = load_run("pretrain", ["model.preset=qwen3-0.6b", "name=qwen3-0.6b", "train.steps=7"])
    assert run == base
    assert load_run("Qwen3-0.6B") == load_run("qwen3-0.6b")


def test_hub_names_and_other_published_names_are_presets(load):
    assert load("", "model.preset=Qwen/Qwen3-0.6B").model.preset == "qwen3-0.6b"
    assert load("", "model.preset=qwen3-0.6b-base").model.preset == "qwen3-0.6b-base"
    assert load_run("llama-3.1-8b-instruct").name == "llama-3.1-8b-instruct"


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-5", 2e-5), ("1E-5", 1e-5), ('"1e-5"', 1e-5), ("5", 5.0), ("1_0", 10.0), (".5", 0.5)],
)
def test_numbers_are_numbers_however_they_are_written(load, written, value):
    assert load(f"optim: {{lr: {written}}}").optim.lr == value
    assert load("", f"optim.lr={written}").optim.lr == value


@pytest.mark.parametrize("written", ["1e2", "100", '"100"', "100.0", "1_00"])
def test_whole_numbers_may_be_written_as_floats_or_text(load, written):
    assert load(f"train: {{steps: {written}}}").train.steps == 100


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate: 1", ["line 3", "learning_rate is not a key", "optim.lr?"]),
        ("optim:\n  lr_rate: 3", ["line 4", "optim.lr_rate is not a key", "optim.lr?"]),
        ("optim:\n  warmpu: 3", ["line 4", "did you mean optim.warmup?"]),
        ("num-epochs: 3", ["num-epochs", "localtrain counts steps: train.steps"]),
        ("train: {batch_sise: 3}", ["did you mean train.batch_size?"]),
        ("trian: {steps: 3}", ["did you mean the section train?"]),
        ("gradient_accumulation_steps: 3", ["train.micro_batch"]),
        ("output_dir: x", ["--out URL"]),
        ("backend: cpu", ["--backend NAME"]),
        ("train: {lr: 3}", ["train.lr is not a key", "did you mean optim.lr?"]),
        ("data.seq_len: 3", ["in a file it is a section, data: with seq_len: inside"]),
        ("zzzzqqq: 3", ["`localtrain config` lists all keys"]),
        ("train: {steps: 1.5}", ["train.steps = 1.5 must be an integer"]),
        ("train: {steps: many}", ["train.steps = 'many' must be an integer"]),
        ("train: {steps: true}", ["train.steps = true must be an integer"]),
        ("train: {steps: 0}", ["train.steps = 0 must be at least 1"]),
        ("train: {steps: 99999999999}", ["must be at most 2147483647"]),
        ("train: {deterministic: 'yes'}", ["train.deterministic = 'yes' must be true or false"]),
        ("train: {deterministic: yes}", ["train.deterministic = 'yes' must be true or false"]),
        ("train: {deterministic: 1}", ["train.deterministic = 1 must be true or false"]),
        ("optim: {lr: true}", ["optim.lr = true must be a number"]),
        ("optim: {lr: .nan}", ["must be a finite number"]),
        ("optim: {lr: 1e999}", ["must be a finite number"]),
        ("optim: {lr: -1}", ["optim.lr = -1 must be greater than 0"]),
        ("optim: {name: adam}", ["must be one of adamw | sgd; did you mean 'adamw'?"]),
        ("train: 5", ["train = 5 must be a section"]),
        ("train: {batch_size: 8, micro_batch: 3}", ["micro_batch = 3 does not divide", "8"]),
        ("train: {profile: [5, 2]}", ["[first, last]"]),
        ("train: {profile: 5}", ["train.profile = 5 must be a list of 2 integers"]),
        ("mesh: {tensor: -1}", ["mesh.fsdp and mesh.tensor are both -1"]),
        ("mesh: {tensor: 0}", ["mesh.tensor = 0 must be at least 1"]),
        ("optim: {warmup: 200}\ntrain: {steps: 100}", ["warmup = 200", "train.steps = 100"]),
        ("name: ../up", ["name = '../up' is not allowed"]),
        ("seed: -1", ["seed = -1 must be at least 0"]),
        ("task: sfft", ["did you mean 'sft'?"]),
        ("1: 2", ["1 is not a key"]),
    ],
)
def test_a_mistake_names_place_key_value_and_what_to_do(load, text, parts):
    said = message(load, text)
    assert said.startswith(str(load.__closure__[0].cell_contents / "mine.yaml"))
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("optim.lrr=3", ["argument 'optim.lrr=...'", "did you mean optim.lr?"]),
        ("lr=3", ["did you mean optim.lr?"]),
        ("train.steps", ["is not KEY=VALUE"]),
        ("=3", ["is not KEY=VALUE"]),
        ("train.steps=abc", ["train.steps = 'abc' must be an integer"]),
        ("train.steps.x=3", ["train.steps has no keys inside"]),
        ("data.sources=[a,b", ["is not valid YAML"]),
        ("data.sources=[{path: b, weight: -2}]", ["data.sources.0.weight = -2 must be greater"]),
        ("data.sources=[{path: b, wieght: 2}]", ["a source has path, weight, field, format"]),
        ("data.sources=5", ["data.sources = 5 must be a list of sources"]),
        ("data.sources=[]", ["data.sources is empty", "python:stdlib"]),
        ("data.seq_len=1", ["data.seq_len = 1 must be at least 2"]),
        ("model.preset=qwen3-06b", ["is not a preset", "did you mean 'qwen3-0.6b'?"]),
        ("model.dtype=float16", ["float32 | bfloat16 or null", "did you mean 'bfloat16'?"]),
        ("optim.warmup=5000", ["optim.warmup = 5000 is longer"]),
        ("optim.lr=1e300", ["optim.lr = 1e+300 must be at most 1000000000000000"]),
        ("eval.prompt=\udcff", ["eval.prompt =", "is not valid Unicode; write it in UTF-8"]),
        ("data.tokenizer=\udcff", ["data.tokenizer =", "is not valid Unicode"]),
        ("data.sources=a\udcff", ["data.sources.0.path =", "is not valid Unicode"]),
    ],
)
def test_a_mistake_in_an_argument_is_answered_in_the_same_way(load, argument, parts):
    said = message(load, "", argument)
    for part in parts:
        assert part in said


def test_a_shortened_run_may_end_within_its_warm_up(load, tmp_path):
    text = "train: {steps: 1000}\noptim: {warmup: 100}"
    run = load(text, "train.steps=5")
    assert run.optim.warmup == 100
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert load_run(str(tmp_path)).train.steps == 5
    assert load("train: {steps: 50}").train.steps == 50  # the default of 100 was never written


def test_several_mistakes_are_said_at_once(load):
    said = message(load, "optim: {lr: x, clip: y}\nseed: z\nname: 3\ntask: q")
    assert all(key in said for key in ("task", "name", "seed")) and "2 more" in said


def test_a_misspelt_section_is_said_before_what_it_lacks(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("modle: {preset: qwen3-tiny}\ndata: {sources: a.txt}\n")
    with pytest.raises(ConfigError) as caught:
        load_run(str(path))
    said = str(caught.value)
    assert said.index("did you mean the section model?") < said.index("no model is named")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"train: {steps: 5, steps: 6}", "key 'steps' is given twice, first in line 1"),
        (b"a: 1\nb: 2\na: 3", "line 3 is not valid YAML: key 'a' is given twice, first in line 1"),
        (b"train:\n\tsteps: 5", "line 2 is not valid YAML: a tab"),
        (b"train: [1, 2", "is not valid YAML"),
        (b"a: b: c", "unexpected ':'"),
        (b"a: 'b", "is not valid YAML"),
        (b"x: !!python/object/apply:os.system ['true']", "tags such as !!python/object"),
        (b"? [a, b]\n: c", "a key must be text"),
        (b"a: *nothing", "undefined alias"),
        (b"--- a\n--- b", "holds two documents"),
        (b"\xff\xfe\x00a", "is not UTF-8 text"),
        (b"a: \x01", "is not valid YAML"),
        (b"[" * 20_000, "nested too deeply"),
        (b"- a", "holds a list, not sections"),
        (b"text", "holds text, not sections"),
        (b"", "no model is named"),
        (b"# nothing", "no model is named"),
    ],
)
def test_a_broken_file_is_one_paragraph(tmp_path, text, part):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text)
    said = message(load_run, str(path))
    assert part in said and "broken.yaml" in said


def test_a_file_with_bom_or_crlf_or_a_commented_section_loads(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode() + b"train:\r\n  # x\r\n")
    assert load_run(str(path)).name == "windows"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("quickstrt", "did you mean 'quickstart'?"),
        ("qwen3-06b", "did you mean 'qwen3-0.6b'?"),
        ("nowhere.yaml", "run file nowhere.yaml does not exist"),
        ("quickstart.yaml", "the packaged run is called 'quickstart'"),
        ("pretrain", "no model is named"),
        ("memory://nowhere.yaml", "memory://nowhere.yaml does not exist"),
    ],
)
def test_a_run_that_is_not_there_is_answered_with_what_is(name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert part in message(load_run, name)


def test_a_folder_is_its_run_yaml(tmp_path):
    assert "is a folder without run.yaml" in message(load_run, str(tmp_path))
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "run.yaml").write_text(load_run("quickstart", ["name=other"]).to_yaml())
    assert load_run(str(folder)).name == "other"
    (folder / "run.yaml").write_text(BASE)
    assert load_run(str(folder)).name == "my-run"


def test_a_url_is_read_through_storage():
    import fsspec

    with fsspec.open("memory://runs/mine.yaml", "w") as file:
        file.write(BASE)
    assert load_run("memory://runs/mine.yaml", ["seed=3"]).seed == 3


def test_exactly_one_model(load):
    assert "model.preset and model.path are both given" in message(
        load, "", "model.path=x", "model.preset=qwen3-0.6b"
    )
    assert (
        load("", "model.init_from=/there").model.preset is None
    )  # an argument replaces the file's
    assert "exactly one" in message(
        RunConfig.model_validate, SMALL | {"model": {}} | {"model": {"preset": "a", "path": "b"}}
    )


def test_arguments_come_after_the_file_and_the_last_one_wins(load):
    run = load("train: {steps: 3}", "train.steps=4", "optim={lr: 1e-3}", "train.steps=5")
    assert (run.train.steps, run.optim.lr, run.optim.clip) == (5, 1e-3, 1.0)


def test_sources_in_every_form(load):
    assert load("", "data.sources=*.txt").data.sources == (Source(path="*.txt"),)
    many = load("", "data.sources=[a.txt, {path: b, weight: 2, field: content}]").data.sources
    assert [source.path for source in many] == ["a.txt", "b"] and many[1].weight == 2.0
    text = "eval: {every: 0}"
    assert (
        load(text, "data.eval_sources=python:stdlib").data.eval_sources[0].path == "python:stdlib"
    )


def test_a_run_is_frozen_and_reads_back_to_itself(load):
    run = load(
        "", "data.sources=[a, {path: b, weight: 2}]", "train.profile=[3, 5]", "optim.lr=3e-7"
    )
    with pytest.raises(Exception, match="frozen"):
        run.seed = 3
    with pytest.raises(Exception, match="frozen"):
        run.optim.lr = 3
    values, _ = parse_yaml(run.to_yaml(), "again")
    assert RunConfig(**values) == run
    assert yaml.safe_load(run.to_yaml())["data"]["sources"] == ["a", {"path": "b", "weight": 2.0}]


def test_python_gets_the_same_errors():
    assert "RunConfig: learning_rate is not a key" in message(
        RunConfig.model_validate, SMALL | {"learning_rate": 3}
    )
    with pytest.raises(ConfigError, match=r"train\.steps = 'x' must be an integer"):
        RunConfig(**SMALL, train={"steps": "x"})


SECRETS = ["hf_token", "wandb_api_key", "password", "aws_secret_access_key", "auth_token"]


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_is_refused_and_never_shown(load, key):
    for said in (
        message(load, f"{key}: hf_Q1w2E3r4T5y6"),
        message(load, "", f"{key}=hf_Q1w2E3r4T5"),
    ):
        assert "looks like a secret" in said and "environment" in said
        assert "Q1w2" not in said


def test_passwords_in_urls_are_masked_in_every_dump(load):
    run = load(
        "", "data.sources=https://me:hunter2@host/x?token=abcdef&a=1", "data.cache=s3://k:v@b"
    )
    for dump in (run.to_yaml(), repr(run), str(run), str(run.to_dict())):
        assert "hunter2" not in dump and "abcdef" not in dump and "k:v" not in dump
        assert "https://***@host/x?token=***&a=1" in dump
    assert run.data.sources[0].path == "https://me:hunter2@host/x?token=abcdef&a=1"
    said = message(load, "", "train.steps=https://me:hunter2@host")
    assert "hunter2" not in said
    assert mask("plain text with a@b.c") == "plain text with a@b.c"


def test_aliases_lead_to_keys_that_exist():
    known = {row.key for row in explain()}
    for alias, answer in ALIASES.items():
        assert alias not in known
        assert " " in answer or answer in known, alias
        assert alias == alias.lower().replace("-", "_")


def test_every_key_is_explained_and_there_are_about_a_hundred_at_most():
    rows = explain()
    assert len(rows) <= 100
    for row in rows:
        assert row.meaning and row.type != "section", row.key
    assert explain("mesh")[0].key == "mesh.replica"
    assert explain("optim.lr")[0].default == 3e-4
    assert "did you mean 'optim'?" in message(explain, "optimm")


def test_the_generated_page_is_current():
    page = Path(__file__).parent.parent / "docs" / "config.md"
    assert page.read_text() == to_markdown(), "run `make docs`"


def test_presets_are_listed():
    assert "qwen3-0.6b" in packaged_presets()


def test_yaml_values_are_those_of_yaml_1_2():
    text = "a: no\nb: 012\nc: 1:30\nd: 2024-01-01\ne: ~\nf: 1e3\ng: .inf\nh: true\ni: 0x10\nj: on"
    values, lines = parse_yaml(text, "x")
    assert values == {
        "a": "no", "b": 12, "c": "1:30", "d": "2024-01-01", "e": None, "f": 1000.0, "g": math.inf,
        "h": True, "i": "0x10", "j": "on",
    }  # fmt: skip
    assert lines["f"] == 6


@given(st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_is_yaml_or_a_config_error(text):
    try:
        parse_yaml(text, "fuzz")
        parse_yaml(text.encode("utf-8", "surrogatepass"), "fuzz")
    except ConfigError as error:
        assert "\n" not in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from([row.key for row in explain()]), JSON)
@settings(max_examples=400, deadline=None)
def test_any_value_of_any_key_is_a_run_or_a_config_error(key, value):
    section, _, name = key.rpartition(".")
    values = {key: dict(entry) for key, entry in SMALL.items()}
    (values.setdefault(section, {}) if section else values)[name] = value
    try:
        RunConfig(**values)
    except LocaltrainError as error:
        assert isinstance(error, ConfigError) and "\n" not in str(error)


def test_two_keys_that_disagree_are_blamed_on_the_argument():
    with pytest.raises(ConfigError, match=r"argument 'train.micro_batch=...': train.micro_batch"):
        load_run("quickstart", ["train.micro_batch=5"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_as_run_file_is_refused_and_what_the_shell_opened_is_read(tmp_path):
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    for name in (pipe, "/dev/zero"):
        with pytest.raises(ConfigError, match=rf"{name} is a pipe, a socket or a device.*<\("):
            load_run(str(name))
    text = "model: {preset: qwen3-tiny}\ndata: {sources: x}\ntrain: {steps: 7}\n"
    code = "import sys, localtrain.config as c; print(c.load_run(sys.argv[1]).train.steps)"
    for place in ("/dev/stdin", "/dev/fd/0"):
        done = subprocess.run(
            [sys.executable, "-c", code, place], input=text, capture_output=True, text=True
        )
        assert done.stdout == "7\n", done.stderr
