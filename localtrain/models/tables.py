"""Weight rules that many families share, in the Llama spelling of the Hub's names."""

from __future__ import annotations

from localtrain.models.weights import Rule


def decoder_rules(tied: bool, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """Embedding, final norm, head, block norms and the gated MLP, in the Llama spelling."""
    layer = prefix + "layers.{layer}."
    rules = [
        Rule(prefix + "embed_tokens.weight", "embed_VD", "V D -> V D"),
        Rule(prefix + "norm.weight", "final_norm/scale", "D -> D"),
        Rule(layer + "input_layernorm.weight", "mixer_norm/scale", "D -> D"),
        Rule(layer + "mlp.gate_proj.weight", "ffn/w_gate_DF", "F D -> D F"),
        Rule(layer + "mlp.up_proj.weight", "ffn/w_up_DF", "F D -> D F"),
        Rule(layer + "mlp.down_proj.weight", "ffn/w_down_FD", "D F -> F D"),
        Rule(layer + "mlp.gate_proj.bias", "ffn/b_gate_F", "F -> F"),
        Rule(layer + "mlp.up_proj.bias", "ffn/b_up_F", "F -> F"),
        Rule(layer + "mlp.down_proj.bias", "ffn/b_down_D", "D -> D"),
    ]
    if not tied:
        rules.append(Rule(head, "head_DV", "V D -> D V"))
    return rules


def attention_rules(prefix: str = "model.") -> list[Rule]:
    """Attention in the Llama spelling; rules of parts that a layer lacks do nothing."""
    layer = prefix + "layers.{layer}.self_attn."
    return [
        Rule(layer + "q_proj.weight", "mixer/wq_DNH", "(N H) D -> D N H"),
        Rule(layer + "k_proj.weight", "mixer/wk_DKH", "(K H) D -> D K H"),
        Rule(layer + "v_proj.weight", "mixer/wv_DKH", "(K H) D -> D K H"),
        Rule(layer + "o_proj.weight", "mixer/wo_NHD", "D (N H) -> N H D"),
        Rule(layer + "q_proj.bias", "mixer/bq_NH", "(N H) -> N H"),
        Rule(layer + "k_proj.bias", "mixer/bk_KH", "(K H) -> K H"),
        Rule(layer + "v_proj.bias", "mixer/bv_KH", "(K H) -> K H"),
        Rule(layer + "o_proj.bias", "mixer/bo_D", "D -> D"),
        Rule(layer + "q_norm.weight", "mixer/q_norm/scale", "H -> H"),
        Rule(layer + "k_norm.weight", "mixer/k_norm/scale", "H -> H"),
        Rule(layer + "sinks", "mixer/sinks_N", "N -> N"),
    ]


def norm_after_mixer(prefix: str = "model.") -> Rule:
    """Llama's name of the norm between attention and feed-forward."""
    name = prefix + "layers.{layer}.post_attention_layernorm.weight"
    return Rule(name, "ffn_norm/scale", "D -> D")
