"""A model on disk, whatever wrote it: a Hugging Face folder, or a run or checkpoint of ours.

Both kinds give the same: the Hub config, the parameters one at a time in the type they are stored
in, the tensors that are carried along untrained, and the files beside them. `load`, `import`,
`export` and a warm start all read through this. Everything that a header can tell is checked when
a source is opened; the values are read on demand, the largest first, so that the peak of memory is
the finished model and little more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain import arrays, hubdir, storage
from localtrain.checkpoint import find_checkpoint
from localtrain.data.tokenizer import BYTE_MARKER
from localtrain.errors import DataError
from localtrain.models import read_hub_config, rules_from, spec_from, weights
from localtrain.models.files import DTYPES, INDEX, SINGLE, HubFiles
from localtrain.models.weights import Leaf
from localtrain.nn.decoder import Params, build

CARRIED, TOKENIZER, MODEL = "carried", "tokenizer", "model.json"  # in a run directory


def open_source(name: str) -> Source:
    """The model that a name means: see `hubdir.locate`, and runs and checkpoints of ours.

    Raises ConfigError for what its config says, DataError for everything else.
    """
    folder = hubdir.locate(name)
    if storage.exists(storage.join(folder, hubdir.CONFIG)):
        return HubSource(name, folder)
    names = storage.list_dir(folder)
    if {SINGLE, INDEX} & set(names) or any(n.endswith((".safetensors", ".bin")) for n in names):
        raise DataError(f"{name}: there are weights but no {hubdir.CONFIG}; fetch it as well.")
    return CheckpointSource(name, folder)


class Source:
    """What both kinds share; `leaves` has shape and stored type of every parameter."""

    def __init__(self, name: str, folder: str, hf: dict[str, Any], where: str):
        self.name = name
        self.folder = folder
        self.hf = hf
        self.where = where
        self.network = build(spec_from(hf, where))
        self.table = rules_from(hf, where)
        self.entries = weights.expand(self.table, self.network)
        self.leaves: dict[Leaf, tuple[tuple[int, ...], np.dtype]] = {}
        self.exceptions: dict[str, np.dtype] = {}  # Hub tensors of another type than their leaf
        self.carried: HubFiles | None = None
        self.notes: list[str] = []
        self.seen: Callable[[int], None] = lambda size: None  # hears of every parameter read

    def read(self, leaf: Leaf) -> np.ndarray:
        """One parameter in its stored type, in host memory."""
        array = self._read(leaf)
        self.seen(array.nbytes)
        return array

    def place(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
        """One parameter in the type and on the devices of `like`."""
        array = self._place(leaf, like)
        shape, dtype = self.leaves[leaf]
        self.seen(math.prod(shape) * dtype.itemsize)
        return array

    def bytes(self) -> int:
        """Stored size of the parameters."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.leaves.values())

    def _read(self, leaf: Leaf) -> np.ndarray:
        raise NotImplementedError

    def _place(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
        raise NotImplementedError

    def tokenizer_files(self) -> dict[str, str]:
        raise NotImplementedError

    def other_files(self) -> dict[str, str]:
        raise NotImplementedError

    def params(self, template: Params) -> Params:
        """All parameters, in the types and on the devices of ShapeDtypeStructs."""
        wanted, tree = weights.flatten(template), {}
        for leaf in self._largest_first():
            weights.put(tree, leaf, self.place(leaf, wanted[leaf]))
        return tree

    def ends(self) -> Params:
        """The parameters that are no layer's, as they are stored, in host memory."""
        return self._on_host(lambda leaf: not leaf[0].startswith("stack_"))

    def periods(self) -> Callable[[int, int], Params]:
        """A function from (stack, repeat) to the parameters of those layers, in host memory.

        Stacks are stored whole, so all of them are held as long as the function is.
        """
        stacks = self._on_host(lambda leaf: leaf[0].startswith("stack_"))
        return lambda i, r: jax.tree.map(lambda array: array[r], stacks[f"stack_{i}"])

    def _on_host(self, wanted: Callable[[Leaf], bool]) -> Params:
        tree: Params = {}
        for leaf in filter(wanted, self._largest_first()):
            weights.put(tree, leaf, self.read(leaf))
        return tree

    def _largest_first(self) -> list[Leaf]:
        return sorted(self.leaves, key=lambda leaf: -math.prod(self.leaves[leaf][0]))

    def carried_names(self) -> list[str]:
        files = self.carried
        return [n for n in files.tensors if self.table.is_carried(n)] if files else []

    def read_carried(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, self.carried.read(name)) for name in self.carried_names())


class HubSource(Source):
    """A Hugging Face folder, or one behind a URL."""

    def __init__(self, name: str, folder: str):
        where = storage.join(folder, hubdir.CONFIG)
        super().__init__(name, folder, read_hub_config(folder), where)
        self.files = self.carried = HubFiles(folder)
        tied = self.network.spec.tied
        weights.check_tensors(self.entries, self.files.shapes(), self.table, folder, tied)
        self._check_second_head()
        self._parts = weights.parts_by_leaf(self.entries)
        for leaf, struct in weights.flatten(self.network.shapes).items():
            names = [entry.name for entry, _, _ in self._parts[leaf]]
            types = {name: self.files.float_type(name) for name in names}
            distinct = set(types.values())  # layers of one stack share an array, so one type
            dtype = distinct.pop() if len(distinct) == 1 else np.dtype(np.float32)
            self.leaves[leaf] = tuple(struct.shape), dtype
            self.exceptions |= {name: kind for name, kind in types.items() if kind != dtype}
        if "auto_map" in self.hf:
            self.notes.append(
                f"{where} names code to run (`auto_map`): it is not run, and not copied; "
                f"`{self.hf.get('model_type')}` is computed by localtrain itself"
            )

    def _check_second_head(self) -> None:
        """Some publish tied embeddings twice. A copy is dropped, another matrix an error."""
        first, second = self.table.tied
        if not self.network.spec.tied or second not in self.files.tensors:
            return
        if not self.files.are_equal(first, second):
            raise DataError(
                f"{self.folder}: the config says `tie_word_embeddings: true`, but the file has an "
                f"output head ({second}) that differs from {first}. Set it to false in "
                f"config.json to use both, or take the config that belongs to the file."
            )
        self.notes.append(f"{second} is a copy of {first} (tied): one is kept")

    def _read(self, leaf: Leaf) -> np.ndarray:
        return weights.read_leaf(self._parts[leaf], *self.leaves[leaf], self.files.read_float)

    def periods(self) -> Callable[[int, int], Params]:
        """Here layers lie apart, so only one is held."""
        return self._period

    def _period(self, i: int, r: int) -> Params:
        tree: Params = {}
        for leaf, parts in self._parts.items():
            if leaf[0] != f"stack_{i}":
                continue
            shape, dtype = self.leaves[leaf]
            mine = [(entry, n, index[1:]) for entry, n, index in parts if index[0] == r]
            array = weights.read_leaf(mine, shape[1:], dtype, self.files.read_float)
            weights.put(tree, leaf[1:], array)
            self.seen(array.nbytes)
        return tree

    def _place(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
        array = self._read(leaf).astype(like.dtype, copy=False)
        if like.sharding is None:
            return jnp.array(array)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda at: array[at])

    def tokenizer_files(self) -> dict[str, str]:
        return hubdir.tokenizer_files(self.folder)

    def other_files(self) -> dict[str, str]:
        return hubdir.other_files(self.folder)


class CheckpointSource(Source):
    """A run directory (its newest checkpoint), one checkpoint of it, or an imported folder."""

    def __init__(self, name: str, folder: str):
        reader, step = find_checkpoint(folder)
        self.step, meta = reader.read_meta(step)  # checks every byte
        self.home = storage.parent_of(str(reader.folder))
        where, hf = storage.join(self.home, MODEL), meta.get("model")
        if not hf:
            if not storage.exists(where):
                raise DataError(f"{where}: missing, so the model of {folder} is not known.")
            hf = read_hub_config(where)
        super().__init__(name, folder, hf, where)
        self.is_import = "run" not in meta  # nothing was trained: tokenizer and config agree
        self._reader = reader  # a local copy of what is behind a URL lives as long
        self.step_folder = reader.local(self.step)
        self._where = reader.shelf.where(self.step)
        self._contents = meta["arrays"]
        template = {"params": self.network.shapes}
        arrays.compare(self._contents, template, self._where, partial=True, cast=True)
        for leaf in weights.flatten(self.network.shapes):
            dtype, shape = self._contents["/".join(("params", *leaf))]
            self.leaves[leaf] = shape, np.dtype(dtype)
        self.exceptions = {n: DTYPES[kind] for n, kind in meta.get("exceptions", {}).items()}
        carried = storage.join(self.home, CARRIED)
        if {SINGLE, INDEX} & set(storage.list_dir(carried)):
            self.carried = HubFiles(carried)

    def _restore(self, leaf: Leaf, like: Any) -> Any:
        template: Params = {}
        weights.put(template, ("params", *leaf), like)
        read = arrays.read(self.step_folder, self._contents, template, self._where)
        return weights.read_from(read)(("params", *leaf))

    def _read(self, leaf: Leaf) -> np.ndarray:
        shape, dtype = self.leaves[leaf]
        return self._restore(leaf, np.broadcast_to(np.zeros((), dtype), shape))

    def _place(self, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self._restore(leaf, like)

    def tokenizer_files(self) -> dict[str, str]:
        return hubdir.tokenizer_files(storage.join(self.home, TOKENIZER))

    def other_files(self) -> dict[str, str]:
        return hubdir.other_files(storage.join(self.home, CARRIED))

    def has_byte_tokenizer(self) -> bool:
        return storage.exists(storage.join(self.home, TOKENIZER, BYTE_MARKER))
