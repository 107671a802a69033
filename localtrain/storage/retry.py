"""Which failures of a remote store pass by themselves, and how long to wait for that.

Every client has exception classes of its own (gcsfs's HttpError is no OSError, s3fs turns most
answers into OSError with some errno), so a failure is judged by what all have: an HTTP status
somewhere in the chain of causes, an errno, or the name of its class. Waits grow exponentially with
full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so that thousands of
hosts which fail together do not come back together.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")
log = logging.getLogger(__name__)

ATTEMPTS = 12  # the waits between them add up to 75 s on average, 150 s at most
BASE_S, CAP_S = 0.25, 30.0
_PASSING = {408, 429, *range(500, 600)} - {501}
_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EBUSY", "EAGAIN", "ETIMEDOUT", "EPIPE", "ECONNRESET"),
        *("ECONNREFUSED", "ECONNABORTED", "ENETUNREACH", "ENETDOWN", "EHOSTUNREACH"),
    )
    if hasattr(errno, name)
}
# Connections that broke and answers that came in part, as aiohttp, botocore, requests, urllib3,
# google.auth, fsspec and gcsfs call them.
_NAMES = (
    *("Timeout", "Connection", "Disconnected", "IncompleteRead", "ClientPayload", "ClientOSError"),
    *("ChunkedEncoding", "ProxyError", "ResponseStreaming", "HTTPClientError", "ResponseParser"),
    *("ChecksumError", "TransportError", "ServerError", "ShortRead", "IncompleteMessage"),
)

_counts: Counter[str] = Counter()
_lock = threading.Lock()


class ShortRead(Exception):
    """The store sent fewer bytes than there are."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a client's exception, or None."""
    response = getattr(error, "response", None)
    found = [getattr(error, "code", None), getattr(error, "status", None)]
    if isinstance(response, dict):  # botocore
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    elif response is not None:  # requests, httpx
        found.append(getattr(response, "status_code", None))
    for value in found:
        if isinstance(value, int | str) and str(value).isdigit() and 100 <= int(value) < 600:
            return int(value)
    return None


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception and what it came from, innermost last."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help. A refusal (4xx) and a mistake of ours never pass."""
    if isinstance(error, PermissionError | FileNotFoundError | FileExistsError):
        return False
    links = chain(error)
    for link in links:  # before the status: aiohttp gives a body that was cut the code 400
        named = any(name in type(link).__name__ for name in _NAMES)
        if named or isinstance(link, TimeoutError | ConnectionError):
            return True
    statuses = [status for link in links if (status := status_of(link)) is not None]
    if statuses:  # before the errno: s3fs has EIO for whatever it does not know
        return statuses[0] in _PASSING
    return any(isinstance(link, OSError) and link.errno in _ERRNOS for link in links)


def reason(error: BaseException) -> str:
    """What a client says, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    status = next((s for s in map(status_of, chain(error)) if s is not None), None)
    line = " ".join(str(text).split())[:300]
    return line if status is None or str(status) in line else f"{line} (HTTP {status})"


def count(error: BaseException) -> None:
    """One request was repeated."""
    status = next((s for s in map(status_of, chain(error)) if s in _PASSING), None)
    with _lock:
        _counts[str(status) if status else type(chain(error)[-1]).__name__] += 1


def report() -> str | None:
    """One line on the requests that this process repeated; None when there were none."""
    with _lock:
        kinds = _counts.most_common()
    if not kinds:
        return None
    listed = ", ".join(f"{number} x {kind}" for kind, number in kinds)
    return f"storage: {sum(number for _, number in kinds)} requests were repeated ({listed})"


def persist(what: str, call: Callable[[], R]) -> R:
    """`call()`, again while its failures may pass; the last one is raised."""
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:
            if attempt == ATTEMPTS or not is_passing(error):
                error.attempts = attempt  # type: ignore[attr-defined]
                error.waited = time.monotonic() - began  # type: ignore[attr-defined]
                raise
            pause = random.uniform(0, min(CAP_S, BASE_S * 2 ** (attempt - 1)))
            count(error)
            log.warning(
                "storage: could not %s: %s; trying again in %.1f s (%d of %d)",
                *(what, reason(error), pause, attempt, ATTEMPTS - 1),
            )
        time.sleep(pause)
    raise AssertionError("the last attempt raises")
