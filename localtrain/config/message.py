"""Config mistakes as one paragraph: where, which key, which value, what was expected, what is near.

pydantic finds the mistakes; this module says them in the words of the run file.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from localtrain.config.alias import ALIASES
from localtrain.config.schema import RunConfig, Source
from localtrain.config.secret import is_secret_key, mask
from localtrain.errors import ConfigError, nearest

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}


@dataclass
class Origin:
    """Where values came from: a file with its lines, and the KEY=VALUE arguments on top."""

    where: str
    lines: dict[str, int] = field(default_factory=dict)
    arguments: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self.arguments or key in self.lines

    def place(self, key: str) -> str:
        """'argument key=...' or 'file line n' for a dotted key."""
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            inner = ".".join(parts[:end])
            if inner in self.arguments:
                return f"argument '{inner}=...'"
            if inner in self.lines:
                return f"{self.where} line {self.lines[inner]}"
        return self.where


def explain_errors(error: ValidationError, origin: Origin | None) -> str:
    """One paragraph for up to three mistakes of a run; `origin` None = built from Python."""
    origin = origin or Origin("RunConfig")
    found = error.errors(include_url=False)
    found.sort(key=lambda entry: entry["type"] != "extra_forbidden")  # a typo causes the others
    sentences = [_sentence(entry, origin) for entry in found[:3]]
    if len(found) > 3:
        sentences.append(f"{len(found) - 3} more after these")
    return "; also ".join(dict.fromkeys(sentences))


def check_key(key: str, where: str) -> None:
    """Raise ConfigError when a dotted key does not exist, naming the nearest one."""
    model: Any = RunConfig
    for index, part in enumerate(key.split(".")):
        if not _is_section(model):
            parent = ".".join(key.split(".")[:index])
            raise ConfigError(f"{where}: {parent} has no keys inside; give its whole value")
        if part not in model.model_fields:
            raise ConfigError(f"{where}: {_unknown(key)}")
        model = model.model_fields[part].annotation


def keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and its pydantic field, in the order of the schema."""
    for name, info in section.model_fields.items():
        if _is_section(info.annotation):
            yield from keys(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def type_name(annotation: Any) -> str:
    """A type in the words of the documentation: 'integer', 'number or null', 'adamw | sgd'."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {type_name(arguments[0])}s"
    if origin is tuple:
        return f"list of {'source' if arguments[0] is Source else type_name(arguments[0])}s"
    return "null" if annotation is type(None) else _TYPES.get(annotation, "section")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _sentence(entry: Any, origin: Origin) -> str:
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path)
    where = origin.place(key)
    if entry["type"] == "extra_forbidden":
        return f"{where}: {_unknown(key)}"
    if entry["type"] == "missing":
        return f"{where}: {key} is missing"
    if entry["type"] in ("value_error", "assertion_error") and _is_cross_field(key):
        text = str(entry["ctx"]["error"])
        named = [name for name, _ in keys() if name in text and name in origin]
        named.sort(key=lambda name: name not in origin.arguments)  # the last word is to blame
        return f"{origin.place(named[0]) if named else where}: {text}"
    value = entry["input"]
    return f"{where}: {key} = {_shown(value)} {_expected(path, entry)}"


def _is_cross_field(key: str) -> bool:
    """Validators of whole sections write the whole sentence themselves."""
    return key not in dict(keys()) and not key.startswith("data.")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(mask(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _expected(path: list[str], entry: Any) -> str:
    info = dict(keys()).get(".".join(path))
    if entry["type"] in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        return _limit(entry)
    if entry["type"] == "string_unicode":
        return "is not valid Unicode; write it in UTF-8"
    if entry["type"] == "finite_number":
        return "must be a finite number"
    if info is None:  # a section, or something inside a source
        if entry["type"] in ("model_type", "model_attributes_type"):
            return "must be a section with keys of its own"
        if entry["type"] == "literal_error":
            return f"must be {entry['ctx']['expected']}"
        return _plain(entry)
    expected = type_name(info.annotation)
    if " | " in expected:
        close = nearest(str(entry["input"]).lower(), expected.split(" or ")[0].split(" | "))
        return f"must be one of {expected}" + (f"; did you mean '{close}'?" if close else "")
    if entry["type"] == "value_error" and expected == "text":
        return f"is not allowed: {entry['ctx']['error']}"
    article = "an" if expected[0] in "aeiou" else "a"
    return f"must be {expected if expected[:4] in ('true', 'text') else f'{article} {expected}'}"


def _limit(entry: Any) -> str:
    return (
        entry["msg"]
        .replace("Input should be greater than or equal to", "must be at least")
        .replace("Input should be less than or equal to", "must be at most")
        .replace("Input should be", "must be")
    )


def _plain(entry: Any) -> str:
    if entry["type"] == "value_error":
        return f"is not allowed: {entry['ctx']['error']}"
    return entry["msg"].replace("Input should be", "must be")


def _unknown(key: str) -> str:
    last = key.rpartition(".")[2]
    if is_secret_key(last):
        return (
            f"{key} looks like a secret: run files are copied into run directories and logs, so "
            "they hold none; remove it and set it in the environment (such as HF_TOKEN) instead"
        )
    hint = _advice(key)
    return f"{mask(key)} is not a key of a run file; {hint}"


def _advice(key: str) -> str:
    known = [name for name, _ in keys()]
    sections = [
        name for name, info in RunConfig.model_fields.items() if _is_section(info.annotation)
    ]
    plain = key.lower().replace("-", "_")
    section, _, last = plain.rpartition(".")
    if key in known:  # a dotted key inside a file
        return f"in a file it is a section, {section}: with {last}: inside"
    if section.startswith(("data.sources.", "data.eval_sources.")):
        return f"a source has {', '.join(Source.model_fields)}"
    for candidate in (plain, last):
        if candidate in known:
            return f"did you mean {candidate}?"
    if last in ALIASES:
        answer = ALIASES[last]
        return answer if " " in answer else f"did you mean {answer}?"
    if section in sections and (near := nearest(last, _inside(known, section))):
        return f"did you mean {section}.{near}?"
    same = [name for name in known if name.rpartition(".")[2] == last]
    if same:
        return f"did you mean {' or '.join(same)}?"
    if section == "" and (near := nearest(plain, sections)):
        return f"did you mean the section {near}?"
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    if near := nearest(last, leaves):
        return f"did you mean {leaves[near]}?"
    if near := nearest(plain, known):
        return f"did you mean {near}?"
    return "`localtrain config` lists all keys"


def _inside(known: list[str], section: str) -> list[str]:
    return [name.removeprefix(f"{section}.") for name in known if name.startswith(f"{section}.")]
