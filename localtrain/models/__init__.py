"""Model families: each file turns a Hub config.json into a spec and a table of weight rules."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localtrain import storage
from localtrain.configs.models.aliases import ALIASES
from localtrain.errors import ConfigError, nearest
from localtrain.models.files import is_there
from localtrain.models.hub import HubConfig
from localtrain.models.weights import Table
from localtrain.nn.spec import Model

FAMILIES = {  # model_type -> file in this folder
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
}


def presets() -> list[str]:
    """Names of the packaged presets, sorted."""
    return sorted(path.name[: -len(".json")] for path in _preset_files())


def read_preset(name: str) -> dict[str, Any]:
    """The config.json of a packaged preset or its alias, whatever lies in the current folder."""
    base, changes = ALIASES.get(name.lower(), (name.lower(), {}))
    for preset in _preset_files():
        if preset.name == f"{base}.json":
            return _parse(preset.read_text(), name) | changes
    guess = nearest(name.lower(), [*presets(), *ALIASES])
    hint = f"; did you mean {guess}?" if guess else "."
    raise ConfigError(
        f"model {name!r}: neither a preset nor a local folder{hint} "
        "`localtrain models` lists the presets."
    )


def read_hub_config(name: str) -> dict[str, Any]:
    """The config.json of a folder or file (local or URL), else of a preset or its alias.

    A run directory has it as model.json.
    """
    if storage.is_dir(name):
        for file in ("config.json", "model.json"):
            path = storage.join(name, file)
            if is_there(path):
                return _parse(storage.read_bytes(path), path)
        raise ConfigError(f"{name}: this folder has no config.json, so it is not a Hub model.")
    if storage.exists(name):
        return _parse(storage.read_bytes(name), name)
    return read_preset(name)


def spec_from(hf: Mapping[str, Any], where: str = "config.json") -> Model:
    """The spec of a Hub config; unknown values that change the maths are ConfigErrors."""
    config = HubConfig(hf, where)
    made = _family(config).spec(config)
    config.refuse_variants()
    if config.unread():
        raise ConfigError(
            f"{where}: unknown keys {', '.join(config.unread())}: what they change is not known, "
            "so the model could not be trained faithfully. Remove them if they change nothing."
        )
    return made


def rules_from(hf: Mapping[str, Any], where: str = "config.json") -> Table:
    """The weight rules of a Hub config."""
    config = HubConfig(hf, where)
    return _family(config).weights(config)


def _family(config: HubConfig):
    kind = config.get("model_type")
    if kind not in FAMILIES:
        guess = nearest(str(kind), FAMILIES)
        hint = f" (nearest is {guess})" if guess else ""
        raise ConfigError(
            f"{config.where}: `model_type` is {kind!r}, a family that is not known{hint}; known "
            f"are {', '.join(sorted(FAMILIES))}."
        )
    return importlib.import_module(f"localtrain.models.{FAMILIES[kind]}")


def _preset_files() -> list:
    """The packaged *.json files: installed as localtrain.configs, beside the package in a clone."""
    clone = Path(__file__).resolve().parents[2] / "configs" / "models"
    if clone.is_dir():
        return list(clone.glob("*.json"))
    from importlib.resources import files

    folder = files("localtrain.configs.models")
    return [path for path in folder.iterdir() if path.name.endswith(".json")]


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); fetch the file again.") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: a config.json must hold an object, not a {type(values).__name__}."
        )
    return values
