"""Other libraries' messages that no user can act on are left out; every other one is shown."""

from __future__ import annotations

import logging

from meshtune.observe.chatter import hush


def shown(name: str, message: str, *arguments: object) -> bool:
    """Whether the logger `name` hands the message on: where to, depends on what else has run in this process."""
    record = logging.LogRecord(name, logging.WARNING, __file__, 1, message, arguments, None)
    return bool(logging.getLogger(name).filter(record))


def test_only_what_is_known_to_mean_nothing_is_left_out() -> None:
    hush()
    hush()  # a command in this process may have said so before
    assert not shown("torchao", "Failed to load /somewhere/_C_mxfp8.so: Could not load this library: _C_mxfp8.so")
    assert shown("torchao", "this configuration is deprecated")
    kernels = "bitsandbytes.backends.cpu.ops"
    assert not shown(kernels, "Failed to load CPU gemm_4bit_forward from x: %s", "why")
    assert shown(kernels, "something else")
    assert len(logging.getLogger("torchao").filters) == 1
