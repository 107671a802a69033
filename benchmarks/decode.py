"""Tokens per second of greedy decoding with random weights, batch 1.

    python benchmarks/decode.py [--dtype float32] [--prompt 32] [--tokens 200] [--batch 1]

The model is a Qwen3 of 100M parameters; at batch 1 a step reads all of them once, so the memory's
bandwidth sets the limit (0.4 GB in float32). The best window of ten steps is what the machine does
when nothing else runs on it.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.generate import stream_tokens
from localtrain.models import spec_from
from localtrain.nn.core import Policy
from localtrain.nn.decoder import build

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 32768,
}
WINDOW = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    for name, value in (("prompt", 32), ("tokens", 200), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    dtype = jnp.dtype(options.dtype)
    network = build(spec_from(CONFIG), Policy(param_dtype=dtype, compute_dtype=dtype))
    params = jax.block_until_ready(jax.jit(network.init)(jax.random.key(0)))
    ids = np.random.default_rng(0).integers(0, 32000, (options.batch, options.prompt))
    times = [time.perf_counter()]
    for _ in stream_tokens(network, params, ids, max_new_tokens=options.tokens):
        times.append(time.perf_counter())
    first, steps = times[1] - times[0], np.array(times[2:])  # the second compiles as well
    windows = np.sort((steps[WINDOW:] - steps[:-WINDOW]) / WINDOW)
    rate = options.batch / windows
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(
        f"{network.spec.parameters():,} parameters, {options.dtype}, batch {options.batch}, prompt "
        f"{options.prompt}: first token after {first:.2f} s (with compilation), then "
        f"{rate[0]:.1f} tokens/s at best, {np.median(rate):.1f} in the middle; "
        f"{size / windows[0] / 1e9:.1f} GB/s of weights"
    )


if __name__ == "__main__":
    main()
