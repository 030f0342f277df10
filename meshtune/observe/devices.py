"""Peak arithmetic of accelerators, as their makers state it.

Dense figures (sparse ones halved) with float32 accumulation, in FLOP/s for one device as torch counts
devices. Sources: the NVIDIA data sheets of each product and, for GeForce, the tables of the Ampere GA102, Ada
and Blackwell architecture white papers; the AMD Instinct data sheets (an MI250X is two devices). fp32 of AMD
is the matrix figure."""

from __future__ import annotations

import re
from typing import Literal

PeakKind = Literal["bf16", "fp16", "tf32", "fp32"]

# Pattern of the device name -> TFLOP/s of (bf16, fp16, tf32, fp32); the first match counts.
_TFLOPS: tuple[tuple[str, tuple[float | None, float | None, float | None, float | None]], ...] = (
    (r"\bGB[23]00\b", (2500, 2500, 1250, 80)),
    (r"\bB[23]00\b", (2250, 2250, 1125, 75)),
    (r"\bH[12]00 NVL\b", (835, 835, 417.5, 60)),
    (r"\bH[18]00 PCIe\b", (756, 756, 378, 51)),
    (r"\b(GH200|H[128]00)\b", (989.4, 989.4, 494.7, 66.9)),
    (r"\bH20\b", (148, 148, 74, 44)),
    (r"\bA[18]00\b", (312, 312, 156, 19.5)),
    (r"\bA30\b", (165, 165, 82.5, 10.3)),
    (r"\bA40\b", (149.7, 149.7, 74.8, 37.4)),
    (r"\bA10G\b", (70, 70, 35, 35)),
    (r"\bA10\b", (125, 125, 62.5, 31.2)),
    (r"\bRTX A6000\b", (154.8, 154.8, 77.4, 38.7)),
    (r"\bL40S\b", (362, 362, 183, 91.6)),
    (r"\bL40\b", (181, 181, 90.5, 90.5)),
    (r"\bL4\b", (121, 121, 60, 30.3)),
    (r"\bRTX 6000 Ada\b", (364.2, 364.2, 182.1, 91.1)),
    (r"\bRTX 5090\b(?! (D|Laptop))", (209.5, 209.5, 104.8, 104.8)),
    (r"\bRTX 4090\b(?! (D|Laptop))", (165.2, 165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b(?! Ti)", (71, 71, 35.6, 35.6)),
    (r"\bV100S\b", (None, 130, None, 16.4)),
    (r"\bV100-PCIE\b", (None, 112, None, 14)),
    (r"\bV100\b", (None, 125, None, 15.7)),
    (r"\bT4\b", (None, 65, None, 8.1)),
    (r"\bMI355X\b", (2516.6, 2516.6, None, 157.3)),
    (r"\bMI350X\b", (2306.9, 2306.9, None, 144.2)),
    (r"\bMI3(00|25)X\b", (1307.4, 1307.4, 653.7, 163.4)),
    (r"\bMI250X\b", (191.5, 191.5, None, 47.9)),
    (r"\bMI250\b", (181, 181, None, 45.3)),
    (r"\bMI210\b", (181, 181, None, 45.3)),
)
_KINDS = ("bf16", "fp16", "tf32", "fp32")


def peak_of(device_name: str, kind: PeakKind | str) -> float | None:
    """FLOP/s of the device with this name; None where it is not known, for a slice of one (MIG) too."""
    if "MIG " in device_name:
        return None
    for pattern, tflops in _TFLOPS:
        if re.search(pattern, device_name):
            figure = tflops[_KINDS.index(kind)]
            return None if figure is None else figure * 1e12
    return None
