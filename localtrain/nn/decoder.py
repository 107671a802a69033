"""The decoder: embedding, stacks of layers, final norm, head; as functions of a plain dict.

`build` makes a Network from a spec without creating an array. Layers that repeat are stored
stacked on a leading `layers` axis and run under `jax.lax.scan`, so compile time does not grow with
depth. Parameters are nested dicts: {"embed": {...}, "stack_0": {"layer_0": {...}, ...}, ...,
"final_norm": {...}, "head": {...}}; layer `l` of the model is entry l // period of
`layer_<l % period>` within its stack.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from localtrain.nn.attention import Attention, Context, init_cache
from localtrain.nn.cached import Slots, extend
from localtrain.nn.core import LOGIT_STD, WEIGHT_STD, Policy, RMSNorm, draw, param, soft_cap
from localtrain.nn.mlp import GatedMlp
from localtrain.nn.parallel import gather_weight, look_up, own_vocab, refetch, size
from localtrain.nn.rope import rope_tables
from localtrain.nn.spec import Layer, Model, Rope

Params = dict  # nested, str keys, array leaves
SAVED_BY_NAME = ("q", "k", "v", "attention", "attention_lse", "mlp_gate", "mlp_up")
REMAT = ("none", "matmuls", "full")


class Block(nnx.Module):
    """One layer."""

    def __init__(self, layer: Layer, dim: int, policy: Policy, out_std: float):
        self.sandwich = layer.residual == "sandwich"
        self.mixer_norm = RMSNorm(dim, layer.norm)
        self.mixer = Attention(layer.mixer, dim, policy, out_std)
        self.ffn_norm = RMSNorm(dim, layer.norm)
        self.ffn = GatedMlp(layer.ffn, dim, policy, out_std)
        if self.sandwich:
            self.mixer_out_norm = RMSNorm(dim, layer.norm)
            self.ffn_out_norm = RMSNorm(dim, layer.norm)

    def __call__(
        self, x_BTD: jax.Array, ctx: Context, cache: dict | None = None
    ) -> tuple[jax.Array, dict | None]:
        mixed_BTD, cache = self.mixer(self.mixer_norm(x_BTD), ctx, cache)
        x_BTD = x_BTD + (self.mixer_out_norm(mixed_BTD) if self.sandwich else mixed_BTD)
        ffn_BTD = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + (self.ffn_out_norm(ffn_BTD) if self.sandwich else ffn_BTD), cache


class Ends(nnx.Module):
    """What is not a layer: embedding, final norm and, unless tied, the head."""

    def __init__(self, spec: Model, vocab: int):
        logit_std = min(WEIGHT_STD, LOGIT_STD / math.sqrt(spec.dim))
        self.embed_VD = param(
            (vocab, spec.dim),
            ("vocab", "embed"),
            "embedding",
            std=logit_std if spec.tied else WEIGHT_STD,
        )
        self.final_norm = RMSNorm(spec.dim, spec.final_norm)
        if not spec.tied:
            self.head_DV = param((spec.dim, vocab), ("embed", "vocab"), "embedding", std=logit_std)


def build(spec: Model, policy: Policy | None = None) -> Network:
    """The network of a spec, abstract: no array is made."""
    return Network(spec, policy or Policy())


class Network:
    """Pure functions on nested dicts of parameters, and the trees that describe them."""

    def __init__(self, spec: Model, policy: Policy):
        self.spec = spec
        self.policy = policy
        self.stacks = spec.stacks
        self.vocab = -(-spec.vocab // policy.vocab_multiple) * policy.vocab_multiple
        self.softcap = spec.softcap
        self.head_name = "embed_VD" if spec.tied else "head_DV"  # the parameter
        out_std = WEIGHT_STD / math.sqrt(2 * len(spec.layers))
        self._ends, ends = nnx.split(Ends(spec, self.vocab))
        self._blocks, variables = [], ends.raw_mapping
        for i, stack in enumerate(self.stacks):
            graphs, layers = [], {}
            for j, layer in enumerate(stack.period):
                graph, state = nnx.split(Block(layer, spec.dim, policy, out_std))
                graphs.append(graph)
                layers[f"layer_{j}"] = state.raw_mapping
            self._blocks.append(graphs)
            variables[f"stack_{i}"] = layers
        self._variables = variables
        self.shapes = self._describe(self._shape)
        self.axes = self._describe(self._axes)
        self.decay = self._describe(lambda path, v: v.get_metadata("kind") == "matrix")

    # trees ------------------------------------------------------------------------------------

    def _describe(self, what) -> Params:
        is_leaf = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        return jax.tree_util.tree_map_with_path(what, self._variables, is_leaf=is_leaf)

    def _repeat(self, path) -> int | None:
        """Length of the leading layers axis of the parameter at `path`, None outside stacks."""
        name = path[0].key
        return self.stacks[int(name[6:])].repeat if name.startswith("stack_") else None

    def _shape(self, path, variable: nnx.Param) -> jax.ShapeDtypeStruct:
        repeat = self._repeat(path)
        shape = variable.get_value().shape
        shape = shape if repeat is None else (repeat, *shape)
        return jax.ShapeDtypeStruct(shape, self.policy.param_dtype)

    def _axes(self, path, variable: nnx.Param) -> tuple[str, ...]:
        axes = variable.get_metadata("logical_axes")
        return axes if self._repeat(path) is None else ("layers", *axes)

    def init(self, key: jax.Array) -> Params:
        """Initial parameters; to be called under jit. Each depends on the key and its path only."""

        def start(path, variable: nnx.Param) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
            shape = self._shape(path, variable).shape
            return draw(leaf_key, variable, shape, self.policy.param_dtype)

        return self._describe(start)

    # forward ----------------------------------------------------------------------------------

    def hidden(self, params: Params, ctx: Context, remat: str = "none") -> jax.Array:
        """The output of the final norm, [B, T, D] in the compute dtype.

        Of this device's part of the tokens, where the program is split over `tensor`.
        """
        x_BTD, ctx = self._embed(params, ctx)
        for i, stack in enumerate(self.stacks):
            scanned = self.policy.scan and stack.repeat > 1
            body = _rematerialise(partial(self._trained_period, i, ctx), remat, scanned)
            x_BTD, _ = self._loop(body, x_BTD, params[f"stack_{i}"], stack.repeat)
        return self._merge_ends(params).final_norm(x_BTD)

    def head(self, params: Params) -> tuple[jax.Array, str]:
        """The output matrix and its layout: the tied embedding "vd", or the head "dv".

        This device's part of the vocabulary, where the program is split over `tensor`.
        """
        name, layout = self.head_name, "vd" if self.spec.tied else "dv"
        w = self._whole(params[name], self.shapes[name].shape, self.axes[name])
        return own_vocab(w, layout.index("v"), self.vocab), layout

    def logits(self, params: Params, h_BTD: jax.Array) -> jax.Array:
        """float32 [..., V] without padded columns; for short sequences (training: losses)."""
        weight, layout = self.head(params)
        equation = "...D,VD->...V" if layout == "vd" else "...D,DV->...V"
        weight = weight.astype(self.policy.compute_dtype)
        logits = jnp.einsum(equation, h_BTD, weight, preferred_element_type=jnp.float32)
        return soft_cap(logits, self.softcap)[..., : self.spec.vocab]

    def _embed(self, params: Params, ctx: Context) -> tuple[jax.Array, Context]:
        dtype = self.policy.compute_dtype
        shape = self.shapes["embed_VD"].shape
        x_BTD = look_up(params["embed_VD"], ctx.tokens_BT, shape, dtype)
        if self.spec.embed_scale is not None:
            x_BTD = x_BTD * jnp.asarray(self.spec.embed_scale, dtype)
        return x_BTD, dataclasses.replace(ctx, tables=self._rope_tables(ctx.positions_BT))

    def _rope_tables(self, positions_BT: jax.Array) -> dict[Rope, tuple[jax.Array, jax.Array]]:
        ropes = {layer.mixer.rope for layer in self.spec.layers} - {None}
        return {rope: rope_tables(rope, positions_BT) for rope in ropes}

    def _merge_ends(self, params: Params) -> Ends:
        names = ("embed_VD", "final_norm", "head_DV")
        return nnx.merge(self._ends, nnx.State({n: params[n] for n in names if n in params}))

    def _trained_period(self, i: int, ctx: Context, x_BTD: jax.Array, weights_and_cache):
        """`_period` on weights that may be split over fsdp."""
        weights, cache = weights_and_cache
        name = f"stack_{i}"
        layers = {}
        for layer, axes in self.axes[name].items():
            layers[layer] = jax.tree.map(
                lambda w, full, axes: self._whole(w, full.shape[1:], axes[1:]),
                weights[layer],
                self.shapes[name][layer],
                axes,
            )
        return self._period(i, ctx, x_BTD, (layers, cache))

    def _whole(self, w: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
        return gather_weight(w, shape, axes, self.policy.compute_dtype)

    def _period(self, i: int, ctx: Context, x_BTD: jax.Array, weights_and_cache):
        """The layers of one period of stack i; with caches also what they add to them."""
        weights, cache = weights_and_cache
        entries = None if cache is None else {}
        for j, graph in enumerate(self._blocks[i]):
            name = f"layer_{j}"
            block = nnx.merge(graph, nnx.State(weights[name]))
            x_BTD, entry = block(x_BTD, ctx, None if cache is None else cache[name])
            if cache is not None:
                entries[name] = entry
        return x_BTD, entries

    def _loop(self, body, x_BTD: jax.Array, weights: Params, repeat: int, cache=None):
        """`body` over the leading axis of weights and cache."""
        if self.policy.scan and repeat > 1:
            return jax.lax.scan(body, x_BTD, (weights, cache), length=repeat)
        entries = []
        for r in range(repeat):
            x_BTD, entry = body(x_BTD, jax.tree.map(lambda a, r=r: a[r], (weights, cache)))
            entries.append(entry)
        stacked = None if cache is None else jax.tree.map(lambda *a: jnp.stack(a), *entries)
        return x_BTD, stacked

    # decoding ---------------------------------------------------------------------------------

    def init_cache(self, batch: int, slots: int, first_B: jax.Array | None = None) -> Params:
        """An empty cache with room for `slots` tokens a row.

        first_B [B]: how many slots each row leaves empty before its first token (padding on the
        left), so that rows of different lengths end in the same slot. Layers with a window have
        fewer slots, which are used again.
        """
        first_B = jnp.zeros(batch, jnp.int32) if first_B is None else first_B
        cache = {"length": jnp.zeros((), jnp.int32), "first_B": first_B}
        for i, stack in enumerate(self.stacks):
            repeat = stack.repeat
            cache[f"stack_{i}"] = jax.tree.map(
                lambda a, n=repeat: jnp.zeros((n, *a.shape), a.dtype),
                jax.eval_shape(partial(self.init_period_cache, i, batch, slots)),
            )
        return cache

    def init_period_cache(self, i: int, batch: int, slots: int) -> Params:
        """The empty cache of one period of stack i."""
        dtype = self.policy.compute_dtype
        return {
            f"layer_{j}": init_cache(layer.mixer, batch, slots, dtype)
            for j, layer in enumerate(self.stacks[i].period)
        }

    def decode(
        self,
        params: Params,
        tokens_BT: jax.Array,
        cache: Params,
        count: jax.Array | int | None = None,
    ) -> tuple[jax.Array, Params]:
        """Like `hidden` for tokens that follow those in the cache; returns the longer cache.

        count: only so many of the T tokens are real, the rest is padding on the right, which is
        not kept. All T must fit into the cache.
        """
        count = tokens_BT.shape[1] if count is None else count
        start = cache["length"]
        ctx = self._follow(tokens_BT, Slots(start, cache["first_B"]), count)
        x_BTD, ctx = self._embed(params, ctx)
        new = {"length": start + count, "first_B": cache["first_B"]}
        for i, stack in enumerate(self.stacks):
            name = f"stack_{i}"
            body = partial(self._period, i, ctx)
            x_BTD, entries = self._loop(body, x_BTD, params[name], stack.repeat, cache[name])
            new[name] = extend(cache[name], entries, start, count)
        return self._merge_ends(params).final_norm(x_BTD), new

    def decode_start(self, ends: Params, tokens_BT: jax.Array) -> jax.Array:
        """The three parts of `decode` for a caller that loops over the layers by itself: first the
        embedding; `ends` are the params without the stacks."""
        return self._embed(ends, Context(tokens_BT, jnp.zeros_like(tokens_BT)))[0]

    def decode_period(
        self,
        i: int,
        weights: Params,
        x_BTD: jax.Array,
        tokens_BT: jax.Array,
        slots: Slots,
        count: jax.Array | int,
        cache: Params,
    ) -> tuple[jax.Array, Params]:
        """Then every period of stack i with its own weights and cache, which `extend` must be given
        the second result for."""
        ctx = self._follow(tokens_BT, slots, count)
        ctx = dataclasses.replace(ctx, tables=self._rope_tables(ctx.positions_BT))
        return self._period(i, ctx, x_BTD, (weights, cache))

    def decode_end(self, ends: Params, x_BTD: jax.Array) -> jax.Array:
        """Last the final norm."""
        return self._merge_ends(ends).final_norm(x_BTD)

    def _follow(self, tokens_BT: jax.Array, slots: Slots, count: jax.Array | int) -> Context:
        """The context of tokens that go into a cache."""
        columns_T = jnp.arange(tokens_BT.shape[1])
        positions_BT = slots.start + columns_T - slots.first_B[:, None]
        real_BT = (positions_BT >= 0) & (columns_T < count)
        positions_BT = jnp.maximum(positions_BT, 0)
        return Context(tokens_BT, positions_BT, real_BT.astype(jnp.int32), slots=slots)


def _rematerialise(body, remat: str, scanned: bool):
    """`none` keeps all activations, `matmuls` the named products, `full` only a layer's input.

    Under `tensor` also what was summed over its devices: a device keeps its part of the tokens, and
    the sum is not repeated.
    """
    if remat == "none":
        return refetch(body, scanned=scanned)
    if remat not in REMAT:
        raise ValueError(f"remat is {remat!r}: one of {', '.join(REMAT)}")
    names = SAVED_BY_NAME if remat == "matmuls" else ()
    if size("tensor") > 1:
        names = (*names, "mixer_out") if remat == "full" else (*names, "mixer_out", "ffn_out")
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    # a scan already keeps the compiler from merging the recomputation with the first computation
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
