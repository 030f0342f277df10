"""A model with an adapter seen without it: the same modules under the names that they have in the bare model.

PEFT puts a wrapper in the place of a layer and the layer inside (`q_proj` becomes `q_proj.base_layer`). What is about the
model alone (loading it, its initial values, the names of its checkpoint, its export) is done through the view, and so done to
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshtune.layout.pieces import aliases, set_aliases

if TYPE_CHECKING:
    from peft import LoraConfig

    from meshtune.models.adapters.section import AdapterSection

_ATTRIBUTE = "_meshtune_adapter"

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Adapter:
    """What has been put into a model.

    Attributes:
        section: `peft:` of the recipe.
        config: PEFT's own config, resolved: full names of targets, of an adapter that goes on what its files say.
        inner: where the module stands that was at a path before, of each that was wrapped: `a.q_proj` -> `a.q_proj.base_layer`.
        trained: names of the parameters that are trained, as the model has them, a tied one under each of its names.
        tensors: those of the whole model, each once.
        kept: names of further tensors that a checkpoint holds, since they cannot be had again.
    """

    section: AdapterSection
    config: LoraConfig
    inner: Mapping[str, str]
    trained: frozenset[str]
    tensors: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that was put into `model`, or None."""
    found: Adapter | None = model.__dict__.get(_ATTRIBUTE)
    return found


def remember(model: nn.Module, adapter: Adapter) -> None:
    """Say what has been put into `model`."""
    model.__dict__[_ATTRIBUTE] = adapter


def kept_of(model: nn.Module) -> Callable[[str], bool] | None:
    """Which tensors of `model` a checkpoint holds, by their names; None: all of them.

    Weights that an adapter leaves as they are come from where they came from.
    """
    adapter = adapter_of(model)
    return None if adapter is None else (adapter.trained | adapter.kept).__contains__


def inner_paths(model: nn.Module) -> Mapping[str, str]:
    """Bare path of each wrapped module -> its path in `model`. Empty without an adapter."""
    adapter = adapter_of(model)
    return {} if adapter is None else adapter.inner


def base_view(model: M) -> M:
    """A shallow copy of `model` in which what PEFT has wrapped stands bare; the model itself where nothing is wrapped.

    Modules and their parameters are the same objects: what is done to those of the view is done to the model's. Modules that
    this rank is without (of a pipeline) are left out.
    """
    view: Any = None
    copied: dict[str, nn.Module] = {}
    for path, inner in inner_paths(model).items():
        module = _at(model, inner)
        if module is None:
            continue
        if view is None:
            view = copied[""] = _shallow(model)
            view.__dict__.pop(_ATTRIBUTE, None)
            set_aliases(view, {_bare(model, name): _bare(model, first) for name, first in aliases(model).items()})
        *parents, name = path.split(".")
        parent, at = copied[""], ""
        for part in parents:
            at = f"{at}.{part}" if at else part
            if at not in copied:
                child = parent._modules[part]
                assert child is not None
                copied[at] = parent._modules[part] = _shallow(child)
            parent = copied[at]
        parent._modules[name] = module
    return model if view is None else cast(M, view)


def _bare(model: nn.Module, name: str) -> str:
    """What a parameter of `model` is called in the bare one."""
    path, _, leaf = name.rpartition(".")
    return next((f"{bare}.{leaf}" for bare, inner in inner_paths(model).items() if inner == path), name)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, or None where it, or one that it is in, is not on this rank. What stands there in its place may
    answer for its attributes: it is not asked."""
    module: nn.Module | None = model
    for name in path.split("."):
        if module is None:
            break
        module = module._modules.get(name)
    return module


def _shallow(module: nn.Module) -> nn.Module:
    """A copy with the same tensors and submodules. Of a module of FSDP2 it is of the class under that one: a copy has no state of
    FSDP2, and must not be asked for it."""
    kind: type = type(module)
    if issubclass(kind, FSDPModule):
        kind = next(base for base in kind.__mro__[1:] if not issubclass(base, FSDPModule))
    view: Any = object.__new__(kind)  # no constructor, of whatever class
    view.__dict__.update(module.__dict__)
    view.__dict__["_modules"] = dict(module._modules)
    return cast(nn.Module, view)
