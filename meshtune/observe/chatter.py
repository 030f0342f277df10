"""What other libraries say when they are imported and no user can act on."""

from __future__ import annotations

import logging
import re

# Of each logger, only what begins or goes on like this. torchao names compiled parts for devices that this machine has not (who
# calls one of them gets an error that says so); bitsandbytes a kernel for inference; torch an Enum that torchao registers.
_KNOWN = {
    "torchao": r"Failed to load .*\.so: ",
    "torch.utils._pytree": r".* is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward",
}


def hush() -> None:
    """Leave out what is known to mean nothing here, and nothing else. Call it before these libraries are imported."""
    for name, pattern in _KNOWN.items():
        logger, known = logging.getLogger(name), _Known(re.compile(pattern, re.DOTALL))
        if not any(isinstance(present, _Known) for present in logger.filters):
            logger.addFilter(known)


class _Known(logging.Filter):
    def __init__(self, pattern: re.Pattern[str]):
        super().__init__()
        self.pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None
