"""The train step and the eval step: pure functions from (state, batch) to (state, metrics).

State is a dict: params, opt, step (int32, updates applied so far). Two properties matter more than
the arithmetic:

- The loss is a sum over trained tokens divided by their count in the WHOLE batch, fixed before the
  first micro-batch. Accumulation, padding, packing and device counts cannot change it.
- An update that is not finite is not applied, and neither is anything after it: the step number
  that belongs to the batch must equal the state's own, which a refused update leaves behind. So the
  loop may run ahead of the device and still stop with the last good state in its hands.

Memory: a matrix is used in the compute dtype, so the product over tokens that is its gradient comes
out in that dtype too, and is kept so whatever the parameters are stored in. Sums of other kinds are
float32: the gradients of embedding, norms and biases, and sums over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from localtrain import optim, sharding
from localtrain.losses import Head, weighted_nll_sum
from localtrain.nn.decoder import Context, Network
from localtrain.nn.parallel import BATCH_AXES, balance, finish_first, lay_out, size, total

if TYPE_CHECKING:
    from localtrain.config import RunConfig

Tree = Any
Batch = dict[str, jax.Array]  # [B, T]: tokens, labels, positions, segments int32; weights float32


def init_state(network: Network, run: RunConfig, seed: jax.Array) -> Tree:
    """A fresh state from an integer seed; call it under jit so that parameters are born sharded."""
    params = network.init(jax.random.key(seed))
    return {
        "params": params,
        "opt": optim.init(run.optim, params),
        "step": jnp.zeros((), jnp.int32),
    }


def init_around(network: Network, run: RunConfig, seed: jax.Array) -> Tree:
    """A fresh state without its parameters, for a run that takes them from elsewhere."""
    return {k: v for k, v in init_state(network, run, seed).items() if k != "params"}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(dtype: jnp.dtype | None, p: jax.Array, slot: jax.Array) -> jax.Array:
    """A parameter in a dtype (None: the slot's); its gradient goes to the slot, in that dtype."""
    return p.astype(dtype or slot.dtype)


def _use_forward(dtype, p, slot):
    return _use(dtype, p, slot), jnp.zeros((), slot.dtype)


def _use_backward(dtype, like, g):
    return None, g.astype(like.dtype)


_use.defvjp(_use_forward, _use_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Layers:
    """A stack whose weights are cast only inside the loop over its layers, one layer at a time."""

    weights: Tree
    slots: Tree

    def __getitem__(self, layer: str) -> Tree:
        return jax.tree.map(partial(_use, None), self.weights[layer], self.slots[layer])


def gradient_slots(network: Network, params: Tree) -> Tree:
    """Zeros in the shapes and dtypes of the gradients; XLA makes no array of them."""

    def slot(path, p: jax.Array, is_matrix: bool) -> jax.Array:
        product = is_matrix or path[0].key == "head_DV"  # else a sum of other kinds: float32
        return jnp.zeros(p.shape, network.policy.compute_dtype if product else jnp.float32)

    return jax.tree_util.tree_map_with_path(slot, params, network.decay)


def batch_loss(
    network: Network, run: RunConfig, params: Tree, *, batch: Batch, slots: Tree | None = None
):
    """(objective, nll): weighted sums over the tokens of one micro-batch, float32 scalars.

    With `slots` (see `gradient_slots`) differentiable towards them instead of the parameters.
    """
    context = Context(batch["tokens"], batch["positions"], batch["segments"])
    h_BTD = network.hidden(_used(params, slots), context, remat=run.train.remat)
    # Its own use of the matrix that may be the embedding too: that one is float32, for the sum.
    ends = _used(params, slots, network.policy.compute_dtype)
    h_BTD, w = finish_first(h_BTD, ends[network.head_name])
    w, head = _head(network, {**ends, network.head_name: w}, run.train.z_loss)
    return weighted_nll_sum(head, w, h_BTD, batch["labels"], batch["weights"])


def _head(network: Network, params: Tree, z_loss: float = 0.0) -> tuple[jax.Array, Head]:
    """The output matrix, or this device's part of the vocabulary, and how it is used."""
    w, layout = network.head(params)
    axis = sharding.RULES["vocab"] if size("tensor") > 1 else None
    return w, Head(layout, network.softcap, z_loss, network.spec.vocab, axis)


def _used(params: Tree, slots: Tree | None, dtype: jnp.dtype | None = None) -> Tree:
    if slots is None:
        return params
    return {
        name: _Layers(tree, slots[name])
        if name.startswith("stack_")
        else jax.tree.map(partial(_use, dtype), tree, slots[name])
        for name, tree in params.items()
    }


def loss_and_grads(
    network: Network, run: RunConfig, params: Tree, batch: Batch, mesh: Mesh | None = None
):
    """(mean loss over trained tokens, gradients of the objective, trained tokens) of a whole batch.

    Gradients accumulate over micro-batches of `train.micro_batch` rows in float32; of a single one
    they have the dtypes of `gradient_slots`. On a mesh each device does this for its own tokens;
    the gradients are placed like the parameters.
    """
    trained = jnp.sum(batch["weights"])
    # In the weights, not as a factor of the sum: that would be a second array as large as the head.
    batch = {**batch, "weights": batch["weights"] / jnp.maximum(trained, 1)}
    rows = batch["tokens"].shape[0]
    sums = partial(_sums, network, run, rows // (run.train.micro_batch or rows))
    if mesh is None or mesh.size == 1:
        return *sums(params, batch), trained
    places = sharding.param_specs(mesh, network.shapes, network.axes)

    def local(params: Tree, batch: Batch):
        loss, grads = sums(params, jax.tree.map(balance, batch))
        grads = jax.tree.map(lambda g, at: lay_out(total(g, sharding.unsplit(at))), grads, places)
        return total(loss, BATCH_AXES), grads

    out = (PartitionSpec(), places)
    everywhere = jax.shard_map(
        local, mesh=mesh, in_specs=(places, sharding.BATCH), out_specs=out, check_vma=False
    )
    return *everywhere(params, batch), trained


def _sums(network: Network, run: RunConfig, pieces: int, params: Tree, batch: Batch):
    """(loss, gradients), summed over the micro-batches of this device's tokens."""

    def micro(piece: Batch):
        if network.policy.compute_dtype == network.policy.param_dtype == jnp.float32:
            objective = partial(batch_loss, network, run, batch=piece)  # 10% faster on CPU
            (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(params)
            return loss, grads
        objective = partial(batch_loss, network, run, params, batch=piece)
        slots = gradient_slots(network, params)
        (_, loss), grads = jax.value_and_grad(lambda s: objective(slots=s), has_aux=True)(slots)
        return loss, grads

    if pieces == 1:
        return micro(batch)

    def accumulate(carry, piece):
        loss, grads = micro(piece)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (loss, grads)), None

    split = _split(batch, pieces)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return lax.scan(accumulate, (jnp.zeros((), jnp.float32), zeros), split)[0]


def _split(batch: Batch, pieces: int) -> Batch:
    """Micro-batches on a leading axis, [pieces, rows / pieces, T]."""
    return jax.tree.map(lambda x: x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1), batch)


def train_step(
    network: Network,
    run: RunConfig,
    state: Tree,
    batch: Batch,
    step: jax.Array,
    mesh: Mesh | None = None,
) -> tuple[Tree, dict[str, jax.Array]]:
    """One optimizer update. `step` is the number (from 0) of the update this batch belongs to."""
    params = state["params"]
    loss, grads, trained = loss_and_grads(network, run, params, batch, mesh)
    norm = optim.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    scale = optim.clip_factor(run.optim, norm)
    lr = optim.learning_rate(run.optim, run.train.steps, step)
    new, opt = optim.update(
        run.optim, network.decay, step, lr, params, state["opt"], grads, scale=scale, seed=run.seed
    )
    apply = finite & (state["step"] == step)
    candidate = {"params": new, "opt": opt, "step": step + 1}
    state = jax.tree.map(lambda a, b: jnp.where(apply, a, b), candidate, state)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "trained_tokens": trained,
        "applied": apply,
    }
    return state, metrics


def eval_step(
    network: Network, run: RunConfig, params: Tree, batch: Batch, mesh: Mesh | None = None
) -> jax.Array:
    """[sum of nll, trained tokens] of one batch, float32; micro-batch by micro-batch, as training
    does it: else it could need more memory than a step."""
    rows = batch["tokens"].shape[0]
    pieces = rows // (run.train.micro_batch or rows)

    def micro(params: Tree, batch: Batch) -> jax.Array:
        context = Context(batch["tokens"], batch["positions"], batch["segments"])
        h_BTD = network.hidden(params, context)
        w, head = _head(network, params)
        _, nll = weighted_nll_sum(head, w, h_BTD, batch["labels"], batch["weights"])
        return jnp.stack([nll, jnp.sum(batch["weights"])])

    def local(params: Tree, batch: Batch) -> jax.Array:
        split = _split(jax.tree.map(balance, batch), pieces)
        if pieces == 1:
            sums = micro(params, jax.tree.map(lambda x: x[0], split))
        else:
            sums = lax.map(partial(micro, params), split).sum(0)
        return total(sums, BATCH_AXES)

    if mesh is None or mesh.size == 1:
        return local(params, batch)
    places = sharding.param_specs(mesh, network.shapes, network.axes)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(places, sharding.BATCH),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(params, batch)


class Programs(NamedTuple):
    """The three programs of a run, lowered for a mesh, and the arrays they take (abstract)."""

    init: jax.stages.Lowered  # (seed uint32) -> state
    train: jax.stages.Lowered  # (state, donated; batch; step int32) -> (state, metrics)
    evaluate: jax.stages.Lowered  # (params, batch) -> [nll, trained tokens]
    state: Tree  # jax.ShapeDtypeStruct with shardings, like the state
    batch: Tree  # the same for a batch


def abstract_batch(run: RunConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch looks like: int32 and float32 arrays [batch_size, seq_len], placed by rows."""
    shape = (run.train.batch_size, run.data.seq_len)
    place = sharding.batch_sharding(mesh)
    kinds = dict.fromkeys(("tokens", "labels", "positions", "segments"), jnp.int32)
    kinds["weights"] = jnp.float32
    return {k: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for k, dtype in kinds.items()}


def lower(network: Network, run: RunConfig, mesh: Mesh) -> Programs:
    """Trace the programs of a run for the devices of a mesh, which need not be there.

    `train` compiles and runs them, `plan` compiles them and reads what the compiler says.
    """
    everywhere = sharding.replicated(mesh)
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=everywhere)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    shapes = jax.eval_shape(partial(init_state, network, run), seed)
    params = sharding.param_shardings(mesh, network.shapes, network.axes)
    places = sharding.state_shardings(mesh, shapes, params)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )
    batch = abstract_batch(run, mesh)

    def jit(f, out, **options):
        return jax.jit(partial(f, network, run), out_shardings=out, **options)

    init, born = init_state, places
    if run.model.init_from:
        init, born = init_around, {k: place for k, place in places.items() if k != "params"}
    return Programs(
        init=jit(init, born).lower(seed),
        train=jit(partial(train_step, mesh=mesh), (places, everywhere), donate_argnums=0).lower(
            state, batch, step
        ),
        evaluate=jit(partial(eval_step, mesh=mesh), everywhere).lower(state["params"], batch),
        state=state,
        batch=batch,
    )
