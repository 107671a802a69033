"""Text in, text out: a model on disk and its tokenizer continue a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localtrain import storage
from localtrain.api import LanguageModel, load
from localtrain.checkpoint import find_checkpoint
from localtrain.data.tokenizer import BYTE_MARKER, Tokenizer, load_tokenizer, mark_document
from localtrain.errors import DataError
from localtrain.generate import stream_tokens


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt; the time includes compilation."""

    prompt: str
    text: str
    tokens: int
    seconds: float


def complete(
    source: str,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    tokenizer: str | None = None,
    write: Callable[[str], None] = lambda piece: None,
) -> Completion:
    """Continue `prompt` with the model at `source`: a Hub folder, run directory or checkpoint.

    `write` gets the text in pieces as they come, never half a character. Stops at the model's end
    token. Raises ConfigError or DataError for what cannot be used.
    """
    text_of = find_tokenizer(source, tokenizer)
    ids = mark_document(text_of.encode(prompt), text_of, ends=False)
    if not len(ids):
        raise DataError("the prompt is empty and the tokenizer has no token that begins a text")
    model = load(source, dtype)
    stops = _stop_ids(model, text_of)
    stream = text_of.decode_stream()
    began, pieces, count = time.monotonic(), [], 0
    for (token,) in stream_tokens(
        model.network,
        model.params,
        np.asarray(ids, np.int32)[None],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        stop_ids=stops,
        seed=seed,
    ):
        count += 1
        if int(token) not in stops:
            pieces.append(stream.push(int(token)))
            write(pieces[-1])
    pieces.append(stream.flush())
    write(pieces[-1])
    return Completion(prompt, "".join(pieces), count, time.monotonic() - began)


def home_of(source: str) -> str:
    """The folder with run.yaml, model.json and tokenizer of a checkpoint; a Hub folder itself."""
    if storage.exists(storage.join(source, "config.json")):
        return source
    checkpoints, _ = find_checkpoint(source)
    return storage.parent_of(str(checkpoints.folder))


def find_tokenizer(source: str, name: str | None = None) -> Tokenizer:
    """The tokenizer `name`, or the one that lies with the model. DataError when there is none."""
    if name is not None:
        return load_tokenizer(name)
    if not storage.is_dir(source):
        raise DataError(
            f"{source} is not a folder here: give a run directory, a checkpoint or a folder with "
            "config.json and safetensors"
        )
    home = home_of(source)
    for folder in (home, storage.join(home, "tokenizer")):
        if any(storage.exists(storage.join(folder, f)) for f in ("tokenizer.json", BYTE_MARKER)):
            return load_tokenizer(folder)
    raise DataError(f"{home} holds no tokenizer.json; name one with --tokenizer")


def _stop_ids(model: LanguageModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens of the tokenizer and of the Hub config, which may list several."""
    listed = model.hf.get("eos_token_id")
    found = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({int(i) for i in [*found, tokenizer.eos_id] if i is not None}))
