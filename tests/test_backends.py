"""Backends: found by entry point, chosen by what works, refused with what was looked for."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from localtrain import backend as backend_module
from localtrain import processes
from localtrain.backend import Backend, choose, find, names, survey
from localtrain.backends import local_gpu
from localtrain.backends.cpu import Cpu
from localtrain.backends.local_gpu import LocalGpu
from localtrain.backends.multi_gpu import MultiGpu
from localtrain.config import load_run
from localtrain.errors import ConfigError


def in_new_process(code: str, **variables: str) -> str:
    """stdout of a fresh interpreter: jax opens its devices once per process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_packaged_backends_are_registered():
    assert {"cpu", "local-gpu"} <= set(names())
    assert find("cpu").check() is None


@pytest.mark.parametrize(
    ("name", "part"), [("cpuu", "did you mean 'cpu'?"), ("moon", "found: cpu")]
)
def test_an_unknown_backend_names_what_was_looked_for(name, part):
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert part in str(caught.value) and "localtrain.backends" in str(caught.value)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local_gpu.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(local_gpu, "_loads", lambda library: False)
    monkeypatch.setattr(local_gpu.shutil, "which", lambda name: None)


@pytest.fixture
def with_driver(no_gpu, monkeypatch):
    monkeypatch.setattr(local_gpu.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(local_gpu, "_loads", lambda library: True)


def test_without_a_gpu_the_cpu_is_chosen_and_said_in_one_line(no_gpu):
    chosen, why = choose()
    assert chosen.name == "cpu" and "\n" not in why
    assert why.startswith("backend cpu: the best usable one") and "no NVIDIA driver" in why


def test_local_gpu_without_a_driver_says_what_was_looked_for(no_gpu):
    with pytest.raises(ConfigError) as caught:
        choose("local-gpu")
    for part in ("/dev/nvidia*", "libcuda", "nvidia-smi", "install the driver"):
        assert part in str(caught.value)


def test_local_gpu_names_the_one_thing_that_is_there(no_gpu, monkeypatch):
    monkeypatch.setattr(local_gpu.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "found only nvidia-smi" in LocalGpu().check()


def test_local_gpu_with_a_driver_but_without_the_plugin_says_what_to_install(
    with_driver, monkeypatch
):
    monkeypatch.setattr(local_gpu, "_plugins", lambda: [])
    assert "pip install 'localtrain[cuda13]'" in LocalGpu().check()


def test_local_gpu_is_preferred_when_driver_and_plugin_are_there(with_driver, monkeypatch):
    monkeypatch.setattr(local_gpu, "_plugins", lambda: ["jax_cuda13_plugin"])
    assert choose()[0].name == "local-gpu"


@pytest.mark.parametrize(
    ("variable", "value"), [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")]
)
def test_local_gpu_obeys_what_hides_it(with_driver, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert variable in LocalGpu().check()


def test_local_gpu_sets_memory_and_platform_and_says_so():
    code = (
        "import os; from localtrain.backends.local_gpu import LocalGpu;"
        "print(LocalGpu().prepare_environment()[0]);"
        "print(os.environ['XLA_CLIENT_MEM_FRACTION'], os.environ['JAX_PLATFORMS'])"
    )
    said, values = in_new_process(code).splitlines()
    assert "90% is reserved" in said and values == "0.9 cuda,cpu"
    said = in_new_process(code.rpartition("print")[0], XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert said == "GPU memory: as the environment says, XLA_PYTHON_CLIENT_MEM_FRACTION=0.5"


@pytest.fixture
def two_gpus(with_driver, entries, monkeypatch):
    monkeypatch.setattr(local_gpu, "_plugins", lambda: ["jax_cuda13_plugin"])
    entries(**{"multi-gpu": "localtrain.backends.multi_gpu:MultiGpu"})
    monkeypatch.setattr(local_gpu.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])


def test_multi_gpu_is_preferred_where_there_are_several(two_gpus, monkeypatch):
    assert choose()[0].name == "multi-gpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose()[0].name == "local-gpu"
    for name, value in (("STEP_NUM_TASKS", "2"), ("PROCID", "0"), ("STEP_NODELIST", "a,b")):
        monkeypatch.setenv(f"SLURM_{name}", value)  # one on each of two hosts
    assert choose()[0].name == "multi-gpu"


@pytest.mark.parametrize(
    ("tasks", "rank", "gpus", "mine"),
    [(1, 0, "0,1,2,3", None), (2, 1, "0,1,2,3", [2, 3]), (4, 3, "0,1,2,3", [3]), (2, 1, "5", None)],
)
def test_processes_of_one_host_share_its_gpus(monkeypatch, tasks, rank, gpus, mine):
    """With all of a host in sight each takes its share; one that was given its own takes that."""
    joined = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(processes, "join", lambda *flags, **options: joined.update(options))
    env = {"SIZE": str(2 * tasks), "RANK": str(tasks + rank)}
    env |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(tasks)}
    for name, value in env.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "4096.0;tcp://10.0.0.1:4")
    MultiGpu().initialize()
    assert joined == {"local_devices": mine}


def test_multi_gpu_refuses_more_processes_or_devices_than_gpus(two_gpus, monkeypatch):
    with pytest.raises(ConfigError, match="--devices 3: backend multi-gpu sees 2 GPUs"):
        MultiGpu().prepare_environment(None, 3)
    for name, value in (("SIZE", "3"), ("RANK", "2"), ("LOCAL_RANK", "2"), ("LOCAL_SIZE", "3")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(ConfigError, match="started 3 processes on this host, which has 2 GPUs"):
        MultiGpu().initialize("host:1")


def test_multi_gpu_takes_all_it_sees():
    script = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '4,5,6'\n"
        "from localtrain.backends.multi_gpu import MultiGpu\n"
        "print(MultiGpu().prepare_environment(None, None)[0])\n"
        "print(os.environ['JAX_PLATFORMS'], os.environ['JAX_CUDA_VISIBLE_DEVICES'])"
    )
    said = in_new_process(script).splitlines()
    assert said == ["3 of 3 GPUs of this host", "cuda,cpu 0,1,2"]


def test_a_backend_of_one_process_refuses_several(monkeypatch):
    with pytest.raises(ConfigError, match="this is process 1 of 2, but backend local-gpu runs in"):
        LocalGpu().initialize("host:1", 2, 1)


def test_local_gpu_takes_one_device_only():
    with pytest.raises(ConfigError, match="uses one GPU"):
        LocalGpu().prepare_environment(None, 2)


def test_deterministic_runs_get_the_option_and_it_compiles():
    import jax

    run = load_run("quickstart", ["train.deterministic=true"])
    options = LocalGpu().compiler_options(run)
    assert options == {"xla_gpu_deterministic_ops": True}
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2  # unknown names are errors
    assert LocalGpu().compiler_options(load_run("quickstart")) == {}


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),  # nvidia.com/en-us/data-center/a100
        ("NVIDIA H100 80GB HBM3", 989),  # nvidia.com/en-us/data-center/h100, half of "sparse"
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 79.4),  # 76 SMs x 2.04 GHz x 512
        ("NVIDIA GeForce RTX 2080", None),
        ("Tesla T4", None),
    ],
)
def test_peak_flops_only_where_there_is_a_source(kind, tera):
    peak = LocalGpu().peak_flops(kind)
    assert peak is None if tera is None else peak == pytest.approx(tera * 1e12)
    assert Cpu().peak_flops("cpu") is None


COUNT = (
    "from localtrain.backends.cpu import Cpu; from localtrain.errors import ConfigError\n"
    "notes = Cpu().prepare_environment(None, {n})\n"
    "import jax; print(jax.device_count(), jax.default_backend(), len(notes))\n"
)


def test_cpu_makes_the_devices_that_were_asked_for():
    assert in_new_process(COUNT.format(n=2)) == "2 cpu 1"
    flags = "--xla_force_host_platform_device_count=3"
    assert in_new_process(COUNT.format(n=1), XLA_FLAGS=flags) == "1 cpu 0"
    assert in_new_process(COUNT.format(n=None), XLA_FLAGS=flags) == "3 cpu 0"


def test_cpu_works_when_jax_is_imported_but_not_up_and_refuses_later_changes():
    code = (
        "import jax\n"
        + COUNT.format(n=2)
        + (
            "Cpu().prepare_environment(None, 2)\n"
            "try: Cpu().prepare_environment(None, 3)\n"
            "except ConfigError as error: print(error)\n"
        )
    )
    first, second = in_new_process(code).splitlines()
    assert first == "2 cpu 1"
    assert second.startswith("--devices 3: jax already runs with 2 CPU devices in this process")


def test_local_gpu_refuses_a_process_in_which_jax_runs_on_the_cpu():
    import jax

    jax.devices()
    with pytest.raises(ConfigError, match="jax already runs on cpu in this process"):
        LocalGpu().prepare_environment()
    assert Cpu().prepare_environment() == []


class Moon(Backend):
    name = "moon"
    summary = "far away"
    priority = 99


@pytest.fixture
def entries(monkeypatch):
    """Register more backends, as other packages would."""

    def register(**more: str) -> None:
        group = backend_module.GROUP
        real = list(importlib.metadata.entry_points(group=group))
        extra = [importlib.metadata.EntryPoint(name, value, group) for name, value in more.items()]
        monkeypatch.setattr(backend_module, "entry_points", lambda group: real + extra)

    return register


def test_a_backend_of_another_package_is_found_and_preferred(entries, monkeypatch):
    monkeypatch.setitem(sys.modules, "moonbase", sys.modules[__name__])
    entries(moon="moonbase:Moon")
    assert choose()[0].name == "moon"
    assert survey()[0] == {"name": "moon", "usable": True, "reason": None, "summary": "far away"}


def test_a_broken_backend_does_not_stop_the_others(entries, no_gpu):
    entries(broken="no_such_package:Nothing")
    assert choose()[0].name == "cpu"
    row = next(row for row in survey() if row["name"] == "broken")
    assert not row["usable"] and "no_such_package" in row["reason"]
    with pytest.raises(ConfigError, match="cannot be loaded"):
        choose("broken")


def test_two_packages_with_one_name_are_an_error(entries):
    entries(cpu="other:Cpu")
    with pytest.raises(ConfigError, match="two packages register a backend 'cpu'"):
        names()


def test_what_a_backend_does_not_do_is_said():
    with pytest.raises(ConfigError, match="backend cpu cannot compile for a machine"):
        Cpu().topology("v5e:4x4")
    with pytest.raises(ConfigError, match="backend cpu starts on this machine only"):
        Cpu().launch(None)
