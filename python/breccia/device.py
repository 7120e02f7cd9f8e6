# SPDX-License-Identifier: Apache-2.0
"""Which kernels run on the CPU, on how many threads, and which on a GPU."""

from __future__ import annotations

import operator
from typing import TypedDict

from breccia import _core


class CoreInfo(TypedDict):
    """What the core says of itself."""

    backend: str
    supported: list[str]
    left_out: list[str]
    features: list[str]
    threads: int


class CpuInfo(CoreInfo):
    """What `cpu_info` returns."""

    kernels: dict[str, dict[str, str]]


def cpu_info() -> CpuInfo:
    """What runs on this machine.

    Returns:
        ``backend`` in use; ``supported`` backends, slowest first; ``left_out``, those that the machine
        could run, had the build not left them out; instruction set ``features`` found; ``threads`` a
        call may use; and ``kernels``: for each recipe of a weight and kind of activations
        ("INT4Scaling x bfloat16", prepared or not) the kernel by their number, as the backend's table of
        docs/kernels.md chooses it.
    """
    kernels: dict[str, dict[str, str]] = {}
    for recipe, activations, prepared, rows, kernel in _core.matmul_kernels():
        name = f"{recipe}{', prepared' if prepared else ''} x {activations}"
        kernels.setdefault(name, {})[f"M = {rows}"] = kernel
    return {**_core.cpu_info(), "kernels": kernels}


def set_backend(name: str) -> None:
    """Force a backend for the whole process, as the environment variable ``BRECCIA_CPU`` does at
    start-up; ``""`` goes back to the best one.

    Args:
        name: one of ``cpu_info()["supported"]``, or "".

    Raises:
        ValueError: the name is unknown, or this machine cannot run that backend.
    """
    _core.set_backend(name)


def set_num_threads(count: int) -> None:
    """Threads a call may use, its own included. Results do not depend on it. The initial value is
    ``BRECCIA_NUM_THREADS`` or the number of processors the process may run on.

    Args:
        count: at least 1.

    Raises:
        TypeError: ``count`` is not an integer.
        ValueError: ``count`` is less than 1.
    """
    try:
        count = operator.index(count)
    except TypeError:
        raise TypeError(f"count must be an integer, got {count!r}") from None
    _core.set_num_threads(count)


def num_threads() -> int:
    """Threads a call may use."""
    return _core.num_threads()


class GpuInfo(TypedDict):
    """What `gpu_info` returns. `kernels`: verb -> what runs it; empty where ``available`` is False."""

    available: bool
    device: str
    capability: str
    torch: str
    triton: str
    kernels: dict[str, str]


def gpu_info(device: int = 0) -> GpuInfo:
    """The sibling of `breccia.cpu_info`: the CUDA device and the kernels that run on it. ``available`` is False
    where torch, Triton or a CUDA device of capability 8.0 is missing; CUDA tensors are then handled by torch's own
    operations.

    Args:
        device: its number.

    Returns:
        What the device is and which kernels it takes.

    Raises:
        ValueError: there is no CUDA device of that number.
    """
    from breccia.kernels import triton

    if triton.TRITON_AVAILABLE:
        import torch

        if torch.cuda.is_available():
            info: GpuInfo = triton.gpu_info(device)
            return info
    return GpuInfo(available=False, device="", capability="", torch="", triton="", kernels={})
