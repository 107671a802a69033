"""Choosing the next token from logits: greedy, or a draw from a cut distribution.

No sort: the cut of top-k and top-p is a threshold that is found by bisection over the bits of a
float, 30 passes over the vocabulary. Every row draws from its own key, so that what a row gets does
not depend on the rows beside it.

top-p: "The Curious Case of Neural Text Degeneration" (1904.09751); min-p: 2407.01082. The order
is that of transformers: temperature, top-k, top-p (of what top-k left), min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How to draw. temperature 0: always the best token, ties to the lowest id.

    top_k: of the k best tokens only. top_p: of the fewest best tokens that have at least this
    probability together. min_p: of tokens with at least this share of the best one's probability.
    Tokens that tie with the last one kept are kept too. Raises ConfigError for impossible values.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; it must be 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be from 0 to 1.")

    @property
    def kind(self) -> tuple[bool, ...]:
        """What is used at all: the part that a compiled program depends on."""
        if self.temperature == 0:
            return (False,) * 4
        cuts = (self.top_k is not None, self.top_p not in (None, 1), bool(self.min_p))
        return (True, *cuts)

    def numbers(self) -> dict[str, np.ndarray]:
        """The values as arguments of a compiled program."""
        return {
            "temperature": np.float32(self.temperature or 1.0),
            "top_k": np.int32(self.top_k or 1),
            "top_p": np.float32(self.top_p or 1.0),
            "min_p": np.float32(self.min_p or 0.0),
        }


def row_keys(seed: int | Sequence[int], rows: Sequence[np.ndarray]) -> jax.Array:
    """One key per row, [B].

    An int is the seed of every row: a row draws as if it were alone. Of equal prompts the second
    and later ones draw from another stream, else they would only repeat the first. A list gives
    every row its own seed.
    """
    copies = np.zeros(len(rows), np.uint32)
    if isinstance(seed, int | np.integer):
        seeds = [seed] * len(rows)
        seen: dict[bytes, int] = {}
        for i, row in enumerate(rows):
            name = np.asarray(row, np.int32).tobytes()
            copies[i] = seen.get(name, 0)
            seen[name] = copies[i] + 1
    else:
        seeds = list(seed)
    if len(seeds) != len(rows):
        raise ConfigError(f"{len(seeds)} seeds for {len(rows)} rows; give one seed per row.")
    keys_B = jax.vmap(jax.random.key)(np.array([_bits(one) for one in seeds], np.uint32))
    return jax.vmap(jax.random.fold_in)(keys_B, copies)


def _bits(seed: int) -> int:
    return int(seed) & 0xFFFFFFFF


def choose(
    kind: tuple[bool, ...],
    logits_BV: jax.Array,
    numbers: dict[str, jax.Array],
    keys_B: jax.Array,
    turn: jax.Array,
    vocab: int | None = None,
) -> jax.Array:
    """Token ids int32 [B]. `turn` counts the draws of a row; ids from `vocab` on are padding."""
    if vocab is not None and vocab < logits_BV.shape[-1]:
        logits_BV = logits_BV[:, :vocab]
    if not kind[0]:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = cut(kind, logits_BV / numbers["temperature"], numbers)

    def draw(key: jax.Array, logits_V: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, turn), logits_V)

    return jax.vmap(draw)(keys_B, logits_BV).astype(jnp.int32)


def cut(kind: tuple[bool, ...], logits_BV: jax.Array, numbers: dict[str, jax.Array]) -> jax.Array:
    """The logits with -inf where a token may not be drawn."""
    _, by_k, by_p, by_min = kind
    weights_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))  # best = 1
    kept_BV = weights_BV

    def keep_from(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jnp.where(weights_BV >= _highest(enough, logits_BV.shape[0]), kept_BV, 0.0)

    if by_k:
        kept_BV = keep_from(lambda t_B1: _sum(kept_BV >= t_B1) >= numbers["top_k"])
    if by_p:
        need_B1 = numbers["top_p"] * _sum(kept_BV)
        kept_BV = keep_from(lambda t_B1: _sum(jnp.where(kept_BV >= t_B1, kept_BV, 0.0)) >= need_B1)
    if by_min:
        kept_BV = jnp.where(weights_BV >= numbers["min_p"], kept_BV, 0.0)
    return jnp.where(kept_BV > 0, logits_BV, -jnp.inf)


def _sum(x_BV: jax.Array) -> jax.Array:
    return jnp.sum(x_BV, axis=-1, keepdims=True)


def _highest(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """For each row the highest t in [0, 1] with enough(t), which must hold at 0; float32 [B, 1].

    Floats from 0 up are ordered as their bits are, so 30 halvings find the exact one.
    """

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        good_B1 = enough(jax.lax.bitcast_convert_type(middle_B1, jnp.float32))
        return jnp.where(good_B1, middle_B1, low_B1), jnp.where(good_B1, high_B1, middle_B1)

    one = int(np.float32(1).view(np.int32))
    low_B1 = jnp.zeros((rows, 1), jnp.int32)
    low_B1, _ = jax.lax.fori_loop(0, 30, halve, (low_B1, jnp.full_like(low_B1, one + 1)))
    return jax.lax.bitcast_convert_type(low_B1, jnp.float32)
