"""Llama 2, 3, 3.1, 3.2, 3.3 and Mistral: transformers' LlamaForCausalLM and MistralForCausalLM.

"Llama 2" (arXiv 2307.09288), "The Llama 3 Herd of Models" (arXiv 2407.21783), "Mistral 7B"
(arXiv 2310.06825). Llama 3.1 and later stretch the rotary embedding; Mistral may have a window,
the same in every layer, and no biases.
"""

from __future__ import annotations

from localtrain.models.hub import HubConfig
from localtrain.models.tables import attention_rules, decoder_rules, norm_after_mixer
from localtrain.models.weights import Table
from localtrain.nn.spec import Glu, Gqa, Layer, Model


def spec(hf: HubConfig) -> Model:
    head_dim, norm = hf.head_dim(), hf.norm()
    bias, mlp_bias, window = False, False, None
    if hf["model_type"] == "llama":
        bias, mlp_bias = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    elif hf.get("sliding_window") is not None:
        window = hf.size("sliding_window")
    mixer = Gqa(
        heads=hf.size("num_attention_heads"),
        kv_heads=hf.kv_heads(),
        head_dim=head_dim,
        rope=hf.rope(head_dim),
        scale=head_dim**-0.5,
        window=window,
        qkv_bias=bias,
        out_bias=bias,
    )
    ffn = Glu(hf.size("intermediate_size"), hf.activation(), mlp_bias)
    return Model(
        vocab=hf.size("vocab_size"),
        dim=hf.size("hidden_size"),
        layers=(Layer(mixer, ffn, norm),) * hf.size("num_hidden_layers"),
        final_norm=norm,
        tied=hf.flag("tie_word_embeddings", False),
        max_length=hf.size("max_position_embeddings"),
    )


def weights(hf: HubConfig) -> Table:
    tied = hf.flag("tie_word_embeddings", False)
    return Table([*decoder_rules(tied), norm_after_mixer(), *attention_rules()])
