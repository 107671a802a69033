"""localtrain: one JAX training program, from a laptop to GPU boxes and TPU slices.

Five public names, loaded on first use so that `import localtrain` costs nothing:
`load`, `train`, `plan` (once this version has it), `RunConfig` and `__version__`.

    import localtrain
    localtrain.train("quickstart", backend="cpu", out="runs/first")
    model = localtrain.load("runs/first")

`localtrain.train` is both the function above and the module `localtrain/train.py`: the module
is made callable when Python hangs it onto this package, whoever imports it first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {"load": "localtrain.api", "RunConfig": "localtrain.config"}
_CALLABLE = ("train", "plan")  # modules that hold a function of their own name


class _CallableModule(ModuleType):
    """A module that can be called like the function of its own name inside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """This package: sees each submodule as the import system sets it as an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _CALLABLE and importlib.util.find_spec(f"localtrain.{name}") is not None:
        return importlib.import_module(f"localtrain.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'localtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = ["load", "train", "RunConfig", "__version__"]
    if importlib.util.find_spec("localtrain.plan") is not None:
        names.append("plan")
    return sorted(names)


sys.modules[__name__].__class__ = _Package
