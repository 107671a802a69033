"""What a model consists of, in numbers, from its config alone: for `localtrain models show`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from localtrain.models import read_hub_config, spec_from

TRAIN_BYTES = 16  # per parameter: float32 weight, gradient and two AdamW moments
SEQ_LENS = (2048, 8192, 32768)  # at which FLOPs per token are given, up to the model's length


def describe(name: str) -> dict[str, Any]:
    """Sizes of a preset or of a folder with a config.json; all values are JSON.

    `flops_per_token` is forward and backward (see Model.model_flops_per_token), `train_bytes` is
    without activations, `cache_bytes_per_token` with 2 bytes a value.
    """
    hf = read_hub_config(name)
    spec = spec_from(hf, name)
    lengths = [n for n in SEQ_LENS if n <= spec.max_length] or [spec.max_length]
    return {
        "name": name,
        "model_type": hf["model_type"],
        "parameters": spec.parameters(),
        "active_parameters": spec.active_parameters(),
        "embedding_parameters": spec.embedding_parameters(),
        "layers": len(spec.layers),
        "dim": spec.dim,
        "vocab": spec.vocab,
        "tied": spec.tied,
        "max_length": spec.max_length,
        "stacks": [{"repeat": s.repeat, "layers": len(s.period)} for s in spec.stacks],
        "mixers": dict(Counter(layer.mixer.kind for layer in spec.layers)),
        "ffns": dict(Counter(layer.ffn.kind for layer in spec.layers)),
        "flops_per_token": {str(n): spec.model_flops_per_token(n) for n in lengths},
        "cache_bytes_per_token": spec.cache_bytes_per_token(2),
        "train_bytes": TRAIN_BYTES * spec.parameters(),
    }
