"""The TPU backend: found without opening a device, and compiled for without having one."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from localtrain import backend, processes, sharding
from localtrain.backends import devices, tpu_vm
from localtrain.backends.tpu_vm import TpuVm
from localtrain.cli import run as command
from localtrain.config import load_run
from localtrain.errors import ConfigError

libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler: pip install 'localtrain[tpu]'",
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a TPU, and functions that put one into it."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found: dict[str, list[str]] = {}
    monkeypatch.setattr(tpu_vm.glob, "glob", lambda pattern: found.get(pattern, []))
    monkeypatch.setattr(tpu_vm, "_installed", lambda: True)

    def pci(vendor: str, kind: str) -> None:
        folder = tmp_path / f"{vendor}-{kind}"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(kind + "\n")
        found.setdefault("/sys/bus/pci/devices/*", []).append(str(folder))

    return found, pci


def test_without_a_tpu_it_says_what_was_looked_for(machine):
    with pytest.raises(ConfigError) as caught:
        backend.choose("tpu-vm")
    for part in ("/dev/accel*", "/dev/vfio/*", "create a TPU VM", "localtrain plan --topology"):
        assert part in str(caught.value)


def test_a_v4_is_found_by_its_driver_and_a_later_one_by_vfio_and_its_pci_number(machine):
    found, pci = machine
    found["/dev/vfio/[0-9]*"] = ["/dev/vfio/0"]
    pci("0x10de", "0x2330")  # a GPU that is passed through with vfio
    pci("0x1ae0", "0x0042")  # Google's network card
    assert "no TPU" in TpuVm().check()
    pci("0x1ae0", "0x0063")  # v5e
    assert TpuVm().check() is None
    found.clear()
    found["/dev/accel[0-9]*"] = ["/dev/accel0"]
    assert TpuVm().check() is None and backend.choose()[0].name == "tpu-vm"


def test_a_tpu_without_its_library_names_the_extra(machine, monkeypatch):
    machine[0]["/dev/accel[0-9]*"] = ["/dev/accel0"]
    monkeypatch.setattr(tpu_vm, "_installed", lambda: False)
    assert "pip install 'localtrain[tpu]'" in TpuVm().check()


def test_the_platform_that_hides_it_is_named(machine, monkeypatch):
    machine[0]["/dev/accel[0-9]*"] = ["/dev/accel0"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu" in TpuVm().check()
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert TpuVm().check() is None


def test_a_part_of_a_slice_is_refused():
    with pytest.raises(ConfigError, match="every chip of the slice"):
        TpuVm().prepare_environment(None, 4)


@pytest.mark.parametrize(
    ("hosts", "slices", "joins"),
    [
        ("localhost", "", False),
        ("10.0.0.1", "1", False),
        ("10.0.0.1,10.0.0.2", "", True),
        ("localhost", "2", True),
        ("", "", True),  # a TPU VM: the metadata server knows
    ],
)
def test_workers_join_unless_the_environment_names_this_host_alone(
    monkeypatch, hosts, slices, joins
):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", slices)
    calls = []
    monkeypatch.setattr(processes, "join", lambda *a, **k: calls.append((a, k)))
    TpuVm().initialize()
    assert calls == ([((), {"auto": True})] if joins else [])
    TpuVm().initialize("10.0.0.1:1234", 2, 1)
    assert calls[-1] == (("10.0.0.1:1234", 2, 1), {})


def test_figures_per_device_are_those_of_the_data_sheets():
    peak = TpuVm().peak_flops
    # docs.cloud.google.com/tpu/docs/v4 .. tpu7x; of TPU7x jax counts half a chip as a device
    kinds = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v6 lite": 918, "TPU7x": 1153.5}
    assert {kind: peak(kind) / 1e12 for kind in kinds} == kinds
    assert peak("TPU v3") is None and peak("TPU v9") is None
    for _, facts, _ in devices.TPUS.values():
        assert facts.link > 1e11 and facts.source and facts.memory_bandwidth > 8e11


def test_memory_leaves_what_the_library_keeps():
    usable, how = TpuVm().usable_memory("v5e:4x4")
    assert usable == int(15.75 * 2**30) and "without 0.25 GiB" in how
    assert TpuVm().usable_memory("tpu7x:2x2x1")[0] == int(94.75 * 2**30)


def plan(*arguments: str) -> subprocess.CompletedProcess:
    """`localtrain plan` in a process of its own, without the flags of the test suite."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    line = [sys.executable, "-m", "localtrain", "plan", *arguments, "--json"]
    return subprocess.run(line, capture_output=True, text=True, timeout=900, env=environment)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--topology", "v5e:4x5"], ("did you mean 'v5e:4x8'?", "v6e: 16x16, 1x1")),
        (["--topology", "v6e-8x8"], ("did you mean 'v6e:8x8'?",)),
        (["--device", "rtx-3060-12gb", "--slices", "2"], ("--slices 2 needs --topology",)),
    ],
)
def test_mistakes_name_the_nearest_and_exit_2(arguments, parts, capfd):
    assert command(["plan", "quickstart", *arguments]) == 2
    said = capfd.readouterr().err
    assert all(part in said for part in parts), said


def test_without_the_compiler_the_extra_is_named(monkeypatch, capfd):
    monkeypatch.setattr(tpu_vm, "_installed", lambda: False)
    assert command(["plan", "quickstart", "--topology", "v5e:4x4"]) == 2
    assert "pip install 'localtrain[tpu]'" in capfd.readouterr().err


@pytest.fixture(scope="module")
def small(tmp_path_factory, tiny_config):
    """A run of two layers as wide as a TPU's tiles."""
    folder = tmp_path_factory.mktemp("model")
    config = {**tiny_config, "hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return [f"model.path={folder}", "data.seq_len=256", "train.remat=full", "train.batch_size=8"]


@pytest.mark.tpu
@libtpu
def test_each_slice_holds_a_whole_copy():
    found = TpuVm().topology("v5e:2x2", None, slices=2)
    mesh = sharding.make_mesh(load_run("quickstart").mesh, found)
    assert dict(mesh.shape) == dict.fromkeys(sharding.AXES, 1) | {"replica": 2, "fsdp": 4}
    for copy in range(2):
        assert {device.slice_index for device in mesh.devices[copy].flat} == {copy}
    with pytest.raises(ConfigError, match="v5e:2x2 has 4 devices"):
        TpuVm().topology("v5e:2x2", 3)


@pytest.mark.tpu
@libtpu
def test_a_small_program_is_compiled_for_a_slice(small):
    done = plan("quickstart", "--topology", "v5e:2x2", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["fits"] and found["devices"] == 4 and found["mesh"]["fsdp"] == 4
    memory = found["memory_per_device"]
    assert memory["available"] == int(15.75 * 2**30)
    norms = 2 * (2 * 256 + 2 * 128) + 256  # whole on every device; the rest is split over 4
    assert memory["parameters"] == 4 * (found["parameters"] - norms) // 4 + 4 * norms
    assert memory["optimizer"] == 2 * memory["parameters"]
    # 2 layers of 7 matrices are gathered forward and again backward, and the head; ids once
    assert found["collectives"]["all-gather"]["count"] == 2 * 7 * 2 + 2
    assert found["kernels"]["attention"] == "splash"
    assert any("splash" in name for name in found["kernels"]["custom_calls"])
    # full remat: a third more than the model's own FLOPs, of which attention is little here
    assert 1.0 < found["flops_per_step"] / found["model_flops_per_step"] < 1.5
    parts = found["step_time_parts"]
    longest = max(parts["arithmetic"], parts["memory"])
    assert found["step_time_s"] == pytest.approx(longest + parts["link"] + parts["network"])


@pytest.mark.tpu
@libtpu
def test_over_many_chips_a_matrix_is_gathered_and_its_gradient_scattered_not_summed(
    tmp_path, tiny_config
):
    wide = {**tiny_config, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    keys = (f"model.path={tmp_path}", "data.seq_len=256", "train.batch_size=64")
    done = plan("quickstart", "--topology", "v5p:4x4x4", "train.remat=full", *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["devices"] == found["mesh"]["fsdp"] == 64
    # twice gathered in bfloat16, once scattered in float32; a sum would send twice as much
    ways = 63 / 64
    assert found["sent_bytes_per_step"]["link"] < 1.1 * (2 * 2 + 4) * found["parameters"] * ways


@pytest.mark.tpu
@pytest.mark.slow
@libtpu
def test_between_slices_only_replica_is_exchanged(small):
    done = plan("quickstart", "--topology", "v5e:2x2", "--slices", "2", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["devices"] == 8 and found["mesh"]["replica"] == 2 and found["mesh"]["fsdp"] == 4
    sent = found["step_time_parts"]["network"] * devices.TPUS["v5e"][1].network
    # each device's part of the gradients, in at most float32, to one other slice and back
    assert 0 < sent <= 4 * found["parameters"] / 4 * 1.3


@pytest.fixture(scope="module")
def qwen():
    """Qwen3-0.6B, 4 rows of 2048 tokens a device."""
    keys = ("data.seq_len=2048", "train.batch_size=64", "train.remat=full")
    done = plan("qwen3-0.6b", "--backend", "tpu-vm", "--topology", "v5e:4x4", *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.tpu
@pytest.mark.slow
@libtpu
def test_qwen_on_16_chips_needs_no_more_than_in_maxtext(qwen):
    """MaxText's own compile of the same: 0.45 GB of arguments and 6.42 of temporaries."""
    memory = qwen["memory_per_device"]
    assert memory["arguments"] <= 0.45e9 and memory["temporaries"] <= 2.0e9
    assert qwen["fits"]


@pytest.mark.tpu
@pytest.mark.slow
@libtpu
def test_the_flops_of_qwen_are_those_counted_by_hand(qwen):
    layers, dim, inner, vocab, tokens = 28, 1024, 3072, 151936, 4 * 2048
    layer = dim * (2048 + 1024 + 1024) + 2048 * dim + 3 * dim * inner  # q, k, v, o, MLP
    # full remat: forward twice, but for the last product of a layer; each backward product has two
    products = layers * (4 * layer - inner * dim) + 3 * vocab * dim
    pairs = 4 * 16 * 2048 * 2048 // 2  # rows, heads, causal pairs, of 128 channels each
    attention = layers * pairs * 128 * (2 * 2 + 3 + 4)  # forward twice, dq, dk and dv
    counted = qwen["flops_per_step"] / 16
    assert counted == pytest.approx(2 * tokens * products + 2 * attention, rel=0.005)


@pytest.mark.tpu
@pytest.mark.slow
@libtpu
def test_llama_8b_on_8_chips_needs_no_more_than_in_maxtext():
    """2 rows of 4096 tokens a device. MaxText's own compile: 12.05 + 12.85 GB."""
    keys = ("data.seq_len=4096", "train.batch_size=16", "train.remat=full")
    done = plan("llama-3.1-8b", "--backend", "tpu-vm", "--topology", "v5p:2x2x2", *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    memory = json.loads(done.stdout)["memory_per_device"]
    assert memory["arguments"] <= 12.05e9 and memory["temporaries"] < 12.85e9


@pytest.mark.tpu
@pytest.mark.slow
@libtpu
def test_a_run_that_the_compiler_refuses_does_not_fit(small):
    keys = ["data.seq_len=512", "train.batch_size=8192", "train.remat=none", "--minutes", "0"]
    done = plan("quickstart", "--topology", "v5e:1x1", *small, *keys)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    memory = found["memory_per_device"]
    assert not found["fits"] and found["advice"] and found["flops_per_step"] is None
    # 8192 x 512 tokens of 256 channels in bfloat16, at least 10 of them for each of 2 layers
    assert memory["total"] >= 2 * 10 * 8192 * 512 * 256 * 2 > memory["available"]
