# SPDX-License-Identifier: Apache-2.0
"""Which kernels run on a GPU."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["GpuInfo", "gpu_info"]


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

    if triton.TRITON_AVAILABLE and _has_cuda():
        info: GpuInfo = triton.gpu_info(device)
        return info
    return GpuInfo(available=False, device="", capability="", torch="", triton="", kernels={})


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())
