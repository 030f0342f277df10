"""The base class of every section of a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict group of settings: no unknown key, no silent conversion, no infinite or NaN number.

    Give every field a `Field(description=...)`: error messages, the reference, the starter recipe and the
    JSON Schema show it. A setting that applies only in some mode defaults to None, and `problems` refuses it
    elsewhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    foreign: ClassVar[dict[str, str]] = {}
    """What keys of other tools are called here, where that is not plain from their names."""

    def problems(self) -> Iterable[tuple[str, str]]:
        """Combinations of settings that cannot work, as `(key, message)`.

        The key is relative to this section, may be dotted, and is "" for the section as a whole. It is called
        once every field has passed on its own, so it may rely on types and bounds.
        """
        return ()
