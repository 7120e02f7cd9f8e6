# SPDX-License-Identifier: Apache-2.0
"""What takes a product, and how it is run: the functions of `paths.PATHS`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch

from breccia.kernels.triton import recipes
from breccia.kernels.triton.device.elements import ELEMENTS
from breccia.kernels.triton.ops import dequantize, dequantize_operand, source_of
from breccia.kernels.triton.products import configs, gemm, pairs
from breccia.kernels.triton.products.product import Fp8, Product
from breccia.kernels.triton.recipes import Source
from breccia.scaled_tensor import ScaledTensor

T = TypeVar("T")


def given(part: T | None) -> T:
    """What a path has seen of a product that it takes."""
    assert part is not None
    return part


def takes_gemv8(p: Product) -> bool:
    w = p.w
    if w is None or ELEMENTS[w.element].bits != 8 or w.codes.stride(-1) != 1:
        return False
    fused = p.on_hopper and p.kind is not None and not p.configured("rows")
    if w.global_scale is not None:
        return False
    return p.few_rows(2) and not fused


def _scaled_mm_scales(p: Fp8, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales for torch._scaled_mm where it takes the operands as they are: bf16 output, whole tiles, no scale padding
    involved."""
    x, w, x_scale, w_scale = p.x, p.w, p.x_scale, p.w_scale
    (m, k), n = x.shape, w.shape[0]
    whole = m % 128 == 0 and n % 128 == 0 and k % 512 == 0
    rows = x.stride(1) == w.stride(1) == 1 and x.is_contiguous() and w.is_contiguous()
    if dtype != torch.bfloat16 or not whole or not rows:
        return None
    if p.blocks:
        if w_scale.shape[0] == n or x_scale.shape[0] != m:
            return None
        return (x_scale if x_scale.stride(0) == 1 else x_scale.T.contiguous().T), w_scale.contiguous().T
    if x_scale.numel() == 1 and w_scale.numel() == 1:
        return x_scale.reshape(()), w_scale.reshape(())
    return None


def takes_scaled_mm(p: Product) -> bool:
    if p.fp8 is None or p.bias is not None:
        return False
    m, n, k = p.fp8.x.shape[0], p.fp8.w.shape[0], p.fp8.x.shape[1]
    return configs.prefers_cublas(m, n, k, p.fp8.mode) and _scaled_mm_scales(p.fp8, p.dtype) is not None


def run_scaled_mm(p: Product) -> torch.Tensor:
    f = given(p.fp8)
    left, right = given(_scaled_mm_scales(f, p.dtype))
    return torch._scaled_mm(f.x, f.w.T, scale_a=left, scale_b=right, out_dtype=p.dtype, use_fast_accum=False)


def run_fp8_hopper(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    f = given(p.fp8)
    return dense_matmul(f.x, f.w, f.x_scale, f.w_scale, p.dtype, p.bias, f.blocks, f.fast)


def run_fp8_blocks(p: Product) -> torch.Tensor:
    f = given(p.fp8)
    rows = 1 if f.w_scale.shape[0] == f.w.shape[0] else 128
    element = "e4m3" if f.w.dtype == torch.float8_e4m3fn else "e5m2"
    # Tiles of activations as rows.
    x_scale = f.x_scale if f.x_scale.shape[0] == len(f.x) else f.x_scale.repeat_interleave(128, 0)[: len(f.x)]
    w = Source(f.w, f.w_scale, element, "float", f.w.shape, (rows, 128))
    return gemm.gemm(f.x, w, p.dtype, x_scale, p.bias)


def run_fp8_decoded(p: Product) -> torch.Tensor:
    f = given(p.fp8)
    if f.x.device.type == "cuda" and _wide_output():
        y = torch.mm(f.x.bfloat16(), f.w.bfloat16().mT, out_dtype=torch.float32) * f.x_scale * f.w_scale.reshape(1, -1)
    else:
        y = (f.x.float() * f.x_scale) @ (f.w.float() * f.w_scale).mT
    return (y if p.bias is None else y + p.bias).to(p.dtype)


def run_rows(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.w4_gemv import w4_gemv

    w = given(p.w)
    return w4_gemv(given(p.rows), w.codes, p.source.scale, given(p.kind), p.dtype, w.global_scale, p.bias)


def run_fused(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.weights_matmul import weights_matmul

    w, level = p.source, p.source.global_scale
    if p.offsets is not None and level is not None:
        level = pairs.for_each(level, w.shape[0])
    kind = given(p.kind)
    return weights_matmul(given(p.rows), w.codes, w.scale, kind, w.element, w.block, p.dtype, level, p.bias, p.offsets)


def run_gemv(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.gemv import gemv

    return gemv(given(p.rows), p.source, p.dtype, p.bias)


def run_gemv8(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.gemv import gemv8

    return gemv8(given(p.rows), p.source, p.dtype, p.bias, early=p.on_hopper)


def run_decoded_weight(p: Product) -> torch.Tensor:
    rows = given(p.rows)
    values = dequantize_operand(given(p.w), rows.dtype)
    if p.dtype == torch.float32 and _wide_output():
        y = torch.mm(rows, values.T, out_dtype=torch.float32)
        return y if p.bias is None else y + p.bias
    y = torch.nn.functional.linear(rows, values, None if p.bias is None else p.bias.to(rows.dtype))
    return y if y.dtype == p.dtype else y.to(p.dtype)


def run_grouped(p: Product) -> torch.Tensor:
    x, x_scale = (given(p.rows), None) if p.fp8 is None else (p.fp8.x, p.fp8.x_scale)
    w, level = p.source, p.source.global_scale
    level = None if level is None else pairs.for_each(level, w.shape[0])
    zero = w.zero_point if w.element != "int8" or w.zero_point is None else w.zero_point.view(torch.int8)
    return gemm.gemm(x, replace(w, zero_point=zero, global_scale=level), p.dtype, x_scale, None, p.offsets)


def takes_experts(p: Product) -> bool:
    """FP8 by FP8 with scales that the kernel finds, in rows that TMA can address."""
    if p.fp8 is None or p.offsets is None or p.w is None:
        return False
    f, (e, n, k) = p.fp8, p.w.shape
    scaled = f.w_scale.ndim == 3 and f.w_scale.shape[1] == (n if p.w.block[0] == 1 else -(-n // 128))
    one_e4m3 = torch.float8_e4m3fn in (f.x.dtype, f.w.dtype)
    aligned = f.w.is_contiguous() and f.w.data_ptr() % 16 == 0 and k % 16 == 0 and k > 0
    return scaled and p.w.block[0] in (1, 128) and one_e4m3 and aligned and e * n < 2**31


def run_experts(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import experts_matmul

    f = given(p.fp8)
    return experts_matmul(f.x, f.w, f.x_scale, f.w_scale, given(p.offsets), p.dtype)


def _exact_in_bf16(x: Any) -> bool:
    if not isinstance(x, ScaledTensor):
        return bool(x.dtype == torch.bfloat16)
    op = recipes.operand(x)
    return op.sfmt == "e8m0" and op.element != "int8"


def all_quantized(p: Product) -> bool:
    return p.operands is not None and all(isinstance(x, ScaledTensor) for x in p.operands)


def takes_exact(p: Product) -> bool:
    return p.operands is not None and all(_exact_in_bf16(x) for x in p.operands)


def by_values(a: Any, b: Any, dtype: torch.dtype) -> bool:
    """Whether it is bf16 by codes whose blocks run along the result, as those of a layer's weight do in its backward
    pass, for a result in bf16: codes are decoded to that, and cuBLAS multiplies."""
    if isinstance(a, ScaledTensor) or not isinstance(b, ScaledTensor) or not a.dtype == dtype == torch.bfloat16:
        return False
    return len(b.shape) == 2 and b.layout.axis != -2


def takes_values(p: Product) -> bool:
    return p.operands is not None and by_values(*p.operands, p.dtype)


def _decoded(p: Product, dtype: torch.dtype) -> list[torch.Tensor]:
    return [dequantize(x, dtype) if isinstance(x, ScaledTensor) else x.to(dtype) for x in given(p.operands)]


def run_exact(p: Product) -> torch.Tensor:
    a, b = _decoded(p, torch.bfloat16)
    if p.dtype == torch.float32 and a.ndim == b.ndim == 2 and a.is_cuda and _wide_output():
        return _biased(torch.mm(a, b, out_dtype=torch.float32), p.bias)
    return _biased(torch.matmul(a, b) if p.dtype == torch.bfloat16 else torch.matmul(a.float(), b.float()), p.bias)


def run_int8_hopper(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    i = given(p.ints)
    return dense_matmul(
        i.x, i.w, i.x_scale.float(), i.w_scale.float(), p.dtype, p.bias, a_zero=i.x_zero, b_zero=i.w_zero
    )


def run_int8(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.int8_gemm import int8_gemm

    i = given(p.ints)
    return int8_gemm(i.x, i.w, i.x_scale, i.w_scale, p.dtype, p.bias, i.x_zero, i.w_zero)


def takes_integers(p: Product) -> bool:
    """Many rows, or float32 results that rounded scales would spoil."""
    if p.pair is None or not all(pairs.is_integer(op) for op in p.pair):
        return False
    return p.dtype == torch.float32 or _rows_of(p) >= configs.UNPACKED_ROWS


def _rows_of(p: Product) -> int:
    return math.prod(given(p.pair)[0].shape[:-1])


def run_integers(p: Product) -> torch.Tensor:
    return run_dense(p, *((pairs.integers(op), pairs.flat_scale(op)) for op in given(p.pair)))


def takes_halves(p: Product) -> bool:
    """float32 results that rounded scales would spoil, or many rows whose scales wait until the end."""
    if p.pair is None:
        return False
    kinds = [pairs.scale_of(op) for op in p.pair]
    if p.dtype == torch.float32 and not all(pairs.is_exact(op) for op in p.pair):
        return None not in kinds
    return kinds == ["whole", "whole"] and _rows_of(p) > configs.FUSED_ROWS


def run_halves(p: Product) -> torch.Tensor:
    return run_dense(p, *(pairs.halves(op) for op in given(p.pair)))


def run_rows_dense(p: Product) -> torch.Tensor:
    """Scales per block that are floats go into the weights, which rounds them once."""
    rows, w = given(p.rows), given(p.w)
    one = pairs.one(rows.device.index)
    exact = pairs.scale_of(w) == "whole"
    return run_dense(p, (rows, one), pairs.halves(w) if exact else (dequantize_operand(w, torch.bfloat16), one))


def run_dense(
    p: Product, left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """By `dense_matmul`: operands of one type, each with its scales."""
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    (x, xs), (w, ws) = left, right
    blocks = any(s.shape[1] > 1 or s.shape[0] not in (1, len(t)) for t, s in (left, right))
    if blocks:
        xs, ws = (pairs.by_blocks(s, *t.shape) for t, s in (left, right))
    return dense_matmul(x, w, xs, ws, p.dtype, p.bias, blocks)


def takes_decoded_in_order(p: Product) -> bool:
    """More rows than the product itself orders, and no more than let it turn the weights instead."""
    if not takes_rows_by_weight(p):
        return False
    from breccia.kernels.triton.products.weights_matmul import kind_of, takes_weight

    x, w = given(p.pair)
    rows, (n, k) = _rows_of(p), w.shape
    kind = kind_of(w.element, w.sfmt, Product(p.dtype, w=w).source.block)
    fused = configs.weight_only(rows, n, k, w.element) == "fused" and w.zero_point is None
    if kind is None or not fused or not takes_weight(w.codes, k, kind) or x.codes.stride(-1) != 1:
        return False
    return configs.weight_tile(rows, n, k, kind).order == "" and source_of(x) is not None


def run_decoded_in_order(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.weights_matmul import kind_of, weights_matmul

    x, weight = given(p.pair)
    w = Product(p.dtype, w=weight).source
    kind = given(kind_of(w.element, w.sfmt, w.block))
    tile = configs.weight_tile(_rows_of(p), *w.shape, kind)
    rows = given(source_of(x))
    return weights_matmul(rows, w.codes, w.scale, kind, w.element, w.block, p.dtype, w.global_scale, p.bias, tile=tile)


def takes_rows_by_weight(p: Product) -> bool:
    return p.pair is not None and (p.dtype != torch.float32 or pairs.is_exact(p.pair[0]))


def run_bf16(p: Product) -> torch.Tensor:
    return _biased(torch.matmul(*_decoded(p, torch.bfloat16)).to(p.dtype), p.bias)


def run_float32(p: Product) -> torch.Tensor:
    return _biased(torch.matmul(*_decoded(p, torch.float32)), p.bias)


def _biased(y: torch.Tensor, bias: Any) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _wide_output() -> bool:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)
