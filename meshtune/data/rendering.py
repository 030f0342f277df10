"""Rendering plain conversations without the checks that they do not need.

`apply_chat_template` copies and normalises messages before each rendering, which changes nothing of roles and strings and costs a
quarter of the time. So the compiled template, as transformers compiles and sandboxes it, is called directly; its first texts are
compared with those of `apply_chat_template`, and at the first difference it is given up. What it does with contents is
followed in one conversation, and most others need no rendering at all.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from meshtune.data.environments import compiled, traceable
from meshtune.data.formats import Message
from meshtune.data.traced import Ways

_COMPARED = 32


class PlainRendering:
    """Renders messages that have a role and a string as content alone, or says that it cannot."""

    def __init__(self, tokenizer: Any) -> None:
        self._compared = 0
        self._values = {
            **tokenizer.special_tokens_map,
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        self._source = tokenizer.chat_template
        self._template = compiled(self._source)
        self._ways = Ways()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_template", "_traceable")}
        return {**state, "_source": self._source if self._template is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _template=compiled(state["_source"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainRendering:
        return self  # what has been compared holds for every copy of an encoder

    @property
    def trusted(self) -> bool:
        """Whether texts need no longer be compared."""
        return self._template is not None and self._compared >= _COMPARED

    def render(self, messages: list[Message]) -> str | None:
        """Return the text; None where there is no compiled template. Raises what the template raises."""
        if self._template is None:
            return None
        if (text := self._ways.text(messages)) is not None:
            return text
        text = self._template.render(messages=messages, **self._values)
        if self._traceable is not None:
            self._ways.learn(messages, text, lambda probes: self._traceable.render(messages=probes, **self._values))
        return text

    @cached_property
    def _traceable(self) -> Any:
        return traceable(self._source)

    def compare(self, messages: list[Message], text: str) -> None:
        """Look whether the text of `apply_chat_template` is what this makes of the messages."""
        try:
            same = self.render(messages) == text
        except Exception:  # a template may raise anything
            same = False
        self._compared += 1
        if not same:
            self._template = None
