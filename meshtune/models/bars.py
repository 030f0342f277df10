"""The progress bars that transformers shows while it loads: one for a model, where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from transformers.utils import logging


@contextmanager
def bars(most: int) -> Iterator[None]:
    """While open, at most so many bars are shown, on a terminal and on rank 0 alone; elsewhere they would only fill a log.

    Those that the user has switched off (`transformers.utils.logging`, HF_HUB_DISABLE_PROGRESS_BARS) stay off; a hook that the
    user has set is called for those that are shown.
    """
    left = most if sys.stderr.isatty() and (not dist.is_initialized() or dist.get_rank() == 0) else 0

    def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            return factory(*arguments, **{**named, "disable": True})
        return previous(factory, arguments, named) if previous is not None else factory(*arguments, **named)

    previous = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
