"""Experts as a layout sees them: modules declare where they are, `parallel` shares them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshtune.errors import LayoutError
from meshtune.layout.pieces import Cut


@dataclass(frozen=True)
class Around:
    """A module around an experts module that holds something for each expert, too: how its parameters are cut with them, by their
    full names, and its own `counters`."""

    path: str
    cuts: Mapping[str, Cut]
    counters: tuple[str, ...]


@dataclass(frozen=True)
class Experts:
    """A module that holds experts side by side and is told which of them each token goes to.

    `parameters` and `counters` are names on the module itself: parameters whose dimension 0 counts experts, and integer
    attributes that say how many there are. With `by_rows` its caller says where tokens go by the order of rows: as many for
    each expert, expert after expert. `around` are modules around it, the outermost first.
    """

    path: str
    count: int
    parameters: tuple[str, ...]
    counters: tuple[str, ...]
    by_rows: bool = False
    around: tuple[Around, ...] = ()

    @property
    def outermost(self) -> str:
        """The path of what holds all that counts these experts."""
        return self.around[0].path if self.around else self.path

    def cuts(self) -> dict[str, Cut]:
        """Rows of what the ranks of `ep` share out, by full names."""
        own = {f"{self.path}.{name}": Cut("ep", 0, (self.count,)) for name in self.parameters}
        return {name: cut for part in (own, *(outer.cuts for outer in self.around)) for name, cut in part.items()}

    def share(self, ep: int) -> int:
        """Experts on each of `ep` ranks: rank r has those from `r * share` on. Raises LayoutError if they do not divide."""
        for problem in problems([self], ep):
            raise LayoutError(problem)
        return self.count // ep


def problems(found: Sequence[Experts], ep: int) -> Iterable[str]:
    """What keeps `ep` ranks from sharing out these experts: one line for each number of experts."""
    for count in sorted({experts.count for experts in found if experts.count % ep}):
        path = next(experts.path for experts in found if experts.count == count)
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        yield (
            f"distributed.ep_size: {count} experts ({path}) cannot be shared out evenly among {ep} ranks; write one of {divisors}"
        )


@dataclass(frozen=True)
class Balancing:
    """The load-balancing loss that a model's config asks for: where its routers are and what it is multiplied with.

    `routers` maps the path of each module that computes router logits to the place of these in its output.
    """

    routers: Mapping[str, int]
    experts: int
    top_k: int
    coefficient: float
