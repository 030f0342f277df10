"""The arithmetic of a merge: what an adapter makes of each weight of the model under it.

All of it is done in float32, as `W + s * (B @ A)`; rounding to the export's dtype comes once, at the end. Rounding the product
first gives other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshtune.errors import ModelError
from meshtune.models.adapters.files import NAME
from meshtune.models.adapters.view import inner_paths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MERGED = "merged.json"
"""The record of a merge, in the folder of its model."""

Change = Callable[[Tensor], Tensor]
"""From a weight in float32 to what it is with the adapter, in float32."""


@dataclass(frozen=True)
class LowRank:
    """`W + scale * (B @ A)`, of a layer's weight as PEFT lays it out.

    Attributes:
        a: [r, in], of an embedding [r, vocabulary], of E experts [E * r, in] with an expert's rows together.
        b: [out, r], of an embedding [hidden, r], of experts [out, r * E] with a rank's columns together.
        scale: alpha / r, or alpha / sqrt(r).
        transposed: the weight is [in, out] (Conv1D, an embedding, some experts).
        experts: how many there are in the weight; None of a weight without that dimension.
        magnitude: [out], of DoRA.
        began: A and B as they began, where the weight that was trained with is the rest, in the dtype `held`.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False
    experts: int | None = None
    magnitude: Tensor | None = None
    began: tuple[Tensor, Tensor] | None = None
    held: torch.dtype = torch.float32

    def __call__(self, weight: Tensor) -> Tensor:
        if self.began is not None:
            weight = (weight - self._product(*self.began)).to(self.held).float()
        changed = weight + self._product(self.a, self.b)
        if self.magnitude is None:
            return changed
        out = 1 if self.transposed else 0
        norm = torch.linalg.norm(changed, dim=1 - out, keepdim=True)
        shape = (1, -1) if self.transposed else (-1, 1)
        return self.magnitude.float().view(shape) / norm * changed

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """In float32 and in the weight's shape."""
        a, b = a.float(), b.float()
        if self.experts is None:
            product = b @ a
            return (product.T if self.transposed else product) * self.scale
        a = a.reshape(self.experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.experts)
        return torch.einsum("ore,eri->eio" if self.transposed else "ore,eri->eoi", b, a) * self.scale


@dataclass(frozen=True)
class Rows:
    """Some rows replaced: tokens that were trained."""

    indices: tuple[int, ...]
    values: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        return weight.index_copy(0, torch.tensor(self.indices), self.values.float())


@dataclass(frozen=True)
class InTurn:
    """What several changes do, one after another."""

    changes: tuple[Change, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        for change in self.changes:
            weight = change(weight)
        return weight


@dataclass(frozen=True)
class Whole:
    """A tensor that was trained whole."""

    value: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        return self.value.float()


@dataclass(frozen=True)
class Part:
    """An adapter on its way into a model.

    Attributes:
        name: where it came from, for the record.
        changes: by the names of the bare model.
        weight: how much of it is taken: 1 is all.
    """

    name: str
    changes: Mapping[str, Change]
    weight: float = 1.0

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        change = self.changes.get(name)
        if change is None or self.weight == 1:
            return weight if change is None else change(weight)
        if isinstance(change, LowRank) and change.magnitude is None and change.began is None:
            return replace(change, scale=self.weight * change.scale)(weight)
        return weight + self.weight * (change(weight) - weight)


class Merging:
    """Adapters merged one after another, each into what those before it have left."""

    def __init__(self, parts: Sequence[Part], base: Mapping[str, Any]):
        """`base` says for the record what was merged into."""
        self._parts, self._base = parts, base
        self.names = {name for part in parts for name in part.changes}
        self.changed = self.lost = 0

    def __call__(self, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """`state` with its changed tensors in float32. Counts what rounding them to `dtype` takes back."""
        return {name: self._merged(name, tensor, dtype) for name, tensor in state.items()}

    def _merged(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if name not in self.names:
            return tensor
        merged = before = tensor.float()
        for part in self._parts:
            merged = part(name, merged)
        moved = merged != before
        self.changed += int(moved.sum())
        self.lost += int((moved & (merged.to(dtype) == before.to(dtype))).sum())
        return merged

    def untied(self, model: PreTrainedModel) -> set[str]:
        """Names of tied tensors that are no longer equal, all of each group."""
        groups: dict[str, set[str]] = {}
        for target, origin in model.all_tied_weights_keys.items():
            groups.setdefault(origin, {origin}).add(target)
        return {name for names in groups.values() if not self._alike(names) for name in names}

    def _alike(self, names: Iterable[str]) -> bool:
        first, *others = ([part.changes.get(name) for part in self._parts] for name in names)
        return all(_same(one, two) for other in others for one, two in zip(first, other, strict=True))

    def record(self) -> dict[str, Any]:
        """What was merged into what."""
        adapters = [{"adapter": part.name, "weight": part.weight} for part in self._parts]
        return {"base": dict(self._base), "adapters": adapters, "changed": self.changed, "lost_to_rounding": self.lost}


def _same(one: Change | None, other: Change | None) -> bool:
    """Whether two changes do the same: only rows that are trained once for both ends of a tied weight do."""
    if one is None or other is None:
        return one is other
    return isinstance(one, Rows) and isinstance(other, Rows) and one.values is other.values


def changes(model: nn.Module, tensors: Mapping[str, Tensor], held: torch.dtype = torch.float32) -> dict[str, Change]:
    """What an adapter does, by the names of the bare model: `tensors` are its own, whole, by the names of `model`, in which it
    was put (on meta is enough). `held` is the dtype of the frozen weights that it was trained with.

    Raises ModelError for a layer of PEFT's that is of another kind.
    """
    found: dict[str, Change] = {}
    for path in inner_paths(model):
        for name, change in _of_layer(model.get_submodule(path), path, path, tensors, held):
            found[name] = change
    return found


def _of_layer(
    wrapper: Any, path: str, bare: str, tensors: Mapping[str, Tensor], held: torch.dtype
) -> Iterator[tuple[str, Change]]:
    """`wrapper` stands at `path`, around the layer that the bare model has at `bare`."""
    from peft.tuners.lora import Embedding, Linear, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(wrapper, ParamWrapper):
        inner, below = wrapper.base_layer, f"{path}.base_layer"
        if isinstance(inner, ParamWrapper):
            yield from _of_layer(inner, below, bare, tensors, held)
        yield f"{bare}.{wrapper.parameter_name}", _of_experts(wrapper, path, tensors)
    elif isinstance(wrapper, Embedding):
        a, b = (tensors[f"{path}.lora_embedding_{matrix}.{NAME}"] for matrix in "AB")
        yield f"{bare}.weight", LowRank(a, b, wrapper.scaling[NAME], True, magnitude=_magnitude(path, tensors))
    elif isinstance(wrapper, Linear):
        a, b = (tensors[f"{path}.lora_{matrix}.{NAME}.weight"] for matrix in "AB")
        across, magnitude = bool(wrapper.fan_in_fan_out), _magnitude(path, tensors)
        began = [tensors.get(f"{path}.lora_{matrix}.{NAME}.initial") for matrix in "AB"]
        beginning = None if began[0] is None or began[1] is None else (began[0], began[1])
        own: Change = LowRank(a, b, wrapper.scaling[NAME], across, magnitude=magnitude, began=beginning, held=held)
        if isinstance(inner := wrapper.base_layer, TrainableTokensWrapper):  # of a head that is tied to the embedding
            own = InTurn((_of_tokens(inner, f"{path}.base_layer", tensors), own))
        yield f"{bare}.weight", own
    elif isinstance(wrapper, ModulesToSaveWrapper):
        for name, _ in wrapper.modules_to_save[NAME].named_parameters():
            yield f"{bare}.{name}", Whole(tensors[f"{path}.modules_to_save.{NAME}.{name}"])
    elif isinstance(wrapper, TrainableTokensWrapper):
        yield f"{bare}.weight", _of_tokens(wrapper, path, tensors)
    else:
        raise ModelError(f"{path} is a {type(wrapper).__name__} of PEFT, which cannot be merged")


def _magnitude(path: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    return tensors.get(f"{path}.lora_magnitude_vector.{NAME}.weight")


def _of_experts(wrapper: Any, path: str, tensors: Mapping[str, Tensor]) -> LowRank:
    a, b = (tensors[f"{path}.lora_{matrix}.{NAME}.weight"] for matrix in "AB")
    stacked = wrapper.get_param().ndim == 3
    transposed = stacked and bool(getattr(wrapper.get_base_layer(), "is_transposed", False))
    return LowRank(a, b, wrapper.scaling[NAME], transposed, wrapper.num_experts if stacked else None)


def _of_tokens(wrapper: Any, path: str, tensors: Mapping[str, Tensor]) -> Rows:
    """A head that is tied to the embedding is trained through the embedding's rows."""
    indices = tuple(wrapper.token_adapter.token_indices[NAME])
    name = f"{path}.token_adapter.trainable_tokens_delta.{NAME}"
    if name not in tensors:
        (name,) = (other for other in tensors if other.endswith(f".trainable_tokens_delta.{NAME}"))
    return Rows(indices, tensors[name])
