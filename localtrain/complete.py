"""Text in, text out: a model on disk and its tokenizer continue prompts.

writer = Writer.open("runs/mine")
for row, piece in writer.write(["Once upon a time"], Settings(max_new_tokens=50)):
    print(piece, end="")
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localtrain import hubdir, storage
from localtrain.api import LanguageModel, load
from localtrain.checkpoint import find_checkpoint
from localtrain.data.tokenizer import BYTE_MARKER, Tokenizer, load_tokenizer, mark_document
from localtrain.errors import ConfigError, DataError, OutOfMemoryError
from localtrain.generate import stream_tokens
from localtrain.oom import is_out_of_memory
from localtrain.sampling import Sampling

log = logging.getLogger(__name__)

TEMPERATURE = 0.8  # of folders that do not say how they want to be sampled


@dataclass(frozen=True)
class Settings:
    """How to write. `stop`: texts that end a row, and are not part of it."""

    max_new_tokens: int = 200
    temperature: float = TEMPERATURE
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more.")
        if not all(self.stop):
            raise ConfigError("a stop text is empty: it would end every text before it begins.")
        _ = self.sampling  # refused here, before anything is loaded

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt. finish: "stop" (an end token or a stop text), "length"."""

    prompt: str
    text: str
    tokens: int
    finish: str


class Writer:
    """A model with its tokenizer."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, stop_ids: Sequence[int] = ()):
        if tokenizer.size > model.spec.vocab:
            raise DataError(
                f"the tokenizer {tokenizer.name} has {tokenizer.size} tokens, but the model knows "
                f"{model.spec.vocab}: use the model's own tokenizer."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = tuple(dict.fromkeys([*tokenizer.stop_ids, *stop_ids]))

    @classmethod
    def open(
        cls, source: str, dtype: str | None = None, tokenizer: Tokenizer | None = None
    ) -> Writer:
        """Load what lies at `source`: a Hub folder or id, a run directory or a checkpoint."""
        words = tokenizer or find_tokenizer(source)
        model = load_in_use(source, dtype)
        for note in model.source.notes:
            log.warning("%s", note)
        return cls(model, words)

    def write(
        self, prompts: Sequence[str], settings: Settings, done: list[Completion] | None = None
    ) -> Iterator[tuple[int, str]]:
        """(row, piece of text) as they come, never half a character. `done` gets the results, one
        for each prompt, when the iterator has ended."""
        rows = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        longest = max(len(row) for row in rows)
        most = self.model.spec.max_length
        if longest + settings.max_new_tokens > most:
            log.warning(
                "%s tokens and %s new ones are more than the %s positions that this model was made "
                "for: what comes after those may be nonsense.",
                *(f"{count:,}" for count in (longest, settings.max_new_tokens, most)),
            )
        tokens_BT = np.stack([np.pad(row, (longest - len(row), 0)) for row in rows])
        lengths = np.array([len(row) for row in rows])
        mask_BT = np.arange(longest) >= longest - lengths[:, None]
        lines = [Line(self.tokenizer, self.stop_ids, settings.stop) for _ in rows]
        for tokens_B in stream_tokens(
            self.model.network,
            self.model.params,
            tokens_BT,
            mask_BT,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            stop_ids=self.stop_ids,
            seed=settings.seed,
            vocab=self.tokenizer.size,
        ):
            for i, (line, token) in enumerate(zip(lines, tokens_B, strict=True)):
                if line.finish is None and (piece := line.push(int(token))):
                    yield i, piece
            if all(line.finish for line in lines):
                break
        for i, line in enumerate(lines):
            if piece := line.close():
                yield i, piece
        if done is not None:
            for prompt, line in zip(prompts, lines, strict=True):
                finish = line.finish or "length"
                done.append(Completion(prompt, "".join(line.pieces), line.tokens, finish))


class Line:
    """Tokens of one row to text, up to an end token or a stop text.

    Text that may be the beginning of a stop text is held back until that is known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special: bool = False,
    ):
        self.pieces: list[str] = []
        self.tokens = 0  # the end token included
        self.finish: str | None = None
        self._stream = tokenizer.decode_stream(skip_special)
        self._stop_ids, self._stop = frozenset(stop_ids), tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain now; `finish` is set when the row has ended."""
        self.tokens += 1
        if token in self._stop_ids:
            self.finish = "stop"
            return self.close()
        return self._give(self._held + self._stream.push(token), ends=False)

    def close(self) -> str:
        """What was held back, when nothing more comes."""
        rest, self._held = self._held + self._stream.flush(), ""
        return self._give(rest, ends=True)

    def _give(self, text: str, ends: bool) -> str:
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.finish, text, self._held = "stop", text[: min(found)], ""
            self._stream = _Silent()
        elif not ends:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if text:
            self.pieces.append(text)
        return text


class _Silent:
    """A stream after the end of its text."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """The ids of a text that goes on: with the begin token, if there is one, exactly once."""
    ids = mark_document(tokenizer.encode(prompt), tokenizer, ends=False)
    if not len(ids):
        raise ConfigError(
            "the prompt is empty, and this tokenizer has no token that begins a text: give a "
            "--prompt with something in it."
        )
    return np.asarray(ids, np.int32)


@contextlib.contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Raises OutOfMemoryError, with what to do, where the device has no room."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"the device ran out of memory: {advice}") from error


def home_of(source: str) -> str:
    """The folder with run.yaml, model.json and tokenizer of a checkpoint; a Hub folder itself."""
    folder = hubdir.locate(source)
    if storage.exists(storage.join(folder, hubdir.CONFIG)):
        return folder
    checkpoints, _ = find_checkpoint(folder)
    return storage.parent_of(str(checkpoints.folder))


def find_tokenizer(source: str, name: str | None = None) -> Tokenizer:
    """The tokenizer `name`, or the one that lies with the model. DataError when there is none."""
    home = home_of(source)
    if name is not None:
        return load_tokenizer(name)
    for folder in (home, storage.join(home, "tokenizer")):
        if any(storage.exists(storage.join(folder, f)) for f in ("tokenizer.json", BYTE_MARKER)):
            return load_tokenizer(folder)
    raise DataError(f"{home} holds no tokenizer.json; name one with --tokenizer.")


def load_in_use(source: str, dtype: str | None = None) -> LanguageModel:
    """`load` from a run that may be training: a checkpoint that was deleted, because newer ones
    came, while it was read is no error."""
    while True:
        before = _newest_step(source)
        try:
            return load(source, dtype)
        except (DataError, OSError):
            if _newest_step(source) == before:
                raise


def _newest_step(source: str) -> int | None:
    try:
        checkpoints, step = find_checkpoint(source)
        return step or max(checkpoints.steps(), default=None)
    except DataError:
        return None


def sampling_defaults(source: str) -> dict[str, Any]:
    """temperature, top_k, top_p, min_p as the folder's generation_config.json wants them."""
    path = storage.join(home_of(source), "generation_config.json")
    values: Any = {}
    if storage.exists(path):
        try:
            values = json.loads(storage.read_text(path))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}); fetch the file again.") from None
    if not isinstance(values, dict) or not values.get("do_sample"):
        return {"temperature": TEMPERATURE}
    found = {key: values.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
    found["top_k"] = found["top_k"] or None  # 0 is off in these files
    found["temperature"] = 1.0 if found["temperature"] is None else found["temperature"]
    return {key: value for key, value in found.items() if value is not None}
