"""Forward passes of an adapter's layers in the place of PEFT's own. Imports PEFT: import this module only where there is one."""

from __future__ import annotations

from torch import nn

from meshtune.layout import Layout, Plan
from meshtune.models.adapters.stacked import use_own_stacked
from meshtune.models.adapters.tokens import place_rows, use_own_rows
from meshtune.models.adapters.variant import place_forwards, use_own_forwards


def use_own_layers(model: nn.Module) -> None:
    """Give the layers that PEFT has put into a whole `model` these forwards. Names of tensors stay."""
    use_own_forwards(model)
    use_own_rows(model)
    use_own_stacked(model)


def place_layers(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Tell them how `model` has been cut, by `plan` with its adapter."""
    place_forwards(model, plan, layout)
    place_rows(model, layout)
