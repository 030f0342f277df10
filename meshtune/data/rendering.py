"""Rendering plain conversations without the checks that they do not need.

`apply_chat_template` copies and normalises messages before each rendering, which changes nothing of roles and strings and costs a
quarter of the time. So the compiled template, as transformers compiles and sandboxes it, is called directly; its first texts are
compared with those of `apply_chat_template`, and at the first difference it is given up. The sandbox stays, but is not
asked about what it allows in any case, which costs another quarter of what is left.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from meshtune.data.formats import Message

_COMPARED = 32


class PlainRendering:
    """Renders messages that have a role and a string as content alone, or says that it cannot."""

    def __init__(self, tokenizer: Any) -> None:
        self._compared = 0
        self._values = dict(tokenizer.special_tokens_map)
        self._source = tokenizer.chat_template
        self._template = _compiled(self._source)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_template": None, "_source": self._source if self._template is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _template=_compiled(state["_source"]))

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
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=False, **self._values
        )

    def compare(self, messages: list[Message], text: str) -> None:
        """Look whether the text of `apply_chat_template` is what this makes of the messages."""
        try:
            same = self.render(messages) == text
        except Exception:  # a template may raise anything
            same = False
        self._compared += 1
        if not same:
            self._template = None


def _compiled(template: Any) -> Any:
    """The template as transformers compiles it, once for each text; None where it is none, or cannot be compiled."""
    return _compiled_text(template) if isinstance(template, str) else None


@lru_cache(maxsize=32)
def _compiled_text(template: str) -> Any:
    """By a function of transformers that is not part of its public interface; None where it is not found."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(template).environment.overlay()
        sandbox: Any = type(environment)
        environment.__class__ = _with_quick_lookups(sandbox)
        return environment.from_string(template)
    except Exception:
        return None


@lru_cache
def _with_quick_lookups(sandbox: Any) -> Any:
    """A kind of jinja environment whose lookups of items, and of what no sandbox forbids, skip its checks: keys of plain
    dicts, methods of strings that return new ones (not `format`, which can reach into its arguments), a loop's counters.
    """
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    of_dicts = frozenset(dir(dict))
    of_strings = frozenset(name for name in dir(str) if name[0] != "_" and not name.startswith("format"))

    class Quick(sandbox):
        def getattr(self, obj: Any, attribute: str) -> Any:
            kind = type(obj)
            if kind is dict:
                if attribute in obj and attribute not in of_dicts:
                    return obj[attribute]
            elif kind is str:
                if attribute in of_strings:
                    return getattr(obj, attribute)
            elif (kind is LoopContext or kind is Namespace) and attribute[0] != "_":
                try:
                    return getattr(obj, attribute)
                except AttributeError:
                    pass
            return super().getattr(obj, attribute)

    return Quick
