"""What a checkpoint holds of model and optimizer: tensors by the names that the transformers model gives them.

A checkpoint of one layout loads into another because these names, and the shapes of whole tensors, are the same on all.
Learning rate, weight decay and other constants of the optimizer are not stored: they follow from the recipe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtune.checkpoint.part import Part
from meshtune.checkpoint.rows import Rows
from meshtune.layout.pieces import Piece, aliases, named_pieces
from meshtune.layout.wrapped import unwrapped
from meshtune.optim import kept as keeping
from meshtune.optim.averaging import IN_TRAINING, averaged

_MODEL, _OPTIMIZER = "model", "optimizer"


State = dict[str, Tensor]
Kept = Callable[[str], bool]


def model_state(model: nn.Module, kept: Kept | None = None) -> State:
    """`model.<name>` of every parameter and persistent buffer, or of those whose names are `kept`, sharing their memory.

    A tied tensor is there once, under the name of its origin, also where this rank has only a copy of it.
    """
    seen: set[int] = set()
    state: State = {}
    pieces, names = named_pieces(model), aliases(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (kept is None or kept(name)):
            seen.add(id(tensor))
            state[f"{_MODEL}.{names.get(name, name)}"] = _part(unwrapped(tensor.detach()), pieces.get(name))
    return state


def _part(tensor: Tensor, piece: Piece | None) -> Tensor:
    if piece is None:
        return tensor
    return Part(tensor.to_local() if piece.axis == "fsdp" and isinstance(tensor, DTensor) else tensor, piece)


class OptimizerState:
    """An optimizer's moments and counters under its parameters' names.

    Make it before the first step: after a validation the modules of FSDP2 may hold gathered parameters, which are not
    those that the optimizer knows.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        names, pieces = aliases(model), named_pieces(model)
        parameters = dict(model.named_parameters())
        self._names = {parameter: names.get(name, name) for name, parameter in parameters.items()}
        self._pieces = {parameter: pieces.get(name) for name, parameter in parameters.items()}

    def held(self) -> Held:
        """What there is of it now, sharing memory with the optimizer's state."""
        return Held(tuple(keeping.kept(self._optimizer)), self._names, self._pieces)

    def tensors(self) -> State:
        """`optimizer.<name>.<moment>`, see `held`."""
        return self.held().tensors()

    def make(self, stored: Iterable[str]) -> None:
        """Give the parameters whose moments are among the names `stored` some of their own, to be filled."""
        prefix = f"{_OPTIMIZER}."
        owners = {key.removeprefix(prefix).rpartition(".")[0] for key in stored if key.startswith(prefix)}
        keeping.make(self._optimizer, self._names, owners)

    @contextmanager
    def at_rest(self) -> Iterator[State]:
        """Inside, weights have the values that are to be kept and exported. Gives, under `optimizer.<name>.training_weight`,
        those that go on being trained where they are others."""
        with averaged(self._optimizer) as before:
            yield {
                f"{_OPTIMIZER}.{self._names[p]}.{IN_TRAINING}": self._like(values, p) for p, values in before.items()
            }

    def _like(self, values: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a tensor that is laid out as `parameter` is."""
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            values = DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
        return _part(values, self._pieces[parameter])


class Held:
    """The tensors of an optimizer's state at one time."""

    def __init__(
        self,
        tensors: Sequence[keeping.StateTensor],
        names: Mapping[nn.Parameter, str],
        pieces: Mapping[nn.Parameter, Piece | None],
    ):
        self._tensors, self._names, self._pieces = tensors, names, pieces

    def tensors(self) -> State:
        """`optimizer.<name>.<moment>`."""
        state: State = {}
        rows: dict[tuple[str, tuple[int, ...]], dict[int, Tensor]] = defaultdict(dict)
        for entry in self._tensors:
            name = f"{_OPTIMIZER}.{self._name(entry)}.{entry.key}"
            if entry.whole is not None:
                rows[name, entry.whole][entry.start] = entry.tensor
            else:
                piece = None if isinstance(entry.of, str) else self._pieces[entry.of]
                state[name] = _part(entry.tensor, piece if entry.tensor.ndim else None)
        return state | {name: Rows(whole, tensors) for (name, whole), tensors in rows.items()}

    def filled(self) -> None:
        """Call when the tensors were filled: numbers go back to where they are counted."""
        for entry in self._tensors:
            if entry.put is not None:
                entry.put(entry.tensor)

    def _name(self, entry: keeping.StateTensor) -> str:
        return entry.of if isinstance(entry.of, str) else self._names[entry.of]
