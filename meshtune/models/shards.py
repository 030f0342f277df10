"""The safetensors files of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


class Shards:
    """Tensors collected into files of at most `max_bytes`, which are named once their number is known."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._pending_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a contiguous tensor that shares no memory with another."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self._bytes += size

    def close(self) -> None:
        """Write what is left, give every file its name, and write the index if there are several."""
        self._flush()
        count = len(self._files)
        weight_map = {}
        for index, names in enumerate(self._files):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{index}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index_json = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index_json)

    def _flush(self) -> None:
        save_file(self._pending, self.folder / f"part-{len(self._files)}", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def write_json(path: Path, values: dict[str, Any]) -> None:
    """`values` as transformers writes its JSON files."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
