"""Random tokens, for smoke tests and speed: no file, no text, the same for the same options.

"synthetic:" or "synthetic:documents=2000,length=300,seed=1". Lengths vary between half and one and
a half of `length`; every ordinary id is equally likely, so the loss stays near ln(size).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from localtrain.data.order import key_of
from localtrain.data.tokenizer import Tokenizer, mark_document
from localtrain.errors import ConfigError, nearest

DEFAULTS = {"documents": 1000, "length": 1000, "seed": 0}


def options(path: str) -> dict[str, int]:
    """The options of a synthetic source; ConfigError for one that is not known."""
    chosen = dict(DEFAULTS)
    for part in filter(None, path.split(":", 1)[1].replace("//", "").split(",")):
        name, _, value = part.partition("=")
        if name not in DEFAULTS or not value.isdecimal():
            close = nearest(name, DEFAULTS)
            hint = f"; did you mean {close}?" if close and close != name else ""
            raise ConfigError(
                f"source {path}: {part!r} is not one of documents=N, length=N, seed=N{hint}."
            )
        chosen[name] = int(value)
    if chosen["documents"] < 1 or chosen["length"] < 2:
        raise ConfigError(f"source {path}: documents must be at least 1 and length at least 2.")
    return chosen


def documents(path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """int32 token arrays with the tokenizer's begin and end markers."""
    chosen = options(path)
    special = set(tokenizer.special.values())
    ordinary = np.array([i for i in range(tokenizer.size) if i not in special], np.int32)
    length = chosen["length"]
    for number in range(chosen["documents"]):
        random = np.random.Generator(np.random.PCG64(key_of(chosen["seed"], number)))
        count = int(random.integers(max(1, length // 2), length + length // 2 + 1))
        yield mark_document(random.choice(ordinary, count), tokenizer)
