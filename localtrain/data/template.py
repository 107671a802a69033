"""Chat templates: from messages to the text and the ids that a model was trained on.

A template is a Jinja program that came with a model from somewhere, so it runs in Jinja's immutable
sandbox: no attribute that begins with an underscore, no mutation, no file. What a template may use
is what transformers (`render_jinja_template`) gives it: messages, tools, documents,
add_generation_prompt, the special tokens by name, `raise_exception`, `strftime_now`, `tojson`, loop
controls, and `{% generation %}` around what the assistant says.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from localtrain import storage
from localtrain.data.tokenizer import Tokenizer
from localtrain.errors import ConfigError, DataError

Message = dict[str, Any]  # role, content, and what else the template knows

# ChatML, as Qwen models use it: for models whose folder has no template.
CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BUILT_IN = {"chatml": CHATML}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks on both sides of its text, in the words of `environment.marks`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


@dataclass(frozen=True)
class Rendered:
    """The text of a chat and which parts of it, [start, end) in characters, the model wrote."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled template. `where` names it in errors."""

    def __init__(self, source: str, named: dict[str, str], where: str):
        self.where = where
        self.named = dict(named)
        self.marks_assistant = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        # Not to be guessed by a text, and no control character that a filter would strip.
        word = secrets.token_hex(16)
        environment.marks = (f"<{word}|", f"|{word}>")  # type: ignore[attr-defined]
        self._marks = environment.marks  # type: ignore[attr-defined]
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            at = f", line {line}" if line else ""
            raise DataError(f"{where}{at}: not a chat template that can be used: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: list | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> Rendered:
        """The chat as text. Raises ConfigError when the template refuses these messages."""
        begin, end = self._marks
        try:
            raw = self._compiled.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.named, **more},
            )
        except jinja2.sandbox.SecurityError as error:
            raise DataError(
                f"{self.where}: the template does something that is not allowed ({error}); it was "
                f"stopped. Do not trust the folder that it came with."
            ) from None
        except _Refused as error:
            raise ConfigError(f"{self.where}: the chat template refuses this: {error}") from None
        except Exception as error:  # a template is a program: anything can go wrong in it
            kind = type(error).__name__
            raise DataError(f"{self.where}: the chat template failed: {kind}: {error}") from None
        pieces, spans, length = [], [], 0
        for n, part in enumerate(raw.replace(end, begin).split(begin)):
            if n % 2:
                spans.append((length, length + len(part)))
            pieces.append(part)
            length += len(part)
        return Rendered("".join(pieces), tuple(spans))


def find_template(tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
    """The template `given` ("chatml" or a file), else the tokenizer's. ConfigError without one."""
    if given is not None:
        if given in BUILT_IN:
            return ChatTemplate(BUILT_IN[given], tokenizer.named, f"template {given}")
        try:
            return ChatTemplate(storage.read_text(given), tokenizer.named, given)
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"--template {given}: neither a text file nor one of {', '.join(BUILT_IN)}."
            ) from None
    found = tokenizer.chat_template
    if isinstance(found, list):  # several with names
        by_name = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = by_name.get("default")
        if found is None and by_name:
            names = ", ".join(map(str, by_name))
            raise ConfigError(
                f"{tokenizer.name}: chat templates {names}, but none called default: save the one "
                f"to use as a file and name it with --template FILE."
            )
    if not isinstance(found, str):
        raise ConfigError(
            f"{tokenizer.name}: no chat template (neither chat_template.jinja nor chat_template in "
            f"tokenizer_config.json), so this is probably not a chat model. Use `localtrain "
            f"generate`, or name a template with --template FILE or --template chatml."
        )
    return ChatTemplate(found, tokenizer.named, f"{tokenizer.name}: chat template")


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [n], mask int32 [n]: 1 where the assistant wrote) of a chat.

    The whole text is tokenized at once and nothing is added: a template that wants a begin token
    writes it itself, so there is never a second one. The mask needs `{% generation %}`.
    """
    rendered = template.render(messages, **options)
    ids, starts, ends = tokenizer.encode_spans(rendered.text)
    mask = np.zeros(len(ids), np.int32)
    for first, last in rendered.spans:
        mask[(ends > first) & (starts < last)] = 1
    return ids, mask


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special token that this template puts after an answer, as () or (id,)."""
    answer = secrets.token_hex(8)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        text = template.render(chat).text
    except (ConfigError, DataError):
        return ()
    after = tokenizer.encode(text.rpartition(answer)[2])
    special = set(tokenizer.special.values())
    return (int(after[0]),) if len(after) and int(after[0]) in special else ()


class _Refused(Exception):
    """What a template says with raise_exception."""


def _raise(message: str) -> None:
    raise _Refused(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps, where Jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
