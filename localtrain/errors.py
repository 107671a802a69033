"""Errors that a user can act on, each with the exit code of the command line.

A message is one paragraph: what is wrong, where (file, key, tensor, row), the value, what to do.
Anything that is not a LocaltrainError is a bug of ours and exits with 1 and a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LocaltrainError(Exception):
    """Base of all errors that are the user's or the machine's, not ours."""

    exit_code = 1


class ConfigError(LocaltrainError):
    """Bad usage or configuration; nothing was started."""

    exit_code = 2


class DataError(LocaltrainError):
    """Bad or missing data, model or checkpoint."""

    exit_code = 3


class NonFiniteError(LocaltrainError):
    """The loss or the gradient stopped being finite; the last good checkpoint is kept."""

    exit_code = 4


class OutOfMemoryError(LocaltrainError):
    """The device ran out of memory; the message carries the keys that help."""

    exit_code = 5


class StorageError(LocaltrainError):
    """Storage failed after retries, or the disk is full."""

    exit_code = 6


class PeerError(LocaltrainError):
    """Another process of the same run failed."""

    exit_code = 7


class BusyError(LocaltrainError):
    """The run directory is in use by another process."""

    exit_code = 8


class Stopped(LocaltrainError):
    """Stopped by a signal after saving: the same command goes on."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that looks most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
