"""`torch.compile`, a block at a time: effective, or refused before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshtune.errors import ModelError

# Of one block's code. Kinds of layer, with and without a mask, one row and several, training and validation, multiply: torch's
# own limit of 8 is soon passed, and a block beyond it would run uncompiled.
_VARIANTS = 256


def compile_units(units: Sequence[nn.Module], device_type: str) -> None:
    """Compile each block in place; names stay. Raises ModelError if the compiler does not run on this machine.

    From then on, in this process, a block that meets more variants than torch would compile is an error.
    """
    from torch._dynamo import config

    _check_compiler(device_type)
    config.recompile_limit = _VARIANTS
    config.accumulated_recompile_limit = max(_VARIANTS, config.accumulated_recompile_limit)
    config.fail_on_recompile_limit_hit = True
    for unit in units:
        unit.compile(dynamic=True)


def _check_compiler(device_type: str) -> None:
    try:
        torch.compile(lambda x: torch.sin(x) + 1, fullgraph=True)(torch.ones(8, device=device_type))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"training.compile: torch.compile does not run on this machine's {device_type} "
            f"({reason[0] if reason else type(error).__name__}); write `compile: false`, or install a C++ compiler (CPU) "
            "or Triton (GPU)"
        ) from error
