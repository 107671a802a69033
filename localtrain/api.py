"""The Python API for a model: load it, look at logits and gradients, generate, save.

    import localtrain
    model = localtrain.load("path/to/hub-folder")      # or a preset, or a run directory
    logits = model.logits([[1, 2, 3]])                 # float32 [1, 3, vocab]
    loss, grads = model.loss_and_grads(ids, labels=ids)
    new = model.generate(ids, max_new_tokens=20)
    model.save_hub("out")

Gradients and saved tensors carry the Hub's names and shapes, so they compare with those of
transformers name by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain import convert, hubdir, storage
from localtrain.errors import ConfigError, DataError
from localtrain.generate import check_prompt, generate, positions_of
from localtrain.losses import Head, weighted_nll_sum
from localtrain.models import read_hub_config, rules_from, spec_from, weights
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Context, Network, Params, build
from localtrain.nn.spec import Model
from localtrain.source import Source, open_source

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
IGNORED = -100  # label of a token that is not trained


def load(source: str, dtype: str | None = None, seed: int = 0) -> LanguageModel:
    """A model from a Hub folder or id, a run or checkpoint of ours, or a preset's name.

    A preset has no weights: it starts from `seed`. `dtype` is that of weights and computation,
    float32 unless given. Raises ConfigError for what the config says, DataError for the weights.
    """
    source, policy = str(source), _policy(dtype)
    if storage.is_dir(source) or ("/" in source and not storage.exists(source)):
        found = open_source(source)
        network = build(found.network.spec, policy)
        return LanguageModel(found.hf, network, found.params(network.shapes), found)
    hf = read_hub_config(source)
    network = build(spec_from(hf, source), policy)
    return LanguageModel(hf, network, jax.jit(network.init)(jax.random.key(seed)))


def _policy(dtype: str | None) -> Policy:
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype is {dtype!r}; known are {', '.join(DTYPES)}.")
    kind = DTYPES[dtype or "float32"]
    return Policy(param_dtype=kind, compute_dtype=kind)


class LanguageModel:
    """A network with its parameters, the Hub config and, when from disk, where it came from."""

    def __init__(
        self,
        hf: Mapping[str, Any],
        network: Network,
        params: Params,
        source: Source | None = None,
    ):
        self.hf = dict(hf)
        self.network = network
        self.params = params
        self.source = source
        self._logits = jax.jit(partial(_logits, network))
        self._grads = jax.jit(jax.value_and_grad(partial(_mean_loss, network)))

    @property
    def spec(self) -> Model:
        return self.network.spec

    def logits(self, input_ids, attention_mask=None) -> jax.Array:
        """float32 [B, T, V]; where the mask is 0 the values mean nothing."""
        tokens_BT, mask_BT = check_prompt(self.network, input_ids, attention_mask)
        with jax.default_matmul_precision("highest"):
            return self._logits(self.params, tokens_BT, mask_BT)

    def loss_and_grads(
        self, input_ids, labels, attention_mask=None
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Mean loss over trained labels, and its gradient for each Hub tensor.

        Labels are not shifted: the logits at i are compared with label i + 1; -100 is ignored.
        """
        tokens_BT, mask_BT = check_prompt(self.network, input_ids, attention_mask)
        labels_BT = np.asarray(labels)
        if labels_BT.shape != tokens_BT.shape:
            raise DataError(
                f"labels have the shape {list(labels_BT.shape)}, input_ids {list(tokens_BT.shape)}."
            )
        next_BT = np.pad(labels_BT[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        trained_BT = next_BT != IGNORED
        if not trained_BT.any():
            raise DataError("no label is trained: all are -100 or the first of their row.")
        if next_BT[trained_BT].min() < 0 or next_BT[trained_BT].max() >= self.spec.vocab:
            raise DataError(f"a label is outside of 0 to {self.spec.vocab - 1} and not -100.")
        with jax.default_matmul_precision("highest"):
            loss, grads = self._grads(
                self.params,
                tokens_BT,
                mask_BT,
                np.where(trained_BT, next_BT, 0).astype(np.int32),
                trained_BT.astype(np.float32),
            )
        return float(loss), dict(weights.export_tensors(self._entries(), weights.read_from(grads)))

    def generate(
        self,
        input_ids,
        attention_mask=None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop_ids: Sequence[int] = (),
        seed: int | Sequence[int] = 0,
    ) -> np.ndarray:
        """New tokens only, int32 [B, n]; n < max_new_tokens when every row has stopped.

        A row gets what it would get alone; equal prompts get different texts. A list of seeds is
        one for each row.
        """
        with jax.default_matmul_precision("highest"):
            return generate(
                self.network,
                self.params,
                input_ids,
                attention_mask,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                stop_ids=stop_ids,
                seed=seed,
            )

    def save_hub(self, folder: str, dtype: str | None = None) -> None:
        """Write config.json and safetensors as the Hub has them, in the held dtype by default."""
        held = jnp.dtype(self.network.policy.param_dtype).name
        name = held if dtype is None else dtype
        if name not in DTYPES:
            raise ConfigError(f"dtype is {name!r}; known are {', '.join(DTYPES)}.")
        entries = self._entries()
        plan = {entry.name: (entry.shape, np.dtype(DTYPES[name])) for entry in entries.values()}
        tensors = weights.export_tensors(entries, weights.read_from(self.params))
        files = {}
        if self.source is not None:
            plan |= convert.carried_plan(self.source)
            carried = list(self.source.read_carried())  # now: `folder` may be where they lie
            tensors = itertools.chain(tensors, carried)
            files = convert.files_beside(self.source)
        ends = convert.ends_of(self.source)
        hf = hubdir.export_config(self.hf, name, self.spec.tied, ends)
        hubdir.write_hub_folder(folder, hf, plan, tensors, files)

    def _entries(self) -> dict[str, weights.Entry]:
        return weights.expand(rules_from(self.hf), self.network)


def _context(tokens_BT: jax.Array, mask_BT: jax.Array) -> Context:
    return Context(tokens_BT, positions_of(mask_BT), mask_BT)


def _logits(network: Network, params: Params, tokens_BT, mask_BT) -> jax.Array:
    return network.logits(params, network.hidden(params, _context(tokens_BT, mask_BT)))


def _mean_loss(network: Network, params: Params, tokens_BT, mask_BT, labels_BT, weights_BT):
    h_BTD = network.hidden(params, _context(tokens_BT, mask_BT))
    w, layout = network.head(params)
    head = Head(layout, network.softcap, vocab=network.spec.vocab)
    total, _ = weighted_nll_sum(head, w, h_BTD, labels_BT, weights_BT)
    return total / jnp.sum(weights_BT)
