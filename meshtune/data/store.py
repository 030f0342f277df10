"""The cache of tokenised data: a folder named by everything that decides its content, complete or absent,
verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from meshtune.data.dataset import TokenDataset
from meshtune.data.encoding import Encoded, Flags, Tokens
from meshtune.data.report import DataReport
from meshtune.errors import DataError

_MANIFEST = "manifest.json"
_ARRAYS = ("input_ids.bin", "supervised.bin", "offsets.bin")
_BLOCK = 1 << 22


def cache_folder(chosen: str | os.PathLike[str] | None) -> Path:
    """Return the folder for tokenised data: the chosen one, or under `MESHTUNE_CACHE`, or ~/.cache."""
    if chosen is not None:
        return Path(chosen)
    root = os.environ.get("MESHTUNE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "meshtune") / "data"


def load(folder: Path, *, whole: bool = True, say: Callable[[str], None] | None = None) -> TokenDataset | None:
    """Return the data set of a cache folder, or None if it is absent, incomplete or not what was written.

    `whole`: read every byte and compare it with what was written. Otherwise only the sizes are compared, for a rank whose
    neighbour has just read it all. `say` is told which file of a complete folder is not what was written.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        report = DataReport.from_dict(manifest["report"])
        for name in _ARRAYS:
            if wrong := _damage(folder / name, manifest["files"][name], whole):
                if say is not None:
                    say(f"{folder / name}: {wrong}")
                return None
        return TokenDataset(folder, manifest["fingerprint"], report)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _damage(file: Path, written: dict[str, Any], whole: bool) -> str:
    """Return what is wrong with a file; "" if nothing is."""
    if not file.exists():
        return "is missing"
    if (size := file.stat().st_size) != written["bytes"]:
        return f"has {size:,} bytes, of which {written['bytes']:,} were written"
    if whole and _digest(file) != written["blake2b"]:
        return "holds other bytes than were written"
    return ""


class Writer:
    """Appends documents to a temporary folder beside the final one; `publish` moves it into place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
        except OSError as error:
            raise DataError(
                f"the data cache {folder.parent} cannot be written ({error}); set MESHTUNE_CACHE to one that can"
            ) from error
        self._input_ids = (self._temporary / _ARRAYS[0]).open("wb")
        self._supervised = (self._temporary / _ARRAYS[1]).open("wb")
        self.lengths: list[int] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._input_ids.close()
        self._supervised.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def append(self, documents: Iterable[Encoded]) -> None:
        """Write documents after those written before."""
        for document in documents:
            self.write(document.input_ids, document.supervised, [len(document.input_ids)])

    def write(self, input_ids: Tokens, supervised: Flags, lengths: Sequence[int]) -> None:
        """Write documents that lie one after the other in `input_ids` [T] and `supervised` [T], by their lengths."""
        self._input_ids.write(np.ascontiguousarray(input_ids, dtype=np.int32).data)
        self._supervised.write(np.ascontiguousarray(supervised, dtype=np.bool_).data)
        self.lengths += lengths

    def publish(self, report: DataReport) -> TokenDataset:
        """Complete the folder, move it into place and open it. A complete folder made meanwhile by others is
        kept.
        """
        self._input_ids.close()
        self._supervised.close()
        np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64).tofile(self._temporary / _ARRAYS[2])
        together = hashlib.blake2b(digest_size=16)
        files = {
            name: {
                "bytes": (self._temporary / name).stat().st_size,
                "blake2b": _digest(self._temporary / name, together),
            }
            for name in _ARRAYS
        }
        manifest = {"fingerprint": together.hexdigest(), "files": files, "report": report.as_dict()}
        (self._temporary / _MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
        for _ in range(3):  # another process may put its folder there between the look and the move
            dataset = load(self.folder)
            if dataset is not None:
                return dataset
            if _moved(self._temporary, self.folder):
                return TokenDataset(self.folder, together.hexdigest(), report)
        raise DataError(f"the data cache {self.folder} cannot be written; remove it, or set MESHTUNE_CACHE")


def _moved(source: Path, target: Path) -> bool:
    """Move a folder, and tell whether that was possible."""
    try:
        os.replace(source, target)
        return True
    except OSError:  # the target holds something: put it aside (load has found it unusable) and try again
        aside = Path(tempfile.mkdtemp(prefix=".broken-", dir=target.parent))
        with contextlib.suppress(OSError):  # another process may have put it aside first
            os.replace(target, aside / target.name)
        shutil.rmtree(aside, ignore_errors=True)
        return False


def _digest(file: Path, together: Any = None) -> str:
    """Return the hash of a file; `together` is the one of all files, to which it is added with its name."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
            if together is not None:
                together.update(block)
    if together is not None:
        together.update(file.name.encode())
    return digest.hexdigest()
