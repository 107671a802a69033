"""Tokens per second and time to first token of greedy decoding with random weights.

    python benchmarks/decode.py [--dtype float32] [--prompt 32] [--tokens 200] [--batch 1] [--json]
    python benchmarks/decode.py --transformers      # beside it, when installed with torch

The model is a Qwen3 of 100M parameters unless --config names a Hub config.json; at batch 1 a step
reads all of them once, so the memory's bandwidth sets the limit (0.4 GB in float32). The best
window of ten steps is what the machine does when nothing else runs on it. Each engine writes once
to warm up (ours compiles there), then both take turns, so that what else the machine does meets
both. transformers gets the same weights through a Hub folder, the same prompt, as many threads as
there are cores, and its own default cache; "equal" says how many tokens agree before the first that
does not.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.api import LanguageModel
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
# Writes the text once: (its tokens of row 0, when each came, in seconds after the call).
Engine = Callable[[], tuple[list[int], list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    for name, value in (("prompt", 32), ("tokens", 200), ("batch", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--config", type=Path, help="config.json of the model")
    parser.add_argument("--transformers", action="store_true", help="measure it as well")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.tokens < WINDOW + 2:
        parser.error(f"--tokens must be at least {WINDOW + 2}")
    if options.transformers and (options.dtype, options.batch) != ("float32", 1):
        parser.error("--transformers is compared in float32 and with batch 1")

    hf = json.loads(options.config.read_text()) if options.config else CONFIG
    dtype = jnp.dtype(options.dtype)
    network = build(spec_from(hf), Policy(param_dtype=dtype, compute_dtype=dtype))
    params = jax.block_until_ready(jax.jit(network.init)(jax.random.key(0)))
    model = LanguageModel(hf, network, params)
    shape = (options.batch, options.prompt)
    ids_BT = np.random.default_rng(0).integers(0, network.spec.vocab, shape)
    engines = {"localtrain": ours(model, ids_BT, options.tokens)}
    if options.transformers:
        engines["transformers"] = theirs(model, ids_BT, options.tokens)

    result = {
        "parameters": network.spec.parameters(),
        "bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
        **{k: getattr(options, k) for k in ("dtype", "batch", "prompt", "tokens", "rounds")},
        "cores": cores(),
        "engines": measure(engines, options.rounds, options.batch),
    }
    print(json.dumps(result, indent=2) if options.json else table(result))


def ours(model: LanguageModel, ids_BT: np.ndarray, count: int) -> Engine:
    def write() -> tuple[list[int], list[float]]:
        start, tokens, times = time.perf_counter(), [], []
        for token_B in stream_tokens(model.network, model.params, ids_BT, max_new_tokens=count):
            times.append(time.perf_counter() - start)
            tokens.append(int(token_B[0]))
        return tokens, times

    return write


def theirs(model: LanguageModel, ids_BT: np.ndarray, count: int) -> Engine:
    """The same with transformers, which reads what `save_hub` wrote."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise SystemExit(f"--transformers needs torch and transformers: {error}") from None
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory() as folder:
        model.save_hub(folder)
        peer = AutoModelForCausalLM.from_pretrained(folder).to(torch.float32).eval()
    peer.generation_config.eos_token_id = None  # both write all tokens
    ids = torch.tensor(ids_BT)

    class Streamer:
        """Is called with the prompt, then with every token."""

        def __init__(self) -> None:
            self.tokens, self.times = [], []
            self.start = time.perf_counter()

        def put(self, value) -> None:
            self.times.append(time.perf_counter() - self.start)
            self.tokens.append(int(value.reshape(-1)[-1]))

        def end(self) -> None:
            pass

    def write() -> tuple[list[int], list[float]]:
        streamer = Streamer()
        with torch.inference_mode():
            peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
        return streamer.tokens[1:], streamer.times[1:]

    return write


def measure(engines: dict[str, Engine], rounds: int, batch: int) -> dict[str, dict]:
    """Of each engine over all rounds: the time to the first token, tokens per second, and how many
    tokens are those of the first engine."""
    texts, first_call_s, runs = {}, {}, {name: [] for name in engines}
    for name, write in engines.items():
        texts[name], times = write()
        first_call_s[name] = times[0]
    for _ in range(rounds):
        for name, write in engines.items():
            runs[name].append(np.array(write()[1]))
    reference = np.array(next(iter(texts.values())))
    found = {}
    for name, times in runs.items():
        steps = np.concatenate([(t[WINDOW:] - t[:-WINDOW])[1:] / WINDOW for t in times])
        differ = np.flatnonzero(reference != np.array(texts[name]))
        found[name] = {
            "first_token_s": float(np.median([t[0] for t in times])),
            "first_token_of_first_call_s": first_call_s[name],
            "tokens_per_s": batch / float(np.median(steps)),
            "best_tokens_per_s": batch / float(steps.min()),
            "equal": int(differ[0]) if len(differ) else len(reference),
        }
    return found


def table(result: dict) -> str:
    lines = [
        f"{result['parameters']:,} parameters, {result['dtype']}, batch {result['batch']}, prompt "
        f"{result['prompt']}, {result['tokens']} tokens, {result['cores']} cores",
        f"{'':14}{'first token':>14}{'first call':>14}{'tokens/s':>12}{'at best':>12}"
        f"{'weights':>14}{'equal':>8}",
    ]
    for name, row in result["engines"].items():
        speed = result["bytes"] * row["best_tokens_per_s"] / result["batch"] / 1e9
        lines.append(
            f"{name:14}{row['first_token_s']:12.3f} s{row['first_token_of_first_call_s']:12.3f} s"
            f"{row['tokens_per_s']:12.1f}{row['best_tokens_per_s']:12.1f}"
            f"{speed:9.1f} GB/s{row['equal']:8}"
        )
    return "\n".join(lines)


def cores() -> int:
    """Those this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


if __name__ == "__main__":
    main()
