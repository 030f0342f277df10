"""The optimizers that a recipe can name: which library has them, which keys they read, and what of a tensor they need at once.

Light: a library is imported when its optimizer is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from meshtune.errors import Problem, RecipeError

if TYPE_CHECKING:
    import torch

    from meshtune.optim.regions import Scope
    from meshtune.optim.section import OptimizerSection

__all__ = ["METHODS", "Method", "check_installed"]

Groups = list[dict[str, Any]]
Make = Callable[["OptimizerSection", Groups, float], "torch.optim.Optimizer"]
Size = Callable[[tuple[int, ...], int], int]

ADAMW_BETAS = (0.9, 0.999)
ADAMW_EPS = 1e-8
# Devices on which torch has a fused AdamW; elsewhere it chooses between foreach and a loop.
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
# torch's own default is "original"; this one lets the rate and the decay that suit AdamW suit both (arXiv 2502.16982).
MUON_ADJUST_LR = "match_rms_adamw"


@dataclass(frozen=True)
class Method:
    """One optimizer.

    Attributes:
        make: from section, groups and learning rate.
        keys: those of the section that it reads beside `weight_decay` and `groups`.
        scope: what of a tensor it updates at once; None: each element by itself, on whatever part a rank holds.
        numbers: keys of its groups that change as it goes.
        size: bytes of what it keeps for a tensor, by the tensor's shape and the bytes of an element, where it has a scope.
        library: what has to be installed for it.
    """

    make: Make
    keys: frozenset[str]
    scope: Scope | None = None
    numbers: tuple[str, ...] = ()
    size: Size = field(default=lambda shape, itemsize: 0)
    library: Library | None = None


@dataclass(frozen=True)
class Library:
    """A package that not every installation has, and the extra that brings it."""

    module: str
    extra: str


def check_installed(name: str) -> None:
    """Raises RecipeError if the library of the optimizer `name` is not installed, saying how to get it."""
    method = METHODS[name]
    if method.library is not None and find_spec(method.library.module) is None:
        message = f"{name} needs a package that is not installed: pip install 'meshtune[{method.library.extra}]'"
        raise RecipeError([Problem("optimizer.name", message)])


def adamw(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    """torch's, with its fused kernel where every parameter is on a device that has one: on CPU a third of the loop's time."""
    import torch

    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters) or None
    betas, eps = section.betas or ADAMW_BETAS, ADAMW_EPS if section.eps is None else section.eps
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=fused)


def _sgd(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=rate, momentum=section.momentum or 0.0, nesterov=bool(section.nesterov))


def _muon(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Muon(
        groups,
        lr=rate,
        momentum=0.95 if section.momentum is None else section.momentum,
        nesterov=section.nesterov is not False,
        adjust_lr_fn=section.adjust_lr or MUON_ADJUST_LR,
    )


def _adafactor(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    import torch

    given = {"beta2_decay": section.decay_rate, "d": section.clip_threshold}
    return torch.optim.Adafactor(groups, lr=rate, **_set(given))


def _lion(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lion

    optimizer: torch.optim.Optimizer = Lion(groups, lr=rate, **_set({"betas": section.betas}))
    return optimizer


def _soap(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    given = {key: getattr(section, key) for key in METHODS["soap"].keys}
    return SOAP(groups, lr=rate, **_set(given))


def _schedule_free(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import ScheduleFreeAdamW

    from meshtune.optim.averaging import Averaging

    class ScheduleFree(Averaging, ScheduleFreeAdamW):
        """The library's, whose averaged weights can be lent."""

    return ScheduleFree(groups, lr=rate, **_set({"betas": section.betas, "eps": section.eps}))


def _low_bit(kind: str) -> Make:
    def make(section: OptimizerSection, groups: Groups, rate: float) -> torch.optim.Optimizer:
        from meshtune.optim.low_bit import low_bit

        betas, eps = section.betas or ADAMW_BETAS, ADAMW_EPS if section.eps is None else section.eps
        return low_bit(kind)(groups, lr=rate, betas=betas, eps=eps)

    return make


def _set(values: dict[str, Any]) -> dict[str, Any]:
    """Those that a recipe sets; the others are the library's."""
    return {key: value for key, value in values.items() if value is not None}


def _one_moment(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize


def _rows_and_columns(shape: tuple[int, ...], itemsize: int) -> int:
    if len(shape) < 2:
        return math.prod(shape) * itemsize
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1]) * itemsize


def _eigenbases(shape: tuple[int, ...], itemsize: int) -> int:
    stack, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    bases = 2 * sum(n * n for n in matrix if n <= 10_000) if len(matrix) > 1 else 0
    return (2 * math.prod(shape) + stack * bases) * itemsize


def _bits(each: int, block: int) -> Size:
    """Two moments of so many bits, with a float32 scale for each block."""

    def size(shape: tuple[int, ...], itemsize: int) -> int:
        elements = math.prod(shape)
        quantised = elements >= 4096 and elements % block == 0
        return 2 * (elements * each // 8 + elements // block * 4) if quantised else 2 * elements * itemsize

    return size


_ADAM = frozenset({"betas", "eps"})
_OPTIMIZERS = Library("pytorch_optimizer", "optimizers")
_TORCHAO = Library("torchao", "torchao")

METHODS: dict[str, Method] = {
    "adamw": Method(adamw, _ADAM),
    "sgd": Method(_sgd, frozenset({"momentum", "nesterov"})),
    "adafactor": Method(
        _adafactor, frozenset({"decay_rate", "clip_threshold"}), scope="tensors", size=_rows_and_columns
    ),
    "muon": Method(_muon, _ADAM | {"momentum", "nesterov", "adjust_lr"}, scope="matrices", size=_one_moment),
    "lion": Method(_lion, frozenset({"betas"}), library=_OPTIMIZERS),
    "soap": Method(
        _soap,
        _ADAM | {"precondition_frequency"},
        scope="matrices",
        numbers=("step",),
        size=_eigenbases,
        library=_OPTIMIZERS,
    ),
    "schedule_free_adamw": Method(_schedule_free, _ADAM, library=_OPTIMIZERS),
    "adamw_8bit": Method(_low_bit("AdamW8bit"), _ADAM, scope="blocks", size=_bits(8, 256), library=_TORCHAO),
    "adamw_4bit": Method(_low_bit("AdamW4bit"), _ADAM, scope="blocks", size=_bits(4, 128), library=_TORCHAO),
}
