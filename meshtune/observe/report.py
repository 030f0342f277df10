"""The run report: one HTML file that can be mailed, with everything that the run folder knows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from meshtune.observe.atomic import write_atomically
from meshtune.observe.history import History, points, smoothed
from meshtune.observe.report_style import STYLE
from meshtune.observe.report_values import compact, decimal, gibibytes, html_of, scientific
from meshtune.observe.svg import NARROW, WIDE, Series, line_chart


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into `run_dir` from what lies there, and return its path.

    Reads `metrics.jsonl`, `recipe.resolved.yaml`, `layout.json`, `data.json` and `environment.json`; a part
    whose file is missing or cannot be read is left out. The page needs no other file and no network."""
    folder = Path(run_dir).resolve()
    history = History.read(folder / "metrics.jsonl")
    recipe = _text(folder / "recipe.resolved.yaml")
    sections = [
        _tiles(history),
        _charts(history),
        _facts("Data", _json(folder / "data.json")),
        _facts("Layout", _json(folder / "layout.json")),
        _facts("Environment", _json(folder / "environment.json")),
        f"<section><h2>Recipe</h2><pre>{escape(recipe)}</pre></section>" if recipe else "",
    ]
    page = _page(folder.name, "\n".join(section for section in sections if section))
    path = folder / "report.html"
    write_atomically(path, page.encode("utf-8"))
    return path


def _page(name: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)} · meshtune</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="kind">meshtune run report</p><h1>{escape(name)}</h1></header>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _tiles(history: History) -> str:
    """The few numbers that a reader looks for first."""
    train = history.train
    epoch, tokens, pace, share, peaks = (
        _known(train, name) for name in ("epoch", "tokens", "tokens_per_second", "mfu", "peak_memory_bytes")
    )
    counts, rates = points(train, "tokens"), points(train, "tokens_per_second")
    seconds = sum(c / r for (_, c), (_, r) in zip(counts, rates, strict=False) if c and r)
    steps = f"{train[-1]['step']:,}" if train else ""
    tiles = [
        _tile("Optimizer steps", steps, f"epoch {epoch[-1]:.2f}" if epoch else ""),
        _tile("Training loss", *_last_and_first(_known(train, "loss"))),
        *(
            _tile(f"{name.capitalize()} loss", *_last_and_first([value for _, value in curve if value is not None]))
            for name, curve in history.validation_losses.items()
        ),
        _tile("Tokens", compact(sum(tokens)) if tokens else ""),
        _tile("Tokens per second", compact(median(pace)) if pace else "", "median"),
        _tile("MFU", f"{median(share):.1%}" if share else "", "median"),
        _tile("Peak memory", gibibytes(max(peaks)) if peaks else ""),
        _tile("Time in steps", str(timedelta(seconds=round(seconds))) if seconds else ""),
    ]
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if any(tiles) else ""


def _tile(label: str, text: str, note: str = "") -> str:
    return f"<div><dt>{label}</dt><dd>{text} <small>{note}</small></dd></div>" if text else ""


def _last_and_first(losses: Sequence[float]) -> tuple[str, str]:
    if not losses:
        return "", ""
    return f"{losses[-1]:.4f}", f"from {losses[0]:.4f}" if len(losses) > 1 else ""


def _charts(history: History) -> str:
    loss = points(history.train, "loss")
    curves = [
        Series("training", loss, "raw"),
        Series("training, smoothed", smoothed(loss), "line"),
        *(Series(name, curve, "marks") for name, curve in history.validation_losses.items()),
    ]
    charts = [_figure("Loss", "nats per token", [curve for curve in curves if curve.points], decimal, WIDE)]
    for title, unit, name, text_of in (
        ("Learning rate", "", "learning_rate", scientific),
        ("Gradient norm", "before clipping", "grad_norm", decimal),
        ("Throughput", "tokens per second", "tokens_per_second", compact),
        ("Peak memory", "GiB", "peak_memory_bytes", decimal),
    ):
        scale = 2.0**-30 if unit == "GiB" else 1.0
        values = [(x, None if y is None else y * scale) for x, y in points(history.train, name)]
        if any(value is not None for _, value in values):
            charts.append(_figure(title, unit, [Series(title, values, "line")], text_of))
    return f'<section class="charts">{"".join(charts)}</section>'


def _figure(
    title: str, unit: str, series: Sequence[Series], text_of: Callable[[float], str], width: int = NARROW
) -> str:
    keys = "".join(f'<span class="{one.style}"><i></i>{escape(one.label)}</span>' for one in series)
    legend = f'<p class="legend">{keys}</p>' if len(series) > 1 else ""
    caption = f"<figcaption><b>{title}</b> <span>{unit}</span>{legend}</figcaption>"
    return f"<figure>{caption}{line_chart(title, series, text_of, width)}</figure>"


def _facts(title: str, content: Any) -> str:
    return f"<section><h2>{title}</h2>{html_of(content)}</section>" if content else ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path) or "null")
    except ValueError:
        return None


def _known(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [value for _, value in points(rows, name) if value is not None]
