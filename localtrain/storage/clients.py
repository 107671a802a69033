"""The fsspec client of a URL: made at its first use, with credentials looked for only then.

Left to themselves, gcsfs asks a metadata server that exists only on Google's machines (20 to 30 s
of silence elsewhere) and unpickles a file of cached tokens, and s3fs asks Amazon's. So what a
machine has is looked up here, in its environment, its files and its firmware's name. Without any
credential the request is anonymous, which public buckets answer.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from localtrain.errors import StorageError
from localtrain.storage import retry

# What to install when fsspec knows a protocol but its implementation is missing.
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
GOOGLE, AMAZON = ("gs", "gcs"), ("s3", "s3a")
OBJECT_STORES = (*GOOGLE, *AMAZON, "az", "abfs", "abfss", "adl", "oci", "http", "https")
CONNECTIONS = 64  # botocore's 10 are 200 requests a second at 50 ms each
_HOSTS = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}
_ADVICE = {
    "gs": "No Google credentials were found. Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or "
    "run `gcloud auth application-default login`; on Google Cloud, give the machine a service "
    "account with access to the bucket.",
    "s3": "No AWS credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run "
    "`aws configure`; on EC2, give the machine a role with access to the bucket.",
}

_open: dict[tuple, Any] = {}
_lock = threading.Lock()


def protocol_of(path: str) -> str:
    """The protocol that reaches the store: the last of a chain such as simplecache::s3://."""
    return path.split("://", 1)[0].split("::")[-1]


def open_client(path: str) -> tuple[Any, str]:
    """(file system, key) of a URL. One client per store and process, shared by all threads.

    fsspec's own cache makes a client per thread, each with a pool of connections of its own.
    """
    import fsspec
    import fsspec.core

    protocol, rest = path.split("://", 1)
    place = (os.getpid(), protocol, rest.split("/", 1)[0])
    if "::" not in protocol and place in _open:
        return _open[place], _open[place]._strip_protocol(path)
    with _lock:
        # Else gcsfs asks for the type of each bucket over gRPC; an emulator stalls that a minute.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            for part in protocol.split("::"):
                fsspec.get_filesystem_class(part)
            client, key = fsspec.core.url_to_fs(path, **_options(protocol))
        except ImportError as error:
            extra = EXTRAS.get(protocol_of(path))
            advice = f"pip install 'localtrain[{extra}]'" if extra else f"({error})"
            raise StorageError(
                f"{path}: the package for {protocol_of(path)}:// is not installed: {advice}."
            ) from error
        except ValueError as error:
            raise StorageError(f"{path}: unknown protocol {protocol}:// ({error}).") from error
        if protocol in AMAZON:
            client.retries = 1  # ours are logged and counted
        _open[place] = client
    return client, key


def _options(protocol: str) -> dict[str, Any]:
    """Settings of a client; what the user's own fsspec configuration says goes before."""
    import fsspec.config

    found: dict[str, Any] = {}
    if protocol in GOOGLE:
        _listen_to_gcsfs()
        found = {"token": _google_token(), "use_listings_cache": False}
    elif protocol in AMAZON:
        limits = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}
        limits["max_pool_connections"] = CONNECTIONS
        found = {"anon": _amazon_is_anonymous(), "use_listings_cache": False}
        found["config_kwargs"] = limits
    user = fsspec.config.conf.get(protocol, {})
    if not user and (found.get("token") == "anon" or found.get("anon")):
        _check_reachable("gs" if protocol in GOOGLE else "s3")
    return {key: value for key, value in found.items() if key not in user}


def _google_token() -> str:
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return "anon"
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    if os.name == "nt" and "CLOUDSDK_CONFIG" not in os.environ:
        folder = Path(os.environ.get("APPDATA", "."), "gcloud")
    stored = Path(folder, "application_default_credentials.json").is_file()
    named = any(
        os.environ.get(name)
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "GCE_METADATA_IP")
    )
    return "google_default" if stored or named or _firmware_names("Google") else "anon"


def _amazon_is_anonymous() -> bool:
    named = any(
        os.environ.get(name)
        for name in (
            *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
            *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        )
    )
    files = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
    stored = any(
        Path(os.environ.get(name) or Path.home() / ".aws" / file).expanduser().is_file()
        for name, file in files.items()
    )
    return not (named or stored or _firmware_names("Amazon EC2"))


def _firmware_names(vendor: str) -> bool:
    """Whether this is a virtual machine of that cloud, by what its firmware says (Linux)."""
    for name in ("product_name", "sys_vendor", "board_vendor", "bios_vendor"):
        try:
            if Path("/sys/class/dmi/id", name).read_text().startswith(vendor):
                return True
        except OSError:
            continue
    return False


def _check_reachable(kind: str) -> None:
    """Without credentials, say so at once where the store cannot be reached either."""
    own = ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if any(os.environ.get(name) for name in (*own, *proxies)):
        return
    outcome: list[str] = ["no answer within 4 s"]

    def knock() -> None:
        try:
            socket.create_connection((_HOSTS[kind], 443), timeout=3).close()
            outcome[0] = ""
        except OSError as error:
            outcome[0] = error.strerror or str(error)

    thread = threading.Thread(target=knock, daemon=True)  # a name server may not answer either
    thread.start()
    thread.join(4)
    if outcome[0]:
        raise StorageError(f"{_HOSTS[kind]} cannot be reached ({outcome[0]}). {_ADVICE[kind]}")


def refusal_advice(path: str, error: BaseException) -> str:
    """What to do when a store refuses (401, 403); "" for other failures."""
    statuses = {retry.status_of(link) for link in retry.chain(error)}
    denied = isinstance(error, PermissionError) or statuses & {401, 403}
    if not (denied or str(error).startswith("Forbidden") or "Credentials" in type(error).__name__):
        return ""
    kind = {"gcs": "gs", "s3a": "s3"}.get(protocol_of(path), protocol_of(path))
    anonymous = {"gs": lambda: _google_token() == "anon", "s3": _amazon_is_anonymous}
    if kind in anonymous and anonymous[kind]():
        return f" {_ADVICE[kind]}"
    return " The credentials that are set here have no right to do this: check them and the bucket."


class _InnerRetries(logging.Handler):
    """gcsfs repeats requests by itself and tells only its debug log; we count and tell."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "retrying after exception" in text:
            import sys

            error = sys.exc_info()[1] or Exception(text)
            retry.count(error)
            retry.log.warning("storage: %s; gcsfs tries again", retry.reason(error))


def _listen_to_gcsfs() -> None:
    logger = logging.getLogger("gcsfs")
    if not any(isinstance(handler, _InnerRetries) for handler in logger.handlers):
        logger.addHandler(_InnerRetries())
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # it also logs the traceback of what it raises
