"""torchao's AdamW with moments of 8 or 4 bits.

It compiles its step for each shape of a tensor, which on a CPU takes a compiler and seconds to a minute; there it runs as
it is written, in a few milliseconds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["low_bit"]


def low_bit(kind: str) -> Any:
    """The class of torchao.optim called `kind`, whose step is compiled on accelerators alone."""
    import torchao.optim

    library: Any = getattr(torchao.optim, kind)

    class LowBit(library):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            devices = {p.device.type for group in self.param_groups for p in group["params"]}
            with torch.compiler.set_stance("force_eager" if devices <= {"cpu"} else "default"):
                super().step()

    return LowBit
