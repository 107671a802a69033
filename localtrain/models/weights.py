"""Linear rules between the Hub's tensors and our parameters, in both directions.

A rule says: this Hub tensor is that parameter, with its axes grouped and ordered so. Patterns read
like einops: "(N H) D -> D N H" splits the rows of the Hub's [out, in] matrix into heads and moves
them behind the input axis. Sizes come from our own shapes. Because a rule only permutes, splits,
stacks, reshapes and drops vocabulary padding, gradients go through it like weights.

Two letters may be missing on one side. A letter that only the right side has is counted off by the
name ("experts.{E}.up_proj": one Hub tensor per expert). `P`, only on the left, counts off several
parameters in one Hub tensor ("(P F) D -> D F" with the paths of gate and up).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from localtrain.errors import DataError

Leaf = tuple[str, ...]  # path of a parameter in the nested dict
# Computed from the config, yet stored by old versions of transformers (Llama 2): never read.
BUFFERS = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Rule:
    """`hub` with {layer} is one tensor per layer, and its paths are relative to the block."""

    hub: str
    paths: str | tuple[str, ...]  # "mixer/wq_DNH"; several with a P in the pattern
    pattern: str


@dataclass(frozen=True)
class Table:
    """The rules of a family, and the prefixes of tensors that are carried along untrained."""

    rules: list[Rule]
    carried: tuple[str, ...] = ()
    # The two names of one matrix when embeddings are tied; only the first is used.
    tied: tuple[str, str] = ("model.embed_tokens.weight", "lm_head.weight")

    def is_carried(self, name: str) -> bool:
        return name.startswith(self.carried) or name.endswith(BUFFERS)


@dataclass(frozen=True)
class Entry:
    """One Hub tensor: where its values live in our tree."""

    name: str
    shape: tuple[int, ...]
    left: tuple[str, ...]  # the letters of the Hub tensor, groups opened
    sizes: tuple[int, ...]  # their sizes
    right: tuple[str, ...]
    targets: tuple[tuple[Leaf, tuple], ...]  # leaf and index into it, per part

    def part(self, array: np.ndarray, number: int) -> np.ndarray:
        """The values of one target, in our order of axes."""
        array = array.reshape(self.sizes)
        letters = list(self.left)
        if "P" in letters:
            array = np.take(array, number, axis=letters.index("P"))
            letters.remove("P")
        return array.transpose([letters.index(c) for c in self.right if c in letters])

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """The Hub tensor from the values of all targets."""
        letters = [c for c in self.left if c != "P"]
        order = [c for c in self.right if c in letters]
        moved = [part.transpose([order.index(c) for c in letters]) for part in parts]
        array = np.stack(moved, axis=self.left.index("P")) if "P" in self.left else moved[0]
        return np.ascontiguousarray(array.reshape(self.shape))


def expand(table: Table, network) -> dict[str, Entry]:
    """Every Hub tensor that a network uses, by name; each parameter is covered."""
    shapes = {leaf: tuple(x.shape) for leaf, x in flatten(network.shapes).items()}
    entries: dict[str, Entry] = {}
    for rule in table.rules:
        if "{layer}" not in rule.hub:
            entries.update(_entries(rule, "", (), rule.hub, shapes, network.spec.vocab))
            continue
        for number, (block, index) in enumerate(_layers(network)):
            name = rule.hub.replace("{layer}", str(number))
            entries.update(_entries(rule, block, index, name, shapes, network.spec.vocab))
    _check_cover(entries, shapes)
    return entries


def _layers(network) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Block path and index on the layers axis of each layer of the model."""
    for i, stack in enumerate(network.stacks):
        for r in range(stack.repeat):
            for j in range(len(stack.period)):
                yield f"stack_{i}/layer_{j}/", (r,)


def _entries(rule: Rule, block: str, index: tuple, name: str, shapes: dict, vocab: int):
    paths = (rule.paths,) if isinstance(rule.paths, str) else rule.paths
    leaves = [tuple((block + path).split("/")) for path in paths]
    if leaves[0] not in shapes:  # a rule of another kind of layer
        return
    groups, right = _parse(rule.pattern)
    shape = shapes[leaves[0]][len(index) :]
    size = dict(zip(right, shape, strict=True)) | {"P": len(paths)}
    if "V" in size:
        size["V"] = vocab  # the Hub knows no padding
    counted = [c for c in right if c not in {c for group in groups for c in group}]
    for numbers in itertools.product(*(range(size[c]) for c in counted)):
        at = dict(zip(counted, numbers, strict=True))
        inner = tuple(at[c] if c in at else slice(0, size[c]) for c in right)
        left = tuple(c for group in groups for c in group)
        full_name = name.format(**at)
        yield (
            full_name,
            Entry(
                full_name,
                tuple(math.prod(size[c] for c in group) for group in groups),
                left,
                tuple(size[c] for c in left),
                tuple(right),
                tuple((leaf, (*index, *inner)) for leaf in leaves),
            ),
        )


def _parse(pattern: str) -> tuple[list[list[str]], list[str]]:
    """ "(N H) D -> D N H" gives [[N, H], [D]] and [D, N, H]."""
    left, right = pattern.split("->")
    groups: list[list[str]] = []
    is_open = False
    for word in left.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            is_open = word == "("
            if is_open:
                groups.append([])
        elif is_open:
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups, right.split()


def _check_cover(entries: dict[str, Entry], shapes: dict[Leaf, tuple]) -> None:
    covered = {leaf for entry in entries.values() for leaf, _ in entry.targets}
    missing = ["/".join(leaf) for leaf in shapes if leaf not in covered]
    if missing:
        raise AssertionError(f"no weight rule writes the parameters {missing}")


def flatten(tree: dict, prefix: Leaf = ()) -> dict[Leaf, Any]:
    """The leaves of a nested dict by path."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, (*prefix, key))
        else:
            flat[(*prefix, key)] = value
    return flat


def put(tree: dict, leaf: Leaf, value: Any) -> None:
    """Hang a leaf into a nested dict."""
    for key in leaf[:-1]:
        tree = tree.setdefault(key, {})
    tree[leaf[-1]] = value


# both directions -------------------------------------------------------------------------------


Part = tuple[Entry, int, tuple]  # a Hub tensor, which part of it, where in the leaf that goes


def parts_by_leaf(entries: dict[str, Entry]) -> dict[Leaf, list[Part]]:
    """What each parameter is made of."""
    parts: dict[Leaf, list[Part]] = {}
    for entry in entries.values():
        for number, (leaf, index) in enumerate(entry.targets):
            parts.setdefault(leaf, []).append((entry, number, index))
    return parts


def read_leaf(
    parts: list[Part], shape: tuple[int, ...], dtype, read: Callable[[str], np.ndarray]
) -> np.ndarray:
    """One parameter, filled from `read(hub name)`; padding of the vocabulary stays zero."""
    array = np.zeros(shape, dtype)
    for entry, number, index in parts:
        array[index] = entry.part(read(entry.name), number)
    return array


def export_tensors(
    entries: dict[str, Entry], read: Callable[[Leaf], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Hub names and tensors of parameters or gradients, one at a time.

    `read(leaf)` gives a parameter; it is asked for once, then for its neighbours' sake kept until
    a tensor needs other ones.
    """
    held: dict[Leaf, np.ndarray] = {}
    for entry in entries.values():
        leaves = [leaf for leaf, _ in entry.targets]
        held = {leaf: array for leaf, array in held.items() if leaf in leaves}
        for leaf in leaves:
            if leaf not in held:
                held[leaf] = read(leaf)
        yield entry.name, entry.join([np.asarray(held[leaf][at]) for leaf, at in entry.targets])


def read_from(tree: dict) -> Callable[[Leaf], np.ndarray]:
    """`read` of `export_tensors` for a nested dict of arrays."""

    def read(leaf: Leaf) -> np.ndarray:
        node = tree
        for key in leaf:
            node = node[key]
        return node

    return read


def check_tensors(
    entries: dict[str, Entry],
    shapes: dict[str, tuple[int, ...]],
    table: Table,
    where: str,
    tied: bool,
) -> None:
    """DataError unless the file's tensors are exactly those the model uses or carries.

    A second copy of tied embeddings is left to the caller, who can compare it.
    """
    spare = table.tied[1] if tied else None
    missing = [name for name in entries if name not in shapes]
    extra = [n for n in shapes if n not in entries and n != spare and not table.is_carried(n)]
    wrong = [
        f"{name} is {list(shapes[name])}, the config gives {list(entry.shape)}"
        for name, entry in entries.items()
        if name in shapes and shapes[name] != entry.shape
    ]
    if missing == [table.tied[1]] and not tied:
        raise DataError(
            f"{where}: the config says `tie_word_embeddings: false`, but the file has no output "
            f"head ({missing[0]}). Correct the config or take the file it belongs to."
        )
    faults = []
    for label, names in (("missing", missing), ("not known", extra), ("of another shape", wrong)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            faults.append(f"{len(names)} {label}: {', '.join(names[:5])}{more}")
    if faults:
        raise DataError(
            f"{where}: the tensors do not fit the config.json: {'; '.join(faults)}. Every tensor "
            "must be used; take the config.json that was published with this file."
        )
