"""Generation: token ids in, new token ids out, greedy or sampled.

Rows of different lengths are shifted to end together, whatever side they were padded on, so that
all of them go on with the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.decode import Decoder
from localtrain.errors import DataError
from localtrain.nn.decoder import Network, Params
from localtrain.sampling import Sampling, row_keys


def stream_tokens(
    network: Network,
    params: Params,
    input_ids_BT: np.ndarray,
    attention_mask_BT: np.ndarray | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    vocab: int | None = None,
) -> Iterator[np.ndarray]:
    """New tokens int32 [B], one array per step, until every row has stopped.

    A row that has produced one of `stop_ids` goes on with that id. Sampling and seeds: see
    sampling.py. vocab: ids from here on are padding and never come out (None: the model's own
    size). Raises DataError for prompts that are empty or hold unknown ids, ConfigError for settings
    that cannot be.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    tokens_BT, mask_BT = check_prompt(network, input_ids_BT, attention_mask_BT)
    rows = [tokens[mask > 0] for tokens, mask in zip(tokens_BT, mask_BT, strict=True)]
    longest = max(len(row) for row in rows)
    first_B = np.array([longest - len(row) for row in rows], np.int32)
    together_BT = np.stack([np.pad(row, (longest - len(row), 0)) for row in rows])
    decoder = Decoder(network, params, first_B)
    decoder.read(together_BT)
    return decoder.stream(max_new_tokens, sampling, row_keys(seed, rows), stop_ids, vocab)


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
