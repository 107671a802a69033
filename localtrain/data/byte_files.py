"""The byte tokenizer as files of the Hub, for models that leave localtrain.

A byte-level BPE without any merge: its alphabet writes byte b as one character, which gets the id
b. The ids are those of `ByteTokenizer`, the begin marker that transformers adds included.
"""

from __future__ import annotations

import json

from localtrain.data.stream import byte_alphabet
from localtrain.data.tokenizer import BYTE_SPECIAL, ByteTokenizer

END = "<|endoftext|>"


def byte_tokenizer_files() -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer = ByteTokenizer()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids)}
    files = {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    return {name: json.dumps(value, indent=1).encode() + b"\n" for name, value in files.items()}


def _tokenizer_json() -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": name, **flags, "special": True}
        for name, number in BYTE_SPECIAL.items()
    ]
    begin = {"SpecialToken": {"id": END, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {END: {"id": END, "ids": [BYTE_SPECIAL[END]], "tokens": [END]}},
        },
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for character, byte in byte_alphabet().items()},
            "merges": [],
        },
    }
