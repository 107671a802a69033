"""Gemma 3: transformers' Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration.

"Gemma 3 Technical Report" (arXiv 2503.19786). Four norms a layer, all stored as offsets from one;
embeddings times sqrt(dim); five layers with a window for one without, each kind with its own
rotary base. The published 4B and larger are a wrapper with a vision tower: it is carried along.
"""

from __future__ import annotations

import math

from localtrain.errors import ConfigError
from localtrain.models.hub import HubConfig, make_rope
from localtrain.models.tables import attention_rules, decoder_rules
from localtrain.models.weights import Rule, Table
from localtrain.nn.spec import Glu, Gqa, Layer, Model, Rope

SLIDING, FULL = "sliding_attention", "full_attention"
VISION = ("vision_tower.", "multi_modal_projector.")


def spec(hf: HubConfig) -> Model:
    outer = hf
    if hf["model_type"] == "gemma3":
        outer.ignore("vision_config", "mm_tokens_per_image")
        outer.ignore("boi_token_index", "eoi_token_index", "image_token_index")
        hf = outer.section("text_config")
        hf.require("model_type", "gemma3_text")
    head_dim, dim, norm = hf.head_dim(), hf.size("hidden_size"), hf.norm(plus_one=True)
    hf.require("attn_logit_softcapping", None)  # in the config, but never applied
    hf.require("use_bidirectional_attention", False)
    bias = hf.flag("attention_bias", False)
    ffn = Glu(hf.size("intermediate_size"), hf.activation("hidden_activation"))
    ropes = {kind: rope(hf, head_dim, kind) for kind in (SLIDING, FULL)}
    windows = {SLIDING: hf.size("sliding_window", 4096), FULL: None}

    def layer(kind: str) -> Layer:
        mixer = Gqa(
            heads=hf.size("num_attention_heads"),
            kv_heads=hf.kv_heads(),
            head_dim=head_dim,
            rope=ropes[kind],
            scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            window=windows[kind],
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
        )
        return Layer(mixer, ffn, norm, residual="sandwich")

    if outer.flag("tie_word_embeddings", True) != hf.flag("tie_word_embeddings", True):
        raise ConfigError(f"{outer.where}: `tie_word_embeddings` differs from text_config's.")
    softcap = hf.get("final_logit_softcapping")
    return Model(
        vocab=hf.size("vocab_size"),
        dim=dim,
        layers=tuple(layer(kind) for kind in layer_kinds(hf)),
        final_norm=norm,
        tied=hf.flag("tie_word_embeddings", True),
        max_length=hf.size("max_position_embeddings"),
        embed_scale=math.sqrt(dim),
        softcap=None if softcap is None else hf.number("final_logit_softcapping"),
    )


def layer_kinds(hf: HubConfig) -> list[str]:
    """`layer_types`, or every sliding_window_pattern-th layer full."""
    pattern = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", 6))
    count = hf.size("num_hidden_layers")
    types = hf.layer_types({SLIDING, FULL})
    return types or [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def rope(hf: HubConfig, head_dim: int, kind: str) -> Rope:
    """Sliding layers have their own base and are never scaled."""
    if hf.get("rope_parameters") is None and kind == SLIDING:
        return make_rope(hf, head_dim, hf.get("rope_local_base_freq"), None, "rope_local_base_freq")
    return hf.rope(head_dim, kind, theta=1e6)


def weights(hf: HubConfig) -> Table:
    wrapped = hf["model_type"] == "gemma3"
    text = hf.section("text_config") if wrapped else hf
    prefix = "language_model.model." if wrapped else "model."
    head = "language_model.lm_head.weight" if wrapped else "lm_head.weight"
    layer = prefix + "layers.{layer}."
    rules = [
        *decoder_rules(text.flag("tie_word_embeddings", True), prefix, head),
        *attention_rules(prefix),
        Rule(layer + "post_attention_layernorm.weight", "mixer_out_norm/scale", "D -> D"),
        Rule(layer + "pre_feedforward_layernorm.weight", "ffn_norm/scale", "D -> D"),
        Rule(layer + "post_feedforward_layernorm.weight", "ffn_out_norm/scale", "D -> D"),
    ]
    tied = (prefix + "embed_tokens.weight", head)
    return Table(rules, carried=VISION if wrapped else (), tied=tied)
