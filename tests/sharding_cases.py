"""Run by test_sharding.py in a process of its own with forced devices; prints one JSON object.

python tests/sharding_cases.py equal 4 '{"name": ["plain", {"fsdp": 4}, null]}'
python tests/sharding_cases.py logprobs 4 | programs 4
"""

import dataclasses
import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from localtrain import hlo, optim, sharding, steps
from localtrain.config import RunConfig
from localtrain.losses import Head, token_logprobs
from localtrain.models import read_hub_config, spec_from
from localtrain.nn.attend import attend
from localtrain.nn.core import Policy
from localtrain.nn.decoder import build

B, T, SHORT, ODD = 8, 48, 200, 263
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def models():
    """plain: tied head, q/k norms. options: everything that a layer may have, untied head, and a
    vocabulary that no mesh divides."""
    plain = spec_from({**read_hub_config("qwen3-tiny"), **SIZES})
    layer = plain.layers[0]
    mixer = dataclasses.replace(
        layer.mixer, qkv_bias=True, out_bias=True, sinks=True, window=10, softcap=20.0
    )
    ffn = dataclasses.replace(layer.ffn, bias=True, act="gelu_tanh")
    local = dataclasses.replace(layer, mixer=mixer, ffn=ffn, residual="sandwich")
    options = dataclasses.replace(
        plain,
        layers=(local, layer, local),
        vocab=ODD,
        tied=False,
        softcap=30.0,
        embed_scale=4.0,
    )
    return {"plain": plain, "options": options}


def make_run(mesh=None, micro_batch=None, remat="none", **data) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": "qwen3-tiny"},
            "data": {"sources": "unused", "seq_len": T, **data},
            "train": {
                "batch_size": B,
                "micro_batch": micro_batch,
                "z_loss": 1e-3,
                "remat": remat,
            },
            "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant"},
            "mesh": {"fsdp": 1, **(mesh or {})},
        }
    )


def make_batch() -> dict[str, np.ndarray]:
    """Packed rows: documents of 1 to 20 tokens that lie across every cut, padding at the end."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, SHORT, (B, T + 1), dtype=np.int32)
    segments, positions = np.zeros((2, B, T), np.int32)
    weights = (random.uniform(size=(B, T)) < 0.8).astype(np.float32)
    for row in range(B):
        at = number = 0
        while at < T - row:
            length = min(int(random.integers(1, 20)), T - row - at)
            number += 1
            segments[row, at : at + length] = number
            positions[row, at : at + length] = np.arange(length)
            weights[row, at + length - 1] = 0
            at += length
        weights[row, at:] = 0
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    return batch | {"positions": positions, "segments": segments, "weights": weights}


def start(network) -> dict:
    """Parameters that are nowhere zero: a bias at zero hides mistakes."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda s: (0.3 * random.standard_normal(s.shape) / np.sqrt(s.shape[-1])).astype(np.float32),
        network.shapes,
    )


def measure(spec, mesh_sizes: dict, micro_batch=None, remat="none") -> dict:
    """Loss, gradients, updated parameters and eval sums of one step on a mesh."""
    run = make_run(mesh_sizes, micro_batch, remat)
    network = build(spec, Policy(vocab_multiple=1 if spec.vocab == ODD else 8))
    count = int(np.prod(list(mesh_sizes.values())))
    mesh = sharding.make_mesh(run.mesh, jax.devices()[:count])
    sharding.check_model(mesh, T, spec)
    places = sharding.param_shardings(mesh, network.shapes, network.axes)

    def step(params, batch):
        loss, grads, _ = steps.loss_and_grads(network, run, params, batch, mesh)
        norm = optim.global_norm(grads)
        number, lr = jnp.int32(0), jnp.float32(0.1)
        new, _ = optim.update(run.optim, network.decay, number, lr, params, {}, grads)
        numbers = {"loss": loss, "grad_norm": norm}
        sums = steps.eval_step(network, run, params, batch, mesh)
        return numbers, sums, {"gradients": grads, "parameters": new}

    out = {"gradients": places, "parameters": places}
    params = jax.device_put(start(network), places)
    batch = jax.device_put(make_batch(), sharding.batch_sharding(mesh))
    return jax.device_get(jax.jit(step, out_shardings=(None, None, out))(params, batch))


def worst(a, b) -> float:
    """Largest difference over the trees, relative to the largest entry of each array."""
    return max(
        float(np.abs(x - y).max() / np.abs(y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def equal(cases: str) -> dict:
    """case -> relative differences from one device."""
    specs, found = models(), {}
    one = {name: measure(spec, {"fsdp": 1}) for name, spec in specs.items()}
    for name, (model, *case) in json.loads(cases).items():
        ours, reference = measure(specs[model], *case), one[model]
        found[name] = {
            **{k: worst(ours[0][k], reference[0][k]) for k in ours[0]},
            "eval": worst(ours[1], reference[1]),
            **{k: worst(ours[2][k], reference[2][k]) for k in ours[2]},
        }
    return found


def logprobs(devices: int) -> dict:
    """Relative differences of `token_logprobs` with its vocabulary over all devices."""
    keys = jax.random.split(jax.random.key(0), 3)
    w_VD, h_BTD = jax.random.normal(keys[0], (48, 16)), jax.random.normal(keys[1], (3, 100, 16))
    labels_BT = jax.random.randint(keys[2], (3, 100), 0, 41)
    head = Head("vd", softcap=5.0, vocab=41)
    mesh = sharding.make_mesh(make_run({"tensor": devices}).mesh)

    def measure(head, w, h, labels):
        def objective(w, h):
            logp = token_logprobs(head, w, h, labels)
            return jnp.sum(jnp.sin(logp)), logp

        (_, logp), grads = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(w, h)
        return {"values": logp, "towards w": grads[0], "towards h": grads[1]}

    out = {"values": P(), "towards w": P("tensor"), "towards h": P(None, "tensor")}
    split = jax.shard_map(
        partial(measure, head._replace(axis="tensor")),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, "tensor"), P()),
        out_specs=out,
        check_vma=False,
    )
    ours = jax.jit(split)(w_VD, h_BTD, labels_BT)
    whole = measure(head, w_VD, h_BTD, labels_BT)
    return {key: worst(np.asarray(ours[key]), np.asarray(whole[key])) for key in out}


def programs(devices: int) -> dict:
    """What the compiled programs of a run with fsdp and tensor exchange, in bfloat16."""
    found = {}
    for name, sizes, vocab, length, remats in (  # 20480, 512: four chunks of the loss a device
        ("fsdp", {"fsdp": devices}, 20480, 512, ("matmuls",)),
        ("both", {"fsdp": 2, "tensor": 2}, 20480, 512, ("none",)),
        ("tensor", {"tensor": devices}, 272, 64, ("none", "matmuls", "full")),
    ):
        spec = dataclasses.replace(models()["plain"], vocab=vocab, tied=False)
        for remat in remats:
            run = make_run(sizes, remat=remat, seq_len=length)
            mesh = sharding.make_mesh(run.mesh)
            network = build(spec, Policy(compute_dtype=jnp.bfloat16))
            lowered = steps.lower(network, run, mesh)
            text = lowered.train.as_text()
            program = hlo.read(lowered.train.compile().as_text())
            shapes = {dims for use in program.walk() for _, dims in use.instruction.shapes}
            found[f"{name} {remat}"] = {
                "collectives": [dataclasses.asdict(c) for c in program.collectives()],
                "loss_loops": loss_loops(program, vocab // sizes.get("tensor", 1)),
                "gathered": sorted(set(re.findall(r"all_gather.*-> tensor<[\dx]+x(\w+)>", text))),
                "scattered": scattered(text),
                "kept": sorted(d[1:] for d in shapes if len(d) == 4 and d[0] == len(spec.layers)),
                "layer_matrices": 7,
                "layers": len(spec.layers),
            }
        init = hlo.read(lowered.init.compile().as_text())
        shapes = [shape for use in init.walk() for shape in use.instruction.shapes]
        found[name] = {"largest": max(int(np.prod(dims)) for _, dims in shapes)}
        sizes = jax.tree.map(lambda s: int(np.prod(s.shape)), network.shapes)
        found[name]["largest_parameter"] = max(jax.tree.leaves(sizes))
    found["attention"] = attention_work(devices)
    return found


def attention_work(devices: int) -> dict:
    """devices -> kind -> FLOPs of one device for attention to a row of 2048, both directions."""
    found = {}
    for ways in (1, devices):
        mesh = sharding.make_mesh(make_run({"context": ways}).mesh, jax.devices()[:ways])
        found[ways] = {}
        for name, window in (("full", None), ("window", 300)):

            def loss(q, k, v, window=window):
                return jnp.sum(attend(q, k, v, scale=1.0, window=window))

            split = (P(None, "context"),) * 3
            step = jax.shard_map(
                jax.grad(loss, (0, 1, 2)),
                mesh=mesh,
                in_specs=split,
                out_specs=split,
                check_vma=False,
            )
            shapes = [
                jax.ShapeDtypeStruct((1, 2048, heads, 16), jnp.float32) for heads in (2, 1, 1)
            ]
            program = hlo.read(jax.jit(step).lower(*shapes).compile().as_text())
            found[ways][name] = program.flops()
    return found


def scattered(text: str) -> list[str]:
    """Element types of the sums that are scattered, as the program is given to the compiler."""
    ends = re.findall(r"reduce_scatter.*?\}\) : \(tensor<[\dx]+x(\w+)>", text, re.DOTALL)
    return sorted(set(ends))


def loss_loops(program: hlo.Program, vocab: int) -> list[str]:
    """Bodies of the loops in which a product over the vocabulary runs."""
    bodies = {
        use.loops[-1]
        for use in program.walk()
        if use.loops and any(vocab in dims for _, dims in use.instruction.shapes)
    }
    return sorted(bodies)


if __name__ == "__main__":
    job, devices, *more = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jobs = {"equal": equal, "logprobs": logprobs, "programs": programs}
    print(json.dumps(jobs[job](*(more or [int(devices)]))))
