# SPDX-License-Identifier: Apache-2.0
"""Gradients of the weights of experts: products of FP8 codes summed over the rows of each expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.device.codecs import FP8, HW, as_hardware, decode_e8m0, decode_element
from breccia.kernels.triton.device.elements import ELEMENTS
from breccia.kernels.triton.runtime import launch


@triton.jit
def experts_gradient_kernel(
    a_ptr, b_ptr, as_ptr, bs_ptr, offset_ptr, out_ptr, M, N, R, a_scale, b_scale, m_tiles, n_tiles,
    ELEMENT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """out[e] = a[:, rows of e] · b[:, rows of e]^T, both with a scale for each square of 128."""
    tile = tl.program_id(0)
    expert = tile // (m_tiles * n_tiles)
    m = tile % (m_tiles * n_tiles) // n_tiles
    n = tile % n_tiles
    rows = m * SIDE + tl.arange(0, SIDE)
    cols = n * SIDE + tl.arange(0, SIDE)
    begin = tl.load(offset_ptr + expert).to(tl.int32)
    end = tl.load(offset_ptr + expert + 1).to(tl.int32)
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    for k0 in range(begin, end, 128):
        k = k0 + tl.arange(0, 128)
        a = tl.load(a_ptr + rows.to(tl.int64)[:, None] * R + k[None, :], mask=(rows < M)[:, None], other=0)
        b = tl.load(b_ptr + cols.to(tl.int64)[:, None] * R + k[None, :], mask=(cols < N)[:, None], other=0)
        if FP8:
            part = tl.dot(as_hardware(a, ELEMENT), tl.trans(as_hardware(b, ELEMENT)))
        elif HW:
            left = decode_element(a, ELEMENT).to(tl.bfloat16)
            part = tl.dot(left, tl.trans(decode_element(b, ELEMENT).to(tl.bfloat16)))
        else:
            part = tl.dot(decode_element(a, ELEMENT), tl.trans(decode_element(b, ELEMENT)))
        scale = decode_e8m0(tl.load(as_ptr + m * (SIDE // 128) * a_scale + k0 // 128))
        scale *= decode_e8m0(tl.load(bs_ptr + n * (SIDE // 128) * b_scale + k0 // 128))
        acc += part * scale
    to = out_ptr + (expert.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def experts_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    element: str = "e4m3",
) -> torch.Tensor:
    """(E, M, N): codes a (M, R) times codes b (N, R) transposed, for each e of columns offsets[e] to offsets[e + 1].

    Codes and E8M0 scales (M / 128, R / 128) and (N / 128, R / 128) are contiguous bytes; offsets are multiples of 128.
    """
    if a.is_cuda and element in ("e4m3", "e5m2") and torch.cuda.get_device_capability(a.device)[0] == 9:
        from breccia.kernels.triton.products import dense_matmul

        fp8 = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
        left, right = (scale.view(torch.float8_e8m0fnu).float() for scale in (a_scale, b_scale))
        return dense_matmul.experts_gradient(a.view(fp8), b.view(fp8), left, right, offsets, dtype)
    (m, r), n, experts = a.shape, b.shape[0], offsets.shape[0] - 1
    out = torch.empty((experts, m, n), dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    m_tiles, n_tiles = triton.cdiv(m, 128), triton.cdiv(n, 128)
    launch(
        experts_gradient_kernel, (experts * m_tiles * n_tiles,), a, b, a_scale, b_scale, offsets, out, m, n, r,
        a_scale.stride(0), b_scale.stride(0), m_tiles, n_tiles, ELEMENT=ELEMENTS[element], SIDE=128, num_warps=8,
        num_stages=3,
    )  # fmt: skip
    return out
