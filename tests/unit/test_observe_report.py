"""The report and the loss picture: complete, self-contained, and made of whatever the run left."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshtune.observe import JSONLSink, loss_png, write_report
from meshtune.observe.atomic import write_atomically
from meshtune.observe.history import History, points, smoothed
from meshtune.observe.report_values import compact, decimal, gibibytes, html_of, scientific
from meshtune.observe.svg import Series, line_chart, thinned


class Checked(HTMLParser):
    """Collects tags and attributes and refuses tags that do not close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def train(folder: Path, steps: int) -> None:
    """A metrics file of `steps` logging steps with a validation every fifth."""
    sink = JSONLSink(folder / "metrics.jsonl", resume_step=0)
    for step in range(1, steps + 1):
        values = {"epoch": step / 10, "loss": 2 + 1 / step, "grad_norm": 1.5, "learning_rate": 1e-5 / step}
        counts = {"tokens": 1000, "tokens_per_second": 500.0, "mfu": 0.25, "peak_memory_bytes": 3 * 2**30}
        sink.write(step, {**values, **counts})
        if step % 5 == 0:
            sink.write(step, {"epoch": step / 10, "validation_loss": 2.5 - step / 100, "validation_tokens": 9})
    sink.close()


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_the_report_has_every_part_and_needs_nothing_else(tmp_path: Path) -> None:
    """Curves, recipe, layout, data statistics and environment in one file with no script and no address in
    it.
    """
    run = tmp_path / "my-run"
    train(run, 20)
    (run / "recipe.resolved.yaml").write_text("recipe: sft\nseed: 42\n", encoding="utf-8")
    (run / "layout.json").write_text(json.dumps({"world_size": 4, "mesh": {"dp_shard": 4}}), encoding="utf-8")
    (run / "data.json").write_text(json.dumps({"train": {"rows": 12345, "unusable": ["row 3"]}}), encoding="utf-8")
    (run / "environment.json").write_text(json.dumps({"git": {"commit": "abc", "dirty": True}}), encoding="utf-8")
    path = write_report(run)
    assert path == run.resolve() / "report.html"
    page = path.read_text(encoding="utf-8")
    parsed = Checked(page)
    assert parsed.tags.count("svg") == 5
    for text in (
        "my-run",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Peak memory",
        "seed: 42",
        "12,345",
    ):
        assert text in page
    for text in (
        "world_size",
        "dp_shard",
        "row 3",
        "abc",
        "2.0500",
        "from 3.0000",
        "2.3000",
        "20k",
        "0:00:40",
    ):
        assert text in page
    assert "script" not in parsed.tags and "link" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name in ("src", "href", "onload")]
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_hardly_began(tmp_path: Path, steps: int) -> None:
    """Ctrl-C before or after the first logging step still leaves a report and a picture."""
    train(tmp_path, steps)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    Checked(page)
    assert ("Nothing logged yet" in page) == (steps == 0)
    assert page.count("<circle") == (5 + 1 if steps else 0)
    loss_png(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1200, 675)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    """An empty folder, a torn line, null losses, a cut JSON file: each leaves out no more than itself."""
    write_report(tmp_path / "nowhere")
    loss_png(tmp_path / "nowhere.jsonl", tmp_path / "loss.png")
    train(tmp_path, 3)
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.write(4, {"loss": math.nan, "grad_norm": math.inf})
    sink.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "lo')
    (tmp_path / "layout.json").write_text('{"world', encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    Checked(page)
    assert "Layout" not in page and "2.3333" in page and "nan" not in page.lower().split("<style>")[0]
    loss_png(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_everything_is_escaped(tmp_path: Path) -> None:
    """Names and data of a user cannot become markup."""
    run = tmp_path / "a<b>&c"
    hostile = '<script>alert("x")</script>'
    run.mkdir()
    (run / "recipe.resolved.yaml").write_text(f"name: {hostile}\n", encoding="utf-8")
    for name in ("layout", "data", "environment"):
        content = {hostile: {hostile: hostile, "list": [hostile, {"inner": hostile}]}, "text": f"{hostile}\n"}
        (run / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    page = write_report(run).read_text(encoding="utf-8")
    parsed = Checked(page)
    assert "script" not in parsed.tags and "b" in parsed.tags
    assert "a&lt;b&gt;&amp;c" in page and "&lt;script&gt;" in page


def test_a_million_steps_stay_a_small_page_and_keep_their_spikes(tmp_path: Path) -> None:
    """Long runs are thinned for the chart; the highest point of each stretch stays, gaps stay gaps."""
    values = [(float(step), 1.0) for step in range(100_000)]
    values[77_777] = (77_777.0, 50.0)
    kept = thinned(values)
    assert len(kept) <= 800 and (77_777.0, 50.0) in kept
    assert kept == sorted(kept)
    unknown = [(float(step), None) for step in range(100_000)]
    assert {y for _, y in thinned(unknown)} == {None}
    assert len(line_chart("x", [Series("x", values, "line")], decimal)) < 20_000


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 6: a write that stops half way leaves the previous file whole, and no litter beside it."""
    target = tmp_path / "report.html"
    write_atomically(target, b"old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_null_cuts_the_curve() -> None:
    """A step whose value is unknown is a gap, not a line drawn through it."""
    values = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 2.0), (5.0, 1.0)]
    chart = line_chart("x", [Series("x", values, "line")], decimal)
    assert chart.count("<polyline") == 2


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0], [-3.0, -1.0], [1e-9, 2e-9], [1e12, 3e12], [0.0, 1e-300]])
def test_charts_of_any_range(values: list[float]) -> None:
    """Constant, zero, negative, tiny and huge values are inside the picture."""
    chart = line_chart("x", [Series("x", [(float(i), v) for i, v in enumerate(values)], "marks")], decimal)
    heights = [float(y) for y in re.findall(r'cy="([^"]+)"', chart)]
    assert len(heights) == len(values) and all(0 <= y <= 240 for y in heights)


def test_smoothing_is_not_pulled_to_zero() -> None:
    """The first smoothed value is the first value, and a constant stays itself."""
    values = [(float(step), 3.0) for step in range(200)]
    assert [y for _, y in smoothed(values)] == pytest.approx([3.0] * 200)
    assert smoothed([(1.0, None), (2.0, 5.0)]) == [(2.0, 5.0)]
    assert smoothed([]) == []


def test_history_tells_training_from_validation(tmp_path: Path) -> None:
    """Each validation line stands apart from the training line of its step."""
    train(tmp_path, 5)
    history = History.read(tmp_path / "metrics.jsonl")
    assert points(history.validation, "validation_loss") == [(5.0, 2.45)]
    assert [step for step, _ in points(history.train, "loss")] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_short_texts() -> None:
    """Numbers in the report are as short as they can be without misleading."""
    assert [scientific(v) for v in (0.0, 1e-5, 2.5e-4, 1.05e-5)] == ["0", "1e-5", "2.5e-4", "1.05e-5"]
    assert [compact(v) for v in (0.5, 999, 12_345, 4.5e6, 2e9)] == ["0.5", "999", "12.3k", "4.5M", "2G"]
    assert [gibibytes(v) for v in (2**29, 3 * 2**30)] == ["512 MiB", "3 GiB"]
    assert html_of({"a": None, "b": True, "c": [], "d": 1234567, "e": 0.987}).count("<tr>") == 5
