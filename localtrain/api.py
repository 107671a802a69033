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
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain import storage
from localtrain.errors import ConfigError, DataError
from localtrain.generate import check_prompt, generate, positions_of
from localtrain.losses import Head, weighted_nll_sum
from localtrain.models import read_hub_config, rules_from, spec_from, weights
from localtrain.models.files import DTYPES as FILE_DTYPES
from localtrain.models.files import HubFiles, write_tensors
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Context, Network, Params, build
from localtrain.nn.spec import Model

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
IGNORED = -100  # label of a token that is not trained
COPIED = (  # files beside the weights that a saved folder needs to be used
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja"),
    "generation_config.json",
)


def load(source: str, dtype: str | None = None, seed: int = 0) -> LanguageModel:
    """A model from a Hub folder, a run directory or checkpoint of ours, or a preset's name.

    A preset has no weights: it starts from `seed`. `dtype` is that of weights and computation,
    float32 unless given. Raises ConfigError for what the config says, DataError for the weights.
    """
    source = str(source)
    if storage.is_dir(source):
        if storage.exists(storage.join(source, "config.json")):
            return _load_hub(source, dtype)
        return _load_checkpoint(source, dtype)
    hf = read_hub_config(source)
    network = build(spec_from(hf, source), _policy(dtype))
    return LanguageModel(hf, network, jax.jit(network.init)(jax.random.key(seed)))


def _policy(dtype: str | None) -> Policy:
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype is {dtype!r}; known are {', '.join(DTYPES)}.")
    kind = DTYPES[dtype or "float32"]
    return Policy(param_dtype=kind, compute_dtype=kind)


def _load_hub(folder: str, dtype: str | None) -> LanguageModel:
    hf = read_hub_config(folder)
    network = build(spec_from(hf, storage.join(folder, "config.json")), _policy(dtype))
    return LanguageModel(hf, network, read_params(hf, network, folder), folder)


def _load_checkpoint(folder: str, dtype: str | None) -> LanguageModel:
    from localtrain.checkpoint import find_checkpoint, restore_params

    found, _ = find_checkpoint(folder)
    where = storage.join(storage.parent_of(str(found.folder)), "model.json")
    if not storage.exists(where):
        raise DataError(f"{where}: missing, so the model of this checkpoint is not known.")
    hf = read_hub_config(where)
    network = build(spec_from(hf, where), _policy(dtype))
    params, _ = restore_params(folder, network.shapes)
    return LanguageModel(hf, network, params)


def read_params(hf: Mapping[str, Any], network: Network, folder: str, place=None) -> Params:
    """The parameters of a Hub folder for a network, leaf by leaf.

    `place(path, numpy array)` puts a leaf where it belongs; by default on the first device.
    """
    files = HubFiles(folder)
    table = rules_from(hf)
    entries = weights.expand(table, network)
    weights.check_tensors(entries, files.shapes(), table, folder, network.spec.tied)
    place = place or (lambda path, array: jnp.asarray(array))
    dtype = network.policy.param_dtype
    return weights.import_params(entries, network, files.read_float, dtype, place)


class LanguageModel:
    """A network with its parameters and the Hub config that it came from."""

    def __init__(
        self, hf: Mapping[str, Any], network: Network, params: Params, folder: str | None = None
    ):
        self.hf = dict(hf)
        self.network = network
        self.params = params
        self.folder = folder
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
        return float(loss), dict(weights.export_tensors(self._entries(), grads))

    def generate(
        self,
        input_ids,
        attention_mask=None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> np.ndarray:
        """New tokens only, int32 [B, n]; n < max_new_tokens when every row has stopped."""
        with jax.default_matmul_precision("highest"):
            return generate(
                self.network,
                self.params,
                input_ids,
                attention_mask,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
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
        plan = {entry.name: (entry.shape, DTYPES[name]) for entry in entries.values()}
        tensors = weights.export_tensors(entries, self.params)
        carried = self._carried(plan)
        storage.make_dirs(folder)
        write_tensors(folder, plan, itertools.chain(tensors, carried))
        hf = {k: v for k, v in self.hf.items() if k not in ("quantization_config", "dtype")}
        hf["torch_dtype"] = name
        text = json.dumps(hf, indent=2) + "\n"
        storage.write_atomic(storage.join(folder, "config.json"), text.encode())
        for file in COPIED if self.folder else ():
            source = storage.join(self.folder, file)
            if storage.exists(source):
                storage.write_atomic(storage.join(folder, file), storage.read_bytes(source))

    def _carried(self, plan: dict) -> Iterator[tuple[str, np.ndarray]]:
        """The untrained tensors of the source folder, noted in `plan` with their own dtypes."""
        if self.folder is None:
            return iter(())
        files, table = HubFiles(self.folder), rules_from(self.hf)
        names = [name for name in files.tensors if table.is_carried(name)]
        for name in names:
            stored = files.tensors[name]
            plan[name] = (stored.shape, FILE_DTYPES[stored.dtype])
        return ((name, files.read(name)) for name in names)

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
