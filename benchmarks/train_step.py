"""Train step on the CPU beside transformers + torch: tokens per second, CPU seconds, memory.

    python benchmarks/train_step.py [--shape small|qwen3-0.6b] [--rounds 2] [--steps N] [--json]
    python benchmarks/train_step.py --torch     # beside torch, eager and compiled, when installed

float32, AdamW, clipping at 1.0, random tokens, every engine with the same configuration and all
cores. Each measurement is a process of its own, so its peak memory is its own; engines take turns,
so that what else the machine does meets all of them. The limit beside them is a float32 matrix
product of 2048 x 2048 x 2048, measured in the same run before each round; "of limit" divides the
model's FLOPs (forward and backward, nothing recomputed) by it.

`localtrain train` starts itself with huge pages (backends/cpu.py); so does its worker here. With
--huge-pages the others get them too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 32768,
}
SHAPES = {"small": (8, 512, 12), "qwen3-0.6b": (1, 512, 3)}  # rows, tokens a row, steps timed
TORCH = ("torch", "torch.compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine")
    parser.add_argument("--steps", type=int, help="steps timed in each")
    parser.add_argument("--torch", action="store_true", help="measure transformers + torch too")
    parser.add_argument("--huge-pages", action="store_true", help="give them to torch too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", choices=("limit", "localtrain", *TORCH), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows, length, steps = SHAPES[options.shape]
    steps = options.steps or steps
    if options.worker:
        print(json.dumps(WORKERS[options.worker](config_of(options.shape), rows, length, steps)))
        return
    engines = ("localtrain", *(TORCH if options.torch else ()))
    result = compare(options.shape, engines, options.rounds, steps, options.huge_pages)
    print(json.dumps(result, indent=2) if options.json else table(result))


def config_of(shape: str) -> dict:
    if shape == "small":
        return SMALL
    from localtrain.models import read_hub_config

    return read_hub_config(shape)


def compare(shape: str, engines: tuple[str, ...], rounds: int, steps: int, pages: bool) -> dict:
    """All measurements of a shape: {"limit_gflops", "engines": {name: figures}, ...}."""
    from localtrain.models import spec_from

    rows, length, _ = SHAPES[shape]
    spec = spec_from(config_of(shape))
    found: dict[str, list[dict]] = {name: [] for name in ("limit", *engines)}
    for _ in range(rounds):
        for name, runs in found.items():
            print(f"{shape}: {name}", file=sys.stderr, flush=True)
            runs.append(in_a_process(name, shape, steps, pages or name == "localtrain"))
    limit = max(run["gflops"] for run in found.pop("limit"))
    tokens, flops = rows * length, spec.model_flops_per_token(length)
    figures = {}
    for name, runs in found.items():
        times = [t for run in runs for t in run["step_s"]]
        per_s = tokens / statistics.median(times)
        figures[name] = {
            "tokens_per_s": per_s,
            "best_tokens_per_s": tokens / min(times),
            "tokens_per_cpu_s": tokens / statistics.median(run["cpu_s"] for run in runs),
            "of_limit": per_s * flops / limit / 1e9,
            "peak_gb": max(run["peak_gb"] for run in runs),
            "first_step_s": min(run["first_step_s"] for run in runs),
            "first_loss": runs[0]["first_loss"],
        }
    return {
        "shape": shape,
        "batch": rows,
        "seq_len": length,
        "parameters": spec.parameters(),
        "tflop_per_step": flops * tokens / 1e12,
        "limit_gflops": limit,
        "cores": cores(),
        "engines": figures,
    }


def in_a_process(worker: str, shape: str, steps: int, pages: bool) -> dict:
    from localtrain.backend import find

    command = [sys.executable, __file__, "--worker", worker, "--shape", shape]
    env = os.environ | (find("cpu").process_environment() if pages else {})
    command += ["--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed(step: Callable[[], float], steps: int) -> dict:
    """Figures of `step`, which returns its loss when all its work is done."""
    began = time.perf_counter()
    losses, times = [step()], []
    first = time.perf_counter() - began
    step()  # the second call may still settle (allocator, autotuning)
    cpu = time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    return {
        "step_s": times,
        "cpu_s": (time.process_time() - cpu) / steps,
        "first_step_s": first,
        "first_loss": losses[0],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def measure_limit(config: dict, rows: int, length: int, steps: int) -> dict:
    """GFLOP/s of one large float32 matrix product, the best of 20."""
    import jax
    import jax.numpy as jnp

    size = 2048
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    multiply = jax.jit(lambda a: a @ a)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        multiply(a).block_until_ready()
        times.append(time.perf_counter() - start)
    return {"gflops": 2 * size**3 / min(times) / 1e9}


def ours(config: dict, rows: int, length: int, steps: int) -> dict:
    return timed(build(config, rows, length)[0], steps)


def prepare(shape: str) -> tuple[Callable[[], float], str]:
    """(one step of localtrain, which returns its loss; the text of its compiled program)."""
    return build(config_of(shape), *SHAPES[shape][:2])


def build(config: dict, rows: int, length: int) -> tuple[Callable[[], float], str]:
    """The very program that `localtrain train` runs, on one batch."""
    import numpy as np

    from localtrain.backend import choose
    from localtrain.config import RunConfig
    from localtrain.job import compile_job, make_network

    train = {"batch_size": rows, "steps": 1000}
    data = {"seq_len": length, "sources": "synthetic:"}
    run = RunConfig.model_validate(
        {"train": train, "data": data, "model": {"preset": "qwen3-0.6b"}}
    )
    backend, _ = choose("cpu")
    backend.prepare_environment(run)
    job = compile_job(run, make_network(run, config, "config.json", backend), backend)
    state = job.fresh_state()
    batch = {name: np.asarray(x) for name, x in random_batch(config, rows, length).items()}
    placed = job.place(batch)
    count = 0

    def step() -> float:
        nonlocal state, count
        state, metrics = job.step(state, placed, job.number(count))
        count += 1
        return float(metrics["loss"])

    return step, job.step.as_text()


def random_batch(config: dict, rows: int, length: int) -> dict:
    import numpy as np

    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (rows, length + 1))
    shape = (rows, length)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "labels": ids[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        "segments": np.ones(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }


def theirs(config: dict, rows: int, length: int, steps: int, compiled: bool = False) -> dict:
    """transformers' Qwen3 with torch: scaled dot-product attention, fused AdamW."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    known = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    known.pop("torch_dtype", None)
    model = Qwen3ForCausalLM(Qwen3Config(**known, attn_implementation="sdpa", use_cache=False))
    model.float().train()
    adamw = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batch = random_batch(config, rows, length)
    ids, labels = (torch.tensor(batch[k], dtype=torch.int64) for k in ("tokens", "labels"))

    def loss_of(ids, labels):
        logits = model(input_ids=ids).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> float:
        loss = forward(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item()

    return timed(step, steps)


def theirs_compiled(config: dict, rows: int, length: int, steps: int) -> dict:
    return theirs(config, rows, length, steps, compiled=True)


WORKERS = {
    "limit": measure_limit,
    "localtrain": ours,
    "torch": theirs,
    "torch.compile": theirs_compiled,
}


def table(result: dict) -> str:
    head = (
        f"{result['shape']}: {result['parameters']:,} parameters, {result['batch']} x "
        f"{result['seq_len']} tokens, {result['tflop_per_step']:.2f} TFLOP a step, "
        f"{result['cores']} cores, matrix product limit {result['limit_gflops']:.0f} GFLOP/s"
    )
    lines = [head, "", f"{'':16}{'tok/s':>9}{'best':>9}{'tok/CPU s':>11}{'of limit':>10}{'GB':>7}"]
    for name, it in result["engines"].items():
        lines.append(
            f"{name:16}{it['tokens_per_s']:9.1f}{it['best_tokens_per_s']:9.1f}"
            f"{it['tokens_per_cpu_s']:11.1f}{it['of_limit']:10.0%}{it['peak_gb']:7.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
