"""The formats of rows: which columns tell each of them, which others it reads, and what counts where several fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A format's columns: all of `required` tell it, `optional` ones are read where a row has them."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


SHAPES: dict[str, Shape] = {
    "messages": Shape(("messages",), ("tools", "train_on_turns")),
    "sharegpt": Shape(("conversations",), ("system", "tools", "train_on_turns")),
    "alpaca": Shape(("instruction", "output"), ("input", "system", "history")),
    "prompt_completion": Shape(("prompt", "completion"), ("tools",)),
    "tokens": Shape(("input_ids",), ("labels", "assistant_masks", "completion_mask", "loss_mask", "attention_mask")),
    "text": Shape(("text",)),
}
"""In the order in which they are listed to users. `text` gives way to any other: rows often keep what they were made
into, or made of, beside their conversation."""

CONVERSATIONAL = ("messages", "sharegpt", "alpaca", "prompt_completion")
"""Formats that become conversations, and so may stand in one set together."""

COLUMNS = tuple(dict.fromkeys(name for shape in SHAPES.values() for name in shape.required + shape.optional))
"""Every column name that some format reads."""


def columns_of_format(row_format: str) -> tuple[str, ...]:
    """Return the columns that a format reads; all that any format reads for `auto`."""
    shape = SHAPES.get(row_format)
    return COLUMNS if shape is None else shape.required + shape.optional


def shapes_of(columns: Mapping[str, Any]) -> list[str]:
    """Return the formats whose columns a row has, null being no value; `text` only where nothing else fits."""
    found = [name for name, shape in SHAPES.items() if all(columns.get(key) is not None for key in shape.required)]
    if "messages" in found and says_from_and_value(columns["messages"]):
        found[found.index("messages")] = "sharegpt"
    return found if len(found) < 2 else [name for name in found if name != "text"]


def says_from_and_value(messages: Any) -> bool:
    """Tell whether a list of messages has ShareGPT's keys."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and "from" in first and "value" in first and "role" not in first
