# SPDX-License-Identifier: Apache-2.0
"""`breccia.transpose` on CUDA: codes move down by differences of exponents, in integers, byte for byte as in the core.

Layers of experts take it with rows in another order (`source`) and one scale for each square (`squares`), which is all
that a transpose has: its g rows of a square share theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.device.elements import ELEMENTS, Element
from breccia.kernels.triton.runtime import FP8, launch

SIDE, WARPS = 128, 8  # of a tile, in codes, and of a program


class Turned(NamedTuple):
    """Codes (K, M), scales (K, M / g) or (K / g, M / g), and two counts on the device, int64: values that are not what
    they were, and of those the zeros; None where nobody counts."""

    codes: torch.Tensor
    scale: torch.Tensor
    counts: torch.Tensor | None


@triton.jit
def moved_down(code, d, ELEMENT: tl.constexpr):
    """The code of a value times 2^-d, d >= 0: (code, whether it is another value, whether that is zero), of int32."""
    MANT: tl.constexpr = ELEMENT.mantissa
    magnitude = code & (ELEMENT.sign - 1)
    field = magnitude >> MANT
    significand = (magnitude & ((1 << MANT) - 1)) | tl.where(field > 0, 1 << MANT, 0)
    # Below the least exponent bits fall out: a carry makes the smallest normal code.
    shift = tl.minimum(tl.maximum(d + 1 - tl.maximum(field, 1), 1), MANT + 3)
    low = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    keeps = (d == 0) | (field > d)
    made = tl.where(keeps, magnitude - (d << MANT), low)
    special = magnitude < 0
    if ELEMENT.infinity != 0:
        special = magnitude >= ELEMENT.infinity
    elif ELEMENT.has_nan:
        special = magnitude == ELEMENT.sign - 1
    made = tl.where(special, magnitude, made)
    other = ((low << shift) != significand) & (keeps == 0) & (special == 0)
    return made | (code & ELEMENT.sign), other, other & (low == 0)


@triton.jit
def moved_down_by_halves(code, d, ELEMENT: tl.constexpr):
    """The code alone, of uint8, by the hardware's conversions of E4M3, two codes an instruction: float16 holds every
    bit of a value times 2^-d that decides its code, and where it has lost some the code is zero."""
    power = tl.where(d < 15, (15 - d) << 10, 1 << tl.maximum(24 - d, 0))
    power = tl.where(d > 24, 0, power).to(tl.int16).to(tl.float16, bitcast=True)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16) * power
    made = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where((code & 0x7F) == ELEMENT.nan, code, made)


@triton.jit
def transpose_kernel(
    code_ptr, scale_ptr, source_ptr, out_ptr, out_scale_ptr, count_ptr, M, N, code_stride, scale_row, scale_col,
    out_stride, out_scale_stride, ELEMENT: tl.constexpr, G: tl.constexpr, GATHER: tl.constexpr, SQUARES: tl.constexpr,
    COUNT: tl.constexpr, HALVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile a program. GATHER: row m is the source's row source_ptr[m], or of zeros where that is negative."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    blocks = tl.program_id(1) * (BN // G) + tl.arange(0, BN // G)
    there = rows < M
    source = rows.to(tl.int64)
    if GATHER:
        source = tl.load(source_ptr + rows, mask=there, other=-1).to(tl.int64)
        there = source >= 0
    inside = there[:, None] & (cols < N)[None, :]
    code = tl.load(code_ptr + source[:, None] * code_stride + cols[None, :], mask=inside, other=0)
    at = source[:, None] * scale_row + blocks.to(tl.int64)[None, :] * scale_col
    known = there[:, None] & (blocks * G < N)[None, :]
    exponent = tl.load(scale_ptr + at, mask=known, other=0).to(tl.int32)
    exponent = tl.where(known, exponent, -1)
    nan = exponent == 255
    numbers = tl.reshape(tl.where(nan, -1, exponent), [BM // G, G, BN // G])
    shared = tl.max(numbers, axis=1)  # [BM / G, BN / G]
    down = tl.maximum(tl.expand_dims(shared, 1) - tl.maximum(numbers, 0), 0)
    down = tl.expand_dims(tl.reshape(down, [BM, BN // G]), 2)
    code = tl.reshape(code, [BM, BN // G, G])
    poisoned = tl.expand_dims(nan, 2)
    if HALVES:
        made = moved_down_by_halves(code, down, ELEMENT)
    else:
        made, other, lost = moved_down(code.to(tl.int32), down, ELEMENT)
        other = other & (poisoned == 0)
        lost = lost & (poisoned == 0)
        made = made.to(tl.uint8)
    if ELEMENT.has_nan:
        made = tl.where(poisoned, tl.full([], ELEMENT.nan, tl.uint8), made)
    made = tl.reshape(made, [BM, BN])
    to_rows = tl.program_id(0) * BM + tl.arange(0, BM)
    to = out_ptr + cols.to(tl.int64)[:, None] * out_stride + to_rows[None, :]
    tl.store(to, tl.trans(made), mask=(cols < N)[:, None] & (to_rows < M)[None, :])
    some_nan = tl.max(tl.reshape(nan.to(tl.int32), [BM // G, G, BN // G]), axis=1) != 0
    stored = tl.where(shared >= 0, shared, tl.where(some_nan, 255, 0)).to(tl.uint8)
    bands = tl.program_id(0) * (BM // G) + tl.arange(0, BM // G)
    if SQUARES:
        to = out_scale_ptr + blocks.to(tl.int64)[None, :] * out_scale_stride + bands[:, None]
        tl.store(to, stored, mask=(bands * G < M)[:, None] & (blocks * G < N)[None, :])
    else:
        wide = tl.reshape(tl.broadcast_to(tl.expand_dims(stored, 2), [BM // G, BN // G, G]), [BM // G, BN])
        to = out_scale_ptr + cols.to(tl.int64)[None, :] * out_scale_stride + bands[:, None]
        tl.store(to, wide, mask=(bands * G < M)[:, None] & (cols < N)[None, :])
    if COUNT:
        tl.atomic_add(count_ptr, tl.sum(tl.sum(tl.sum(other.to(tl.int32), 2), 1), 0).to(tl.int64))
        tl.atomic_add(count_ptr + 1, tl.sum(tl.sum(tl.sum(lost.to(tl.int32), 2), 1), 0).to(tl.int64))


def takes(element: Element | None, group: int) -> bool:
    """Whether the kernel turns codes of that element in such blocks."""
    return element is not None and not element.is_integer and 8 <= group <= SIDE and group & (group - 1) == 0


def transpose(
    codes: torch.Tensor,
    scale: torch.Tensor,
    element: str,
    group: int,
    source: torch.Tensor | None = None,
    squares: bool = False,
    count: bool = True,
) -> Turned:
    """The transpose of codes (M, K) of unit stride along rows with E8M0 scales (M, K / g), as bytes; M and K are
    multiples of g. `source`: integers (R,), the rows to take in M's place, none where negative."""
    rows, cols = codes.shape[0] if source is None else source.shape[0], codes.shape[1]
    out = torch.empty((cols, rows), dtype=torch.uint8, device=codes.device)
    out_scale = torch.empty((cols // group if squares else cols, rows // group), dtype=torch.uint8, device=codes.device)
    counts = torch.zeros(2, dtype=torch.int64, device=codes.device) if count else None
    launch(
        transpose_kernel, (triton.cdiv(rows, SIDE), triton.cdiv(cols, SIDE)), codes, scale,
        codes if source is None else source, out, out_scale, out if counts is None else counts, rows, cols,
        codes.stride(0), *scale.stride(), out.stride(0), out_scale.stride(0), ELEMENT=ELEMENTS[element], G=group,
        GATHER=source is not None, SQUARES=squares, COUNT=count,
        HALVES=FP8 and element == "e4m3" and not count, BM=SIDE, BN=SIDE, num_warps=WARPS,
    )  # fmt: skip
    return Turned(out, out_scale, counts)
