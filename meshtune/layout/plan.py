"""Plan: what a model declares about how it may be laid out. `models` makes one, `parallel` applies any.

Tensor parallelism is said in one form. A *split* is a module, or a few, whose output is the sum over tp ranks of what each
computes with its part of the parameters. What enters is the same on every rank and gets the sum of the ranks' gradients; what
leaves is summed. Everything inside that is not cut is *shared*: each rank has a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from meshtune.layout.experts import Balancing, Experts
from meshtune.layout.pieces import Cut


@dataclass(frozen=True)
class Group:
    """`length` features from `start` on, made of `count` equal groups (heads)."""

    start: int
    length: int
    count: int

    def span(self, size: int, rank: int) -> tuple[int, int]:
        """(start, length) of what `rank` of `size` needs; where there are fewer groups than ranks, several need the same."""
        each = self.length // self.count
        if self.count % size == 0:
            share = self.count // size
            return self.start + rank * share * each, share * each
        return self.start + rank * self.count // size * each, each


@dataclass(frozen=True)
class Split:
    """Modules that compute a part of a sum on each tp rank: inputs enter at `entries`, outputs leave at `exits`.

    With `adds`, activations that enter beside the first are added to the output: each rank adds its share of them.
    """

    entries: tuple[str, ...]
    exits: tuple[str, ...]
    adds: bool = False


@dataclass(frozen=True)
class Sequences:
    """How blocks are given sequences: `dim` is the dimension of positions in the hidden states that they hand on; `beside` are
    the places or names of further arguments [batch, positions, ...] that carry a gradient."""

    dim: int = 1
    beside: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The rules of one model, by qualified names of its modules and parameters.

    Attributes:
        units: repeated blocks, in the order in which they run; the parameters of one are gathered together by data parallelism.
        joined_units: units that read more of the one before them than hidden states, so that no pipeline stage begins with them.
        splits: see `Split`.
        cuts: parameters of which each rank holds a part.
        shared: parameters inside splits that every rank holds whole, with a part of the gradient on each.
        divided: parameters inside splits that are added to every rank's output, so each adds its share of them.
        gathered: modules inside splits that must see all features: of their output each rank takes its own.
        selected: modules inside splits that every rank runs whole, and the features of their output that it needs.
        attributes: numbers of modules that become local (head counts); a mapping changes a copy of what the module holds under
            that name (its config).
        head_inputs: modules that are given tensors [heads, ...] or [batch * heads, ...] without a gradient (score biases), and
            how many heads; each rank takes its own.
        vocabulary: modules whose weight is cut by rows of the vocabulary: the embedding, and the head.
        whole: modules that stay whole and whose output at a position depends on others, so they need the whole sequence.
        sequences: how blocks are given sequences.
        experts: modules whose experts are shared out where the layout has an `ep` axis.
        balancing: the load-balancing loss that the model asks for.
        idle: modules that no forward calls, so that what they hold need not be gathered for one.
        wrapped: paths of modules that stand inside others, by the paths that the model's own code and config know them by.
    """

    units: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    selected: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    head_inputs: Mapping[str, int] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    experts: tuple[Experts, ...] = ()
    balancing: Balancing | None = None
    sequences: Sequences = Sequences()
    joined_units: frozenset[str] = frozenset()
    wrapped: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    def on_stage(self, units: Sequence[str], absent: Collection[str]) -> Plan:
        """The rules of what a pipeline rank holds: the blocks `units`, and all that is not inside the modules `absent`."""

        def here(name: str) -> bool:
            return not any(name == path or name.startswith(f"{path}.") for path in absent)

        splits = (
            replace(s, entries=tuple(filter(here, s.entries)), exits=tuple(filter(here, s.exits))) for s in self.splits
        )
        return replace(
            self,
            units=tuple(units),
            splits=tuple(s for s in splits if s.entries or s.exits),
            cuts={name: cut for name, cut in self.cuts.items() if here(name)},
            shared=frozenset(filter(here, self.shared)),
            divided=frozenset(filter(here, self.divided)),
            gathered=frozenset(filter(here, self.gathered)),
            selected={name: groups for name, groups in self.selected.items() if here(name)},
            attributes={name: values for name, values in self.attributes.items() if here(name)},
            head_inputs={name: heads for name, heads in self.head_inputs.items() if here(name)},
            vocabulary=tuple(filter(here, self.vocabulary)),
            idle=tuple(filter(here, self.idle)),
            whole=tuple(filter(here, self.whole)),
            experts=tuple(found for found in self.experts if here(found.path)),
        )

    def sharing_out(self, experts: Sequence[Experts]) -> Plan:
        """The same plan with whole experts on each rank in the place of a part of every expert."""
        names = {f"{found.path}.{name}" for found in experts for name in found.parameters}
        return replace(
            self,
            cuts={name: cut for name, cut in self.cuts.items() if name not in names},
            shared=self.shared - names,
            divided=self.divided - names,
            experts=tuple(experts),
        )

    def joined(self, *others: Plan) -> Plan:
        """One plan with the rules of all, in their order."""
        plans = (self, *others)
        return Plan(
            tuple(chain.from_iterable(plan.units for plan in plans)),
            tuple(chain.from_iterable(plan.splits for plan in plans)),
            {name: cut for plan in plans for name, cut in plan.cuts.items()},
            frozenset().union(*(plan.shared for plan in plans)),
            frozenset().union(*(plan.divided for plan in plans)),
            frozenset().union(*(plan.gathered for plan in plans)),
            {name: groups for plan in plans for name, groups in plan.selected.items()},
            {name: values for plan in plans for name, values in plan.attributes.items()},
            {name: heads for plan in plans for name, heads in plan.head_inputs.items()},
            tuple(chain.from_iterable(plan.vocabulary for plan in plans)),
            tuple(chain.from_iterable(plan.whole for plan in plans)),
            tuple(chain.from_iterable(plan.experts for plan in plans)),
            sequences=self.sequences,
        )

    def under(self, prefix: str) -> Plan:
        """The same rules for a module that stands at `prefix`."""

        def at(name: str) -> str:
            return f"{prefix}.{name}" if prefix and name else prefix or name

        return Plan(
            tuple(at(name) for name in self.units),
            tuple(replace(s, entries=tuple(map(at, s.entries)), exits=tuple(map(at, s.exits))) for s in self.splits),
            {at(name): cut for name, cut in self.cuts.items()},
            frozenset(map(at, self.shared)),
            frozenset(map(at, self.divided)),
            frozenset(map(at, self.gathered)),
            {at(name): groups for name, groups in self.selected.items()},
            {at(name): values for name, values in self.attributes.items()},
            {at(name): heads for name, heads in self.head_inputs.items()},
            tuple(map(at, self.vocabulary)),
            tuple(map(at, self.whole)),
            tuple(replace(found, path=at(found.path)) for found in self.experts),
        )
