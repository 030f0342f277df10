"""The errors that meshtune raises for its users. Each says what was wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class MeshtuneError(Exception):
    """Base of every error that a user can act on; printed without a traceback."""

    shared = False
    """Whether every rank of the run raises it, so that one of them saying it is enough."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a recipe: the dotted key, what is wrong, and where it was written, if it was.

    `file` is a path, or `override "key=value"` for a value of the command line; `line` counts from 1.
    """

    path: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file and self.line else self.file
        line = ": ".join(part for part in (place, self.path, self.message) if part)
        return line.replace("\n", "\\n")


class RecipeError(MeshtuneError):
    """One or more problems in a recipe, an override or a combination of settings, one a line."""

    def __init__(self, problems: str | Iterable[Problem]) -> None:
        self.problems = [Problem("", problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class LayoutError(MeshtuneError):
    """The layout does not fit the world size or the model."""


class ModelError(MeshtuneError):
    """The model cannot be built, loaded or exported as asked."""


class DataError(MeshtuneError):
    """A data file cannot be read, or holds no row that can be trained on."""


class CheckpointError(MeshtuneError):
    """A checkpoint cannot be written, found, or loaded."""


class TrainingError(MeshtuneError):
    """Training had to stop on every rank, for example on a loss that is not finite."""

    shared = True
