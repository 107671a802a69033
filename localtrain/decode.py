"""Decoding: a network with a cache that reads tokens and goes on from there.

Prompts go through the network in pieces of a few fixed lengths, so that a program compiled once
serves prompts of any length; then one token at a time, each step dispatched before the host has
read the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.nn.cached import SLOT_AXES, Slots, capacity, extend, grow
from localtrain.nn.decoder import Network, Params
from localtrain.sampling import Sampling, choose

PIECES = (512, 256, 128, 64, 32, 16)  # lengths in which prompts are read
SHORTEST_CACHE, LONG_CACHE = 256, 4096  # caches double between these, then grow by the latter


class Decoder:
    """Rows of tokens in a cache: `read` some, `stream` what follows, read more."""

    def __init__(self, network: Network, params: Params, first_B: np.ndarray | None = None) -> None:
        """first_B: padding on the left of each row of the first tokens that will be read (None: one
        row without any)."""
        self.slots = SHORTEST_CACHE
        self.length = 0  # slots in use
        self._longest = 0  # most slots that were in use since the cache was empty
        self._windows = {layer.mixer.window for layer in network.spec.layers} - {None}
        first_B = np.zeros(1, np.int32) if first_B is None else first_B
        self.rows = len(first_B)
        device = _only_device(params)
        make = ByPeriod if device is not None and device.platform == "cpu" else Whole
        self._place = make(network, params, self.slots, first_B)
        self._h_BD: jax.Array | None = None  # final state after the last token read

    def read(self, tokens_BT: np.ndarray) -> None:
        """Take tokens int [B, T] into the cache."""
        self._make_room(padded_length(tokens_BT.shape[1]))
        for start in range(0, tokens_BT.shape[1], PIECES[0]):
            piece_BT = tokens_BT[:, start : start + PIECES[0]].astype(np.int32)
            count = piece_BT.shape[1]
            padding = padded_length(count) - count
            piece_BT = np.pad(piece_BT, ((0, 0), (0, padding)))
            self._advance(piece_BT, count)

    def _advance(self, tokens_BT: jax.Array | np.ndarray, count: int) -> None:
        self._h_BD = self._place.advance(tokens_BT, np.int32(count))
        self.length += count
        self._longest = max(self._longest, self.length)

    def _make_room(self, more: int) -> None:
        if self.length + more > self.slots:
            self.slots = slots_for(self.length + more)
            self._place.grow(self.slots)

    def rewinds(self, length: int) -> bool:
        """Whether `rewind` is possible: every layer keeps its tokens apart in slots, and those in
        its window before slot `length` have not made room for later ones."""
        for window in self._windows if length else ():
            lost = self._longest - capacity(window, self.slots)
            if max(length - (window - 1), 0) < lost:
                return False
        stacks = {k: v for k, v in self._place.cache.items() if k.startswith("stack")}
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(stacks)[0]]
        return all(path[-1].key in SLOT_AXES for path in paths)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` slots; 0 is possible before anything was read."""
        self.length = length
        self._longest = self._longest if length else 0
        self._place.cache["length"] = self._place.put(np.int32(length))

    def stream(
        self,
        count: int,
        sampling: Sampling,
        keys_B: jax.Array,
        stop_ids: Sequence[int] = (),
        vocab: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Up to `count` new tokens int32 [B] a step. What was given out is in the cache, but for
        the last one when all `count` came."""
        if count < 1:
            return
        numbers = sampling.numbers()
        draw = self._place.sampler(sampling.kind, vocab)
        turn, keys_B = self._place.put((np.int32(0), keys_B))
        token_B1, turn = draw(self._h_BD, numbers, keys_B, turn)
        stops = np.asarray(list(stop_ids), np.int32)
        stopped_B = np.zeros(self.rows, bool)
        last_B = np.zeros(self.rows, np.int32)
        for number in range(1, count + 1):
            current_B1 = token_B1
            if number < count:  # dispatched before the host waits for the current token
                self._make_room(1)
                self._advance(current_B1, 1)
                token_B1, turn = draw(self._h_BD, numbers, keys_B, turn)
            last_B = np.where(stopped_B, last_B, np.asarray(current_B1)[:, 0])
            yield last_B
            stopped_B = stopped_B | (last_B[:, None] == stops).any(axis=1)
            if stopped_B.all():
                return


class Whole:
    """A network with a cache; one program takes all layers."""

    def __init__(self, network: Network, params: Params, slots: int, first_B: np.ndarray):
        self.network = network
        self.params = params
        self.device = _only_device(params)
        ends = {k: v for k, v in params.items() if not k.startswith("stack_")}
        self.ends = self.put(ends)
        self.cache = self.put(self._empty(slots)(first_B))

    def put(self, tree: Any) -> Any:
        """Onto the device of the parameters, for good: an array without a fixed place would be
        another program than the same array with one."""
        return tree if self.device is None else jax.device_put(tree, self.device)

    def _empty(self, slots: int):
        """first_B -> an empty cache, by one program: array by array it took 15 ms of 12 layers."""
        return self.compiled(("empty", slots), _empty, slots=slots)

    def grow(self, slots: int) -> None:
        """Make room for `slots` tokens."""
        empty = jax.eval_shape(self._empty(slots), self.cache["first_B"])
        self.cache = grow(self.cache, empty)

    def advance(self, tokens_BT: jax.Array | np.ndarray, count: np.int32) -> jax.Array:
        """Take `count` real tokens a row; the final state of the last of them, [B, D]."""
        program = self.compiled("advance", _advance, donate_argnames="cache")
        h_BD, self.cache = program(self.params, tokens_BT, self.cache, count)
        return h_BD

    def sampler(self, kind: tuple[bool, ...], vocab: int | None):
        """(h_BD, numbers, keys_B, turn) -> (token_B1, turn + 1)."""
        program = self.compiled(("draw", kind, vocab), _draw, kind=kind, vocab=vocab)
        return partial(program, self.ends)

    def compiled(self, key, function, donate_argnames=None, **fixed):
        """A program of this network, kept on it."""
        programs = self.network.__dict__.setdefault("_generation", {})
        if key not in programs:
            call = partial(function, self.network, **fixed)
            programs[key] = jax.jit(call, donate_argnames=donate_argnames)
        return programs[key]


class ByPeriod(Whole):
    """The same on a CPU: a program of one period of layers, called for each.

    A slice of a stacked weight is a copy in XLA's CPU programs, which made a step of 100M
    parameters six times slower; weights that are apart (in the same memory) are read as they are.
    And one period compiles in a second, whatever the depth.
    """

    def __init__(self, network: Network, params: Params, slots: int, first_B: np.ndarray):
        super().__init__(network, params, slots, first_B)
        stacks = [params[f"stack_{i}"] for i in range(len(network.stacks))]
        self.stacks = [take_apart(stack, self.device) for stack in stacks]

    def _empty(self, slots: int):
        return self.compiled(("empty by period", slots), _empty_by_period, slots=slots)

    def advance(self, tokens_BT: jax.Array | np.ndarray, count: np.int32) -> jax.Array:
        cache = self.cache
        start = cache["length"]
        slots = Slots(start, cache["first_B"])
        x_BTD = self.compiled("start", _start)(self.ends, tokens_BT)
        write = self.compiled("write", _write, donate_argnames="cache")
        for i, stack in enumerate(self.stacks):
            program = self.compiled(("period", i), _period, i=i)
            caches = cache["stacks"][i]
            for r, weights in enumerate(stack):
                x_BTD, entry = program(weights, x_BTD, tokens_BT, slots, count, caches[r])
                # another program, because XLA's CPU compiler copies a cache that is also read
                caches[r] = write(cache=caches[r], entry=entry, start=start, count=count)
        h_BD, cache["length"] = self.compiled("end", _end)(self.ends, x_BTD, start, count)
        return h_BD


def padded_length(length: int) -> int:
    """The slots that reading `length` tokens touches: whole pieces."""
    whole, rest = divmod(length, PIECES[0])
    return whole * PIECES[0] + (min(p for p in PIECES if p >= rest) if rest else 0)


def slots_for(needed: int) -> int:
    """Slots of a cache: not many more than needed, in few sizes, each of which is a program."""
    if needed > LONG_CACHE:
        return -(-needed // LONG_CACHE) * LONG_CACHE
    return max(SHORTEST_CACHE, 1 << (needed - 1).bit_length())


def _only_device(params: Params) -> jax.Device | None:
    """The device of all parameters, None when there are several."""
    devices = {device for leaf in jax.tree.leaves(params) for device in leaf.devices()}
    return devices.pop() if len(devices) == 1 else None


def take_apart(stack: dict[str, Any], device: jax.Device) -> list[dict[str, Any]]:
    """One tree per period of a stack on a CPU, in the same memory where it is aligned."""
    views = jax.tree.map(np.asarray, stack)
    periods = range(len(jax.tree.leaves(views)[0]))
    apart = [jax.tree.map(lambda view, r=r: view[r], views) for r in periods]
    return jax.device_put(apart, device, may_alias=True)


def _empty(network, first_B, slots):
    return network.init_cache(len(first_B), slots, first_B)


def _empty_by_period(network, first_B, slots):
    stacks = [
        [network.init_period_cache(i, len(first_B), slots) for _ in range(stack.repeat)]
        for i, stack in enumerate(network.stacks)
    ]
    return {"length": jnp.int32(0), "first_B": first_B, "stacks": stacks}


def _advance(network, params, tokens_BT, cache, count):
    h_BTD, cache = network.decode(params, tokens_BT, cache, count)
    return _last(h_BTD, count), cache


def _start(network, ends, tokens_BT):
    return network.decode_start(ends, tokens_BT)


def _period(network, weights, x_BTD, tokens_BT, slots, count, cache, i):
    return network.decode_period(i, weights, x_BTD, tokens_BT, slots, count, cache)


def _write(network, cache, entry, start, count):
    return extend(cache, entry, start, count)


def _end(network, ends, x_BTD, length, count):
    return network.decode_end(ends, _last(x_BTD, count)), length + count


def _last(x_BTD, count):
    return jax.lax.dynamic_index_in_dim(x_BTD, count - 1, axis=1, keepdims=False)


def _draw(network, ends, h_BD, numbers, keys_B, turn, kind, vocab):
    token_B = choose(kind, network.logits(ends, h_BD), numbers, keys_B, turn, vocab)
    return token_B[:, None], turn + 1
