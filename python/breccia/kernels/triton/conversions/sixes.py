# SPDX-License-Identifier: Apache-2.0
"""6-bit codes from four in three bytes to one per byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.runtime import launch

WORDS, WARPS = 1024, 4  # of a program; a word is four codes


@triton.jit
def unpack_kernel(packed_ptr, codes_ptr, count, BLOCK: tl.constexpr):
    """Word i of the codes from bytes 3 i to 3 i + 2."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    first = packed_ptr + 3 * at
    x = tl.load(first, mask=inside, other=0).to(tl.int32)
    x |= tl.load(first + 1, mask=inside, other=0).to(tl.int32) << 8
    x |= tl.load(first + 2, mask=inside, other=0).to(tl.int32) << 16
    spread = (x & 0x3F) | ((x & 0xFC0) << 2) | ((x & 0x3F000) << 4) | ((x & 0xFC0000) << 6)
    tl.store(codes_ptr + at, spread, mask=inside)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes ``(..., K)`` of bytes ``(..., 3 K / 4)``."""
    packed = packed.contiguous()
    codes = torch.empty((*packed.shape[:-1], packed.shape[-1] // 3 * 4), dtype=torch.uint8, device=packed.device)
    words = codes.numel() // 4
    grid = (triton.cdiv(words, WORDS),)
    launch(unpack_kernel, grid, packed, codes.view(torch.int32), words, BLOCK=WORDS, num_warps=WARPS)
    return codes
