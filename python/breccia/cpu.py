# SPDX-License-Identifier: Apache-2.0
"""Which kernels run, and on how many threads."""

from __future__ import annotations

from typing import TypedDict

from breccia import _core


class CpuInfo(TypedDict):
    """What `cpu_info` returns."""

    backend: str
    supported: list[str]
    features: list[str]
    threads: int


def cpu_info() -> CpuInfo:
    """The backend in use, the backends this machine supports (slowest first), the instruction set
    extensions found and the number of threads a call may use."""
    return _core.cpu_info()


def set_backend(name: str) -> None:
    """Force a backend for the whole process, as the environment variable ``BRECCIA_CPU`` does at
    start-up; ``""`` goes back to the best one.

    Raises:
        ValueError: the name is unknown, or this machine cannot run that backend.
    """
    _core.set_backend(name)


def set_num_threads(count: int) -> None:
    """Threads a call may use, its own included. Results do not depend on it. The initial value is
    ``BRECCIA_NUM_THREADS`` or the number of processors the process may run on.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    _core.set_num_threads(count)


def num_threads() -> int:
    """Threads a call may use."""
    return _core.num_threads()
