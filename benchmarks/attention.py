"""Attention on the CPU: the blockwise kernel beside `jax.nn.dot_product_attention`.

    python benchmarks/attention.py [--length 512 4096] [--rounds 5] [--json]

One layer, forward and gradients of q, k and v, float32, causal, without documents: 16 heads, 8 kv
heads, head_dim 128 (Qwen3-0.6B), 4096 tokens in all. The two take turns, each time the best of a
round counts, and the table has the median of the rounds. Memory is the compiler's: temporary
buffers of the compiled program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 16, 8, 128, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = [measure(length, options.rounds) for length in options.length]
    print(json.dumps(rows, indent=2) if options.json else table(rows))


def measure(length: int, rounds: int) -> dict:
    """Milliseconds and temporary bytes of both at `length` tokens a row."""
    import jax
    import jax.numpy as jnp

    from localtrain.nn.attend import attend

    jax.config.update("jax_platforms", "cpu")
    scale, batch = HEAD_DIM**-0.5, max(1, TOKENS // length)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, g = (
        jax.random.normal(key, (batch, length, heads, HEAD_DIM), jnp.float32)
        for key, heads in zip(keys, sizes, strict=True)
    )
    kernels = {
        "blockwise": lambda q, k, v: attend(q, k, v, scale=scale),
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True
        ),
    }
    programs, outputs, times = {}, {}, {name: [] for name in kernels}
    for name, kernel in kernels.items():

        def both(q, k, v, g, kernel=kernel):
            out, pull = jax.vjp(kernel, q, k, v)
            return out, *pull(g)

        programs[name] = jax.jit(both).lower(q, k, v, g).compile()
        outputs[name] = programs[name](q, k, v, g)
    for ours, theirs in zip(outputs["blockwise"], outputs["jax.nn"], strict=True):
        if not jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            raise SystemExit("the two kernels disagree: nothing is measured")
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(min(once(program, q, k, v, g) for _ in range(3)))
    return {
        "length": length,
        "batch": batch,
        "ms": {name: 1000 * statistics.median(found) for name, found in times.items()},
        "temporaries": {
            name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()
        },
    }


def once(program, *arrays) -> float:
    import jax

    began = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return time.perf_counter() - began


def table(rows: list[dict]) -> str:
    lines = [f"{'tokens':>12}{'blockwise':>12}{'jax.nn':>10}{'':4}{'temporaries':>12}{'':>12}"]
    for row in rows:
        ms, size = row["ms"], row["temporaries"]
        lines.append(
            f"{row['batch']:>4} x {row['length']:>5}{ms['blockwise']:9.1f} ms{ms['jax.nn']:7.1f} ms"
            f"{'':4}{size['blockwise'] / 1e6:9.1f} MB{size['jax.nn'] / 1e6:9.1f} MB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
