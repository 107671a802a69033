"""Which meshes there are: sizes, slices, and what a model and its rows can be split over."""

import dataclasses
import re

import numpy as np
import pytest

from localtrain import sharding
from localtrain.config import RunConfig
from localtrain.errors import ConfigError
from localtrain.models import read_hub_config, spec_from
from localtrain.nn.core import Policy
from localtrain.nn.decoder import build

SPEC = spec_from(
    {
        **read_hub_config("qwen3-tiny"),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)


def mesh_config(**sizes):
    run = {"model": {"preset": "qwen3-tiny"}, "data": {"sources": "x"}, "mesh": sizes}
    return RunConfig.model_validate(run).mesh


def test_mesh_sizes_take_what_is_left_and_refuse_what_does_not_fit():
    assert sharding.mesh_sizes(mesh_config(), 8) == (1, 8, 1, 1, 1)
    assert sharding.mesh_sizes(mesh_config(tensor=2, fsdp=-1, replica=2), 8) == (2, 2, 1, 1, 2)
    with pytest.raises(ConfigError, match=r"fsdp: 2, tensor: 3.*8 devices.*mesh.tensor=4"):
        sharding.mesh_sizes(mesh_config(fsdp=2, tensor=3), 8)
    with pytest.raises(
        ConfigError, match=r"context: 3\) does not fit 4.*mesh.context=4; or .* 3 d"
    ):
        sharding.mesh_sizes(mesh_config(context=3), 4)


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a TPU device as a mesh looks at."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(slices):
    return [Chip(4 * s + i, s, (i % 2, i // 2, 0)) for s in range(slices) for i in range(4)]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (2, 4, 1, 1, 1)),
        ({"fsdp": -1, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"replica": 4}, (4, 2, 1, 1, 1)),
        ({"replica": -1, "fsdp": 1, "context": 4}, (2, 1, 4, 1, 1)),
    ],
)
def test_over_slices_replica_is_outside_and_all_else_within_one(sizes, shape):
    mesh = sharding.make_mesh(mesh_config(**sizes), chips(slices=2))
    assert mesh.devices.shape == shape
    copies = [{chip.slice_index for chip in copy.flat} for copy in mesh.devices]
    half = len(copies) // 2
    assert copies == [{0}] * half + [{1}] * half


def test_gpus_of_several_hosts_make_one_mesh_with_the_inner_axes_within_a_host():
    """To jax each GPU host is a slice of its own."""
    gpus = [
        Chip(i, i // 8, (i, 0, 0), process_index=i // 8, platform="gpu", device_kind="H100")
        for i in range(16)
    ]
    mesh = sharding.make_mesh(mesh_config(tensor=8), gpus)
    assert mesh.devices.shape == (1, 2, 1, 1, 8)
    assert [{gpu.slice_index for gpu in part.flat} for part in mesh.devices[0]] == [{0}, {1}]


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v6 lite"])
def test_an_axis_of_the_torus_may_be_split_over_two_of_the_mesh(kind):
    grid = [Chip(i, 0, (i % 4, i // 4, 0), device_kind=kind) for i in range(16)]
    mesh = sharding.make_mesh(mesh_config(tensor=2), grid)
    assert mesh.devices.shape == (1, 8, 1, 1, 2)
    assert {chip.id for chip in mesh.devices.flat} == set(range(16))
    for pair in mesh.devices.reshape(8, 2):  # neighbours on the torus
        apart = np.abs(np.subtract(pair[0].coords, pair[1].coords))
        assert np.minimum(apart, 4 - apart).sum() == 1


@pytest.mark.parametrize("count", [1, 4, 8])
def test_other_devices_stay_in_their_order(count):
    cpus = [Chip(i, 0, (0, 0, 0), platform="cpu", device_kind="cpu") for i in range(count)]
    mesh = sharding.make_mesh(mesh_config(), cpus)
    assert list(mesh.devices.flat) == cpus and mesh.shape["fsdp"] == count


@pytest.mark.parametrize(
    ("sizes", "devices", "words"),
    [
        ({"fsdp": 8}, chips(2), r"replica: 2, fsdp: 8\) does not fit 8 devices.* mesh.fsdp=4\."),
        ({"replica": -1, "fsdp": 8}, chips(2), r"fit 2 slices: .* multiple of 2.* mesh.fsdp=4\."),
        ({"replica": 2}, chips(3), r"fit 3 slices: .* multiple of 3.* mesh.replica=3\."),
        ({}, chips(2)[:-1], r"slices have \[3, 4\] devices"),
    ],
)
def test_meshes_that_slices_cannot_have_are_refused(sizes, devices, words):
    with pytest.raises(ConfigError, match=words):
        sharding.make_mesh(mesh_config(**sizes), devices)


class Sizes:
    """As much of a mesh as the checks look at; the real one needs that many devices."""

    def __init__(self, **sizes):
        self.shape = dict.fromkeys(sharding.AXES, 1) | sizes


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"tensor": 3},
            "mesh.tensor = 3 .* the 4 heads .* can be 1, 2, 4. .* 3 devices: mesh.fsdp=3",
        ),
        ({"tensor": 8}, "the 4 heads .* 8 devices: mesh.fsdp=2 mesh.tensor=4"),
        (
            {"context": 5},
            "seq_len = 48 .* mesh.context = 5 .*seq_len=40 or 50.* mesh.fsdp=5 mesh.cont",
        ),
        ({"context": 16}, "two chunks a device .*seq_len=32 or 64, .* mesh.fsdp=2 mesh.context=8"),
        ({"fsdp": 2, "expert": 2}, "no experts to split. .* 4 devices: mesh.fsdp=4 mesh.expert=1"),
    ],
)
def test_a_mesh_that_the_model_cannot_be_split_over_is_refused_with_what_works(sizes, words):
    with pytest.raises(ConfigError, match=words):
        sharding.check_model(Sizes(**sizes), 48, SPEC)


def test_a_mixer_that_cannot_work_on_a_part_of_a_row_is_named_with_its_layer():
    class Recurrent(type(SPEC.layers[0].mixer)):
        supports_context = False

    mixer = Recurrent(**vars(SPEC.layers[1].mixer))
    layers = SPEC.layers[0], dataclasses.replace(SPEC.layers[1], mixer=mixer)
    spec = dataclasses.replace(SPEC, layers=layers)
    sharding.check_model(Sizes(tensor=2), 48, spec)
    with pytest.raises(ConfigError, match=r"mesh.context = 2: the Recurrent mixer of layer 1 "):
        sharding.check_model(Sizes(context=2), 48, spec)


def test_fewer_key_value_heads_than_devices_are_kept_on_all_of_them():
    network = build(SPEC, Policy())  # 4 heads, 2 kv heads
    sharding.check_model(Sizes(tensor=4), 48, network.spec)
    specs = sharding.param_specs(Sizes(tensor=4), network.shapes, network.axes)
    mixer = specs["stack_0"]["layer_0"]["mixer"]
    assert "tensor" in mixer["wq_DNH"] and "tensor" not in mixer["wk_DKH"]


def test_what_every_device_then_holds_whole_is_told(caplog):
    sharding.check_model(Sizes(fsdp=3), 48, SPEC)
    assert "mesh.fsdp = 3 does not divide the model's dim = 32" in caplog.text
    odd = dataclasses.replace(SPEC, vocab=32003, tied=False)
    sharding.check_model(Sizes(fsdp=2, tensor=2), 48, odd)
    assert "mesh.tensor = 2 does not divide the vocabulary of 32003" in caplog.text
    assert "1.02 M parameters" in caplog.text and "(0.0123 GB" in caplog.text  # 2 x 32003 x 32 / 2


def test_whatever_the_mesh_it_works_or_the_error_names_one_that_does():
    """2000 draws of model, rows, devices and sizes; half of them with a single -1."""
    random = np.random.default_rng(0)
    seen = {"works": 0, "no mesh": 0, "nearest": 0}

    def check(sizes, devices, slices, seq_len, rows, spec):
        fitted = sharding.mesh_sizes(mesh_config(**sizes), devices, slices)
        assert int(np.prod(fitted)) == devices and fitted[0] % slices == 0
        mesh = Sizes(**dict(zip(sharding.AXES, fitted, strict=True)))
        sharding.check_model(mesh, seq_len, spec, rows, slices)
        _, _, context, expert, tensor = fitted
        mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
        assert expert == 1 and seq_len % (context * tensor) == 0
        assert context == 1 or seq_len % (2 * context) == 0
        assert mixer.heads % tensor == 0 and ffn.hidden % tensor == 0

    for _ in range(2000):
        heads = int(random.choice([4, 6, 8, 12]))
        kv_heads = int(random.choice([n for n in range(1, heads + 1) if heads % n == 0]))
        mixer = dataclasses.replace(SPEC.layers[0].mixer, heads=heads, kv_heads=kv_heads)
        ffn = dataclasses.replace(SPEC.layers[0].ffn, hidden=int(random.choice([48, 50, 64])))
        layer = dataclasses.replace(SPEC.layers[0], mixer=mixer, ffn=ffn)
        spec = dataclasses.replace(SPEC, layers=(layer,), dim=int(random.choice([32, 36])))
        slices = int(random.choice([1, 1, 2]))
        devices = slices * int(random.choice([1, 2, 3, 4, 6, 8, 12, 16]))
        sizes = {axis: int(random.choice([1, 1, 1, 2, 3, 4, 8])) for axis in sharding.AXES}
        if random.uniform() < 0.5:
            sizes[str(random.choice(sharding.AXES))] = -1
        seq_len, rows = int(random.choice([48, 64, 50, 7])), 48
        for _ in range(3):  # a product that fits, then a mesh that fits the model
            try:
                check(sizes, devices, slices, seq_len, rows, spec)
                seen["works"] += 1
                break
            except ConfigError as problem:
                text = str(problem)
            near = re.findall(r"mesh\.(\w+)=(\d+)", text.split("Nearest")[-1])
            if "Nearest" not in text:
                assert "No mesh" in text
                seen["no mesh"] += 1
                break
            assert near, text
            seen["nearest"] += 1
            sizes |= {axis: int(size) for axis, size in near}
        else:
            raise AssertionError(f"three errors, the last: {text}")
    assert min(seen.values()) > 10 and seen["works"] > 1000, seen
