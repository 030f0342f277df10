"""What a key that no section has was probably meant to be."""

from __future__ import annotations

import difflib

from meshtune.config.annotations import sections
from meshtune.config.section import Section


def unknown_key(root: type[Section], cls: type[Section], path: str, key: str) -> str:
    """The message for `key` in the section `cls` at `path`: where it belongs, the nearest valid key, or all
    of them.
    """
    if key == "base":
        return "found an unknown key; only a recipe file can name its base, at its top level"
    if key in cls.foreign:
        return f"found an unknown key; write `{cls.foreign[key]}`"
    hints = []
    if homes := [".".join(place) for place, section in sections(root) if key in section.model_fields]:
        hints.append("it belongs " + " or ".join(f"in {home}" if home else "at the top level" for home in homes))
    if near := nearest(key, list(cls.model_fields)):
        hints.append(f"did you mean {near}?")
    elif not hints and (far := _elsewhere(root, key)):
        hints.append(f"did you mean {far}?")
    keys = ", ".join(cls.model_fields)
    where = path or "the top level"
    return (
        f"found an unknown key; {'; '.join(hints)}"
        if hints
        else (f"found an unknown key; wanted one of the keys of {where}: {keys}")
    )


def nearest(key: str, names: list[str]) -> str | None:
    """The name that `key` most resembles, or whose words it abbreviates (`lr` for `learning_rate`); else
    None.
    """
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(key.lower().replace("-", "_"), by_lower, n=1)
    if close:
        return by_lower[close[0]]
    return next((name for name in names if _initials(name) == key.lower() and len(key) > 1), None)


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_") if word)


def _elsewhere(root: type[Section], key: str) -> str | None:
    for place, section in sections(root):
        if near := nearest(key, list(section.model_fields)):
            return ".".join((*place, near))
    return None
