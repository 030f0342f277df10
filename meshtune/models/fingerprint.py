"""Which weights a run begins from: a hash of samples, for a run whose checkpoints do not hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshtune.models.source import Source

_SAMPLES = 64
_BYTES = 4096


def of_files(source: Source) -> str:
    """Of the weight files of `source`: their names, sizes, beginnings (where the table of tensors is), and blocks at equal
    distances. Of random weights, what they follow from beside the seed."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(source.model_class.__name__.encode())
    if not source.files:
        digest.update(source.config.to_json_string(use_diff=False).encode())
    for file in sorted(source.files):
        size = Path(file).stat().st_size
        digest.update(f"{Path(file).name} {size}".encode())
        with open(file, "rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(index * max(size - _BYTES, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_BYTES))
    return digest.hexdigest()


def of_tensors(weights: Mapping[str, Tensor]) -> str:
    """Of tensors in memory: their names, shapes and dtypes, and elements at equal distances."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        digest.update(flat[:: max(len(flat) // _BYTES, 1)].double().cpu().numpy().tobytes())
    return digest.hexdigest()
