"""How the run report writes values: JSON as HTML, numbers as short texts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


def html_of(content: Any) -> str:
    """Any JSON value as escaped HTML.

    Mappings become tables (inner ones of a few short values a line of pairs), lists of plain values a line,
    text with line breaks keeps them."""
    if isinstance(content, Mapping):
        rows = (f"<tr><th>{escape(str(key))}</th><td>{_inner(value)}</td></tr>" for key, value in content.items())
        return f"<table>{''.join(rows)}</table>"
    if isinstance(content, list):
        if any(isinstance(item, (Mapping, list)) for item in content):
            return "<ul>" + "".join(f"<li>{_inner(item)}</li>" for item in content) + "</ul>"
        return ", ".join(html_of(item) for item in content) or "none"
    if isinstance(content, str):
        return f"<pre>{escape(content)}</pre>" if "\n" in content else escape(content)
    if content is None or isinstance(content, bool):
        return {None: "unknown", True: "yes", False: "no"}[content]
    return f"{content:,}" if isinstance(content, int) else f"{content:,.6g}"


def _inner(content: Any) -> str:
    if not isinstance(content, Mapping) or not all(_is_short(value) for value in content.values()):
        return html_of(content)
    pairs = (
        f'<span class="pair"><span>{escape(str(key))}</span> {html_of(value)}</span> ' for key, value in content.items()
    )
    return "".join(pairs) or "none"


def _is_short(value: Any) -> bool:
    return not isinstance(value, (Mapping, list)) and len(str(value)) <= 48 and "\n" not in str(value)


def decimal(value: float) -> str:
    """A number with as many digits as it needs, four at most: 0.25, 1.5, 12."""
    return f"{value:.4g}"


def scientific(value: float) -> str:
    """Scientific notation without padding: 1e-5, 2.5e-4."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def compact(value: float) -> str:
    """12,345 as 12.3k, 4.5e6 as 4.5M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def gibibytes(value: float) -> str:
    """Bytes as GiB, as MiB below one."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
