"""Real servers for s3:// and gs:// on loopback, each behind a proxy that can make it fail."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_proxy import FaultProxy
from program import arrays, rows, train

CLIENTS = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}


def start_server(command, port, path):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).read()
            return process
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, command
            time.sleep(0.05)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_s3():
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return start_server(command, port, "/moto-api/"), port


def start_gs():
    port = free_port()
    code = (
        "import sys; from gcp_storage_emulator.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    more = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=bkt"]
    return start_server([sys.executable, "-c", code, *more], port, "/storage/v1/b?project=p"), port


def end_part(body):
    """gcsfs ends a part of a multipart upload by LF; the emulator's e-mail parser then takes a CR
    at the end of the data for a piece of the line end, and drops it."""
    end = b"\n--==0==--"
    return body[: -len(end)] + b"\r" + end if body.endswith(end) else body


def store(kind):
    for package in CLIENTS[kind]:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'localtrain[test]'")
    process, port = {"s3": start_s3, "gs": start_gs}[kind]()
    proxy = FaultProxy(port) if kind == "s3" else FaultProxy(port, serial=True, mend=end_part)
    if kind == "s3":
        environment = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        make = urllib.request.Request(f"http://127.0.0.1:{port}/bkt", method="PUT")
        urllib.request.urlopen(make, timeout=20)
    else:
        environment = {"STORAGE_EMULATOR_HOST": proxy.url}
    saved = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield SimpleNamespace(kind=kind, url=f"{kind}://bkt", proxy=proxy, environment=environment)
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        proxy.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3_server():
    yield from store("s3")


@pytest.fixture(scope="session")
def gs_server():
    yield from store("gs")


@pytest.fixture
def s3(s3_server):
    s3_server.proxy.clear()
    return s3_server


@pytest.fixture
def gs(gs_server):
    gs_server.proxy.clear()
    return gs_server


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def remote(request):
    """Each store in turn; gcsfs waits seconds before it tries again, so that one is slow."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(tiny_config))
    text = folder / "text"
    text.mkdir()
    for file in sorted(Path(__file__).parent.parent.glob("test_*.py"))[:6]:
        (text / file.name).write_bytes(file.read_bytes())
    (folder / "tiny.yaml").write_text(
        f"""
name: tiny
model: {{path: {folder / "model"}}}
data: {{sources: "{text}/*.py", seq_len: 32, eval_fraction: 0.2}}
train: {{steps: 20, batch_size: 4, log_every: 1}}
optim: {{lr: 3e-3, warmup: 5}}
eval: {{every: 10, batches: 2}}
checkpoint: {{every: 5, keep: 10}}
"""
    )
    return folder


@pytest.fixture(scope="session")
def reference(folder, tmp_path_factory):
    """The same run on the local disk, uninterrupted: (rows, arrays of the last step)."""
    out = tmp_path_factory.mktemp("reference") / "out"
    train(folder, out)
    return rows(out), arrays(out, 20)
