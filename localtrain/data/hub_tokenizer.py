"""A tokenizer.json as the Hub carries it, alone or in a folder with its side files.

The ids are those of transformers (`TokenizersBackend`, "PreTrainedTokenizerFast" before version 5),
without needing it: truncation and padding stored in the file are switched off, tokens that only
tokenizer_config.json declares are added, and begin and end markers follow the same rule: an
`add_bos_token` or `add_eos_token` in tokenizer_config.json decides when there is one, else the
post-processor of tokenizer.json does. A training document always ends with the end token, once.
Nothing ever adds an id that the files do not have: a padding token is not needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from localtrain import storage
from localtrain.data.stream import ByteStream, Stream, WindowStream, byte_alphabet
from localtrain.data.tokenizer import mark_document
from localtrain.errors import DataError

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SIDE_FILES = (CONFIG, "special_tokens_map.json", "generation_config.json", "config.json")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token", "pad_token")
# What files without any configuration call the end of a text.
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eos|>")


class HubTokenizer:
    """Built by `load_hub_tokenizer`. `bos_id` is set when documents begin with it (a declared but
    unused one, as in GPT-2, is None). `stop_ids` are the ids that end a generated text."""

    def __init__(self, name: str, text: str, files: dict[str, bytes]):
        self.name = name
        self._text = text
        self._files = files
        side = {n: _parse(f"{name}: {n}", data) for n, data in files.items() if n.endswith("json")}
        self._config = side.get(CONFIG, {})
        self._rust = _load_rust(name, text)
        self._rust.no_truncation()
        self._rust.no_padding()
        names = _named_tokens(self._config, side.get("special_tokens_map.json", {}))
        self.named = names
        _add_declared(self._rust, self._config, names, name)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        added = self._rust.get_added_tokens_decoder()
        self.special = {t.content: n for n, t in sorted(added.items()) if t.special}
        self.eos_id, self.stop_ids = _ends(name, names, vocabulary, side, self.size)
        self.prefix, self.suffix = _markers(self._rust, self._config, names, vocabulary, name)
        self.bos_id = self.prefix[0] if self.prefix else None
        if not self.suffix and self.eos_id is not None:
            self.suffix = (self.eos_id,)
        template = files.get("chat_template.jinja")
        self.chat_template = template.decode() if template else self._config.get("chat_template")
        state = [text, self.prefix, self.suffix, sorted(self.special.items()), self.size]
        self.hash = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
        self._bytes = byte_alphabet() if _decodes_bytes(self._rust) else None

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], nothing added; the name of a special token in the text becomes that token."""
        return np.array(self._rust.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`encode`, and the first and end character in the text of every id."""
        found = self._rust.encode(text, add_special_tokens=False)
        spans = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int32), spans[:, 0], spans[:, 1]

    def encode_document(self, text: str) -> np.ndarray:
        return mark_document(self.encode(text), self)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts at once, on all cores."""
        encoded = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        ids = [int(i) for i in ids if 0 <= int(i) < self.size]
        return self._rust.decode(ids, skip_special_tokens=skip_special)

    def decode_stream(self, skip_special: bool = False) -> Stream:
        if self._bytes is not None:
            return ByteStream(self._bytes_of, skip_special)
        return WindowStream(self.decode, skip_special)

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 [size]; 0 for special tokens."""
        return np.array([self._byte_length(token) for token in range(self.size)], np.int64)

    def _byte_length(self, token: int) -> int:
        if self._bytes is not None:
            return len(self._bytes_of(token, skip_special=True))
        name = self._rust.id_to_token(token)
        if name is None or name in self.special:
            return 0
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # a byte that has no token of its own
            return 1
        return len(name.replace("\u2581", " ").encode())  # SentencePiece's space

    def _bytes_of(self, token: int, skip_special: bool) -> bytes:
        name = self._rust.id_to_token(token) if token >= 0 else None
        if name is None or (skip_special and name in self.special):
            return b""
        try:
            return bytes([self._bytes[character] for character in name])
        except KeyError:  # an added token with characters outside the byte alphabet
            return name.encode()

    def save(self, folder: str) -> None:
        """The same files again, byte for byte."""
        for name, data in {FILE: self._text.encode(), **self._files}.items():
            if name not in ("config.json", "generation_config.json"):
                storage.write_atomic(storage.join(folder, name), data)
        generation = {"eos_token_id": list(self.stop_ids)}
        if self.stop_ids:
            path = storage.join(folder, "generation_config.json")
            storage.write_atomic(path, json.dumps(generation).encode())


def load_hub_tokenizer(name: str) -> HubTokenizer:
    """A tokenizer.json or a folder (or URL) that holds one. DataError names what is missing."""
    folder = storage.is_dir(name)
    path = storage.join(name, FILE) if folder else name
    if not storage.exists(path):
        raise DataError(_not_found(name, folder))
    data = storage.read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a tokenizer.json: {error}.") from error
    top = name if folder else storage.parent_of(name)
    files = {}
    # beside a tokenizer.json of another name the side files may belong to something else
    if folder or storage.name_of(name) == FILE:
        for side in (*SIDE_FILES, "chat_template.jinja"):
            try:
                files[side] = storage.read_bytes(storage.join(top, side))
            except FileNotFoundError:
                continue
    return HubTokenizer(name, text, files)


def _not_found(name: str, folder: bool) -> str:
    if not folder:
        hub = (
            f" If it is a Hub id, fetch it first: hf download {name} tokenizer.json "
            f"tokenizer_config.json generation_config.json --local-dir FOLDER."
            if name.count("/") == 1 and not name.startswith((".", "/", "~"))
            else ""
        )
        return (
            f"data.tokenizer {name!r}: there is no such file or folder. It is `byte`, a "
            f"tokenizer.json, or a folder that holds one.{hub}"
        )
    held = set(storage.list_dir(name))
    other = sorted(held & {"tokenizer.model", "vocab.json", "merges.txt", "tekken.json"})
    has = f"; it has {', '.join(other)}, which must be converted first" if other else ""
    return f"data.tokenizer {name!r}: the folder has no {FILE}{has}."


def _load_rust(name: str, text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # a panic of the Rust code is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise DataError(f"{name}: not a tokenizer.json that can be read ({error}).") from error


def _parse(what: str, data: bytes) -> dict:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{what}: a JSON object is expected, not {type(value).__name__}.")
    return value


def _content(value: Any) -> str | None:
    """A token as the files write it: a string or {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: dict, special_map: dict) -> dict[str, str]:
    """bos_token, eos_token, ... as declared; tokenizer_config.json goes first."""
    names = {}
    for key in NAMED:
        value = _content(config[key] if key in config else special_map.get(key))
        if value is not None:
            names[key] = value
    return names


def _add_declared(
    rust: tokenizers.Tokenizer, config: dict, names: dict[str, str], name: str
) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json does not mark, under their own ids."""
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    entries = declared.items() if isinstance(declared, dict) else ()
    try:
        for number, entry in sorted(((int(k), v) for k, v in entries), key=lambda kv: kv[0]):
            if entry["content"] in known:
                continue
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            given = {flag: bool(entry[flag]) for flag in flags if flag in entry}
            rust.add_tokens([tokenizers.AddedToken(entry["content"], **given)])
            if rust.token_to_id(entry["content"]) != number:
                raise DataError(
                    f"{name}: {CONFIG} gives token {entry['content']!r} the id {number}, but "
                    f"{FILE} makes it {rust.token_to_id(entry['content'])}: the files do not "
                    f"belong together."
                )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{name}: {CONFIG}: added_tokens_decoder is damaged ({error}).") from error
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    more = list(more.values()) if isinstance(more, dict) else more
    for content in [*names.values(), *(_content(token) for token in more)]:
        if content and content not in known and rust.token_to_id(content) is not None:
            token = tokenizers.AddedToken(content, special=True, normalized=False)
            rust.add_special_tokens([token])


def _ends(
    name: str, names: dict[str, str], vocabulary: dict[str, int], side: dict, size: int
) -> tuple[int | None, tuple[int, ...]]:
    """(the id that ends a document, all ids that end a generated text)."""
    ids: list[int] = []
    declared = names.get("eos_token")
    if declared is not None:
        if declared not in vocabulary:
            raise DataError(
                f"{name}: eos_token {declared!r} of {CONFIG} is not in {FILE}: the files do not "
                f"belong together, or the token was never added."
            )
        ids.append(vocabulary[declared])
    for file in ("generation_config.json", "config.json"):
        value = side.get(file, {})
        value = value.get("eos_token_id", (value.get("text_config") or {}).get("eos_token_id"))
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int and 0 <= number < size and number not in ids:
                ids.append(number)
    if not ids:
        ids = [vocabulary[end] for end in USUAL_ENDS if end in vocabulary][:1]
    return (ids[0] if ids else None), tuple(ids)


def _markers(
    rust: tokenizers.Tokenizer,
    config: dict,
    names: dict[str, str],
    vocabulary: dict[str, int],
    name: str,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids put before a text, ids put after it) by transformers."""
    if "add_bos_token" in config or "add_eos_token" in config:
        found = []
        for key in ("bos_token", "eos_token"):
            token = names.get(key) if config.get(f"add_{key}") else None
            if token is not None and token not in vocabulary:
                raise DataError(f"{name}: {key} {token!r} of {CONFIG} is not in {FILE}.")
            found.append((vocabulary[token],) if token is not None else ())
        return found[0], found[1]
    plain = rust.encode("a", add_special_tokens=False).ids
    full = rust.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _decodes_bytes(rust: tokenizers.Tokenizer) -> bool:
    """True when the decoder only turns the byte alphabet back into bytes."""
    if rust.decoder is None:
        return False
    state = json.loads(rust.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return all(part.get("type") == "ByteLevel" for part in parts)
