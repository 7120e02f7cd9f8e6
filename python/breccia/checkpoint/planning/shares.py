# SPDX-License-Identifier: Apache-2.0
"""Dividing a list of costs into runs that cost about the same."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise


def shares(costs: list[int], parts: int) -> list[range]:
    """Runs of neighbours, as many as there are parts, of which the dearest costs as little as can be."""
    sums = [0, *accumulate(costs)]
    low, high = max(max(costs, default=0), -(-sums[-1] // parts)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _cuts(sums, parts, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(sums, parts, low)
    cuts += cuts[-1:] * (parts + 1 - len(cuts))
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _cuts(sums: list[int], parts: int, most: int) -> list[int]:
    """Where runs end that cost no more than ``most`` and take all they can; empty ones at the end are left out."""
    cuts = [0]
    while len(cuts) <= parts and cuts[-1] < len(sums) - 1:
        cuts.append(bisect_right(sums, sums[cuts[-1]] + most) - 1)
    return cuts
