"""Reading a Hub config.json: strict look-ups that remember which keys were read.

Both dialects are understood: the old one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `layer_types`, `dtype`). A value that would change the maths and
is not known is a ConfigError, never a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localtrain.errors import ConfigError, nearest
from localtrain.nn.spec import (
    LinearScaling,
    Llama3Scaling,
    Norm,
    Rope,
    YarnScaling,
    yarn_mscale,
)

# Keys that do not change the maths of training a text model: bookkeeping, generation settings,
# and what only takes effect in other settings of transformers.
NO_EFFECT = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id
    prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
# Keys that change the maths, with the one value that is computed here.
ONLY = {
    "add_cross_attention": False,
    "attention_dropout": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "resid_pdrop": 0.0,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class HubConfig(Mapping):
    """The dict of a config.json that notes the keys that were read."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.values_by_key = dict(values)
        self.where = where
        self.read: set[str] = set()
        self.sections: dict[str, HubConfig] = {}

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self.values_by_key:
            guess = nearest(key, self.values_by_key)
            hint = f" (there is `{guess}`)" if guess else ""
            raise ConfigError(f"{self.where}: the key `{key}` is missing{hint}; add it.")
        return self.values_by_key[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        self.read.add(key)
        value = self.values_by_key.get(key)
        return default if value is None else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)

    def __contains__(self, key: object) -> bool:
        return key in self.values_by_key

    def refuse_variants(self) -> None:
        """Refuse the options that no family here has."""
        for key, expected in ONLY.items():
            if key not in self.read:
                self.require(key, expected)
        for part in self.sections.values():
            part.refuse_variants()

    def unread(self) -> list[str]:
        """Keys that were neither read nor are known to have no effect."""
        own = sorted(set(self.values_by_key) - self.read - NO_EFFECT)
        return own + [f"{n}.{key}" for n, part in self.sections.items() for key in part.unread()]

    def ignore(self, *keys: str) -> None:
        """Keys that matter elsewhere (images, say) but not to the maths of the text model."""
        self.read.update(keys)

    def section(self, key: str) -> HubConfig:
        """A nested config, whose unread keys count as this one's."""
        if key not in self.sections:
            value = self[key]
            if not isinstance(value, Mapping):
                raise ConfigError(f"{self.where}: `{key}` must be an object.")
            self.sections[key] = HubConfig(value, f"{self.where}: {key}")
        return self.sections[key]

    # typed look-ups -----------------------------------------------------------------------------

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self[key] if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.where}: `{key}` is {value!r}; it must be a whole number > 0.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self[key] if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self.where}: `{key}` is {value!r}; it must be a number > 0.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: `{key}` is {value!r}; it must be true or false.")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str | None = None) -> str:
        value = self[key] if default is None else self.get(key, default)
        if value not in choices:
            known = ", ".join(sorted(choices))
            raise ConfigError(f"{self.where}: `{key}` is {value!r}; known are {known}.")
        return choices[value]

    def require(self, key: str, expected: Any) -> None:
        """Refuse a known key with a value that this program does not compute."""
        value = self.get(key, expected)
        if value != expected:
            raise ConfigError(
                f"{self.where}: `{key}` is {value!r}, which changes the maths and is not "
                f"supported here; only {expected!r} is."
            )

    # parts that many families share -------------------------------------------------------------

    def activation(self, key: str = "hidden_act") -> str:
        return self.choice(key, ACTIVATIONS)

    def norm(self, plus_one: bool = False) -> Norm:
        return Norm(self.number("rms_norm_eps"), plus_one)

    def head_dim(self) -> int:
        """What the file says; only where it is silent hidden size / heads."""
        given = self.get("head_dim")
        if given is not None:
            return self.size("head_dim")
        dim, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if dim % heads:
            raise ConfigError(
                f"{self.where}: `hidden_size` {dim} is not divisible by `num_attention_heads` "
                f"{heads} and there is no `head_dim`; add it."
            )
        return dim // heads

    def kv_heads(self) -> int:
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{self.where}: `num_attention_heads` {heads} is not a multiple of "
                f"`num_key_value_heads` {kv_heads}."
            )
        return kv_heads

    def layer_types(self, known: set[str]) -> list[str] | None:
        """`layer_types` of transformers 5, checked, or None where absent."""
        types = self.get("layer_types")
        count = self.size("num_hidden_layers")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != count:
            raise ConfigError(
                f"{self.where}: `layer_types` must list one type for each of the "
                f"{count} layers of `num_hidden_layers`."
            )
        for i, kind in enumerate(types):
            if kind not in known:
                raise ConfigError(
                    f"{self.where}: `layer_types[{i}]` is {kind!r}; known are "
                    f"{', '.join(sorted(known))}."
                )
        return types

    def rope(self, head_dim: int, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
        """The rotary embedding, from either dialect (nested per layer type where asked).

        `theta` is the class's default where the file gives none.
        """
        theta, scaling = self.get("rope_theta", theta), self.get("rope_scaling")
        where = "rope_scaling"
        parameters = self.get("rope_parameters")
        if parameters is not None:
            where = "rope_parameters"
            if layer_type is not None and layer_type in parameters:
                where = f"rope_parameters.{layer_type}"
                parameters = parameters[layer_type]
            scaling = dict(parameters)
            theta = scaling.pop("rope_theta", theta)
        return make_rope(self, head_dim, theta, scaling, where)


def make_rope(
    hf: HubConfig, head_dim: int, theta: Any, scaling: Mapping | None, where: str
) -> Rope:
    """A Rope of `theta` and a scaling dict, all of whose keys must be known."""
    theta = 10000.0 if theta is None else theta
    values = HubConfig(scaling or {}, f"{hf.where}: {where}")
    kind = values.get("rope_type", values.get("type", "default"))
    makers = {"default": _no_scaling, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    if kind not in makers:
        raise ConfigError(
            f"{hf.where}: `{where}.rope_type` is {kind!r}; known are {', '.join(sorted(makers))}. "
            "A rotary embedding that is not known cannot be trained faithfully."
        )
    values.require("partial_rotary_factor", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise ConfigError(f"{hf.where}: `rope_theta` is {theta!r}; it must be a number > 0.")
    made = makers[kind](values, hf)
    if values.unread():
        raise ConfigError(f"{hf.where}: `{where}` has unknown keys: {', '.join(values.unread())}.")
    return Rope(float(theta), head_dim, made)


def _no_scaling(values: HubConfig, hf: HubConfig) -> None:
    return None


def _linear(values: HubConfig, hf: HubConfig) -> LinearScaling:
    return LinearScaling(values.number("factor"))


def _llama3(values: HubConfig, hf: HubConfig) -> Llama3Scaling:
    return Llama3Scaling(
        values.number("factor"),
        values.number("low_freq_factor"),
        values.number("high_freq_factor"),
        values.size("original_max_position_embeddings"),
    )


def _yarn(values: HubConfig, hf: HubConfig) -> YarnScaling:
    """Attention factor: as given, or from both mscales, or 0.1 ln(factor) + 1."""
    factor = values.number("factor")
    given = values.get("attention_factor")
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    if given is None and mscale and mscale_all:
        given = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return YarnScaling(
        factor,
        values.get("original_max_position_embeddings") or hf.size("max_position_embeddings"),
        values.number("beta_fast", 32.0),
        values.number("beta_slow", 1.0),
        yarn_mscale(factor) if given is None else float(given),
        values.flag("truncate", True),
    )
