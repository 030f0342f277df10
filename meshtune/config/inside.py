"""Names that a file gives of its neighbours, which must not lead out of their folder."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath


def inside(folder: Path, name: str, links: bool = True) -> Path:
    """The file that an index or a manifest calls `name`, inside `folder`, which need not exist.

    With `links` false, the file must lie there too: no link on the way may lead out. Raises ValueError otherwise.
    """
    as_windows = PureWindowsPath(name)  # takes both kinds of separator
    if not name or "\0" in name or as_windows.drive or as_windows.root or ".." in as_windows.parts:
        raise ValueError(f"{name!r} is not the name of a file inside {folder}")
    path = folder / name
    if not links and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is a link that leads out of {folder}")
    return path
