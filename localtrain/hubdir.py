"""Hugging Face folders: where one is, what lies in it beside the weights, and writing a new one.

A name is a local folder or URL, a folder of the Hub's cache, or a Hub id (`org/name`, `@revision`
may follow). A Hub id is looked for in the local cache first and fetched only when it is not there
whole. A new local folder is filled under another name and renamed at the end; behind a URL, where
nothing can be renamed, `config.json` comes last: a folder without it is not a model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from localtrain import storage
from localtrain.errors import ConfigError, DataError, LocaltrainError
from localtrain.models import read_hub_config
from localtrain.models.files import INDEX, SHARD_BYTES, SINGLE, HubFiles, is_there, write_tensors

CONFIG = "config.json"
TOKENIZER_FILES = (  # what makes and reads text, chat template and ends of generation included
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
OTHER_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_LEGAL = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*", re.IGNORECASE)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


# finding ---------------------------------------------------------------------------------------


def locate(name: str, weights: bool = True) -> str:
    """The folder or URL that a name means; weights: a Hub id needs more than the config.

    Raises DataError when there is none.
    """
    name = str(name)
    if storage.is_url(name):
        return name
    if storage.is_dir(name):
        return _inside_cache(storage.local_path(name))
    if storage.exists(name):
        raise DataError(f"{name} is a file; name the folder that holds it and its config.json.")
    if is_hub_id(name):
        return _from_hub(name, weights)
    raise DataError(f"{name}: there is no such folder here, and it does not look like a Hub id.")


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local path looks like `org/name`."""
    return bool(_HUB_ID.fullmatch(name))


def _inside_cache(folder: str) -> str:
    """The newest snapshot, when the folder is a repository of the Hub's cache."""
    snapshots = os.path.join(folder, "snapshots")
    if not os.path.isdir(snapshots) or os.path.exists(os.path.join(folder, CONFIG)):
        return folder
    main = os.path.join(folder, "refs", "main")
    if os.path.isfile(main):
        with open(main, encoding="utf-8") as file:
            found = os.path.join(snapshots, file.read().strip())
        if os.path.isdir(found):
            return found
    held = sorted(os.scandir(snapshots), key=lambda entry: entry.stat().st_mtime)
    if not held:
        raise DataError(f"{folder}: a folder of the Hugging Face cache without any snapshot.")
    return held[-1].path


def _from_hub(name: str, weights: bool) -> str:
    from huggingface_hub import constants, snapshot_download

    repo, _, revision = name.partition("@")

    def fetch(patterns: list[str], offline: bool) -> str:
        return snapshot_download(
            repo, revision=revision or None, allow_patterns=patterns, local_files_only=offline
        )

    small = [CONFIG, INDEX, *TOKENIZER_FILES, *OTHER_FILES, "LICENSE*", "NOTICE*", "USE_POLICY*"]
    try:
        folder = fetch(small, offline=True)
        if _is_whole(folder, weights):
            return folder
    except Exception:  # not in the cache: every reason is the same here
        folder = None
    if constants.HF_HUB_OFFLINE:
        partly = f" whole ({folder} lacks files)" if folder else ""
        raise DataError(
            f"{name}: neither a folder here nor{partly} in the local Hugging Face cache, and "
            "HF_HUB_OFFLINE forbids the network. Fetch it where there is a network "
            f"(hf download {repo}) and copy its folder here."
        )
    try:
        folder = fetch(small, offline=False)
        return fetch([*small, *_weight_files(folder)], offline=False) if weights else folder
    except Exception as error:  # the client has many; each is a reason in words
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{name}: neither a folder here nor in the local Hugging Face cache, and it could not "
            f"be fetched: {type(error).__name__}: {reason[0][:200]}. Check the name and the "
            "network (HF_TOKEN for a gated model), or name a folder."
        ) from error


def _is_whole(folder: str, weights: bool) -> bool:
    try:
        return bool(read_hub_config(folder)) and (not weights or bool(HubFiles(folder).tensors))
    except (LocaltrainError, OSError):
        return False


def _weight_files(folder: str) -> list[str]:
    """Only what the index names: some repositories hold the weights twice."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        return [SINGLE]
    with open(index, encoding="utf-8") as file:
        return sorted(set(json.load(file)["weight_map"].values()))


# what lies beside the weights ------------------------------------------------------------------


def tokenizer_files(folder: str) -> dict[str, str]:
    """Name -> path of the tokenizer's files, chat template and generation settings included."""
    return _files(folder, lambda name: name in TOKENIZER_FILES)


def other_files(folder: str) -> dict[str, str]:
    """Name -> path of what else belongs to the model: image processors, the licence."""
    return _files(folder, lambda name: name in OTHER_FILES or bool(_LEGAL.fullmatch(name)))


def _files(folder: str, wanted) -> dict[str, str]:
    paths = {name: storage.join(folder, name) for name in storage.list_dir(folder) if wanted(name)}
    return {name: path for name, path in paths.items() if is_there(path)}


def copy_files(files: Mapping[str, str | bytes], folder: str) -> None:
    """Copy paths, or write bytes, into a folder under the given names, byte for byte."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else storage.read_bytes(content)
        storage.write_atomic(storage.join(folder, name), data)


# writing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(out: str, need: int = 0) -> Iterator[str]:
    """A folder to fill, which becomes `out` when the block ends well and vanishes when not.

    Raises ConfigError when `out` holds anything, StorageError when `need` bytes do not fit. Behind
    a URL it is `out` itself.
    """
    if storage.exists(out) and (not storage.is_dir(out) or storage.list_dir(out)):
        raise ConfigError(f"{out} is not empty; nothing was written there. Choose a new folder.")
    if storage.is_url(out):
        try:
            yield out.rstrip("/")
        except BaseException:
            with contextlib.suppress(LocaltrainError):  # what failed first is told
                storage.remove_tree(out)  # there was nothing in it before
            raise
        return
    final = os.path.abspath(storage.local_path(out))
    made = f"{final}.tmp-{secrets.token_hex(6)}"
    storage.make_dirs(made)
    try:
        if need > shutil.disk_usage(made).free:
            full = OSError(errno.ENOSPC, "No space left on device")
            raise storage.storage_error(f"write {need / 1e9:.2f} GB into", final, full)
        yield made
        _publish(made, final)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _publish(made: str, final: str) -> None:
    """Give a finished folder its name."""
    try:
        if os.path.isdir(final):
            os.rmdir(final)  # it was empty
    except OSError as error:
        raise storage.storage_error("replace", final, error) from error
    storage.rename(made, final)
    storage.sync_dir(os.path.dirname(final))


def write_hub_folder(
    folder: str,
    hf: Mapping[str, Any],
    plan: dict[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    files: Mapping[str, str | bytes],
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Weights, then the files beside them, then config.json. Returns the names of the weights.

    Weights that lay there before go: readers would take the wrong ones.
    """
    storage.make_dirs(folder)
    written = write_tensors(folder, plan, tensors, shard_bytes)
    copy_files(files, folder)
    storage.write_atomic(storage.join(folder, CONFIG), encode_config(hf))
    kept = {*written, INDEX} if len(written) > 1 else {*written}
    for name in storage.list_dir(folder):
        if _WEIGHTS.fullmatch(name) and name not in kept:
            storage.remove_tree(storage.join(folder, name))
    return written


def encode_config(hf: Mapping[str, Any]) -> bytes:
    return json.dumps(hf, indent=2).encode() + b"\n"


def export_config(
    hf: Mapping[str, Any], dtype: str, tied: bool, ends: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of exported weights.

    dtype: of most weights, such as "bfloat16". tied: what the weights are, written out because
    readers have different defaults. ends: bos_token_id and eos_token_id of another tokenizer than
    the config's own. Remote code is not copied and packed weights are decoded, so their keys go.
    """
    gone = ("quantization_config", "auto_map", "dtype")
    made = {key: value for key, value in hf.items() if key not in gone}
    made["torch_dtype"] = dtype
    made["tie_word_embeddings"] = tied
    text = dict(made["text_config"]) if isinstance(made.get("text_config"), Mapping) else made
    if text is not made:
        made["text_config"] = text
        text["tie_word_embeddings"] = tied
        text.pop("quantization_config", None)
        for key in {"dtype", "torch_dtype"} & text.keys():
            text[key] = dtype
    for part in (made, text) if ends else ():
        part.update({key: value for key, value in ends.items() if key in part or part is text})
    vocab = text.get("vocab_size")
    for part in (made, text):  # an id outside the vocabulary stops transformers from loading
        pad = part.get("pad_token_id")
        if isinstance(pad, int) and isinstance(vocab, int) and pad >= vocab:
            del part["pad_token_id"]
    return made
