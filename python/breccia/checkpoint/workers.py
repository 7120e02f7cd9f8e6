# SPDX-License-Identifier: Apache-2.0
"""Threads for the pieces of a tensor."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any

import numpy as np

from breccia.checkpoint.arguments import count_of

MAX_THREADS = 1 << 10
PIECE = 4 << 20  # bytes of output at a time: several fit in a cache, and writing them costs few calls


def runs(count: int, step: int = 1024) -> Iterator[slice]:
    """The rows of a matrix, so many at a time."""
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def thread_count(threads: int | None) -> int:
    """How many threads to use: as many as are asked for, else one per core. Raises TypeError where it is no integer,
    ValueError where it is below 1 or above 1,024."""
    return os.cpu_count() or 1 if threads is None else count_of(threads, "threads", MAX_THREADS)


class Workers:
    """Threads that turn pieces into bytes and write them, each with memory of its own."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or thread_count(None)
        self._pool = ThreadPoolExecutor(self.count)
        self._memory: queue.SimpleQueue[np.ndarray[Any, Any]] = queue.SimpleQueue()
        for _ in range(self.count):
            self._memory.put(np.empty(PIECE, np.uint8))

    def each(self, work: Callable[[Any, np.ndarray[Any, Any]], None], pieces: Iterator[Any]) -> None:
        """Run ``work(piece, memory)`` for every piece; the first error is raised.

        A single piece runs on the caller's thread: handing it over takes longer than copying a small tensor."""

        def run(piece: Any) -> None:
            memory = self._memory.get()
            try:
                work(piece, memory)
            finally:
                self._memory.put(memory)

        first = list(islice(pieces, 2))
        if len(first) < 2:
            for piece in first:
                run(piece)
            return
        running: deque[Future[None]] = deque()
        try:
            for piece in chain(first, pieces):
                running.append(self._pool.submit(run, piece))
                if len(running) > 2 * self.count:
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            _drain(running)

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown(cancel_futures=True)


def _drain(running: Iterable[Future[None]]) -> None:
    """Cancel what has not begun and wait for what has, whoever interrupts: it writes to a file that is closed
    next."""
    interrupted: KeyboardInterrupt | None = None
    for future in running:
        future.cancel()
    while True:
        try:
            wait(running)
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
