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

import numpy as np

from localtrain.errors import DataError

Leaf = tuple[str, ...]  # path of a parameter in the nested dict


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

    def is_carried(self, name: str) -> bool:
        return name.startswith(self.carried)


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
    shapes = _flatten(network.shapes)
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


def _flatten(tree: dict, prefix: Leaf = ()) -> dict[Leaf, tuple]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, (*prefix, key))
        else:
            flat[(*prefix, key)] = tuple(value.shape)
    return flat


# both directions -------------------------------------------------------------------------------


def import_params(
    entries: dict[str, Entry],
    network,
    read: Callable[[str], np.ndarray],
    dtype,
    place: Callable[[Leaf, np.ndarray], object] = lambda leaf, array: array,
) -> dict:
    """The nested dict of parameters, filled leaf by leaf from `read(hub name)`.

    `place` may send a finished leaf to a device, so that the host holds one leaf at a time.
    """
    by_leaf: dict[Leaf, list] = {}
    for entry in entries.values():
        for number, (leaf, index) in enumerate(entry.targets):
            by_leaf.setdefault(leaf, []).append((entry, number, index))
    tree: dict = {}
    for leaf, shape in _flatten(network.shapes).items():
        array = np.zeros(shape, dtype)
        for entry, number, index in by_leaf[leaf]:
            array[index] = entry.part(read(entry.name), number)
        node = tree
        for key in leaf[:-1]:
            node = node.setdefault(key, {})
        node[leaf[-1]] = place(leaf, array)
    return tree


def export_tensors(entries: dict[str, Entry], tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Hub names and tensors of a nested dict of parameters or gradients, one at a time."""
    for entry in entries.values():
        parts = []
        for leaf, index in entry.targets:
            node = tree
            for key in leaf:
                node = node[key]
            parts.append(np.asarray(node[index]))
        yield entry.name, entry.join(parts)


def check_tensors(
    entries: dict[str, Entry],
    shapes: dict[str, tuple[int, ...]],
    table: Table,
    where: str,
    tied: bool,
) -> None:
    """DataError unless the file's tensors are exactly those the model uses or carries."""
    missing = [name for name in entries if name not in shapes]
    extra = [name for name in shapes if name not in entries and not table.is_carried(name)]
    wrong = [
        f"{name} is {list(shapes[name])}, the config gives {list(entry.shape)}"
        for name, entry in entries.items()
        if name in shapes and shapes[name] != entry.shape
    ]
    head = [name for name in (missing + extra) if name.endswith("lm_head.weight")]
    if head:
        has = "has no" if head[0] in missing else "has a separate"
        raise DataError(
            f"{where}: the config says `tie_word_embeddings: {str(tied).lower()}`, but the file "
            f"{has} output head ({head[0]}). Correct the config or take the file it belongs to."
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


# tables that many families share ---------------------------------------------------------------


def decoder_rules(tied: bool, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """Embedding, final norm, head, block norms and the gated MLP, in the Llama spelling."""
    layer = prefix + "layers.{layer}."
    rules = [
        Rule(prefix + "embed_tokens.weight", "embed_VD", "V D -> V D"),
        Rule(prefix + "norm.weight", "final_norm/scale", "D -> D"),
        Rule(layer + "input_layernorm.weight", "mixer_norm/scale", "D -> D"),
        Rule(layer + "mlp.gate_proj.weight", "ffn/w_gate_DF", "F D -> D F"),
        Rule(layer + "mlp.up_proj.weight", "ffn/w_up_DF", "F D -> D F"),
        Rule(layer + "mlp.down_proj.weight", "ffn/w_down_FD", "D F -> F D"),
        Rule(layer + "mlp.gate_proj.bias", "ffn/b_gate_F", "F -> F"),
        Rule(layer + "mlp.up_proj.bias", "ffn/b_up_F", "F -> F"),
        Rule(layer + "mlp.down_proj.bias", "ffn/b_down_D", "D -> D"),
    ]
    if not tied:
        rules.append(Rule(head, "head_DV", "V D -> D V"))
    return rules


def attention_rules(prefix: str = "model.") -> list[Rule]:
    """Attention in the Llama spelling; rules of parts that a layer lacks do nothing."""
    layer = prefix + "layers.{layer}.self_attn."
    return [
        Rule(layer + "q_proj.weight", "mixer/wq_DNH", "(N H) D -> D N H"),
        Rule(layer + "k_proj.weight", "mixer/wk_DKH", "(K H) D -> D K H"),
        Rule(layer + "v_proj.weight", "mixer/wv_DKH", "(K H) D -> D K H"),
        Rule(layer + "o_proj.weight", "mixer/wo_NHD", "D (N H) -> N H D"),
        Rule(layer + "q_proj.bias", "mixer/bq_NH", "(N H) -> N H"),
        Rule(layer + "k_proj.bias", "mixer/bk_KH", "(K H) -> K H"),
        Rule(layer + "v_proj.bias", "mixer/bv_KH", "(K H) -> K H"),
        Rule(layer + "o_proj.bias", "mixer/bo_D", "D -> D"),
        Rule(layer + "q_norm.weight", "mixer/q_norm/scale", "H -> H"),
        Rule(layer + "k_norm.weight", "mixer/k_norm/scale", "H -> H"),
        Rule(layer + "sinks", "mixer/sinks_N", "N -> N"),
    ]


def norm_after_mixer(prefix: str = "model.") -> Rule:
    """Llama's name of the norm between attention and feed-forward."""
    name = prefix + "layers.{layer}.post_attention_layernorm.weight"
    return Rule(name, "ffn_norm/scale", "D -> D")
