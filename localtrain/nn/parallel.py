"""What one device's program says to the others: every collective of a training step is here.

The loss and its gradients run under `jax.shard_map` over the whole mesh (see `steps`), so the code
in nn/ sees one device's part of each array and calls these functions where parts meet. Outside of
shard_map, and on axes of size 1, each of them does nothing: one source for a laptop and a slice.

The scheme: fsdp as in "ZeRO" (arXiv 1910.02054): a layer's matrices are gathered when it runs, in
the compute dtype, and gathered again in the backward pass; their gradients are summed and scattered
in float32. tensor as in "Megatron-LM" (arXiv 1909.08053) with the sequence parallelism of "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): between the products each
device has its part of the tokens; `enter` gathers them before a product whose columns are split,
`leave` sums and scatters after one whose rows are. context: a row is 2n chunks, device i has chunks
i and 2n-1-i (as in "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2: of one stretch
each the last device would have most of the causal work), and gathers keys and values. shard_map
does not check replication here (check_vma=False). One rule keeps it simple: the gradient of a
parameter that devices have in common is a part of it on each, and is summed once at the end.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

PIECES = 16
LANES = 128  # of a TPU's vector registers
BATCH_AXES = ("replica", "fsdp", "context")  # tokens are split over these


def size(axis: str) -> int:
    """Devices along a mesh axis that the current program is split over; 1 outside of shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def index(axis: str) -> jax.Array | int:
    """This device's place along an axis."""
    return lax.axis_index(axis) if size(axis) > 1 else 0


def total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum over the devices of these axes, in float32; not to be differentiated."""
    axes = tuple(axis for axis in axes if size(axis) > 1)
    return lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x


def enter(x_BTD: jax.Array) -> jax.Array:
    """All tokens, which the devices of `tensor` then compute different things from, of its part."""
    if size("tensor") == 1:
        return x_BTD
    return lax.all_gather(x_BTD, "tensor", axis=1, tiled=True)


def leave(x_BTD: jax.Array) -> jax.Array:
    """This device's part of the tokens of the sum of the x of the devices of `tensor`."""
    if size("tensor") == 1:
        return x_BTD
    return lax.psum_scatter(x_BTD, "tensor", scatter_dimension=1, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def join(x: jax.Array, axis: str) -> jax.Array:
    """The sum of the x of the devices of `axis`, then used equally by all; so is its gradient."""
    return lax.psum(x, axis)


join.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, g: (g,))


def gather_weight(w: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], dtype) -> jax.Array:
    """A matrix whole along its `embed` axis, in `dtype`, if it is split there; else as it is.

    shape: of the whole matrix, axes: its logical axes.
    """
    if size("fsdp") == 1 or "embed" not in axes:
        return w
    dim = axes.index("embed")
    by_rows = axes == ("vocab", "embed")
    return w if w.shape[dim] == shape[dim] else _gather(dim, by_rows, w.astype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(dim: int, by_rows: bool, w: jax.Array) -> jax.Array:
    return _gather_forward(dim, by_rows, w)[0]


def _gather_forward(dim: int, by_rows: bool, w: jax.Array):
    return _on_tpus(gather, dim, _rows(size("fsdp"), 64), by_rows, w), None


def _scatter(dim: int, by_rows: bool, _, g: jax.Array):
    # in float32: it is a sum over tokens, as that over micro-batches is
    return (_on_tpus(scatter, dim, _rows(size("fsdp"), 8), by_rows, g).astype(g.dtype),)


_gather.defvjp(_gather_forward, _scatter)


def _on_tpus(exchange, dim: int, rows: int, by_rows: bool, x: jax.Array) -> jax.Array:
    """`exchange` at once; on many TPUs in two steps, if there are rows, and a tied embedding's
    `in_pieces`."""
    at_once, tpu = partial(exchange, dim, 1), partial(exchange, dim, rows)
    if by_rows and size("fsdp") >= 8:
        tpu = partial(in_pieces, tpu)
    elif rows == 1:
        return at_once(x)
    return lax.platform_dependent(x, tpu=tpu, default=at_once)


def _rows(ways: int, least: int) -> int:
    """Of the most square grid of `ways` devices; 1 (a line) below `least`.

    Over 8 devices of v5p:2x2x2, 16 of v5e:4x4 and 256 of v5e:16x16, libtpu 0.0.42 makes of one
    scatter a sum of the whole matrix on every device; of two, first between and then within the
    rows of the grid, it makes none. It does so with one gather over 64 devices of v5p:4x4x4 and
    more, not over 32 of v5p:2x4x4; there one is better, as it can run beside the products.
    """
    return max(d for d in range(1, int(ways**0.5) + 1) if ways % d == 0) if ways >= least else 1


def _groups(rows: int) -> list:
    """The devices that talk in each step: between the rows, then within them; or all of them."""
    grid = np.arange(size("fsdp")).reshape(rows, -1)
    return [grid.T.tolist(), grid.tolist()] if rows > 1 else [None]


def gather(dim: int, rows: int, w: jax.Array) -> jax.Array:
    """All devices' w, one after another along `dim`, in one step or two."""
    for groups in reversed(_groups(rows)):
        w = lax.all_gather(w, "fsdp", axis=dim, tiled=True, axis_index_groups=groups)
    return w


def scatter(dim: int, rows: int, g: jax.Array) -> jax.Array:
    """This device's part, along `dim`, of the float32 sum of all devices' g, in one step or two."""
    g = g.astype(jnp.float32)
    for groups in _groups(rows):
        g = lax.psum_scatter(g, "fsdp", scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return g


def in_pieces(exchange, x: jax.Array) -> jax.Array:
    """`exchange` of a tied embedding [V, D] over D, some rows after the others: of all at once,
    TPUs have a copy in another layout (0.3 GB of Qwen3-0.6B's, 0.6 GB of its gradient)."""
    pieces = max(p for p in range(1, PIECES + 1) if x.shape[0] % p == 0)
    parts = lax.map(exchange, x.reshape(pieces, -1, *x.shape[1:]))
    return parts.reshape(x.shape[0], *parts.shape[2:])


def balance(x_BT: jax.Array) -> jax.Array:
    """This device's two chunks of every row, from its stretch: what comes with tokens is put into
    the order of the work once, before the first layer. Not to be differentiated."""
    ways = size("context")
    if ways == 1:
        return x_BT
    whole_BS = lax.all_gather(x_BT, "context", axis=1, tiled=True)
    chunks = whole_BS.reshape(x_BT.shape[0], 2 * ways, -1)
    mine = jnp.stack([index("context"), 2 * ways - 1 - index("context")])
    return jnp.take(chunks, mine, axis=1).reshape(x_BT.shape)


def gather_length(x: jax.Array) -> jax.Array:
    """[B, T, ...] of this device's two chunks to [B, S, ...] of the whole rows, in order."""
    if size("context") == 1:
        return x
    parts = lax.all_gather(x, "context")  # [devices, B, T, ...]
    first, last = jnp.split(parts, 2, axis=2)
    chunks = jnp.moveaxis(jnp.concatenate([first, last[::-1]]), 0, 1)
    return chunks.reshape(x.shape[0], -1, *x.shape[2:])


def own_kv_heads(w: jax.Array, kv_heads: int) -> jax.Array:
    """The key/value head that this device's queries need, when there are fewer than devices.

    w [..., K, H] has all kv heads; the queries of one of them are on size / kv_heads devices.
    """
    ways = size("tensor")
    if ways == 1 or kv_heads % ways == 0:
        return w  # already split, like the heads
    return lax.dynamic_slice_in_dim(w, index("tensor") * kv_heads // ways, 1, axis=w.ndim - 2)


def own_vocab(w: jax.Array, dim: int, vocab: int) -> jax.Array:
    """This device's part of the output matrix along `dim`, also where tensor does not divide the
    vocabulary and each device has all of it: the last part then ends in zeros."""
    ways = size("tensor")
    if ways == 1 or w.shape[dim] < vocab:
        return w
    columns = -(-vocab // ways)
    w = jnp.pad(w, [(0, ways * columns - vocab if d == dim else 0) for d in range(w.ndim)])
    return lax.dynamic_slice_in_dim(w, index("tensor") * columns, columns, axis=dim)


def look_up(table_VD: jax.Array, ids_BT: jax.Array, shape: tuple[int, int], dtype) -> jax.Array:
    """table[ids] of this device's part of the tokens in `dtype`, [B, T / tensor, D].

    The ids are those of all devices of tensor; the table, of `shape`, may be split on both axes.
    Split over fsdp, each device looks up its channels for the tokens of all, then they exchange:
    this moves activations, a tenth or less of the table, and the table's gradient needs no sum.
    """
    split_v, split_d = table_VD.shape[0] < shape[0], table_VD.shape[1] < shape[1]
    if size("tensor") > 1 and not split_v:
        part = ids_BT.shape[1] // size("tensor")
        ids_BT = lax.dynamic_slice_in_dim(ids_BT, index("tensor") * part, part, axis=1)
    if split_d:
        ids_BT = lax.all_gather(ids_BT, "fsdp", axis=0, tiled=True)
    if split_v:
        rows = table_VD.shape[0]
        ids_BT = ids_BT - index("tensor") * rows
        here_BT = (ids_BT >= 0) & (ids_BT < rows)
        x_BTD = jnp.take(table_VD, jnp.clip(ids_BT, 0, rows - 1), axis=0).astype(dtype)
        x_BTD = leave(jnp.where(here_BT[..., None], x_BTD, 0))
    else:
        x_BTD = jnp.take(table_VD, ids_BT, axis=0).astype(dtype)
    if split_d:
        x_BTD = lax.all_to_all(x_BTD, "fsdp", split_axis=0, concat_axis=2, tiled=True)
    return x_BTD


def lay_out(g: jax.Array) -> jax.Array:
    """The gradient of a parameter, laid out as TPUs store that parameter.

    Columns fill 128 lanes, so of a part of an embedding with fewer the rows are stored along them;
    the gradient, a sum into rows, comes out the other way. Left to itself the compiler moves
    parameter and moments to the gradient, from the start of the step and padded: 0.23 GB of
    Qwen3-0.6B over 16 chips.
    """
    if g.ndim != 2 or g.shape[1] >= LANES:
        return g
    by_columns = partial(with_layout_constraint, layouts=Layout(major_to_minor=(1, 0)))
    return lax.platform_dependent(g, tpu=by_columns, default=lambda g: g)


def finish_first(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; backwards, the gradient of w is scattered before that of x goes on.

    Else that of the whole output matrix may wait, in float32, until all layers are through: 2.1 GB
    of Llama-3.1-8B on each device.
    """
    return lax.optimization_barrier((x, w)) if size("fsdp") > 1 else (x, w)


def refetch(body, *, scanned: bool):
    """`body` of a layer, keeping for the backward pass all but what came from other devices.

    Without it the gathered matrices of all layers would be kept: the whole model on each device.
    """
    if size("fsdp") == 1 and size("context") == 1:
        return body
    return jax.checkpoint(body, policy=_is_ours, prevent_cse=not scanned)


def _is_ours(primitive, *_, **params) -> bool:
    """Whether to keep a value: not if gathered, nor if only the shape, type or order of one.

    Activations gathered over `tensor` are kept, like any other.
    """
    if primitive.name == "all_gather":
        return params["axis_name"] in ("tensor", ("tensor",))
    cheap = ("reshape", "convert_element_type", "transpose", "squeeze", "broadcast_in_dim")
    return primitive.name not in (*cheap, "split", "slice", "rev", "concatenate")
