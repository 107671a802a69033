"""Qwen2.5 and Qwen3, dense: transformers' Qwen2ForCausalLM and Qwen3ForCausalLM.

"Qwen2.5 Technical Report" (arXiv 2412.15115), "Qwen3 Technical Report" (arXiv 2505.09388).
Qwen2.5 has biases on q, k and v (no key says so); Qwen3 norms q and k per head instead.
"""

from __future__ import annotations

from localtrain.errors import ConfigError
from localtrain.models.hub import HubConfig
from localtrain.models.tables import attention_rules, decoder_rules, norm_after_mixer
from localtrain.models.weights import Table
from localtrain.nn.spec import Glu, Gqa, Layer, Model


def spec(hf: HubConfig) -> Model:
    head_dim, norm = hf.head_dim(), hf.norm()
    is_qwen3 = hf["model_type"] == "qwen3"
    bias = hf.flag("attention_bias", False) if is_qwen3 else False
    rope = hf.rope(head_dim)
    ffn = Glu(hf.size("intermediate_size"), hf.activation())

    def layer(window: int | None) -> Layer:
        mixer = Gqa(
            heads=hf.size("num_attention_heads"),
            kv_heads=hf.kv_heads(),
            head_dim=head_dim,
            rope=rope,
            scale=head_dim**-0.5,
            window=window,
            qkv_bias=bias or not is_qwen3,
            out_bias=bias,
            qk_norm=norm if is_qwen3 else None,
        )
        return Layer(mixer, ffn, norm)

    return Model(
        vocab=hf.size("vocab_size"),
        dim=hf.size("hidden_size"),
        layers=tuple(layer(window) for window in windows(hf)),
        final_norm=norm,
        tied=hf.flag("tie_word_embeddings", False),
        max_length=hf.size("max_position_embeddings"),
    )


def windows(hf: HubConfig) -> list[int | None]:
    """The window of each layer: only with `use_sliding_window`, from `max_window_layers` on."""
    count = hf.size("num_hidden_layers")
    types = hf.layer_types({"full_attention", "sliding_attention"})
    first = hf.get("max_window_layers", 28)  # these two are the defaults of both classes
    window = hf.get("sliding_window", 4096)
    if types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    elif "sliding_attention" in types and not hf.flag("use_sliding_window", False):
        raise ConfigError(
            f"{hf.where}: `layer_types` has sliding layers but `use_sliding_window` is false; "
            "set it to true or make all layers full_attention."
        )
    if not hf.flag("use_sliding_window", False):
        return [None] * count
    return [window if kind == "sliding_attention" else None for kind in types]


def weights(hf: HubConfig) -> Table:
    tied = hf.flag("tie_word_embeddings", False)
    return Table([*decoder_rules(tied), norm_after_mixer(), *attention_rules()])
