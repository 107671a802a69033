"""`localtrain report`: one page of any run directory, whatever state it is in."""

import json
import math
import os
import re
from html.parser import HTMLParser

import fsspec
import pytest

from localtrain.cli import run as command
from localtrain.config import load_run
from localtrain.goodput import describe, discarded, goodput
from localtrain.lock import FolderLock
from localtrain.models import read_preset
from localtrain.report import curves, write_report

EVIL = "<script>alert('x')</script>&amp;"


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self._inside = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside.append(tag)

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._inside[-1:]):
            self.text += data


def train_row(step, loss=None, **more):
    base = {"loss": 5.0 / step if loss is None else loss, "grad_norm": 1.5, "lr": 1e-3}
    base |= {"tokens_per_s": 1000.0, "step_time_s": 0.1, "mfu": None, "data_wait_s": 0.01}
    return {"step": step, **base, "tokens": 100 * step, "time": 1e9 + step, **more}


def started(step=0, at=1e9, **more):
    host = {"platform": "cpu", "device": "cpu", "devices": 2, "processes": 1, "system": "Linux"}
    versions = {"localtrain": "0.1.0", "jax": "0.10.2", "python": "3.11.7"}
    facts = {"began": at - 9, "data_s": 1.0, "compile_s": 5.0}
    return {"event": "start", "step": step, **host, **versions, **facts, "time": at, **more}


def sample(step, text, prompt="Once"):
    return {"event": "sample", "step": step, "prompt": prompt, "text": text, "seconds": 0.5}


def make(folder, rows, overrides=("train.steps=20",), log=""):
    """A run directory with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(load_run("quickstart", list(overrides)).to_yaml())
    (folder / "model.json").write_text(json.dumps(read_preset("qwen3-tiny")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "log.txt").write_text(log)
    return folder


def show(folder):
    """(facts, page) of a run directory."""
    facts = write_report(str(folder))
    with open(facts["report"], encoding="utf-8") as file:
        text = file.read()
    return facts, Page(text), text


FINISHED = [
    started(),
    *(train_row(step) for step in range(1, 21)),
    {"step": 20, "eval_loss": 0.5, "eval_tokens": 900, "time": 1e9 + 20.5},
    {"event": "eval", "step": 20, "seconds": 0.25, "time": 1e9 + 20.5},
    sample(20, " upon a time"),
    {"event": "save", "step": 20, "seconds": 0.125, "time": 1e9 + 21},
    {"event": "end", "step": 20, "time": 1e9 + 22},
]


def test_the_page_tells_what_ran_where_and_how_it_went(tmp_path):
    facts, page, text = show(make(tmp_path / "r", FINISHED))
    assert facts["state"] == "finished" and facts["losses"]["last"] == 0.25
    for words in (
        *("quickstart", "finished", "step 20 of 20", "qwen3-tiny", "821,632 parameters", "2 x cpu"),
        *("0.2500", "from 5.0000", "last held-out loss", "0.5000", "2.00k", "tokens/s, median"),
        *("Loss", "nats per token", "Learning rate", "Gradient norm", "Throughput", "data"),
        *("training steps", "compiling", "evaluation", "saving", "Once upon a time"),
        *("data.sources", "python:stdlib", "that differ from the defaults", "at their defaults"),
    ):
        assert words in page.text, words
    assert page.tags.count("svg") == 5 and "utilization" not in page.text  # no peak, no MFU
    assert text.isascii() or text.encode("utf-8")


def test_nothing_is_fetched_and_no_script_is_needed(tmp_path):
    _, page, text = show(make(tmp_path / "r", FINISHED))
    names = {name for _, name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}
    assert not {"link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    without = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert Page(without).tags.count("path") > 20 and Page(without).text == page.text


def test_equal_files_give_an_equal_page(tmp_path):
    first, second = (show(make(tmp_path / name / "r", FINISHED))[2] for name in "ab")
    assert first == second == show(tmp_path / "a" / "r")[2]


@pytest.mark.parametrize(
    ("rows", "state", "why"),
    [
        (FINISHED, "finished", "last step"),
        ([started(), train_row(1)], "interrupted", "goes on"),
        ([started(), train_row(1), {"event": "stop", "step": 1, "reason": "SIGTERM"}], "stopped",
         "SIGTERM"),
        ([started(), {"event": "non_finite", "step": 7, "reason": "step 8: the loss is nan"}],
         "failed", "step 8: the loss is nan"),
        ([started(), {"event": "stop", "step": 1, "reason": "SIGTERM"},
          {"event": "resume", "step": 1}, train_row(2)], "interrupted", "goes on"),
        ([{"event": "end", "step": 10}], "interrupted", "goes on"),  # and train.steps was raised
        ([], "empty", "nothing was logged"),
    ],
)  # fmt: skip
def test_the_state_of_a_run(tmp_path, rows, state, why):
    facts, page, _ = show(make(tmp_path / "r", rows))
    assert facts["state"] == state and why in facts["why"] and why in page.text


@pytest.mark.skipif(os.name != "posix", reason="needs flock")
def test_a_run_that_a_process_holds_is_running(tmp_path):
    folder = make(tmp_path / "r", FINISHED[:5])
    lock = FolderLock(folder)
    assert show(folder)[0]["state"] == "running"
    lock.release()
    assert show(folder)[0]["state"] == "interrupted"
    FolderLock(folder).release()  # looking took nothing away


def test_every_text_is_shown_as_text(tmp_path):
    rows = [
        started(device=EVIL),
        train_row(1),
        sample(1, EVIL + "\x00\x1b[31m\ud800", prompt=EVIL),
        {"event": "stop", "step": 1, "reason": EVIL},
    ]
    log = f"2026-01-01 00:00:00,000 WARNING {EVIL}\n"
    folder = make(tmp_path / "r", rows, [f"data.sources={EVIL}"], log)
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text() + f'"{EVIL}": 1\n')
    _, page, text = show(folder)
    assert page.tags.count("script") == 1
    assert page.text.count(EVIL) >= 7
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_no_secret_reaches_the_page_or_the_document(tmp_path, capsys):
    token = "hf_abcdefghijklmnop1234"
    rows = [started(), train_row(1), sample(1, f"say {token}", prompt=token)]
    log = f"2026-01-01 00:00:00,000 WARNING cannot read s3://me:{token}@host/x?token=geheim1\n"
    folder = make(tmp_path / "r", rows, log=log)
    text = (folder / "run.yaml").read_text().replace("python:stdlib", f"s3://me:{token}@h/x")
    (folder / "run.yaml").write_text(text + "hub: {api_key: geheim2, my_password: geheim3}\n")
    assert command(["report", str(folder), "--json"]) == 0
    said = capsys.readouterr().out + (folder / "report.html").read_text()
    for secret in (token, "geheim", "abcdefghijk"):
        assert secret not in said
    assert "***" in said and "hub.my_password" in said


# ---- rows that are not as they should be


def values_of(text):
    """Numbers in the drawn paths."""
    return [
        number for d in re.findall(r' d="([^"]*)"', text) for number in re.split("[MLHVhv ]", d)
    ]


def test_values_that_are_not_finite_leave_gaps_that_are_named(tmp_path):
    lost = {4: None, 5: math.nan, 6: math.inf, 7: -math.inf}
    rows = [{**train_row(step), "loss": lost.get(step, 2.0 + step)} for step in range(1, 21)]
    facts, page, text = show(make(tmp_path / "r", rows))
    assert "4 values not finite, marked at the top" in page.text
    assert facts["losses"]["last"] == 22.0
    assert all(re.fullmatch(r"[-\d.]*", number) for number in values_of(text))
    assert 'class="lost"' in text


@pytest.mark.parametrize("only", [math.nan, None, 0.0, 1e-300, 1e29, -3.0])
def test_one_value_repeated_is_drawn_or_named(tmp_path, only):
    rows = [{**train_row(step), "loss": only, "lr": only, "grad_norm": only} for step in (1, 2, 3)]
    _, page, text = show(make(tmp_path / "r", rows))
    assert all(re.fullmatch(r"[-\d.]*", number) for number in values_of(text))
    assert ("not finite" in page.text) == (only is None or math.isnan(only))


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "loss": "much"}',
        '{"step": 3, "loss": true, "lr": [], "grad_norm": {}, "tokens_per_s": -1, "tokens": "x"}',
        '{"step": 3, "loss": 1' + "0" * 400 + "}",
        '{"step": 3, "loss": 1e999, "tokens_per_s": 0}',
        '{"step": -5, "loss": 1.0}',
        '{"step": 1' + "0" * 60 + ', "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        '{"event": "start", "step": 3, "began": "x", "time": -1e300}',
        '{"event": "sample", "step": 3}',
        '{"event": "sample", "step": 3, "prompt": 7, "text": ["a"]}',
        '{"event": "end", "step": 3, "time": 1e29, "reason": 5}',
        '{"event": 7, "step": 3}',
        '{"event": {}, "step": 3}',
        '{"loss": 3}',
        "[]",
        '{"step": 4, "lo',
        "\udcff\udcfe",
    ],
)
def test_a_strange_row_does_not_spoil_the_page(tmp_path, line):
    folder = make(tmp_path / "r", FINISHED[:10])
    with open(folder / "metrics.jsonl", "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line + "\n" + json.dumps(train_row(11)) + "\n")
    facts, page, text = show(folder)
    assert facts["losses"]["last"] == pytest.approx(5 / 11)
    assert page.tags.count("svg") == 5
    assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize("name", ["run.yaml", "model.json", "log.txt", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00\xfe", b"- [}", b'{"model": 3}'])
def test_a_broken_file_is_named_and_the_rest_is_shown(tmp_path, name, content):
    folder = make(tmp_path / "r", FINISHED)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    facts, page, _ = show(folder)
    if name in ("run.yaml", "model.json") and content != b'{"model": 3}':
        assert any(name in problem for problem in facts["problems"])
    assert ("0.2500" in page.text) == (name != "metrics.jsonl")
    assert ("python:stdlib" in page.text) == (name != "run.yaml")


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    for place in ("other", "nowhere"):
        assert command(["report", str(tmp_path / place)]) == 3
        assert "is not a run directory" in capsys.readouterr().err
    folder = make(tmp_path / "r", FINISHED)
    (tmp_path / "file").write_text("")
    assert command(["report", str(folder), "--out", str(tmp_path / "file" / "x.html")]) == 6
    assert "x.html" in capsys.readouterr().err


# ---- large runs


def test_a_hundred_thousand_rows_are_a_small_page_that_keeps_its_spikes(tmp_path):
    rows = [train_row(step, loss=3.0 + math.sin(step) / 9) for step in range(1, 100_001)]
    rows[54_320]["grad_norm"] = 99.0
    rows[77_777]["grad_norm"] = 0.5
    rows[12_345]["tokens_per_s"] = 1.0
    rows += [{"step": 500 * n, "eval_loss": 3.0} for n in range(1, 200)]
    rows += [sample(500 * n, f"text {n} " + "x" * 200) for n in range(1, 200)]
    _, page, text = show(make(tmp_path / "r", rows))
    assert len(text) < 1_000_000
    norm = next(
        d for name, d in re.findall(r'data-name="([^"]*)" d="([^"]*)"', text) if name == "norm"
    )
    heights = [float(point.split()[1]) for point in re.split("[ML]", norm) if point]
    usual = max(set(heights), key=heights.count)
    assert min(heights) < usual - 150 and max(heights) > usual and len(heights) < 5000
    assert "text 199 " in page.text and "are in metrics.jsonl" in page.text


def test_thinning_keeps_first_lowest_highest_and_last_of_every_column():
    points = [(curves.LEFT + 0.4 * n / 1000, float((n * 37) % 1000)) for n in range(1000)]
    kept = curves.decimate(points)
    assert points[0] in kept and points[-1] in kept and len(kept) <= 4
    assert {min(p[1] for p in points), max(p[1] for p in points)} <= {p[1] for p in kept}
    assert kept == sorted(kept)


def test_the_smoothed_curve_has_no_start_up_bias():
    flat, span = curves.smooth([(n, 7.0) for n in range(300)])
    assert span == 10 and all(y == pytest.approx(7.0) for _, y in flat)
    assert curves.smooth([(1, 5.0), (2, 1.0)])[0] == [(1, 5.0), (2, 1.0)]
    gap, _ = curves.smooth([(1, 1.0), (2, None), (3, 1.0)])
    assert gap == [(1, 1.0), (2, None), (3, 1.0)]


# ---- where the time went


def seconds(rows):
    return {one["what"]: one["seconds"] for one in goodput(rows)["parts"]}


def test_time_is_summed_from_what_was_recorded():
    found = goodput(FINISHED)
    # 2000 tokens at 1000 tokens/s; 9 s before the start row, 22 s after it
    assert seconds(FINISHED) == {
        **{"data": 1.0, "compile": 5.0, "steps": 1.8, "wait": 0.2, "eval": 0.25, "sample": 0.5},
        **{"save": 0.125, "other": pytest.approx(31 - 8.875)},
    }
    assert sum(one["share"] for one in found["parts"]) == pytest.approx(1)
    assert found["wall_s"] == 31 and found["goodput"] == pytest.approx(1.8 / 31)
    assert found["attempts"] == 1 and found["lost_steps"] == 0
    line = describe(found)
    assert line.startswith("goodput 5.8% of 31.0 s") and "not recorded 71.4%, compiling" in line


def test_a_resume_counts_its_own_steps_its_own_start_and_what_lay_between():
    rows = [
        started(),
        *(train_row(n) for n in (5, 10)),
        {"event": "resume", "step": 12, "time": 2e9},
    ]
    rows += [started(12, at=2e9), train_row(15, time=2e9 + 1), train_row(20, time=2e9 + 2)]
    spent = seconds(rows)
    assert spent["steps"] + spent["wait"] == pytest.approx((10 + 8) * 0.1)
    assert spent["compile"] == 10.0 and spent["idle"] == 2e9 - 9 - (1e9 + 10)
    assert sum(spent.values()) - spent["idle"] == pytest.approx((9 + 10) + (9 + 2))
    found = goodput(rows)
    assert found["goodput_running"] > found["goodput"]
    assert found["wall_s"] == pytest.approx(2e9 + 2 - (1e9 - 9))


def resume(rows, step, at):
    """The rows after a resume at `step`, as MetricsWriter leaves them."""
    kept = [row for row in rows if row["step"] <= step]
    mark = {"event": "resume", "step": step, **discarded(rows, kept, step), "time": at}
    return [*kept, mark, started(step, at=at)]


def test_lost_steps_are_counted_however_often_and_far_a_run_falls_back():
    rows = [started(), *(train_row(n) for n in range(1, 13))]  # 1 s a row, 0.1 s of it the step
    rows = resume(rows, 10, at=1e9 + 100)
    assert (goodput(rows)["lost_steps"], seconds(rows)["lost"]) == (2, 2.0)
    assert seconds(rows)["idle"] == 100 - 9 - 12
    rows += [train_row(n, time=1e9 + 100 + n) for n in range(11, 14)]
    far = resume(rows, 5, at=1e9 + 200)  # the checkpoint of step 10 was damaged
    found = goodput(far)
    # 6 to 12 of the first attempt, 11 to 13 of the second, and the second's start
    assert found["lost_steps"] == 7 + 3 and found["attempts"] == 2
    assert seconds(far)["lost"] == (12 - 5) + (9 + 13)
    assert seconds(far)["idle"] == (100 - 9 - 12) + (200 - 9 - 113)
    assert sum(seconds(far).values()) == pytest.approx(209) == found["wall_s"]


def test_steps_that_a_checkpoint_kept_without_a_row_are_not_lost():
    save = {"event": "save", "step": 13, "seconds": 0.5, "steps_s": 0.3, "wait_s": 0.1}
    rows = [started(), train_row(10), {**save, "time": 1e9 + 14}, train_row(20)]
    later = resume(rows, 13, at=1e9 + 50)
    assert goodput(later)["lost_steps"] == 7
    assert seconds(later)["steps"] == pytest.approx(1.0 + 0.3 - 0.01 - 0.1)
    assert seconds(rows)["steps"] == pytest.approx(2.0 - 0.02)  # a row came after: not twice


def test_without_recorded_times_nothing_is_made_up():
    assert goodput([])["parts"] == [] and goodput([])["goodput"] is None
    assert goodput([{"step": 1, "loss": 2.0}])["parts"] == []
    assert list(seconds([train_row(1)])) == ["steps", "wait"]
    assert goodput([train_row(1)])["goodput"] is None and describe(goodput([])) is None


# ---- the command


def test_the_command_prints_where_the_page_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "first", FINISHED)
    assert command(["report", "first"]) == 0  # a name under runs/
    assert capsys.readouterr().out.strip() == os.path.join("runs", "first", "report.html")
    assert command(["report", "runs/first/", "--out", "page.html", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == "page.html" and document["state"] == "finished"
    assert document["model"]["parameters"] == 821632 and "rows" not in document
    assert [one["text"] for one in document["samples"][0]["texts"]] == [" upon a time"]
    assert (tmp_path / "page.html").read_text() == (
        tmp_path / "runs" / "first" / "report.html"
    ).read_text()


def test_a_run_behind_a_url(tmp_path):
    folder = make(tmp_path / "r", FINISHED)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket/run", recursive=True)
    try:
        facts = write_report("memory://bucket/run")
        assert facts["report"] == "memory://bucket/run/report.html"
        page = memory.cat_file("/bucket/run/report.html").decode()
        assert page == show(folder)[2]
    finally:
        memory.rm("/bucket", recursive=True)
