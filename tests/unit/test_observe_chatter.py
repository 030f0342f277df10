"""Other libraries' messages that no user can act on are left out; every other one is shown."""

from __future__ import annotations

import logging

import pytest

from meshtune.observe.chatter import hush


def test_only_what_is_known_to_mean_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    hush()
    hush()  # a command in this process may have said so before
    torchao = logging.getLogger("torchao")
    torchao.warning("Failed to load /somewhere/_C_mxfp8.so: Could not load this library: _C_mxfp8.so")
    torchao.warning("this configuration is deprecated")
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward from x: %s", "why")
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("something else")
    assert capsys.readouterr().err.splitlines() == ["this configuration is deprecated", "something else"]
    assert len(torchao.filters) == 1
