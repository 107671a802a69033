"""Train a byte-level BPE tokenizer on one's own text; the same text gives the same file.

The text is cut into words by the pattern that GPT-4 and its followers use, with digits in groups of
at most three, so that merges never cross a word. Every byte is a token: any text can be encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from localtrain.data.hub_tokenizer import CONFIG, HubTokenizer
from localtrain.errors import ConfigError, DataError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALLEST = 256 + len(SPECIAL)


def train_bpe(texts: Iterable[str], size: int) -> HubTokenizer:
    """A tokenizer of `size` ids at most (fewer when the text has no more pairs to merge)."""
    if size < SMALLEST:
        raise ConfigError(
            f"--train-tokenizer {size}: at least {SMALLEST} ids are needed (256 bytes and "
            f"{len(SPECIAL)} control tokens)."
        )
    rust = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = False

    def marked() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen = True
            yield text

    rust.train_from_iterator(marked(), trainer)
    if not seen:
        raise DataError("no usable document to train a tokenizer on.")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    config |= {"bos_token": None, "add_bos_token": False, "add_eos_token": False}
    side = {CONFIG: (json.dumps(config, indent=1) + "\n").encode()}
    return HubTokenizer("trained", rust.to_str(pretty=True), side)
