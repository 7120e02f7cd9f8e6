# SPDX-License-Identifier: Apache-2.0
"""What every kernel file needs to know: the machine and how to launch on a tensor's device."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from breccia.kernels.triton.recipes import Plan

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HW = not INTERPRETED  # instructions of a GPU; the interpreter computes their bits instead
# The instructions for FP8, of capability 8.9 and later. Without a GPU, code is compiled for one that has them.
FP8 = HW and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9))


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel there may begin before the one before it has ended (`launch_pdl`)."""
    return HW and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def along_rows(plan: Plan) -> bool:
    """Whether `cast` stores the scale of row m and block k at [k, m], as FP8 products read those of activations:
    float32 scales of 1 x 128 blocks."""
    fp8 = plan.element in ("e4m3", "e5m2") and plan.block == (1, 128)
    return fp8 and plan.rule == "divide" and plan.scale_dtype == torch.float32


def empty_along_rows(rows: int, blocks: int, device: Any) -> torch.Tensor:
    """Scales (rows, blocks) with unit stride along the rows, and blocks a multiple of 16 bytes apart for TMA."""
    return torch.empty_strided((rows, blocks), (1, -(-rows // 4) * 4), dtype=torch.float32, device=device)


def empty_parts(
    shape: tuple[int, ...], plan: Plan, device: Any, *, along: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes of a cast and for its scales; `along`: the latter as `along_rows` says."""
    rows, cols = shape
    codes = torch.empty((rows, (cols + 1) // 2 if plan.packed else cols), dtype=torch.uint8, device=device)
    blocks = -(-cols // plan.block[1])
    if along and along_rows(plan):
        return codes, empty_along_rows(rows, blocks, device)
    dtype = plan.scale_dtype if plan.rule in ("divide", "multiply", "asymmetric") else torch.uint8
    return codes, torch.empty((-(-rows // plan.block[0]), blocks), dtype=dtype, device=device)


def one_byte_scales(scale: torch.Tensor) -> torch.Tensor:
    """Their bytes, contiguous and where words of four can be viewed; no copy where that already holds."""
    scale = scale.view(torch.uint8).contiguous()
    return scale if scale.data_ptr() % 4 == 0 else scale.clone()


def constant(make: Any) -> torch.Tensor:
    """The tensor that `make` returns, to be kept: made by another thread, so that it lies in no pool of a CUDA graph
    that this one is about to capture, which would take it for a leak."""
    made: list[torch.Tensor] = []

    def run() -> None:
        made.append(make())
        if made[0].is_cuda:
            torch.cuda.current_stream(made[0].device).synchronize()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


class _Observer(threading.local):
    """Who hears of a thread's launches: None, or a function of (kernel, compiled, grid, args, options)."""

    launched: Any = None


observer = _Observer()


def launch_tiles(
    kernel: Any, pointers: Any, shape: Any, strides: Any, tile: tuple[int, int], *more: Any, **options: Any
) -> None:
    """Launches a program for each tile of a matrix: with the pointers, the matrix's rows and columns, strides, how many
    tiles are side by side, and `more`, or, where the kernel asks for ``tiles``, how many there are."""
    rows, cols = shape
    across = -(-cols // tile[1])
    tiles = across * -(-rows // tile[0])
    counted = (tiles,) if "tiles" in kernel.arg_names else ()
    launch(kernel, (tiles,), *pointers, rows, cols, *strides, across, *counted, *more, **options)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches on the device of its first tensor, whichever one is current; nothing where there is no program."""
    if 0 in grid:
        return
    like = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            compiled = kernel[grid](*args, **options)
    else:
        compiled = kernel[grid](*args, **options)
    if observer.launched is not None:
        observer.launched(kernel, compiled, grid, args, options)
