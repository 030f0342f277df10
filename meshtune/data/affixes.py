"""What two texts share at their ends."""

from __future__ import annotations


def common_prefix(left: str, right: str) -> int:
    """Return the length of the longest common prefix, by bisection over slice comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(left: str, right: str) -> int:
    """Return the length of the longest common suffix."""
    return common_prefix(left[::-1], right[::-1])
