"""Every packaged preset: exact parameter counts, all keys read, layers that collapse."""

import csv
import json
import math
from pathlib import Path

import jax
import pytest

from localtrain.configs.models.aliases import ALIASES
from localtrain.models import presets, read_hub_config, spec_from
from localtrain.models.describe import describe
from localtrain.models.hub import NO_EFFECT, HubConfig
from localtrain.nn.decoder import build

# Trainable tensors counted by transformers 5.24.0 on the meta device, most of them confirmed by
# the size of the published checkpoint. Not counted with this program.
PARAMETERS = {
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b-pt": 999_885_952,
    "gemma-3-4b-pt": 3_880_263_168,
    "gemma-3-12b-pt": 11_766_034_176,
    "gemma-3-27b-pt": 27_009_346_304,
    "llama-2-7b-hf": 6_738_415_616,
    "llama-2-13b-hf": 13_015_864_320,
    "llama-2-70b-hf": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b-instruct": 70_553_706_496,
    "meta-llama-3-8b": 8_030_261_248,
    "meta-llama-3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-instruct-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
OURS = {"qwen3-tiny"}  # for the quickstart; no published count

ROOT = Path(__file__).resolve().parents[2]
every_preset = pytest.mark.parametrize("name", presets())


def test_every_preset_has_a_typed_count():
    assert set(presets()) - OURS == set(PARAMETERS)


@every_preset
def test_parameter_count_is_the_published_one(name):
    spec = spec_from(read_hub_config(name))
    arrays = sum(math.prod(s.shape) for s in jax.tree.leaves(build(spec).shapes))
    assert arrays == spec.parameters() == PARAMETERS.get(name, arrays)
    assert spec.active_parameters() == spec.parameters()


@every_preset
def test_every_key_is_read_or_known_to_change_nothing(name):
    hf = read_hub_config(name)
    spec_from(hf)  # unread keys are a ConfigError
    assert not {"model_type", "hidden_size", "rope_theta", "rope_scaling"} & NO_EFFECT
    with pytest.raises(Exception, match="surprise"):
        spec_from(hf | {"surprise": 1})


@every_preset
def test_layers_collapse_into_few_traced_blocks(name):
    stacks = spec_from(read_hub_config(name)).stacks
    assert sum(len(stack.period) for stack in stacks) <= 10


@every_preset
def test_description_is_json_with_the_same_numbers(name):
    row = json.loads(json.dumps(describe(name)))
    assert row["parameters"] == spec_from(read_hub_config(name)).parameters()
    assert sum(row["mixers"].values()) == row["layers"]


def test_the_tiny_preset_takes_bytes():
    spec = spec_from(read_hub_config("qwen3-tiny"))
    assert (spec.vocab, spec.tied) == (264, True)
    assert 0.5e6 < spec.parameters() < 4e6


def test_qwen3_06b_described_by_hand():
    """28 layers of 8 kv heads of 128, keys and values, 2 bytes; FLOPs as in the convention."""
    row = describe("qwen3-0.6b")
    assert row["cache_bytes_per_token"] == 28 * 2 * 8 * 128 * 2 == 114_688
    assert row["embedding_parameters"] == 151_936 * 1024
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    attention = 28 * 12 * 16 * 128 * 2048 / 2
    assert row["flops_per_token"]["2048"] == 6 * (596_049_920 - norms) + attention
    assert row["mixers"] == {"full attention, 16 heads, 8 kv, dim 128": 28}


def test_aliases_point_to_presets_and_change_only_what_they_say():
    assert set(ALIASES) & set(presets()) == set()
    for alias, (preset, changes) in ALIASES.items():
        assert preset in presets()
        hf = read_hub_config(alias)
        assert hf == read_hub_config(preset) | changes
        assert set(changes) <= set(HubConfig(read_hub_config(preset)))
        spec_from(hf)


def test_counts_agree_with_the_shared_table():
    table = ROOT.parent / "shared" / "notes" / "presets.csv"
    if not table.is_file():
        pytest.skip("the table is not in this checkout")
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    counts = {row["name"]: int(row["total_params"]) for row in csv.DictReader(lines)}
    assert {name: counts[name] for name in PARAMETERS} == PARAMETERS
