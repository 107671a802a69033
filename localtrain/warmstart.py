"""What a run starts from: a model's config, its tokenizer and, with `model.init_from`, its weights.

The weights are read once, at step 0; what else belongs to the model is copied into the run
directory then. A run that has a checkpoint finds all of it there and needs the source no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from localtrain import hubdir, models, storage
from localtrain.config import RunConfig
from localtrain.convert import keep_beside
from localtrain.data.tokenizer import BYTE_MARKER, Tokenizer, load_tokenizer
from localtrain.errors import ConfigError, DataError, LocaltrainError
from localtrain.models import read_hub_config
from localtrain.nn.spec import Model
from localtrain.rundir import MODEL, find_started
from localtrain.source import TOKENIZER, CheckpointSource, Source, open_source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """`source` has the weights; None: they come from the seed, or from the run's checkpoint."""

    hf: dict[str, Any]
    name: str  # of the model, for messages
    tokenizer: Tokenizer
    source: Source | None = None
    own_tokenizer: bool = False  # the tokenizer is the one that the weights were trained with
    resumes: bool = False  # all of it lies in the run directory already
    notes: list[str] = field(default_factory=list)

    def keep(self, home: str) -> None:
        """Put the tokenizer and what else belongs to the model into a run directory."""
        if self.resumes:
            return
        place = storage.join(home, TOKENIZER)
        self.tokenizer.save(place)
        if self.source is not None:
            keep_beside(self.source, home, with_tokenizer=self.own_tokenizer)
            if not _have_same_ids(self.tokenizer, place):  # config.json knew more about the ends
                self.tokenizer.save(place)


def find_start(run: RunConfig, out: str | None, override: bool = False) -> Start:
    """Everything about the model that can be known before data and devices are touched.

    Raises ConfigError or DataError; nothing is written.
    """
    if run.model.init_from is None:
        name, preset = run.model.preset or run.model.path, run.model.preset
        hf = models.read_preset(preset) if preset else _read_config(run.model.path)
        return _checked(run, Start(hf, name, load_tokenizer(run.data.tokenizer or "byte")))
    name, started = run.model.init_from, find_started(out, run, override)
    if started is not None:
        words = load_tokenizer(run.data.tokenizer or storage.join(started, TOKENIZER))
        hf = read_hub_config(storage.join(started, MODEL))
        return _checked(run, Start(hf, name, words, resumes=True))
    source = open_source(name)
    place, notes = tokenizer_of(source), list(source.notes)
    size = ", ".join(sorted({dtype.name for _, dtype in source.leaves.values()}))
    notes.insert(0, f"weights from {name}: {source.network.spec.parameters():,} in {size}")
    if run.data.tokenizer is None:
        if place is None:
            raise DataError(
                f"model.init_from = {name!r}: no tokenizer.json lies with these weights. Name the "
                "tokenizer that they were trained with by data.tokenizer."
            )
        words, is_own = load_tokenizer(place), True
    else:
        words = load_tokenizer(run.data.tokenizer)
        is_own = place is not None and _have_same_ids(words, place)
        if place is not None and not is_own:
            notes.append(
                f"data.tokenizer = {run.data.tokenizer!r} is not the tokenizer of {name}: the "
                "weights were trained with other ids; without data.tokenizer its own is used"
            )
    start = Start(source.hf, name, words, source, own_tokenizer=is_own, notes=notes)
    return _checked(run, start)


def _read_config(path: str) -> dict[str, Any]:
    """The config.json of a folder, file, URL or Hub id."""
    if not storage.exists(path) and hubdir.is_hub_id(path):
        path = hubdir.locate(path, weights=False)
    return read_hub_config(path)


def tokenizer_of(source: Source) -> str | None:
    """What `load_tokenizer` takes for the tokenizer that lies with a model."""
    folder = source.folder
    if isinstance(source, CheckpointSource):
        folder = storage.join(source.home, TOKENIZER)
    there = any(storage.exists(storage.join(folder, n)) for n in ("tokenizer.json", BYTE_MARKER))
    return folder if there else None


def _have_same_ids(tokenizer: Tokenizer, place: str) -> bool:
    try:
        return tokenizer.hash == load_tokenizer(place).hash
    except LocaltrainError:  # a damaged one that is not going to be used
        return False


def _checked(run: RunConfig, start: Start) -> Start:
    """The embedding must have a row for every token id (more rows are padding and fine)."""
    spec: Model = models.spec_from(start.hf, start.name)
    size = start.tokenizer.size
    if size > spec.vocab:
        own = "leave data.tokenizer out to use the model's own tokenizer"
        other = f"use a config.json with vocab_size {size} or more"
        raise ConfigError(
            f"data.tokenizer = {run.data.tokenizer or start.tokenizer.name!r} has {size} tokens, "
            f"but the model ({start.name}) has a vocabulary of {spec.vocab}: "
            f"{own if run.model.init_from and run.data.tokenizer else other}, or name a tokenizer "
            "that fits."
        )
    return start
