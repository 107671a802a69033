"""A conversation with a model, in the form of its chat template.

Every turn renders the whole conversation again, because a template may say different things about
older turns; what has stayed the same at its beginning is still in the cache and not read twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from localtrain.complete import Line, Settings, Writer
from localtrain.data.template import ChatTemplate, Message, encode_chat, turn_ends
from localtrain.decode import Decoder
from localtrain.errors import ConfigError
from localtrain.sampling import row_keys


class Chat:
    """Messages so far, and the model that answers. `system`: a first message of that role."""

    def __init__(
        self,
        writer: Writer,
        template: ChatTemplate,
        settings: Settings,
        system: str | None = None,
    ):
        self.writer, self.template, self.settings = writer, template, settings
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        ends = turn_ends(template, writer.tokenizer)
        self._stop_ids = tuple(dict.fromkeys([*writer.stop_ids, *ends]))
        self._decoder: Decoder | None = None
        self._held = np.zeros(0, np.int32)  # the ids in its cache
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = list(self._start)
        self.turns = 0

    def answer(self, text: str) -> Iterator[str]:
        """Say `text`; yields the answer piece by piece. Closing the iterator ends the answer there.

        Raises ConfigError, and forgets `text`, when the template refuses it or it is too long.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids, _ = encode_chat(
            self.template, self.writer.tokenizer, asked, add_generation_prompt=True
        )
        if not len(ids):
            raise ConfigError(f"{self.template.where}: the template makes nothing of this chat.")
        line = Line(self.writer.tokenizer, self._stop_ids, self.settings.stop, skip_special=True)
        room = self._room(len(ids))
        try:
            for token in self._tokens(ids, room):
                if piece := line.push(token):
                    yield piece
                if line.finish:
                    break
            if piece := line.close():
                yield piece
        finally:
            said = {"role": "assistant", "content": "".join(line.pieces)}
            self.messages = [*asked, said]
            self.turns += 1

    def _room(self, length: int) -> int:
        """How many tokens an answer may have after `length` tokens."""
        longest = self.writer.model.spec.max_length
        if length >= longest:
            raise ConfigError(
                f"the conversation has {length:,} tokens and the model was made for {longest:,}: "
                f"/reset starts over."
            )
        return min(self.settings.max_new_tokens, longest - length)

    def _tokens(self, ids: np.ndarray, count: int) -> Iterator[int]:
        """Up to `count` new tokens after `ids`."""
        decoder, known = self._decoder, _common(self._held, ids[:-1])
        if decoder is None or not decoder.rewinds(known):
            model = self.writer.model
            decoder, known = Decoder(model.network, model.params), 0
        self._decoder = decoder
        self._held = ids[:known]
        decoder.rewind(known)
        decoder.read(ids[None, known:])
        seen = list(ids)
        settings = dataclasses.replace(self.settings, seed=self.settings.seed + self.turns)
        stream = decoder.stream(
            count,
            settings.sampling,
            row_keys(settings.seed, [ids]),
            self._stop_ids,
            self.writer.tokenizer.size,
        )
        try:
            for (token,) in stream:
                seen.append(int(token))
                yield int(token)
        finally:
            self._held = np.array(seen[: decoder.length], np.int32)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids at the beginning of both are equal."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
