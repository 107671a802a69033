"""What a person sees, in a real browser: the page of a run, and TensorBoard.

The browser can reach nothing but this machine. Pictures are judged by their pixels: a curve is
there when enough of them have its color, in many columns.
"""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]
BLUE, ORANGE = (0x09, 0x69, 0xDA), (0xBC, 0x4C, 0x00)


def browse(url, *options, network="MAP * ~NOTFOUND"):
    """Standard output and the console of one visit; a new profile each time."""
    with tempfile.TemporaryDirectory() as profile:
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        base = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        more = ["--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
        own = [f"--user-data-dir={profile}", f"--host-resolver-rules={network}"]
        done = subprocess.run(
            [*base, *quiet, *more, *own, *options, url],
            capture_output=True,
            timeout=120,
        )
    log = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, log[-2000:]
    return done.stdout.decode("utf-8"), [line for line in log.splitlines() if "CONSOLE" in line]


def picture(url, path, width, height, *options, **more):
    """Pixels uint8 [height, width, 3] of a visit."""
    shot = [f"--screenshot={path}", f"--window-size={width},{height}"]
    _, console = browse(url, *shot, *options, **more)
    assert console == []
    return pixels_of(path)


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB"))


def columns_of(pixels, color, near=40):
    """How many columns have a pixel of about this color."""
    return int((np.abs(pixels.astype(int) - color).sum(axis=2) < near).any(axis=0).sum())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_config):
    """A real run of the program, stopped nowhere, and its report."""
    folder = tmp_path_factory.mktemp("seen")
    for file in sorted(Path(__file__).parent.glob("test_*.py"))[:8]:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(tiny_config))
    keys = {
        "model.preset": "null",
        "model.path": folder,
        "eval.prompt": "import",
        "data.sources": f"{folder}/*.py",
        "data.eval_fraction": 0.3,
        "data.seq_len": 64,
        "train.steps": 40,
        "train.batch_size": 4,
        "train.log_every": 1,
        "eval.every": 10,
        "eval.batches": 1,
        "eval.sample_length": 20,
        "checkpoint.every": 40,
    }
    run = [sys.executable, "-m", "localtrain", "train", "quickstart", "--backend", "cpu"]
    run += ["--out", str(folder / "run"), *(f"{key}={value}" for key, value in keys.items())]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = [sys.executable, "-m", "localtrain", "report", str(folder / "run")]
    done = subprocess.run(report, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip().endswith("report.html"), done.stderr
    return folder / "run"


def test_the_report_opens_offline_with_its_numbers_and_no_complaint(trained):
    from localtrain.metrics import read_metrics

    dom, console = browse(f"file://{trained}/report.html", "--dump-dom")
    assert console == []
    rows = read_metrics(trained)
    last = [row["loss"] for row in rows if "loss" in row][-1]
    held = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    for words in (f"{last:.4f}", f"{held:.4f}", "27,104 parameters", "finished", "step 40 of 40"):
        assert words in dom, words
    assert dom.count("<svg") == 5 and dom.count("<pre>") == 4 and "<b>import</b>" in dom


@pytest.mark.parametrize(("width", "least"), [(1200, 700), (500, 300)])  # headless: 500 at least
def test_the_curves_of_the_report_are_drawn(trained, tmp_path, width, least):
    pixels = picture(f"file://{trained}/report.html", tmp_path / "p.png", width, 1400)
    assert pixels.shape == (1400, width, 3)
    assert columns_of(pixels, BLUE) > least  # at 1200 two charts stand side by side
    assert columns_of(pixels, ORANGE) > 100
    assert (pixels.reshape(-1, 3) == 255).all(axis=1).mean() > 0.5  # on white


def test_a_dark_screen_gets_a_dark_page(trained, tmp_path):
    dark = "--blink-settings=preferredColorScheme=0"
    pixels = picture(f"file://{trained}/report.html", tmp_path / "p.png", 1200, 900, dark)
    assert np.median(pixels) < 40 and columns_of(pixels, (0x44, 0x93, 0xF8)) > 700


def test_the_page_never_scrolls_sideways(trained, tmp_path):
    """A frame of 400 pixels, narrower than a headless window can be, says how wide its page is."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="file://{trained}/report.html" width="400" height="900"></iframe>'
        "<script>f.onload = () => document.title = "
        "'wide ' + f.contentDocument.documentElement.scrollWidth</script>"
    )
    dom, _ = browse(f"file://{frame}", "--dump-dom", "--allow-file-access-from-files")
    width = int(re.search(r"<title>wide (\d+)", dom)[1])
    assert 300 < width <= 400


def test_the_value_under_the_pointer_is_told(trained, tmp_path):
    page = (trained / "report.html").read_text()
    moved = tmp_path / "moved.html"
    moved.write_text(
        page.replace(
            "</body>",
            "<script>const s = document.querySelector('svg'), b = s.getBoundingClientRect();"
            "const x = b.right - b.width * 12 / 440;"
            "s.dispatchEvent(new PointerEvent('pointermove', {clientX: x}))"
            "</script></body>",
        )
    )
    dom, console = browse(f"file://{moved}", "--dump-dom")
    shown = re.search(r"<output>step 40: ([\d.]+) / ([\d.]+)", dom)
    loss, held = (
        re.search(rf"<b>([\d.]+)</b><span>last {name}", dom)[1] for name in ("tr", "held")
    )
    assert console == []
    assert abs(float(shown[1]) - float(loss)) < 0.03 and abs(float(shown[2]) - float(held)) < 0.03


# ---- TensorBoard


@pytest.fixture(scope="module")
def board(trained):
    """The address of a TensorBoard that shows the run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(trained / "tensorboard")]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                if get(f"{address}/data/plugin/scalars/tags"):
                    break
            except OSError:
                pass
            assert process.poll() is None, process.stderr.read()[-2000:]
            assert time.monotonic() < end, "TensorBoard did not answer for a minute"
            time.sleep(0.2)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def get(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return json.load(answer)


def test_tensorboard_serves_every_number_and_text(trained, board):
    (run,) = get(f"{board}/data/runs")
    tags = get(f"{board}/data/plugin/scalars/tags")[run]
    numbers = ("loss", "lr", "grad_norm", "tokens_per_s", "flops_per_s", "data_wait_s")
    assert {f"train/{name}" for name in numbers} | {"eval/loss"} <= tags.keys()
    points = get(f"{board}/data/plugin/scalars/scalars?run={run}&tag=train/loss")
    assert [step for _, step, _ in points] == list(range(1, 41))
    texts = get(f"{board}/data/plugin/text/tags")[run]
    assert set(texts) == {"run", "samples/1"}
    settings = get(f"{board}/data/plugin/text/text?run={run}&tag=run")[0]["text"]
    assert "seq_len: 64" in settings and "<code>" in settings
    shown = get(f"{board}/data/plugin/text/text?run={run}&tag=samples/1")
    assert [one["step"] for one in shown] == [10, 20, 30, 40]


def test_tensorboard_draws_the_curves(board, tmp_path):
    local = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    shot = [f"--screenshot={tmp_path / 'tb.png'}", "--window-size=1200,900"]
    browse(f"{board}/#scalars", *shot, "--virtual-time-budget=20000", network=local)
    pixels = pixels_of(tmp_path / "tb.png").astype(int)
    pixels = pixels[180:, 320:]  # without the orange head and the list of runs
    # the first run is orange (#ff7043)
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    curve = (red > 230) & (green < 200) & (blue < 180) & (red - blue > 60)
    assert curve.any(axis=0).sum() > 150
