"""Golden checkpoints: the full set beside the checkout where it is, else the copy of a few here."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from localtrain import api

ROOT = Path(__file__).resolve().parents[2]
FULL, SMALL = ROOT.parent / "shared" / "golden", ROOT / "tests" / "golden_small"


@dataclass
class Golden:
    folder: Path
    facts: dict
    tensors: dict[str, np.ndarray]

    @property
    def mask(self) -> np.ndarray:
        return self.tensors["attention_mask"].astype(bool)

    @property
    def atol(self) -> float:
        return self.facts["suggested_atol"]

    @cache  # noqa: B019 - one model for all tests of a family, so one compilation
    def model(self) -> api.LanguageModel:
        return api.load(str(self.folder))

    @cache  # noqa: B019
    def loss_and_grads(self) -> tuple[float, dict[str, np.ndarray]]:
        t = self.tensors
        return self.model().loss_and_grads(t["input_ids"], t["labels"], t["attention_mask"])

    __hash__ = object.__hash__


@cache
def load_golden(family: str) -> Golden:
    folder = FULL / family if (FULL / family).is_dir() else SMALL / family
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoint of {family} in this checkout")
    facts = json.loads((folder / "golden.json").read_text())
    return Golden(folder, facts, load_file(folder / "golden.safetensors"))


@pytest.fixture(scope="session")
def golden():
    return load_golden


@pytest.fixture
def hub_copy(tmp_path):
    """A writable copy of a golden folder's config and weights."""

    def copy(family: str, **changes) -> Path:
        source = load_golden(family).folder
        folder = tmp_path / family
        folder.mkdir()
        hf = json.loads((source / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(hf))
        (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        return folder

    return copy
