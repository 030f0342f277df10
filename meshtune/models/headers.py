"""What a checkpoint's safetensors files say of their tensors, of which none is read."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from meshtune.errors import ModelError
from meshtune.models.quantization.stored import beside_weights

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def safetensors_header(file: Path, key: str = "model.name") -> dict[str, Any]:
    """Tensor name to its dtype, shape and offsets. Raises ModelError if the file, which the recipe names by `key`, is shorter or
    longer than it says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError(f"its header should be {length:,} bytes long, but the file has {size:,}")
            header = json.loads(stream.read(length))
    except (struct.error, ValueError) as error:
        raise ModelError(f"{key}: {file} is truncated or not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise ModelError(
            f"{key}: {file} is truncated or damaged: its header describes {end:,} bytes, but the file has {size:,}; "
            "fetch it again"
        )
    return header


def stored_dtypes(files: Iterable[str]) -> dict[str, torch.dtype | None]:
    """Every tensor of the safetensors files among `files`, and its dtype there if it is a floating one. What stands beside a
    quantised weight is a part of it."""
    return {name: _DTYPES.get(entry["dtype"]) for name, entry in _entries(files).items()}


def checkpoint_dtype(files: Iterable[str]) -> torch.dtype | None:
    """The floating dtype that most of a checkpoint's elements have, or None."""
    elements: Counter[torch.dtype] = Counter()
    for entry in _entries(files).values():
        if entry["dtype"] in _DTYPES:
            elements[_DTYPES[entry["dtype"]]] += math.prod(entry["shape"])
    return max(elements, key=elements.__getitem__, default=None)


def _entries(files: Iterable[str]) -> dict[str, Any]:
    found = {
        name: entry
        for file in files
        if file.endswith(".safetensors")
        for name, entry in safetensors_header(Path(file)).items()
    }
    parts = {name for beside in beside_weights(found).values() for name in beside.values()}
    return {name: entry for name, entry in found.items() if name not in parts}
