"""The most memory that this process has held."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device | str) -> int | None:
    """Peak memory in bytes: what the allocator of a CUDA, ROCm or XPU device held at most, elsewhere (CPU,
    Apple's unified memory) the peak resident set of the process. None where the system does not tell."""
    if str(device).split(":")[0] in ("cuda", "xpu"):
        import torch

        return int(torch.get_device_module(device).max_memory_allocated(device))
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int | None:
    if sys.platform == "win32":
        return _peak_working_set_bytes()
    return _linux_high_water_bytes() or _rusage_bytes()


def _linux_high_water_bytes() -> int | None:
    """`VmHWM`: unlike `ru_maxrss` it does not start with the peak of the process that launched this one."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kib[0]) * 1024 if kib else None


def _rusage_bytes() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2) counts in KiB on Linux and the BSDs, in bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_working_set_bytes() -> int | None:
    """`PROCESS_MEMORY_COUNTERS.PeakWorkingSetSize` of the Windows API."""
    import ctypes
    from ctypes import wintypes

    sizes = ("PeakWorkingSetSize", "WorkingSetSize", "QuotaPeakPagedPoolUsage", "QuotaPagedPoolUsage")
    pool = ("QuotaPeakNonPagedPoolUsage", "QuotaNonPagedPoolUsage", "PagefileUsage", "PeakPagefileUsage")

    class Counters(ctypes.Structure):
        _fields_ = (
            ("cb", wintypes.DWORD),
            ("PageFaultCount", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in (*sizes, *pool)),
        )

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    query = kernel.K32GetProcessMemoryInfo
    query.argtypes = (wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD)
    if not query(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        return None
    return int(counters.PeakWorkingSetSize)
