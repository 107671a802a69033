"""From a name, path or URL and KEY=VALUE arguments to a RunConfig.

A run is looked up in this order: a packaged run (`quickstart`), a preset (then the packaged
`pretrain` run with that preset), a run file, a folder with run.yaml, a URL. Later wins:
defaults < run file < KEY=VALUE.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localtrain.config.explain import sections
from localtrain.config.message import Origin, check_key
from localtrain.config.schema import RunConfig
from localtrain.config.secret import mask
from localtrain.config.yamlfile import parse_yaml
from localtrain.errors import ConfigError, LocaltrainError, nearest

_MODEL_KEYS = ("preset", "path", "init_from")


def load_run(name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file and apply KEY=VALUE arguments. Raises ConfigError in one paragraph."""
    overrides = list(overrides)
    text, where, stem, preset = _find(name)
    values, lines = parse_yaml(text, where)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "text"
        raise ConfigError(f"{where} holds {kind}, not sections such as 'model:' and 'train:'")
    origin = Origin(where, lines)
    values.setdefault("name", stem)
    if preset:
        _drop_other_models(values, "preset")
        _set(values, ["model", "preset"], preset)
    for argument in overrides:
        _apply(values, argument, origin)
    for section in sections():
        if section in values and values[section] is None:
            del values[section]  # 'train:' with every line under it commented out
    run = RunConfig.model_validate(values, context=origin)
    _check_preset(run, origin)
    _check_warmup(run, origin)
    return run


def packaged_runs() -> list[str]:
    """Names of the run files that come with localtrain."""
    return sorted(path.name.removesuffix(".yaml") for path in _packaged(".yaml"))


def packaged_presets() -> list[str]:
    """Names of the model presets that come with localtrain."""
    return sorted(path.name.removesuffix(".json") for path in _packaged(".json", "models"))


def known_models() -> list[str]:
    """Names that `model.preset` may have: the presets and their other published names."""
    from localtrain.configs.models.aliases import ALIASES

    return sorted({*packaged_presets(), *ALIASES})


def _packaged(suffix: str, *folder: str) -> list[Any]:
    from importlib.resources import files

    root = files("localtrain.configs").joinpath(*folder)
    return [entry for entry in root.iterdir() if entry.name.endswith(suffix)]


def _find(name: str) -> tuple[bytes, str, str, str | None]:
    """The run file's bytes, what to call it in errors, the default run name, and a preset."""
    if "://" in name:
        return _read_url(name), mask(name), _stem(name), None
    runs = {path.name.removesuffix(".yaml"): path for path in _packaged(".yaml")}
    if name in runs:
        return runs[name].read_bytes(), f"{name}.yaml (packaged)", name, None
    preset = name.lower()
    if preset in known_models():
        return runs["pretrain"].read_bytes(), "pretrain.yaml (packaged)", preset, preset
    path = Path(name)
    if path.is_dir() and (path / "run.yaml").is_file():
        path = path / "run.yaml"
    try:
        _check_regular(path)
        return path.read_bytes(), str(path), _stem(str(path)), None
    except IsADirectoryError:
        raise ConfigError(
            f"{name} is a folder without run.yaml; name a run file such as {name}/my-run.yaml"
        ) from None
    except FileNotFoundError:
        raise ConfigError(_not_found(name)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"run file {name} cannot be read: {reason}") from None


def _check_regular(path: Path) -> None:
    """A named pipe without a writer would be waited for, and a device read, for ever. What the
    shell opened already (`/dev/stdin`, `<(...)`) ends by itself."""
    mode = path.stat().st_mode
    opened = str(path).startswith(("/dev/stdin", "/dev/null", "/dev/fd/", "/proc/self/fd/"))
    if not (opened or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(
            f"run file {path} is a pipe, a socket or a device: give a regular file, or what the "
            f"shell opens, /dev/stdin or <(command)"
        )


def _read_url(url: str) -> bytes:
    from localtrain import storage

    try:
        return storage.read_bytes(url)
    except FileNotFoundError:
        raise ConfigError(f"run file {mask(url)} does not exist") from None
    except (OSError, ValueError, ImportError) as error:
        reason = mask(" ".join(str(error).split())) or type(error).__name__
        raise ConfigError(f"run file {mask(url)} cannot be read: {reason}") from None
    except LocaltrainError as error:
        raise type(error)(f"run file {mask(str(error))}") from None


def _not_found(name: str) -> str:
    known = [*packaged_runs(), *known_models()]
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        stem = re.split(r"[\\/]", name)[-1].rpartition(".")[0]
        hint = f"; the packaged run is called '{stem}'" if stem in packaged_runs() else ""
        return f"run file {name} does not exist (looked in {Path.cwd()}){hint}"
    close = nearest(name.lower(), known)
    hint = f"did you mean '{close}'? " if close else ""
    return (
        f"'{name}' is no packaged run ({', '.join(packaged_runs())}), no preset "
        f"(see `localtrain models`) and no file; {hint}A run is one of these or a URL"
    )


def _stem(name: str) -> str:
    """A run name from a file name: portable characters only."""
    parts = [part for part in re.split(r"[\\/]", name) if part]
    stem = re.sub(r"\.(yaml|yml)$", "", parts[-1])
    if stem == "run" and len(parts) > 1:  # a run directory: its own name
        stem = parts[-2]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")
    return stem[:100].rstrip(".") or "run"


def _apply(values: dict[str, Any], argument: str, origin: Origin) -> None:
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"argument '{mask(argument)}' is not KEY=VALUE, such as train.steps=100")
    origin.arguments.add(key)
    check_key(key, f"argument '{key}=...'")
    try:
        value, _ = parse_yaml(text, f"argument '{key}=...'")
    except ConfigError:
        if text.lstrip()[:1] in ("[", "{", "'", '"'):
            raise
        value = text  # *.txt, @name and the like are plain text on a command line
    path = key.split(".")
    if path[0] == "model" and path[-1] in _MODEL_KEYS and value is not None:
        _drop_other_models(values, path[-1], keep=origin.arguments)
    _set(values, path, value)


def _drop_other_models(values: dict[str, Any], key: str, keep: Iterable[str] = ()) -> None:
    """An argument that names the model replaces the file's model."""
    model = values.get("model")
    for other in _MODEL_KEYS:
        if isinstance(model, dict) and other != key and f"model.{other}" not in keep:
            model.pop(other, None)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    if isinstance(value, dict) and isinstance(values.get(path[-1]), dict):
        values[path[-1]] = values[path[-1]] | value
    else:
        values[path[-1]] = value


def _check_preset(run: RunConfig, origin: Origin) -> None:
    preset = run.model.preset
    if preset is None or preset in known_models():
        return
    close = nearest(preset, known_models())
    hint = f"did you mean '{close}'?" if close else "`localtrain models` lists them"
    raise ConfigError(
        f"{origin.place('model.preset')}: model.preset = '{mask(preset)}' is not a preset; {hint}"
    )


def _check_warmup(run: RunConfig, origin: Origin) -> None:
    """A written warm-up longer than the run is a mistake; a shortened run (smoke test) is not."""
    if run.optim.warmup <= run.train.steps or "optim.warmup" not in origin:
        return
    shortened = "train.steps" in origin.arguments or origin.where.endswith("run.yaml")
    if shortened and "optim.warmup" not in origin.arguments:
        return  # a run directory's run.yaml was accepted when it was written
    raise ConfigError(
        f"{origin.place('optim.warmup')}: optim.warmup = {run.optim.warmup} is longer than the "
        f"whole run, train.steps = {run.train.steps}; the peak would never be reached"
    )
