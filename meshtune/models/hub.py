"""The model hub, which may not be reachable: found out in seconds, where its client would try again for minutes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

_PATIENCE_S = 5.0


@cache
def unreachable() -> str | None:
    """Why the hub cannot be asked, or None. One request a process, through the proxy that the environment names."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def local_files_only(location: str) -> bool:
    """Whether only what is on this machine may be looked at: a folder, or the hub's cache while the hub is unreachable."""
    return Path(location).is_dir() or unreachable() is not None


def reason(location: str, error: Exception) -> str:
    """Why `location` could not be loaded, in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "custom code" in text:
        return f"{text}; to run it write `trust_remote_code: true`"
    if Path(location).is_dir() or not isinstance(error, OSError):
        return text
    if (why := unreachable()) is not None:
        return f"no folder has this name, the hub's cache ({constants.HF_HUB_CACHE}) does not hold it, and {why}"
    return f"{text}; no folder has this name either"
