"""Which ranks did not come when the others had waited for them for too long."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import torch.distributed as dist

_ANSWER_S = 3.0
"""How long ranks have to say that they waited, too. Those of one collective lose patience together, and where one of them leaves,
the next ones notice at once."""
_LOOK_AGAIN_S = 0.1


def wait_at_most(minutes: float) -> None:
    """Set how long a rank waits for others in any collective of the groups that there are now, in place of torch's own limits: 10
    minutes for NCCL, 30 for gloo."""
    world = dist.distributed_c10d
    for group in list(world._world.pg_map):
        if not world._rank_not_in_group(group):
            world._set_pg_timeout(timedelta(minutes=minutes), group)


def absent_ranks(in_vain: bool) -> list[int]:
    """To be called on every rank whose collective has failed: those that do not call it, too, within some seconds. What they do
    instead nobody knows. Empty where the ranks' store has gone with one of them, and for a rank that has not waited `in_vain`,
    which only tells the others that it was there.
    """
    found: list[int] = []
    if not dist.is_initialized():
        return found
    asking = threading.Thread(target=_ask, args=(found, in_vain), daemon=True)
    asking.start()
    asking.join(2 * _ANSWER_S)  # a store whose host hangs, too, never answers
    return found


def _ask(found: list[int], in_vain: bool) -> None:
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(dist.get_rank()), "1")
        missing = list(range(dist.get_world_size())) if in_vain else []
        deadline = time.monotonic() + _ANSWER_S
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([_key(rank)])]
            time.sleep(_LOOK_AGAIN_S)
        found.extend(missing)


def _key(rank: int) -> str:
    return f"meshtune/was there/{rank}"
