"""Nothing secret is ever printed or stored: what counts as secret, and how it is masked.

A run file is copied into the run directory, logs and bug reports, so tokens have no place in it:
clients read them from the environment. What slips into a URL or a value is masked in every dump.
"""

from __future__ import annotations

import re
from typing import Any

_KEY = re.compile(
    r"(^|[._-])(token|secret|password|passwd|api_?key|access_?key|credentials?|auth)s?$", re.I
)
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET_IN_QUERY = re.compile(
    r"(?<=[?&])((?:[\w-]*(?:token|sig|signature|secret|key|credential|password))=)[^&\s]+", re.I
)
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA|AIza|ya29\.)[\w-]{8,}")


def is_secret_key(key: str) -> bool:
    """Whether a key looks like one that holds a token or a password."""
    return bool(_KEY.search(key))


def mask(value: Any) -> Any:
    """The same value with passwords, signed query values and tokens replaced by ***."""
    if isinstance(value, str):
        value = _PASSWORD_IN_URL.sub("***", value)
        return _TOKEN.sub("***", _SECRET_IN_QUERY.sub(r"\1***", value))
    if isinstance(value, dict):
        return {key: mask(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mask(entry) for entry in value)
    return value
