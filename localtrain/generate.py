"""Generation with a cache: one compiled step per token, greedy or sampled.

The prompt is padded to a multiple of 64 and goes through `Network.decode` at once; then one token
at a time. Padding takes cache slots but is never seen, so rows may differ in length and be padded
on either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.errors import ConfigError, DataError
from localtrain.nn.decoder import Context, Network, Params

PROMPT_MULTIPLE = 64  # prompt lengths share compiled programs in steps of this


def stream_tokens(
    network: Network,
    params: Params,
    input_ids_BT: np.ndarray,
    attention_mask_BT: np.ndarray | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """New tokens int32 [B], one array per step, until every row has stopped.

    A row that has produced one of `stop_ids` goes on with that id. Temperature 0 takes the best
    token, ties to the lowest id. Raises DataError for prompts that are empty or hold unknown ids.
    """
    tokens_BT, mask_BT = check_prompt(network, input_ids_BT, attention_mask_BT)
    length = tokens_BT.shape[1]
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; it must be 0 (greedy) or more.")
    if max_new_tokens < 1:
        return
    padding = -length % PROMPT_MULTIPLE
    tokens_BT = np.pad(tokens_BT, ((0, 0), (0, padding)))
    mask_BT = np.pad(mask_BT, ((0, 0), (0, padding)))
    total = tokens_BT.shape[1] + max_new_tokens
    total += -total % PROMPT_MULTIPLE
    prefill, step = _programs(network, total, temperature, top_k)
    key = jax.random.key(seed)
    token_B, position_B, cache = prefill(params, tokens_BT, mask_BT, jax.random.fold_in(key, 0))
    stops = np.asarray(list(stop_ids), np.int32)
    stopped_B = np.zeros(tokens_BT.shape[0], bool)
    last_B = np.zeros(tokens_BT.shape[0], np.int32)
    for number in range(1, max_new_tokens + 1):
        current_B = token_B
        if number < max_new_tokens:  # dispatched before the host waits for the current token
            turn = jax.random.fold_in(key, number)
            token_B, position_B, cache = step(params, current_B, position_B, cache, turn)
        last_B = np.where(stopped_B, last_B, np.asarray(current_B))
        yield last_B
        stopped_B = stopped_B | np.isin(last_B, stops)
        if stopped_B.all():
            return


def generate(
    network: Network, params: Params, input_ids_BT, attention_mask_BT=None, **options
) -> np.ndarray:
    """All new tokens of `stream_tokens`, int32 [B, n]."""
    steps = list(stream_tokens(network, params, input_ids_BT, attention_mask_BT, **options))
    rows = np.asarray(input_ids_BT).shape[0]
    return np.stack(steps, axis=1) if steps else np.zeros((rows, 0), np.int32)


def check_prompt(
    network: Network, input_ids_BT, attention_mask_BT=None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask as int32 [B, T], refused with a DataError when they cannot be used."""
    tokens_BT = np.asarray(input_ids_BT)
    if tokens_BT.ndim != 2 or tokens_BT.size == 0 or tokens_BT.dtype.kind not in "iu":
        raise DataError(
            f"input_ids must be whole numbers of shape [rows, tokens], at least one token; got "
            f"shape {list(tokens_BT.shape)} of {tokens_BT.dtype}."
        )
    mask_BT = np.ones(tokens_BT.shape, np.int32)
    if attention_mask_BT is not None:
        mask_BT = (np.asarray(attention_mask_BT) != 0).astype(np.int32)
    if mask_BT.shape != tokens_BT.shape or not mask_BT.any(axis=1).all():
        raise DataError(
            f"attention_mask must have the shape of input_ids, {list(tokens_BT.shape)}, and at "
            f"least one token in each row; it has the shape {list(mask_BT.shape)}."
        )
    vocab = network.spec.vocab
    bad = np.argwhere((tokens_BT < 0) | (tokens_BT >= vocab))
    if len(bad):
        row, column = bad[0]
        raise DataError(
            f"input_ids[{row}, {column}] is {tokens_BT[row, column]}; this model knows the ids 0 "
            f"to {vocab - 1}. Is the tokenizer that of the model?"
        )
    return tokens_BT.astype(np.int32), mask_BT


def positions_of(mask_BT: jax.Array) -> jax.Array:
    """Positions that count only what the mask keeps: 0 is the first real token."""
    return jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0)


def _programs(network: Network, total: int, temperature: float, top_k: int | None):
    """The compiled prefill and step of a network, kept on it."""
    programs = network.__dict__.setdefault("_generation", {})
    key = (total, temperature > 0, top_k)
    if key not in programs:
        choose = partial(_choose, greedy=temperature == 0, top_k=top_k)
        prefill = jax.jit(partial(_prefill, network, choose, total))
        step = jax.jit(partial(_step, network, choose), donate_argnames="cache")
        programs[key] = prefill, step
    prefill, step = programs[key]
    scale = jnp.float32(temperature or 1.0)
    return partial(prefill, scale), partial(step, scale)


def _prefill(network, choose, total, temperature, params, tokens_BT, mask_BT, key):
    ctx = Context(tokens_BT, positions_of(mask_BT), mask_BT)
    h_BTD, cache = network.decode(params, ctx, network.init_cache(tokens_BT.shape[0], total))
    columns_T = jnp.arange(tokens_BT.shape[1])
    last_B = jnp.max(jnp.where(mask_BT > 0, columns_T, 0), axis=1)
    h_BD = jnp.take_along_axis(h_BTD, last_B[:, None, None], axis=1)[:, 0]
    token_B = choose(network.logits(params, h_BD), temperature, key)
    return token_B, jnp.sum(mask_BT, axis=1), cache


def _step(network, choose, temperature, params, token_B, position_B, cache, key):
    ctx = Context(token_B[:, None], position_B[:, None])
    h_BTD, cache = network.decode(params, ctx, cache)
    token_B = choose(network.logits(params, h_BTD[:, 0]), temperature, key)
    return token_B, position_B + 1, cache


def _choose(logits_BV, temperature, key, greedy: bool, top_k: int | None):
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < smallest_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)
