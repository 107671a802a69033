"""YAML as people mean it: 2e-5 is a number, `yes` is text, a key given twice is an error.

PyYAML follows YAML 1.1, where `2e-5` is text, `no` is false and `1:30` is 90. Here the plain values
follow the YAML 1.2 core schema. No tag builds an object. Lines are kept so that errors name them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from localtrain.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (replaces PyYAML's table)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be text", problem_mark=key.start_mark
                )
            line = key.start_mark.line + 1
            if key.value in first:
                problem = f"key '{key.value}' is given twice, first in line {first[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = line
        values = super().construct_mapping(node, deep)
        return {key if isinstance(key, str) else str(key): value for key, value in values.items()}


def _plain(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


_plain("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_plain("null", "~|null|Null|NULL|", "~nN")
_plain("int", r"[-+]?[0-9][0-9_]*", "-+0123456789")
_plain(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_plain("merge", "<<", "<")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(
    ("tag:yaml.org,2002:null", re.compile("^$"))
)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))  # decimal: 010 is ten, not eight


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str | bytes, where: str) -> tuple[Any, dict[str, int]]:
    """The value of one YAML document, and the line of every dotted path in it.

    Raises ConfigError, one paragraph with file and line, for anything that is not one document.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        _collect_lines(node, "", lines)
        return (None if node is None else loader.construct_document(node)), lines
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 text (byte {error.start}); a run file is YAML"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(error, text, where)) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply to be a run file") from None


def _collect_lines(node: yaml.Node | None, path: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked, value in children:
        inner = f"{path}.{name}" if path else name
        lines.setdefault(inner, marked.start_mark.line + 1)
        _collect_lines(value, inner, lines)


def _syntax_error(error: yaml.MarkedYAMLError, text: str | bytes, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    source = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    shown = (source.splitlines()[line - 1 : line] or [""])[0]
    reason = error.problem or error.context or "cannot be read"
    if re.match(r" *\t", shown) or "'\\t'" in reason:
        reason = "a tab is used for indentation; YAML wants spaces"
    elif "could not determine a constructor" in reason:
        reason = "tags such as !!python/object are not allowed in a run file"
    elif "found another document" in reason:
        reason = "it holds two documents ('---'), a run file is one"
    elif "mapping values are not allowed" in reason:
        reason = "unexpected ':'; quote the value if it contains ': '"
    return f"{where} line {line} is not valid YAML: {reason}"
