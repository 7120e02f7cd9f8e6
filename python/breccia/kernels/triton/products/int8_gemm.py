# SPDX-License-Identifier: Apache-2.0
"""INT8 by INT8 products in plain Triton, for GPUs without `hopper_dense`: sums in int32, zero points and scales at the
end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.products.code_sums import code_sums
from breccia.kernels.triton.runtime import launch


@triton.jit
def int8_kernel(
    x_ptr, w_ptr, xs_ptr, ws_ptr, xz_ptr, wz_ptr, xt_ptr, wt_ptr, bias_ptr, out_ptr, M, N, K, x_stride, w_stride,
    xs_stride, ws_stride, X_ZERO: tl.constexpr, W_ZERO: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    live_m, live_n = rows < M, cols < N
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    w_at = w_ptr + cols.to(tl.int64)[:, None] * w_stride
    acc = tl.zeros([BM, BN], tl.int32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_at + k[None, :], mask=live_m[:, None] & (k < K)[None, :], other=0)
        w = tl.load(w_at + k[None, :], mask=live_n[:, None] & (k < K)[None, :], other=0)
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    # (x - z) (w - y) adds up to x w - z w - y (x - z).
    if X_ZERO:
        zero = tl.load(xz_ptr + rows, mask=live_m, other=0).to(tl.int32)
        acc -= zero[:, None] * tl.load(wt_ptr + cols, mask=live_n, other=0)[None, :]
    if W_ZERO:
        zero = tl.load(wz_ptr + cols, mask=live_n, other=0).to(tl.int32)
        acc -= tl.load(xt_ptr + rows, mask=live_m, other=0)[:, None] * zero[None, :]
    xs = tl.load(xs_ptr + rows * xs_stride, mask=live_m, other=0).to(tl.float32)
    ws = tl.load(ws_ptr + cols * ws_stride, mask=live_n, other=0).to(tl.float32)
    y = acc.to(tl.float32) * xs[:, None] * ws[None, :]
    if BIAS:
        y += tl.load(bias_ptr + cols, mask=live_n, other=0).to(tl.float32)[None, :]
    to = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


def int8_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    x_zero: torch.Tensor | None = None,
    w_zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M, K) times w (N, K) transposed, int8; each scale has one element or one per row, zero points one per row."""
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, w = (t if t.stride(1) == 1 else t.contiguous() for t in (x, w))
    x_scale, w_scale = x_scale.reshape(-1), w_scale.reshape(-1)
    bm = 16 if m <= 16 else 64 if m <= 64 else 128
    launch(
        int8_kernel,
        (triton.cdiv(m, bm), triton.cdiv(n, 64 if bm < 128 else 128)),
        x,
        w,
        x_scale,
        w_scale,
        x if x_zero is None else x_zero,
        x if w_zero is None else w_zero,
        x if w_zero is None else code_sums(x, x_zero),
        x if x_zero is None else code_sums(w),
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        int(x_scale.numel() > 1),
        int(w_scale.numel() > 1),
        X_ZERO=x_zero is not None,
        W_ZERO=w_zero is not None,
        BIAS=bias is not None,
        BM=bm,
        BN=64 if bm < 128 else 128,
        BK=128 if bm < 128 else 64,
        num_warps=4 if bm < 128 else 8,
        num_stages=3,
    )
    return out
