"""Configs that must be refused, and both spellings of those that are taken."""

import json

import pytest

from localtrain.errors import ConfigError
from localtrain.models import read_hub_config, spec_from
from localtrain.nn.spec import LinearScaling, Llama3Scaling, YarnScaling

QWEN = read_hub_config("qwen3-tiny")
LLAMA = read_hub_config("llama-3.1-8b")
GEMMA = read_hub_config("gemma-3-1b-pt")


def without(hf: dict, key: str) -> dict:
    return {k: v for k, v in hf.items() if k != key}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen9"}, "`model_type` is 'qwen9'.*nearest is qwen3"),
        ({"model_type": None}, "`model_type` is None"),
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu'; known are .*silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; known are default"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: the key `factor` is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}},
            "unknown keys: wobble",
        ),
        ({"rope_theta": -1}, "`rope_theta` is -1"),
        ({"hidden_size": 128.0}, "`hidden_size` is 128.0; it must be a whole number"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"num_attention_heads": True}, "`num_attention_heads` is True"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of `num_key_value_heads` 3"),
        ({"rms_norm_eps": "1e-6"}, "`rms_norm_eps` is '1e-6'; it must be a number"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes'; it must be true or"),
        ({"attention_dropout": 0.1}, "`attention_dropout` is 0.1, which changes the maths"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ({"layer_types": ["full_attention"]}, "one type for each of the 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["x"]}, r"`layer_types\[3\]` is 'x'"),
        ({"layer_types": ["sliding_attention"] * 4}, "`use_sliding_window` is false"),
        ({"num_experts": 8}, "unknown keys num_experts"),
    ],
)
def test_what_would_change_the_maths_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_from(QWEN | changes, "some/config.json")


def test_a_missing_key_is_named_with_its_file_and_neighbour():
    hf = without(QWEN, "hidden_size") | {"hidden_sizes": 128}
    with pytest.raises(ConfigError, match=r"my/config.json: the key `hidden_size` is missing"):
        spec_from(hf, "my/config.json")


def test_head_dim_is_what_the_file_says_and_else_dim_over_heads():
    assert spec_from(QWEN | {"head_dim": 48}).layers[0].mixer.head_dim == 48
    assert spec_from(without(QWEN, "head_dim")).layers[0].mixer.head_dim == 32
    with pytest.raises(ConfigError, match="not divisible"):
        spec_from(without(QWEN, "head_dim") | {"hidden_size": 130})


def test_every_scaling_reads_the_same_from_both_dialects():
    cases = {
        "linear": ({"factor": 4.0}, LinearScaling(4.0)),
        "llama3": (
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
        "yarn": (
            {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "attention_factor": 1.25,
                "beta_fast": 24,
            },
            YarnScaling(4.0, 32768, 24.0, 1.0, 1.25),
        ),
    }
    for kind, (values, expected) in cases.items():
        old = QWEN | {"rope_theta": 5e5, "rope_scaling": {"type": kind} | values}
        parameters = {"rope_type": kind, "rope_theta": 5e5} | values
        new = without(without(QWEN, "rope_theta"), "rope_scaling") | {"rope_parameters": parameters}
        rope = spec_from(old).layers[0].mixer.rope
        assert rope == spec_from(new).layers[0].mixer.rope
        assert (rope.theta, rope.scaling) == (5e5, expected)


def test_yarn_attention_factor_defaults_to_the_papers_formula():
    def factor(**values):
        scaling = {"rope_type": "yarn", "factor": 40.0} | values
        return spec_from(QWEN | {"rope_scaling": scaling}).layers[0].mixer.rope.scaling

    assert factor().attention_factor == pytest.approx(1.3688879)  # 0.1 ln(40) + 1
    assert factor(mscale=1.0, mscale_all_dim=1.0).attention_factor == pytest.approx(1.0)
    assert factor().original_length == QWEN["max_position_embeddings"]
    assert factor(truncate=False).truncate is False


def test_windows_of_qwen_start_at_max_window_layers():
    hf = QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert [layer.mixer.window for layer in spec_from(hf).layers] == [None, None, None, 64]
    assert all(
        layer.mixer.window is None for layer in spec_from(QWEN | {"sliding_window": 9}).layers
    )


def test_gemma_alternates_windows_with_their_own_rotary_base():
    layers = spec_from(GEMMA).layers
    assert [i for i, layer in enumerate(layers) if layer.mixer.window is None] == [5, 11, 17, 23]
    assert {layer.mixer.rope.theta for layer in layers if layer.mixer.window} == {1e4}
    assert {layer.mixer.rope.theta for layer in layers if not layer.mixer.window} == {1e6}
    assert layers[0].mixer.scale == 256**-0.5


def test_biases_are_those_of_the_family():
    qwen25 = spec_from(read_hub_config("qwen2.5-0.5b")).layers[0].mixer
    assert (qwen25.qkv_bias, qwen25.out_bias, qwen25.qk_norm) == (True, False, None)
    llama = spec_from(LLAMA | {"attention_bias": True, "mlp_bias": True}).layers[0]
    assert (llama.mixer.qkv_bias, llama.mixer.out_bias, llama.ffn.bias) == (True, True, True)


def test_names_that_do_not_exist_get_a_hint(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a preset .* did you mean qwen3-0.6b"):
        read_hub_config("qwen3-0.6")
    with pytest.raises(ConfigError, match=r"no config.json"):
        read_hub_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_hub_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold an object"):
        read_hub_config(str(tmp_path))


def test_a_folder_and_its_file_give_the_same_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert read_hub_config(str(tmp_path)) == QWEN
    assert read_hub_config(str(tmp_path / "config.json")) == QWEN
    assert read_hub_config("Qwen3-Tiny") == QWEN
