"""A chat template as transformers compiles and sandboxes it, and two kinds of its jinja environment: one that is quicker, and one
in which contents can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from meshtune.data.traced import Joined, Probe, Untraceable

# Filters and tests that do with a string what its methods do, or do not look into it.
_FOLLOW = {"trim", "string", "default", "d", "upper", "lower"}
_PASS = {"length", "count", "list", "select", "reject", "selectattr", "rejectattr", "map", "first", "last", "reverse"}
_COMPARE = {"==", "eq", "equalto", "!=", "ne"}
_OF_TYPE = {
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "number",
    "integer",
    "float",
    "boolean",
    "true",
    "false",
}
_OF_TYPE |= {"sequence", "iterable", "callable"}


def compiled(source: Any) -> Any:
    """Return the template, whose lookups are quick; None where transformers does not have what is looked for, which is not
    part of its public interface.
    """
    if not isinstance(source, str):
        return None
    try:
        environment = _environment(source)
        sandbox: Any = type(environment)
        environment.__class__ = _with_quick_lookups(sandbox)
        return environment.from_string(source)
    except Exception:
        return None


def traceable(source: str) -> Any:
    """Return the template in an environment for probes, or None where it holds what a probe cannot be followed through."""
    environment = _environment(source)
    if not _can_be_followed(environment.parse(source)):
        return None
    sandbox: Any = type(environment)
    environment.__class__ = _with_guarded_calls(sandbox)
    environment.filters = {name: _guarded_filter(name, call) for name, call in environment.filters.items()}
    environment.tests = {name: _guarded_test(name, call) for name, call in environment.tests.items()}
    return environment.from_string(source)


def _environment(source: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source).environment.overlay()


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


@lru_cache
def _with_guarded_calls(sandbox: Any) -> Any:
    """A kind of jinja environment in which a probe is given to nothing that could look into it: `"abc".count(content)`."""
    from jinja2.utils import Namespace

    class Guarded(sandbox):
        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if __obj is not Namespace and _hold_a_probe((*args, *kwargs.values())):
                raise Untraceable("a call with a content")
            return super().call(__context, __obj, *args, **kwargs)

    return Guarded


def _can_be_followed(tree: Any) -> bool:
    """Tell whether text made of contents is only written: what joins strings outside of an output hides them."""
    from jinja2 import nodes

    made_into_text = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Mod)
    if next(tree.find_all((*made_into_text, nodes.Include, nodes.ImportedName, nodes.Import, nodes.FromImport)), None):
        return False
    written = {id(node) for output in tree.find_all(nodes.Output) for child in output.nodes for node in _joined(child)}
    if any(id(node) not in written for node in tree.find_all(nodes.Concat)):
        return False
    if any(node.name == "strftime_now" for node in tree.find_all(nodes.Name)):
        return False
    return all(
        isinstance(compare.expr, nodes.Const) or isinstance(operand.expr, (nodes.List, nodes.Tuple))
        for compare in tree.find_all(nodes.Compare)
        for operand in compare.ops
        if operand.op in ("in", "notin")
    )


def _joined(node: Any) -> Iterator[Any]:
    from jinja2 import nodes

    if isinstance(node, nodes.Concat):
        yield node
        for child in node.nodes:
            yield from _joined(child)
    elif isinstance(node, nodes.CondExpr):
        for branch in (node.expr1, node.expr2):
            if branch is not None:
                yield from _joined(branch)


def _guarded_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name not in _FOLLOW | _PASS or (name in _PASS and _hold_a_probe((*args, *kwargs.values()))):
            raise Untraceable(name)
        return call(*args, **kwargs)

    return _as_jinja_calls_it(guarded, call)


def _guarded_test(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name in _OF_TYPE:
            args = tuple("x" if isinstance(arg, (Probe, Joined)) else arg for arg in args)
        elif name not in _COMPARE and _hold_a_probe((*args, *kwargs.values())):
            raise Untraceable(name)
        return call(*args, **kwargs)

    return _as_jinja_calls_it(guarded, call)


def _as_jinja_calls_it(guarded: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with what jinja's decorators have noted of it: whether the context goes in first."""
    if (passed := getattr(call, "jinja_pass_arg", None)) is not None:
        guarded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return guarded


def _hold_a_probe(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, (Probe, Joined)) for argument in arguments)
