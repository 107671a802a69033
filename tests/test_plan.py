"""`localtrain plan`: what the compiler says, of the step that is trained, for devices not here."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from localtrain import backend, hlo, job, oom, steps
from localtrain import plan as planning
from localtrain.backends import devices, local_gpu
from localtrain.cli import run as command
from localtrain.config import RunConfig, load_run
from localtrain.plan import plan, targets, tune
from localtrain.plan.place import Place, here
from localtrain.warmstart import find_start

CARDS = Path(local_gpu.__file__).parent.parent / "configs" / "cards"
# By hand: embedding 264 x 32; a layer: q and o 2 x 32 x 32, k and v 2 x 32 x 16, MLP 3 x 32 x 64,
# norms 2 x 32 + 2 x 16; final norm 32.
PARAMETERS = 264 * 32 + 2 * (2 * 1024 + 2 * 512 + 6144 + 96) + 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_config):
    """Arguments of a run that compiles fast."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_config))
    return (f"model.path={folder}", "data.seq_len=32", "train.batch_size=4", "train.remat=none")


@pytest.fixture(scope="module")
def planned(tiny):
    return plan(load_run("quickstart", tiny), backend="cpu")


def test_the_classes_are_bytes_of_the_run_and_add_up(planned):
    memory = planned.memory_per_device
    assert planned.parameters == PARAMETERS and planned.devices == len(jax.devices())
    assert memory["parameters"] == 4 * PARAMETERS
    assert memory["optimizer"] == 8 * PARAMETERS
    assert memory["total"] == memory["arguments"] + memory["temporaries"] + memory["code"]
    assert memory["arguments"] >= memory["parameters"] + memory["optimizer"]
    assert planned.fits == (memory["total"] <= memory["available"]) and planned.fits
    assert planned.tokens_per_step == 4 * 32


def test_it_is_the_step_that_train_compiles(planned, tiny):
    run = load_run("quickstart", tiny)
    start = find_start(run, None)
    place, _ = backend.choose("cpu")
    compiled = job.compile_job(run, job.make_network(run, start.hf, "tiny", place), place)
    mine = {k: v for k, v in planned.memory_per_device.items() if k != "available"}
    assert compiled.memory() == mine


def test_the_state_is_updated_in_place(planned):
    """New parameters and moments take no memory of their own: only the step's numbers do."""
    memory = planned.memory_per_device
    assert memory["temporaries"] - memory["compiler_temp"] < 4096


@pytest.fixture(scope="module")
def searched(tiny):
    """A run of many rows with two thirds of the memory it needs, and what was found for it."""
    run = load_run("quickstart", [*tiny, "train.batch_size=64", "data.seq_len=128"])
    needed = plan(run, backend="cpu").memory_per_device["total"]
    told: list[str] = []
    found = plan(run, backend="cpu", memory=needed * 2 // 3, progress=told.append)
    return run, found, told


def test_a_setting_that_fits_is_found_and_each_is_compiled_once(searched):
    run, found, told = searched
    assert not found.fits and found.suggestion
    changes = yaml.safe_load(found.suggestion)
    assert set(changes) <= {"train", "optim", "mesh"}
    again = RunConfig.model_validate(_merged(run.model_dump(), changes))
    memory = found.memory_per_device["available"]
    assert plan(again, backend="cpu", memory=memory).fits
    # the batch is the same: only how it is computed and stored differs
    assert again.train.batch_size == 64 and again.data == run.data and again.model == run.model
    assert "looking for the fastest setting that fits" in told[0] and "at most 10 min" in told[0]
    tried = [line.rpartition(": ")[0] for line in told[1:]]
    assert len(tried) == len(set(tried)) >= 1


def _merged(plain, changes):
    return {
        key: {**value, **changes.get(key, {})} if key in changes else value
        for key, value in plain.items()
    }


def test_the_fastest_settings_come_first_and_bfloat16_last(searched):
    run, _, _ = searched
    place = here(run, "cpu", None)
    order = [setting.changes for setting in tune.settings(run, place, network_of(run, place))]
    assert order[0]["train.remat"] == "none" and order[0]["train.micro_batch"] is None
    exact = {"optim.state_dtype": "float32", "train.param_dtype": "float32"}
    assert {key: order[0][key] for key in exact} == exact
    rounded = [sum(change[key] == "bfloat16" for key in exact) for change in order]
    assert rounded == sorted(rounded) and set(rounded) == {0, 1, 2}
    sizes = {change["train.micro_batch"] for change in order}
    assert sizes == {None, 32, 16, 8, 4, 2, 1}


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of one as a mesh looks at."""

    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def candidates(tiny, count, *keys):
    run = load_run("quickstart", [*tiny, *keys])
    some = [Device(i) for i in range(count)]
    place = dataclasses.replace(here(run, "cpu", None), devices=some)
    return [setting.changes for setting in tune.settings(run, place, network_of(run, place))]


def network_of(run, place):
    start = find_start(run, None)
    return job.make_network(run, start.hf, start.name, place.backend)


def test_every_divisor_of_the_rows_and_every_mesh_is_one_candidate(tiny):
    order = candidates(tiny, 4, "train.batch_size=24", "mesh.fsdp=2", "mesh.tensor=2")
    assert {change["train.micro_batch"] for change in order} == {None, 12, 8, 6, 4, 2}
    meshes = {(change["mesh.fsdp"], change["mesh.tensor"]) for change in order}
    assert meshes == {(2, 2), (-1, 1)}  # (-1, 2) is the run's own
    as_text = [str(change) for change in order]
    assert len(set(as_text)) == len(as_text)


def test_a_run_in_bfloat16_is_not_offered_other_types(tiny):
    types = ("optim.state_dtype", "train.param_dtype")
    order = candidates(tiny, 1, *(f"{key}=bfloat16" for key in types))
    assert {change[key] for change in order for key in types} == {"bfloat16"}


def test_an_error_of_the_compiler_in_a_candidate_is_told_and_the_first_plan_kept(tiny, monkeypatch):
    real, told = planning.compile_for, []

    def compile_for(run, start, place):
        if told:  # the search has begun
            raise jax.errors.JaxRuntimeError("INTERNAL: cannot do that")
        return real(run, start, place)

    monkeypatch.setattr(planning, "compile_for", compile_for)
    run = load_run("quickstart", tiny)
    found = plan(run, backend="cpu", memory=700_000, progress=told.append)
    assert not found.fits and found.suggestion is None and found.memory_per_device["total"]
    assert any("left out, the compiler says: INTERNAL: cannot do that" in line for line in told)


def test_a_suggestion_that_rounds_says_so_above_its_lines(tiny):
    run = load_run("quickstart", [*tiny, "train.batch_size=1", "train.remat=full"])
    place = dataclasses.replace(here(run, "cpu", None), devices=jax.devices()[:1])
    first = planning.compile_for(run, find_start(run, None), place)
    # less than the parameters and moments take in float32
    tight = first.memory_per_device["total"] - first.parameters
    place = dataclasses.replace(place, available=tight)
    first = dataclasses.replace(first, fits=False)
    told = []
    said, _ = tune.search(run, find_start(run, None), place, first, 600, told.append)
    assert said is not None, told
    assert said.startswith("# not the same training: optim.state_dtype round")
    assert yaml.safe_load(said)["optim"] == {"state_dtype": "bfloat16"}


def test_without_time_nothing_is_searched(tiny):
    found = plan(load_run("quickstart", tiny), backend="cpu", memory=200_000, minutes=0)
    assert not found.fits and found.suggestion is None and found.advice


def test_where_the_state_alone_is_too_large_more_devices_are_what_helps(tiny):
    told = []
    run = load_run("quickstart", tiny)
    found = plan(run, backend="cpu", memory=10_000, progress=told.append)
    assert not found.fits and found.suggestion is None and not told  # nothing else is compiled
    least = found.parameters * 2 * 3  # parameters and two moments in bfloat16
    assert f"take {least / 1e9:.2f} GB" in found.advice[0] and "more devices" in found.advice[0]
    # a sixteenth is too much, with norms that each device has: 6 * (26624 / 16 + 480) bytes
    assert "over mesh.fsdp=32 there is room" in found.advice[0]
    # room for the state and no more: other settings are looked for, and what they vary is no help
    assert "train.param_dtype=bfloat16" in " ".join(plan(run, memory=least + 1, minutes=0).advice)
    found = plan(run, backend="cpu", memory=least + 1, progress=told.append)
    assert found.suggestion is None and told[-1] == "none of them fits"
    assert found.advice[0] == "more devices" and "bfloat16" not in " ".join(found.advice)
    assert any(tip.startswith("data.seq_len=") for tip in found.advice)


def test_what_a_device_holds_is_what_the_mesh_really_splits(tiny):
    run = load_run("quickstart", tiny)
    place = here(run, "cpu", None)
    network = network_of(run, place)
    norms = 2 * 96 + 32
    whole, axes = PARAMETERS, ("replica", "fsdp", "context", "expert", "tensor")

    def part(**sizes):
        mesh = jax.sharding.AbstractMesh(tuple(sizes.get(axis, 1) for axis in axes), axes)
        return tune.held(network, mesh)

    assert part() == part(replica=2) == part(context=4) == whole
    assert part(fsdp=3) == whole  # does not divide dim 32
    assert part(fsdp=4) == part(fsdp=4, replica=2) == (whole - norms) // 4 + norms


def test_a_run_that_does_not_fit_says_so_and_names_the_keys_that_help(tiny, capfd):
    line = ["plan", "quickstart", "--backend", "cpu", "--memory", "200kB", "--minutes", "0"]
    assert command([*line, *tiny]) == 0
    said = capfd.readouterr().out
    assert "IT DOES NOT FIT" in said and "0.00 GB (as given)" in said
    for key in ("train.remat=full", "optim.state_dtype=bfloat16", "train.param_dtype=bfloat16"):
        assert key in said


def test_json_has_the_contracts_keys_and_no_null(tiny, capfd):
    assert command(["plan", "quickstart", "--backend", "cpu", "--json", *tiny]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {"fits", "device", "devices", "parameters", "memory_per_device"} <= set(found)
    assert {"model_flops_per_step", "tokens_per_step", "compile_s", "kernels"} <= set(found)
    classes = {"parameters", "optimizer", "temporaries", "code", "total", "available"}
    assert {*classes, "arguments", "compiler_temp"} == set(found["memory_per_device"])
    assert {"flops_per_step", "collectives", "step_time_s", "how", "suggestion"} <= set(found)
    unknown = {key for key, value in found.items() if value is None}
    assert unknown == {"step_time_s", "tokens_per_day", "mfu", "suggestion"}  # no figures of a CPU
    assert "no figures of cpu are known" in found["how"]
    assert None not in found["memory_per_device"].values()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--device", "rtx-3060"], ("did you mean 'rtx-3060-12gb'?", "h100-80gb")),
        (["--device", "rtx-3060-12gb", "--topology", "v5e:4x4"], ("name one of them",)),
        (["--device", "rtx-3060-12gb", "--backend", "cpu"], ("backend cpu has no machine",)),
        (["--memory", "lots"], ("'lots' is not a size such as 8GB",)),
        (["--memory", "0"], ("is not a size",)),
        (["--memory", "9" * 400], ("is not a number of bytes",)),
        (["--memory", "0.1"], ("is not a number of bytes",)),
        (["--minutes", "nan"], ("nan is not a number of minutes",)),
        (["--minutes", "inf"], ("inf is not a number of minutes",)),
    ],
)
def test_mistakes_are_one_paragraph_and_exit_2(arguments, parts, capfd):
    assert command(["plan", "quickstart", *arguments]) == 2
    said = capfd.readouterr().err
    assert all(part in said for part in parts), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("kind", "count", "said"),
    [
        ("NVIDIA H100 80GB HBM3", 16, True),
        ("NVIDIA H100 80GB HBM3", 8, False),
        ("TPU v4", 16, False),
    ],
)
def test_the_exchanges_of_more_gpus_than_a_host_has_are_told_to_be_too_fast(
    monkeypatch, tiny, kind, count, said
):
    cpu, many = backend.find("cpu"), [Device(i, device_kind=kind) for i in range(count)]
    run = load_run("quickstart", tiny)
    network = job.make_network(run, find_start(run, None).hf, "tiny", cpu)
    step = steps.lower(network, run, job.run_mesh(run, jax.devices()[:1])).train.compile()
    monkeypatch.setattr(type(cpu), "facts", lambda self, kind: devices.facts(kind))
    place = Place(cpu, "x", many, 1, "x")
    how = planning._work(run, place, network, hlo.read(step.as_text()), 128, "")["how"]
    assert ("as if all 16 GPUs were on one host" in how) == said


def test_what_the_compiler_refuses_without_a_figure_is_given_in_its_words(monkeypatch, tiny):
    vague = "RESOURCE_EXHAUSTED: shared memory\n  of a kernel"
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: _raise(vague))
    found = plan(load_run("quickstart", tiny), backend="cpu", minutes=0)
    assert not found.fits
    assert "words: RESOURCE_EXHAUSTED: shared memory of a kernel" in found.how
    known = "RESOURCE_EXHAUSTED: Used 20.5G of 16.0G hbm"
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: _raise(known))
    found = plan(load_run("quickstart", tiny), backend="cpu", memory=10**9, minutes=0)
    assert found.memory_per_device["total"] == int(20.5 * 2**30) and "words" not in found.how


def _raise(message):
    raise jax.errors.JaxRuntimeError(message)


def test_compiling_for_a_card_leaves_the_environment_as_it_was(monkeypatch, tiny):
    monkeypatch.setenv("JAX_PLATFORMS", "before")
    seen = []

    def topology(self, name, *given):
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
        os.environ["JAX_PLATFORMS"] = "cpu"
        seen.append(name)
        return jax.devices()[:1]

    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.setattr(local_gpu.LocalGpu, "topology", topology)
    monkeypatch.setattr(local_gpu.LocalGpu, "defaults", lambda self: backend.Defaults())
    assert plan(load_run("quickstart", tiny), device="h100-80gb").fits
    assert seen == ["h100-80gb"]
    assert os.environ["JAX_PLATFORMS"] == "before" and "TPU_WORKER_HOSTNAMES" not in os.environ


def test_without_the_compiler_the_extra_is_named(monkeypatch, capfd):
    monkeypatch.setattr(local_gpu, "_installed", lambda module: module != "nvidia.cudnn")
    assert command(["plan", "quickstart", "--device", "rtx-3060-12gb"]) == 2
    said = capfd.readouterr().err
    assert "found no nvidia.cudnn; pip install 'localtrain[plan-gpu]'" in said


def test_every_card_names_its_source_and_has_the_figures_that_xla_reads():
    assert targets()["local-gpu"] == sorted(path.stem for path in CARDS.glob("*.txt"))
    for path in CARDS.glob("*.txt"):
        text = path.read_text()
        assert text.startswith("# ") and "Source:" in text.split("gpu_device_info")[0], path
        for key in ("core_count", "memory_bandwidth", "l2_cache_size", "device_memory_size"):
            assert int(re.search(rf"{key}: (\d+)", text)[1]) > 0, (path, key)
        # the name says the memory: rtx-3060-12gb
        size = int(re.search(r"device_memory_size: (\d+)", text)[1])
        assert abs(size / 1e9 / int(re.search(r"(\d+)gb$", path.stem)[1]) - 1) < 0.08
        # and the table behind step times and MFU has the same card
        facts = local_gpu.LocalGpu().facts(re.search(r'description_str: "(.*)"', text)[1])
        bandwidth = int(re.search(r"memory_bandwidth: (\d+)", text)[1])
        assert facts.memory == pytest.approx(size, rel=0.01), path
        assert facts.memory_bandwidth == pytest.approx(bandwidth, rel=0.01), path
        assert facts.source and facts.peak_flops > 20e12, path


def compiled_for(card: str, *arguments: str) -> dict[str, int]:
    """Memory of a run on a card, from a process of its own without the flags of the test suite."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    line = [sys.executable, "-m", "localtrain", "plan", *arguments, "--device", card, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["memory_per_device"]


cuda_compiler = pytest.mark.skipif(
    not all(map(local_gpu._installed, local_gpu._COMPILER)),
    reason="needs NVIDIA's compiler: pip install 'localtrain[plan-gpu]'",
)


@pytest.mark.slow
@cuda_compiler
@pytest.mark.parametrize(
    ("name", "card", "most"),
    [
        ("qwen3-0.6b-8gb", "rtx-4060-laptop-8gb", 7.0e9),
        ("qwen3-0.6b-12gb", "rtx-3060-12gb", 10.8e9),
        ("qwen3-0.6b-16gb", "rtx-4060-ti-16gb", 14.4e9),
    ],
)
def test_the_run_files_of_small_gpus_fit_them(name, card, most):
    run = load_run(name)
    assert (run.train.micro_batch or run.train.batch_size) * run.data.seq_len >= 2048
    memory = compiled_for(card, name)
    assert memory["total"] <= most and memory["total"] <= memory["available"]
    assert memory["temporaries"] - memory["compiler_temp"] < 2**20  # the state lies in place


@pytest.mark.slow
@cuda_compiler
@pytest.mark.parametrize(("moments", "most"), [("float32", 9.65e9), ("bfloat16", 7.27e9)])
def test_float32_parameters_need_no_more_than_the_prototype_did(moments, most):
    """1 x 2048 tokens, full remat. Bars: a prototype's step, compiled by the same compiler."""
    keys = ("train.batch_size=1", "data.seq_len=2048", f"optim.state_dtype={moments}")
    assert compiled_for("rtx-4060-laptop-8gb", "qwen3-0.6b", *keys)["total"] <= most


def test_the_compilers_modules_are_looked_up_without_importing_them():
    assert local_gpu._installed("json") and not local_gpu._installed("no_such_package.part")


def test_out_of_memory_says_what_was_needed_and_what_was_free_by_class(monkeypatch, tiny):
    monkeypatch.setattr(oom, "_device_memory", lambda: (8 * 2**30, 6 * 2**30))
    needed = {"parameters": 2**30, "optimizer": 2**31, "temporaries": 2**32, "total": 7 * 2**30}
    run = load_run("quickstart", tiny)
    error = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."
    said = oom.explain(RuntimeError(error), run, needed)
    assert "allocating 4.00 GiB on a device with 8.00 GiB, of which 2.00 GiB were free" in said
    assert "needs 7.00 GiB per device: parameters 1.00 GiB, optimizer 2.00 GiB, temp" in said
    for key in ("train.remat=full", "optim.state_dtype=", "train.param_dtype=bfloat16"):
        assert key in said
    assert "costs 4 bytes a parameter" in said and "train.batch_size=2 " in said


def test_the_program_does_not_grow_with_depth(tiny_config):
    """What a compiler gets to see is as long for 24 layers as for 2."""
    run, lines = load_run("quickstart", ["data.seq_len=32", "train.batch_size=4"]), []
    for layers in (2, 24):
        hf = {**tiny_config, "num_hidden_layers": layers}
        network = job.make_network(run, hf, "tiny", backend.find("cpu"))
        text = steps.lower(network, run, job.run_mesh(run, None, network)).train.as_text()
        lines.append(len(text.splitlines()))
    assert lines[0] == lines[1] > 100
