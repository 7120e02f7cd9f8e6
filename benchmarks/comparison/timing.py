# SPDX-License-Identifier: Apache-2.0
"""A piece of work, those who can do it, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], Any]


@dataclass
class Work:
    """One row of the table.

    Args:
        group: "cast", "dequantize", "search", "requantize" or "matmul M=…".
        name: what is done, without who does it.
        runs: by contestant; "breccia" is the one the others are compared with.
        size: bytes read and written, or the floating point operations where `limit` counts those.
        limit: what bounds it, a key of the measured limits.
        memory: the contestants on operands taken in turn, more than the last-level cache holds.
        memory_limit: what bounds those.
        sizes: of contestants that are given less work than `size`; their times are scaled.
    """

    group: str
    name: str
    runs: dict[str, Run]
    size: float
    limit: str
    memory: dict[str, Run] = field(default_factory=dict)
    memory_limit: str = ""
    sizes: dict[str, float] = field(default_factory=dict)


SLOW = 2.0  # seconds; a call that takes longer is not repeated
BURST = 3  # calls to a turn: the first finds the caches full of the others' operands
TURNS = 4  # at least, and half as many of contestants whose calls are LONG: a slow spell outlasts a turn
LONG = 0.1


def best_times(contestants: dict[str, Run], seconds: float) -> dict[str, float]:
    """Seconds of each at its best, in turns, so that a slow spell of the machine falls on all. After a warming call a
    contestant has `seconds`, and TURNS turns at least; one whose calls are LONG has half of them, cut short.
    """
    times = {name: elapsed(run) for name, run in contestants.items()}
    waiting = [name for name, first in times.items() if first < SLOW]
    spent = dict.fromkeys(waiting, 0.0)
    times |= dict.fromkeys(waiting, float("inf"))
    turns = 0
    while waiting:
        for name in waiting:
            for _ in range(BURST):
                took = elapsed(contestants[name])
                times[name] = min(times[name], took)
                spent[name] += took
                if took >= LONG:
                    break
        turns += 1
        due = {name: TURNS if times[name] < LONG else TURNS // 2 for name in waiting}
        waiting = [name for name in waiting if spent[name] < seconds or turns < due[name]]
    return times


def elapsed(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def in_turn(run: Callable[[Any], Any], operands: Sequence[Any]) -> Run:
    """Calls `run` with the next operand each time."""
    count = 0

    def once() -> Any:
        nonlocal count
        count += 1
        return run(operands[count % len(operands)])

    return once


def measure(works: Sequence[Work], seconds: float) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Seconds by contestant, of `runs` and of `memory`, for works that are measured in one round: a contestant of
    several of them is timed once."""
    cached = {id(run): run for work in works for run in work.runs.values()}
    rotating = {id(run): run for work in works for run in work.memory.values()}
    times = _by_identity(cached, seconds) | _by_identity(rotating, seconds)

    def scaled(work: Work, runs: dict[str, Run]) -> dict[str, float]:
        return {name: times[id(run)] * work.size / work.sizes.get(name, work.size) for name, run in runs.items()}

    return [(scaled(work, work.runs), scaled(work, work.memory)) for work in works]


def _by_identity(runs: dict[int, Run], seconds: float) -> dict[int, float]:
    found = best_times({str(key): run for key, run in runs.items()}, seconds)
    return {int(key): value for key, value in found.items()}
