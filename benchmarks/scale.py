"""What one device computes, sends and holds in a train step on 1 to 64 devices, as compiled.

    python benchmarks/scale.py [--model qwen3-0.6b] [--devices 1 4 16 64] [--json]
    python benchmarks/scale.py --device rtx-4090-24gb # compiled for a GPU (extra `plan-gpu`)
    python benchmarks/scale.py --model qwen3-8b --seq-len 4096 --topology v5p:2x2x1 v5p:4x4x4

Nothing runs: the real train step is compiled for that many devices (forced CPU devices unless
--device names a card) in a process of its own and counted in the compiled program, loops multiplied
out (localtrain/hlo). Rows per device stay the same. Bytes are those of the whole array that is
gathered, scattered, summed or exchanged; a ring sends (n-1)/n of them, for a sum twice that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

MESHES = {
    "fsdp": lambda n: {"fsdp": n},
    "replica x fsdp": lambda n: {"replica": 2, "fsdp": n // 2} if n >= 4 else None,
    "fsdp x tensor": lambda n: {"fsdp": n // 4, "tensor": 4} if n >= 8 else None,
    "fsdp x context": lambda n: {"fsdp": n // 4, "context": 4} if n >= 8 else None,
}
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--rows", type=int, default=1, help="rows per device")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--device", help="compile for this card instead of the CPU")
    parser.add_argument("--topology", nargs="+", help="slices to compile for instead (extra `tpu`)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options, options.worker)))
        return
    if options.topology:
        over_slices(options)
        return
    if not options.json:
        print("| devices | mesh | TFLOP | " + " | ".join(f"{k} MB" for k in KINDS), end=" | ")
        print("state GB | temporaries GB | compile s |\n|" + "---|" * 10)
    for name in options.mesh:
        for devices in options.devices:
            if sizes := MESHES[name](devices):
                command = [sys.executable, *sys.argv, "--worker", json.dumps(sizes)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                print(done.stdout.strip() if options.json else row(json.loads(done.stdout)))
                sys.stdout.flush()


def over_slices(options: argparse.Namespace) -> None:
    """`localtrain plan` for one slice after another, with the same rows on each device."""
    from localtrain import backend

    place = backend.find("tpu-vm")
    backend.set_jax(jax_platforms="cpu")
    if not options.json:
        print("| slice | devices | TFLOP | " + " | ".join(f"{k} MB" for k in KINDS), end=" | ")
        print("sent GB | memory traffic GB | arguments GB | temporaries GB", end=" | ")
        print("step s at best | compile s |\n|" + "---|" * 13)
    for name in options.topology:
        rows = options.rows * len(place.topology(name))
        keys = [f"data.seq_len={options.seq_len}", f"train.batch_size={rows}", "train.remat=full"]
        command = [sys.executable, "-m", "localtrain", "plan", options.model, "--topology", name]
        command += ["--json", "--minutes", "0", *keys]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        if found["flops_per_step"] is None:
            print(f"{name}: {found['how']}", file=sys.stderr, flush=True)
            continue
        sent = [found["collectives"].get(kind, {"bytes": 0})["bytes"] / 1e6 for kind in KINDS]
        memory = found["memory_per_device"]
        cells = [
            name,
            str(found["devices"]),
            f"{found['flops_per_step'] / found['devices'] / 1e12:.1f}",
            *(f"{x:.0f}" for x in sent),
            f"{sum(found['sent_bytes_per_step'].values()) / 1e9:.1f}",
            f"{found['memory_bytes_per_step'] / 1e9:.0f}",
            f"{memory['arguments'] / 1e9:.2f}",
            f"{memory['temporaries'] / 1e9:.2f}",
            f"{found['step_time_s']:.3f}",
            f"{found['compile_s']:.0f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def measure(options: argparse.Namespace, sizes: dict[str, int]) -> dict:
    """Compile for one mesh, in this process."""
    import math

    from localtrain import backend, hlo, job, models, sharding, steps
    from localtrain.config import RunConfig
    from localtrain.nn.core import Policy
    from localtrain.nn.decoder import build

    devices = math.prod(sizes.values())
    batch_ways = sizes.get("replica", 1) * sizes["fsdp"]
    # the same tokens for each device: rows are shared out over the other axes
    rows = max(options.rows * devices, batch_ways)
    run = RunConfig.model_validate(
        {
            "model": {"preset": options.model},
            "data": {"sources": "unused", "seq_len": options.seq_len},
            "train": {"batch_size": rows},
            "mesh": {"fsdp": 1, **sizes},
        }
    )
    if options.device:
        place = backend.find("local-gpu")
        backend.set_jax(jax_platforms="cpu")
        found = place.topology(options.device, devices)
    else:
        place = backend.find("cpu")
        place.prepare_environment(run, devices)
        found = None
    dtype = place.defaults().dtype
    spec = models.spec_from(models.read_hub_config(options.model))
    network = build(spec, Policy(compute_dtype=dtype))
    mesh = job.run_mesh(run, found, network)
    programs = steps.lower(network, run, mesh)
    began = time.monotonic()
    step = programs.train.compile(compiler_options=place.compiler_options(run))
    seconds = time.monotonic() - began
    program, memory = hlo.read(step.as_text()), job.compiled_memory(programs, step)
    return {
        "model": options.model,
        "device": options.device or "cpu",
        "dtype": str(dtype),
        "mesh": {axis: n for axis, n in zip(sharding.AXES, mesh.devices.shape, strict=True)},
        "devices": devices,
        "rows": rows,
        "flops": program.flops(),
        "model_flops": spec.model_flops_per_token(options.seq_len) * rows * options.seq_len,
        "collectives": hlo.by_kind(program.collectives()),
        "memory": memory,
        "compile_s": round(seconds, 1),
    }


def row(found: dict) -> str:
    mesh = " x ".join(f"{axis} {n}" for axis, n in found["mesh"].items() if n > 1) or "-"
    sent = [found["collectives"].get(kind, {"bytes": 0})["bytes"] / 1e6 for kind in KINDS]
    memory = found["memory"]
    state = (memory["parameters"] + memory["optimizer"]) / 1e9
    cells = [
        str(found["devices"]),
        mesh,
        f"{found['flops'] / 1e12:.2f}",
        *(f"{x:.0f}" for x in sent),
        f"{state:.2f}",
        f"{memory['temporaries'] / 1e9:.2f}",
        f"{found['compile_s']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
