"""Plan: placement rules as data. Models declare one; `parallel.apply` applies any."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Modules whose qualified name matches `pattern` (with `*` for one name component) form one `unit`.

    A unit's parameters are gathered together before its forward and released after it.
    """

    pattern: str
    unit: bool = True


@dataclass(frozen=True)
class Plan:
    """The rules of one model, in the order in which its modules run."""

    rules: tuple[Rule, ...] = ()

    def units(self, module_names: list[str]) -> list[str]:
        """The names among `module_names` that some rule makes a unit, in their given order."""
        return [name for name in module_names if any(r.unit and _matches(r.pattern, name) for r in self.rules)]


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))
