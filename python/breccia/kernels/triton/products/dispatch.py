# SPDX-License-Identifier: Apache-2.0
"""`matmul`, `linear` and `grouped_matmul` on CUDA: what kind of product it is. `paths` knows which kernel takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from breccia.frameworks.torch.tensors import FLOATS, float_dtype
from breccia.kernels.triton import recipes
from breccia.kernels.triton.ops import dequantize
from breccia.kernels.triton.products import pairs, paths
from breccia.kernels.triton.products.product import Fp8, Integers, Product
from breccia.scaled_tensor import ScaledTensor

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def matmul(a: Any, b: Any, out_dtype: Any = "float32", bias: Any = None, fast_accumulate: bool = False) -> torch.Tensor:
    """a (..., M, K) times b (..., K, N), each a CUDA tensor or ScaledTensor.

    FP8 products add up in float32 every 128 elements of K; `fast_accumulate` leaves products of tensor- or row-scaled
    FP8 to the tensor cores' own short accumulator.
    """
    dtype = float_dtype(out_dtype)
    _check(a, b)
    a, b = _known(a), _known(b)
    product = Product(torch.float32 if dtype == torch.float64 else dtype, bias, operands=(a, b))
    if len(b.shape) == 2 and isinstance(b, ScaledTensor):
        w = recipes.operand(b)
        if w.transposed or w.scale.numel() == 1:
            _by_weight(product, a, w, fast_accumulate)
    y = paths.run(product)
    y = y.reshape(*a.shape[:-1], b.shape[-1]) if y.ndim < len(a.shape) else y
    return y if y.dtype == dtype else y.to(dtype)


def linear(x: Any, w: Any, bias: Any = None, out_dtype: Any = "float32", fast_accumulate: bool = False) -> torch.Tensor:
    """x (..., K) times a weight (N, K) transposed, plus bias."""
    return matmul(x, w.mT, out_dtype, bias, fast_accumulate)


def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
    """Rows offsets[e] to offsets[e + 1] of x (T, K) times expert e's weight w_stack (E, N, K)[e] transposed.

    x is bf16/fp16, or FP8 with scales per 1 x 128, floats or powers of two. `offsets` (E + 1, integers, on the device)
    is never read on the host; rows past its last entry are zero.
    """
    shape = tuple(w_stack.shape)
    if len(shape) != 3 or not shape[0] or w_stack.layout.axis == -2:
        raise ValueError(f"w_stack must be a ScaledTensor (E, N, K), got shape {shape}")
    if tuple(offsets.shape) != (shape[0] + 1,):
        raise ValueError(f"offsets must have shape ({shape[0] + 1},), got {tuple(offsets.shape)}")
    if x.shape[-1] != shape[-1] or len(x.shape) != 2:
        raise ValueError(f"x must be (T, {shape[-1]}), got {tuple(x.shape)}")
    default = torch.bfloat16 if isinstance(x, ScaledTensor) else x.dtype
    dtype = default if out_dtype is None else float_dtype(out_dtype)
    if not recipes.decodes(w_stack):
        return _by_floats(_rows(x), w_stack, offsets, dtype)
    w = recipes.operand(w_stack, exact=False)
    if w.block[1] & (w.block[1] - 1):
        raise ValueError(f"w_stack must have power-of-two blocks, got {w_stack.layout}")
    product = Product(dtype, w=w, offsets=offsets)
    if isinstance(x, ScaledTensor) and recipes.decodes(x):
        op = recipes.operand(x)
        fp8 = op.element in FP8 and w.element in FP8 and op.block == (1, 128) and w.block[1] == 128
        if fp8 and {op.sfmt, w.sfmt} <= {"float", "e8m0"}:
            codes = w.codes.view(FP8[w.element])
            product.w = w = replace(w, scale=_numbers(w), sfmt="float")
            product.fp8 = Fp8(op.codes.view(FP8[op.element]), codes, _numbers(op).float(), w.scale, True)
    if product.fp8 is None:
        product.rows = _rows(x)
    return paths.run(product)


def _rows(x: Any) -> torch.Tensor:
    """Floats of 16 bits, as products of experts take them: bfloat16 where x is neither that nor float16."""
    rows = dequantize(x, "bfloat16") if isinstance(x, ScaledTensor) else x
    return rows if rows.dtype in (torch.bfloat16, torch.float16) else rows.to(torch.bfloat16)


def _by_floats(rows: torch.Tensor, w_stack: ScaledTensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`grouped_matmul` by weights whose codes no kernel decodes: as floats, which torch multiplies."""
    w, row = dequantize(w_stack, rows.dtype), torch.arange(len(rows), device=rows.device)
    aligned = rows.shape[1] % 8 == w.shape[1] % 8 == 0 and rows.is_contiguous()
    if aligned and rows.dtype == dtype == torch.bfloat16 and Product(dtype, rows=rows).on_hopper:
        y = torch._grouped_mm(rows, w.mT, offs=offsets[1:].int())
        return torch.where((row < offsets[-1])[:, None], y, 0)
    expert = torch.searchsorted(offsets, row, right=True) - 1
    y = torch.zeros(len(rows), w.shape[1], dtype=dtype, device=rows.device)
    for e, weight in enumerate(w):  # each by all rows: whose they are is not known to the host
        product = matmul(rows, weight.T, dtype)
        y = torch.where((expert == e)[:, None], product, y)
    return y


def _numbers(op: recipes.Operand) -> torch.Tensor:
    """Scales as floats, strides kept: of codes float32."""
    return op.scale if op.sfmt == "float" else op.scale.view(torch.float8_e8m0fnu).float()


def _known(operand: Any) -> Any:
    """The operand, in float32 if it is of an element format that no kernel decodes."""
    unknown = isinstance(operand, ScaledTensor) and not recipes.decodes(operand)
    return dequantize(operand, torch.float32) if unknown else operand


def _by_weight(product: Product, a: Any, w: recipes.Operand, fast: bool) -> None:
    """Says what a product is by a 2-D weight whose scales run along K, where a kernel may take that."""
    if not isinstance(a, ScaledTensor):
        if a.dtype in (torch.bfloat16, torch.float16) and w.transposed:
            product.rows, product.w = a.flatten(0, -2), w
        return
    x = recipes.operand(a)
    if x.transposed or len(x.shape) < 2:
        return
    if w.transposed:
        product.pair = x, w
    codes = w.codes if w.transposed else w.codes.mT
    kinds = pairs.scale_of(x), pairs.scale_of(w)
    if None in kinds or not x.sfmt == w.sfmt == "float":
        product.ints = _integers(x, w) if w.transposed else None
        return
    if x.element in FP8 and w.element in FP8 and "e4m3" in (x.element, w.element):
        blocks = "block" in kinds
        scales = [pairs.flat_scale(op).float() for op in (x, w)]
        rows, weights = x.codes.flatten(0, -2).view(FP8[x.element]), codes.view(FP8[w.element])
        if blocks:
            scales = [
                pairs.by_blocks(scale, len(side), x.shape[-1])
                for scale, side in zip(scales, (rows, weights), strict=True)
            ]
        product.fp8 = Fp8(rows, weights, scales[0], scales[1], blocks, fast)
    elif w.transposed:
        product.ints = _integers(x, w)


def _integers(x: recipes.Operand, w: recipes.Operand) -> Integers | None:
    """INT8 by INT8 with scales per tensor or row, where int32 holds every sum."""
    if not x.element == w.element == "int8" or not (pairs.is_whole_integer(x) and pairs.is_whole_integer(w)):
        return None
    if x.shape[-1] > pairs.MAX_DEPTH or w.codes.stride(-1) != 1:
        return None
    codes = [op.codes.reshape(-1, op.shape[-1]).view(torch.int8) for op in (x, w)]
    scales = [pairs.flat_scale(op) for op in (x, w)]
    return Integers(codes[0], codes[1], scales[0], scales[1], pairs.zeros_of(x), pairs.zeros_of(w))


def weight_only(x: torch.Tensor, w: recipes.Operand, dtype: torch.dtype, bias: Any) -> torch.Tensor:
    """bf16/fp16 rows by a quantized weight (N, K)."""
    return paths.run(Product(dtype, bias, rows=x, w=w))


def _check(a: Any, b: Any) -> None:
    for name, t in (("a", a), ("b", b)):
        data = t.data if isinstance(t, ScaledTensor) else t
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor or a ScaledTensor of one, got {type(t).__name__}")
        if not isinstance(t, ScaledTensor) and t.dtype not in FLOATS:
            raise TypeError(f"{name} must be a float tensor or a ScaledTensor, got dtype {t.dtype}")
    devices = [(t.data if isinstance(t, ScaledTensor) else t).device for t in (a, b)]
    if devices[0] != devices[1]:
        raise TypeError(f"operands must be on one device, got {devices[0]} and {devices[1]}")
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a (..., M, K) and b (..., K, N) must agree in K, got {tuple(a.shape)} and {tuple(b.shape)}")
