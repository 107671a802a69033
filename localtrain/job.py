"""What one run needs before its first step: model, tokenizer, data, compiled programs.

Checks run in the order of their cost: configuration, then tokenizer, then data, then compilation,
so that a mistake is reported before time is spent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain import compile_cache, models, processes, sharding, steps
from localtrain.backend import Backend
from localtrain.config import RunConfig
from localtrain.errors import ConfigError
from localtrain.nn import attend
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Network, build
from localtrain.oom import gigabytes, memory_advice
from localtrain.source import Source

log = logging.getLogger(__name__)
Tree = Any


@dataclass
class Job:
    """The compiled programs of a run, and where their arrays live."""

    run: RunConfig
    network: Network
    programs: steps.Programs
    init: Callable[[jax.Array], Tree]
    step: jax.stages.Compiled  # (state, batch, step) -> (state, metrics)
    evaluate: Callable[[Tree, steps.Batch], jax.Array]
    compile_s: float
    from_cache: int  # of the three programs
    peak_flops: float | None  # of all devices together, FLOP/s; None when there is no source

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one token, forward and backward, nothing recomputed."""
        return self.network.spec.model_flops_per_token(self.run.data.seq_len)

    def memory(self) -> dict[str, int]:
        """Bytes per device of the train step by class, as the compiler counts them."""
        return compiled_memory(self.programs, self.step)

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows of a batch that this process's devices need, in rising order."""
        like = self.programs.batch["tokens"]
        parts = like.sharding.addressable_devices_indices_map(like.shape).values()
        return np.unique(np.concatenate([np.arange(like.shape[0])[part[0]] for part in parts]))

    def place(self, batch: dict[str, np.ndarray]) -> steps.Batch:
        """Host arrays of this process's rows of a batch onto its devices."""
        return {k: self._place(self.programs.batch[k], v) for k, v in batch.items()}

    def _place(self, like: jax.ShapeDtypeStruct, value_BT: np.ndarray) -> jax.Array:
        if processes.count() == 1:
            return jax.device_put(value_BT, like.sharding)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(like.shape[0])
            here = np.searchsorted(self.rows, (first, last))
            return value_BT[slice(*here), index[1]]

        return jax.make_array_from_callback(like.shape, like.sharding, part)

    def fresh_state(self, source: Source | None = None) -> Tree:
        """Step 0: parameters from a source, else from the run's seed."""
        state = self.init(self._everywhere(np.uint32(self.run.seed)))
        if self.run.model.init_from:
            state["params"] = source.params(self.programs.state["params"])
        return state

    def number(self, value: int) -> jax.Array:
        """A step number for `step`: placed on purpose, the loop forbids implicit transfers."""
        return self._everywhere(np.int32(value))

    def _everywhere(self, value: np.generic) -> jax.Array:
        """device_put of several processes' arrays would compare the values of all: a collective."""
        place = self.programs.state["step"].sharding
        if processes.count() == 1:
            return jax.device_put(value, place)
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback((), place, lambda _: np.asarray(value))


def make_network(run: RunConfig, hf: dict[str, Any], where: str, backend: Backend) -> Network:
    """The abstract network in the run's types of parameters and arithmetic."""
    spec = models.spec_from(hf, where)
    dtype = jnp.dtype(run.model.dtype or backend.defaults().dtype)
    if run.data.seq_len > spec.max_length:
        log.warning(
            "data.seq_len = %d is longer than the %d positions that %s was made for",
            run.data.seq_len,
            spec.max_length,
            where,
        )
    param_dtype = jnp.dtype(run.train.param_dtype)
    kernel = backend.defaults().attention
    return build(spec, Policy(param_dtype=param_dtype, compute_dtype=dtype, attention=kernel))


def compile_job(run: RunConfig, network: Network, backend: Backend) -> Job:
    """Compile the three programs side by side. Raises OutOfMemoryError with advice."""
    mesh = run_mesh(run, network=network)
    log.info("attention kernel: %s", attention_kernels(run, network, mesh))
    cache, began = compile_cache.enable(), time.monotonic()
    before = cache.hits
    programs = steps.lower(network, run, mesh)
    options = backend.compiler_options(run)

    def build_one(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return lowered.compile(compiler_options=options)

    with memory_advice(run, lambda: memory_by_class(programs)), ThreadPoolExecutor(3) as pool:
        parts = (programs.train, programs.init, programs.evaluate)
        train, init, evaluate = pool.map(build_one, parts)
    peak = backend.peak_flops(jax.devices()[0].device_kind)
    return Job(
        run=run,
        network=network,
        programs=programs,
        init=init,
        step=train,
        evaluate=evaluate,
        compile_s=time.monotonic() - began,
        from_cache=cache.hits - before,
        peak_flops=None if peak is None else peak * jax.device_count(),
    )


def run_mesh(
    run: RunConfig,
    devices: Sequence[jax.Device] | None = None,
    network: Network | None = None,
) -> jax.sharding.Mesh:
    """The devices (None: this process's) as the run wants them, or ConfigError.

    Every device gets the same number of rows of every micro-batch.
    """
    mesh = sharding.make_mesh(run.mesh, devices)
    rows = run.train.micro_batch or run.train.batch_size
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    if rows % ways:
        key = "train.micro_batch" if run.train.micro_batch else "train.batch_size"
        raise ConfigError(
            f"{key} = {rows} rows cannot be split evenly over {ways} devices (mesh.replica x "
            f"mesh.fsdp): make it a multiple of {ways}, for example {-(-rows // ways) * ways}."
        )
    if network is not None:
        slices = sharding.slice_count(mesh.devices.flat)
        sharding.check_model(mesh, run.data.seq_len, network.spec, rows, slices)
    return mesh


def attention_kernels(run: RunConfig, network: Network, mesh: jax.sharding.Mesh) -> str:
    """Which kernels the layers use, and why not the one that this place has."""
    policy, ways = network.policy, mesh.shape["context"]
    wanted, dtype = policy.attention, jnp.dtype(policy.compute_dtype).name
    found = attend.kernels(network.spec, wanted, run.data.seq_len, ways, dtype)
    return ", ".join(
        name if reason is None else f"{name} in place of {wanted}: {reason}"
        for name, reason in found.items()
    )


def bytes_per_device(tree: Tree) -> int:
    """Bytes that one device holds of a tree of placed shapes."""
    shards = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in shards)


def memory_by_class(programs: steps.Programs) -> dict[str, int]:
    """Bytes per device that are known before anything is compiled."""
    return {
        "parameters": bytes_per_device(programs.state["params"]),
        "optimizer": bytes_per_device(programs.state["opt"]),
    }


def compiled_memory(programs: steps.Programs, step: jax.stages.Compiled) -> dict[str, int]:
    """Bytes per device of the compiled train step by class, and the compiler's own counts.

    The state is donated, so new parameters and moments lie where the old ones were; outputs that do
    not count as temporaries. `total` is what has to be free at once.
    """
    known, found = memory_by_class(programs), step.memory_analysis()
    if found is None:  # a program from the compile cache of some platforms
        return known
    known["compiler_temp"] = found.temp_size_in_bytes
    extra = found.output_size_in_bytes - found.alias_size_in_bytes
    known["temporaries"] = known["compiler_temp"] + extra
    known["code"] = found.generated_code_size_in_bytes
    known["arguments"] = found.argument_size_in_bytes
    known["total"] = known["arguments"] + known["temporaries"] + known["code"]
    return known


def describe(run: RunConfig, network: Network) -> dict[str, Any]:
    """What a dry run tells: sizes and costs, without data, devices or compilation."""
    spec = network.spec
    state = jax.eval_shape(lambda: steps.init_state(network, run, np.uint32(0)))
    size = {
        key: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state[key]))
        for key in ("params", "opt")
    }
    tokens = run.train.batch_size * run.data.seq_len
    flops = spec.model_flops_per_token(run.data.seq_len)
    return {
        "parameters": spec.parameters(),
        "layers": len(spec.layers),
        "vocabulary": spec.vocab,
        "tokens_per_step": tokens,
        "tokens": tokens * run.train.steps,
        "model_flops_per_step": flops * tokens,
        "parameter_bytes": size["params"],
        "optimizer_bytes": size["opt"],
        "gradient_bytes": 4 * spec.parameters(),
        "summary": (
            f"{spec.parameters():,} parameters, layers: {len(spec.layers)}; {tokens:,} tokens a "
            f"step, {tokens * run.train.steps:,} in {run.train.steps} steps; "
            f"{flops * tokens:.3g} model FLOPs a step; memory before activations: parameters "
            f"{gigabytes(size['params'])}, optimizer {gigabytes(size['opt'])}, gradients "
            f"{gigabytes(4 * spec.parameters())}"
        ),
    }
