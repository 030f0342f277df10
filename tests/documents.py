"""Reads the project's Markdown: its fenced blocks, what is noted above them, and the places that it names.

A note is an HTML comment on the line above a block, which no reader of the page sees:

- `<!-- not run: needs two machines -->`: the block is not run; only for what a test cannot have.
- `<!-- exits: 2 -->`: a bash block ends with this exit code.
- `<!-- output -->`: a text block is what the block before it printed; `...` stands for any text.
- `<!-- file: rows.jsonl -->`: the block is written to this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAYED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
WRITTEN = [*PLAYED, *RECORDS, ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)\s*$")
_NOTE = re.compile(r"<!--\s*(?P<name>[a-z ]+?)(?::\s*(?P<value>\S.*?))?\s*-->")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)|<(?:img|source)[^>]*?(?:src|srcset)=\"(?P<image>[^\"]+)\"")
NOTES = ("not run", "exits", "output", "file")


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the line of its fence, its language, its text and its notes by name."""

    document: Path
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order. Raises ValueError for a note that nobody knows."""
    lines = document.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == fence["ticks"])
        indent = len(fence["indent"])
        text = "\n".join(line[indent:] for line in lines[at + 1 : end]) + "\n"
        found.append(Block(document, at + 1, fence["language"], text, _notes(document, lines[:at])))
        at = end + 1
    return found


def _notes(document: Path, above: list[str]) -> dict[str, str]:
    notes: dict[str, str] = {}
    for line in reversed(above):
        note = _NOTE.fullmatch(line.strip())
        if note is None:
            break
        if note["name"] not in NOTES:
            raise ValueError(f"{document}: unknown note {line.strip()}")
        notes[note["name"]] = note["value"] or ""
    return notes


def prose(document: Path) -> Iterator[tuple[int, str]]:
    """The lines outside fenced blocks, numbered from 1."""
    inside = False
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def links(document: Path) -> Iterator[tuple[int, str]]:
    """The targets of links and images, with their lines."""
    for number, line in prose(document):
        for match in _LINK.finditer(line):
            yield number, match["target"] or match["image"]


def code_spans(document: Path) -> Iterator[tuple[int, str]]:
    """What stands in single backticks outside fenced blocks, with its line."""
    for number, line in prose(document):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            yield number, span


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    found = set()
    for _, line in prose(document):
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found
