# SPDX-License-Identifier: Apache-2.0
"""`matmul`, `linear` and `grouped_matmul` on CUDA: which kernel takes a product, and the way there.

| operands | path |
| --- | --- |
| FP8 x FP8, scales per tensor, row, 1x128 or 128x128 (weights) | Hopper kernel, or torch._scaled_mm where faster |
| bf16 x 4- or 8-bit weight, up to 1024 rows or grouped | weights decode inside the product (Hopper) |
| bf16/fp16 x other quantized weights, or more rows | weights decode to the activations' dtype once, then cuBLAS |
| formats whose values are exact in bf16 (MX, NVFP4 but for its global scale) | decode to bf16, then cuBLAS |
| anything else | decode to float32, then a float32 product |
"""

from __future__ import annotations

from typing import Any

import torch

from breccia.kernels.triton import recipes
from breccia.kernels.triton.ops import dequantize, dequantize_operand, float_dtype
from breccia.kernels.triton.products import configs, gemm
from breccia.scaled_tensor import ScaledTensor

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def matmul(a: Any, b: Any, out_dtype: Any = "float32", bias: Any = None, fast_accumulate: bool = False) -> torch.Tensor:
    """a (..., M, K) times b (..., K, N), each a CUDA tensor or ScaledTensor.

    FP8 products add up in float32 every 128 elements of K; `fast_accumulate` leaves products of tensor- or row-scaled
    FP8 to the tensor cores' own short accumulator.
    """
    dtype = float_dtype(out_dtype, "out_dtype")
    _check(a, b)
    a, b = _known(a), _known(b)
    made = torch.float32 if dtype == torch.float64 else dtype
    y = None
    if len(b.shape) == 2 and isinstance(b, ScaledTensor):
        w = recipes.operand(b)
        if w.transposed or w.scale.numel() == 1:
            y = _by_weight(a, w, made, bias, fast_accumulate)
    if y is None:
        y = _plain(a, b, made)
        y = y if bias is None else (y + bias.to(y.dtype))
    return y if y.dtype == dtype else y.to(dtype)


def linear(x: Any, w: Any, bias: Any = None, out_dtype: Any = "float32", fast_accumulate: bool = False) -> torch.Tensor:
    """x (..., K) times a weight (N, K) transposed, plus bias."""
    return matmul(x, w.mT, out_dtype, bias, fast_accumulate)


def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
    """Rows offsets[e] to offsets[e + 1] of x (T, K) times expert e's weight w_stack (E, N, K)[e] transposed.

    x is bf16/fp16, or FP8 with scales per 1 x 128. `offsets` (E + 1, integers, on the device) is never read on the
    host; rows past its last entry are zero.
    """
    w = recipes.operand(w_stack, exact=False)
    experts = w.shape[0] if len(w.shape) == 3 else 0
    if not experts or w.transposed:
        raise ValueError(f"w_stack must be a ScaledTensor (E, N, K), got shape {tuple(w_stack.shape)}")
    if tuple(offsets.shape) != (experts + 1,):
        raise ValueError(f"offsets must have shape ({experts + 1},), got {tuple(offsets.shape)}")
    if x.shape[-1] != w.shape[-1] or len(x.shape) != 2:
        raise ValueError(f"x must be (T, {w.shape[-1]}), got {tuple(x.shape)}")
    scale = w.scale if w.scale.ndim == 3 else w.scale.reshape(-1, 1, 1).expand(experts, 1, 1)
    x_codes, x_scale, raw = x, None, x
    if isinstance(x, ScaledTensor):
        op = recipes.operand(x)
        both = (
            op.element in FP8 and w.element in FP8 and op.block == (1, 128) and w.block[1] == 128 and op.sfmt == "float"
        )
        if both and w.sfmt == "float":
            x_codes, x_scale = op.codes.view(FP8[op.element]), op.scale.float()
        else:
            x_codes = raw = dequantize(x, "bfloat16")
    own = torch.bfloat16 if isinstance(x, ScaledTensor) else raw.dtype
    dtype = own if out_dtype is None else float_dtype(out_dtype, "out_dtype")
    if x_scale is None and x_codes.dtype not in (torch.bfloat16, torch.float16):
        x_codes = x_codes.to(torch.bfloat16)
    g = w.global_scale
    g = None if g is None else g.reshape(-1).expand(experts).contiguous()
    block = w.block
    if block[1] & (block[1] - 1):
        raise ValueError(f"w_stack must have power-of-two blocks, got {w_stack.layout}")
    kind = _fused_kind(x_codes, w, block) if x_scale is None and x_codes.is_cuda else None
    if kind is not None:
        from breccia.kernels.triton.products.weights_matmul import weights_matmul

        return weights_matmul(x_codes, w.codes, scale, kind, w.element, block, dtype, g, None, offsets)
    zero = w.zero_point if w.element != "int8" or w.zero_point is None else w.zero_point.view(torch.int8)
    return gemm.gemm(
        x_codes, w.codes, scale, w.element, w.sfmt, block, w.packed, dtype, x_scale, zero, g, None, offsets
    )


def _known(operand: Any) -> Any:
    """The operand, in float32 if it is of an element format that no kernel decodes."""
    unknown = isinstance(operand, ScaledTensor) and not recipes.decodes(operand)
    return dequantize(operand, torch.float32) if unknown else operand


def _by_weight(a: Any, w: recipes.Operand, dtype: torch.dtype, bias: Any, fast: bool) -> torch.Tensor | None:
    """Products by a 2-D weight whose scales run along K; None where no kernel takes them."""
    codes = w.codes if w.transposed else w.codes.mT
    n = w.shape[-2] if w.transposed else w.shape[-1]
    scale = w.scale if w.scale.numel() > 1 else w.scale.reshape(1, 1)
    block = w.block if w.scale.numel() > 1 else (0, 0)
    if isinstance(a, ScaledTensor):
        x = recipes.operand(a)
        if x.transposed or len(x.shape) < 2:
            return None
        lead = x.shape[:-1]
        mode = _fp8_mode(x, w, block)
        if mode is None:
            return None
        rows = x.codes.flatten(0, -2).view(FP8[x.element])
        xs = x.scale.reshape(1, 1) if x.scale.numel() == 1 else x.scale.flatten(0, -2)
        weights = codes.view(FP8[w.element]) if codes.dtype == torch.uint8 else codes
        y = fp8(rows, weights, xs.float(), scale.float(), dtype, bias, mode == "block", fast)
        return y.reshape(*lead, n)
    if a.dtype not in (torch.bfloat16, torch.float16) or not w.transposed:
        return None
    x2 = a.flatten(0, -2)
    y = weight_only(x2, w, dtype, bias)
    return y.reshape(*a.shape[:-1], n)


def _fp8_mode(x: recipes.Operand, w: recipes.Operand, wblock: tuple[int, int]) -> str | None:
    if x.element not in FP8 or w.element not in FP8 or "e4m3" not in (x.element, w.element):
        return None
    whole = ((0, 0), (1, 0))
    xblock = x.block if x.scale.numel() > 1 else (0, 0)
    per_row = xblock != (1, 0) or tuple(x.scale.shape) == (*x.shape[:-1], 1)
    if xblock in whole and wblock in whole and per_row:
        return "whole"
    float_scales = x.sfmt == w.sfmt == "float"
    return "block" if float_scales and xblock == (1, 128) and wblock in ((1, 128), (128, 128)) else None


def fp8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: Any,
    block: bool,
    fast: bool,
) -> torch.Tensor:
    """FP8 rows (M, K) by FP8 weights (N, K), on this machine's best kernel."""
    if torch.cuda.get_device_capability(x.device)[0] == 9:
        from breccia.kernels.triton.products.fp8_matmul import fp8_matmul

        mode = "block" if block else "fast" if fast else "precise"
        if bias is None and configs.prefers_cublas(x.shape[0], w.shape[0], x.shape[1], mode):
            y = _cublas(x, w, x_scale, w_scale, dtype, mode)
            if y is not None:
                return y
        return fp8_matmul(x, w, x_scale, w_scale, dtype, bias, block, fast)
    if block:
        return gemm.gemm(
            x,
            w,
            w_scale,
            _name(w),
            "float",
            (1 if w_scale.shape[0] == w.shape[0] else 128, 128),
            False,
            dtype,
            x_scale.reshape(x.shape[0], -1),
            bias=bias,
        )
    y = (x.float() * x_scale) @ (w.float() * w_scale).mT
    return (y if bias is None else y + bias).to(dtype)


def _cublas(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype, mode: str
) -> torch.Tensor | None:
    """torch._scaled_mm where it takes the operands as they are: bf16 output, whole tiles, no scale padding involved."""
    (m, k), n = x.shape, w.shape[0]
    whole = m % 128 == 0 and n % 128 == 0 and k % 512 == 0
    rows = x.stride(1) == w.stride(1) == 1 and x.is_contiguous() and w.is_contiguous()
    if dtype != torch.bfloat16 or not whole or not rows:
        return None
    if mode == "block":
        if w_scale.shape[0] == n:
            return None
        left, right = (x_scale if x_scale.stride(0) == 1 else x_scale.T.contiguous().T), w_scale.contiguous().T
    elif x_scale.numel() == 1 and w_scale.numel() == 1:
        left, right = x_scale.reshape(()), w_scale.reshape(())
    else:
        return None
    return torch._scaled_mm(x, w.T, scale_a=left, scale_b=right, out_dtype=dtype, use_fast_accum=False)


def _name(x: torch.Tensor) -> str:
    return "e4m3" if x.dtype == torch.float8_e4m3fn else "e5m2"


def weight_only(x: torch.Tensor, w: recipes.Operand, dtype: torch.dtype, bias: Any) -> torch.Tensor:
    """bf16/fp16 rows by a quantized weight (N, K)."""
    m = x.shape[0]
    block = w.block if w.scale.numel() > 1 else (0, 0)
    scale = w.scale.reshape(1, 1) if w.scale.numel() == 1 else w.scale
    powers = block[1] & (block[1] - 1) == 0 and (w.sfmt != "float" or block[1] == 0 or block[1] >= 16)
    choice = configs.weight_only(m, w.shape[-2], w.shape[-1], w.element)
    kind = _fused_kind(x, w, block)
    if kind is not None and choice == "rows" and w.packed:
        from breccia.kernels.triton.products.w4_gemv import w4_gemv

        return w4_gemv(x, w.codes, scale, kind, dtype, w.global_scale, bias)
    if kind is not None and choice == "fused":
        from breccia.kernels.triton.products.weights_matmul import weights_matmul

        return weights_matmul(x, w.codes, scale, kind, w.element, block, dtype, w.global_scale, bias)
    if m == 1 and powers and w.zero_point is None and w.shape[-1] % 256 == 0 and w.packed:
        from breccia.kernels.triton.products.gemv import gemv

        return gemv(x, w.codes, scale, w.element, w.sfmt, block, dtype, w.global_scale, bias)
    wide = w.element in ("e4m3", "e5m2", "int8") and w.zero_point is None and w.shape[-1] % 256 == 0
    if m <= 2 and powers and wide and w.codes.stride(-1) == 1:
        from breccia.kernels.triton.products.gemv import gemv8

        return gemv8(x, w.codes, scale, w.element, w.sfmt, block, dtype, bias)
    values = dequantize_operand(w, x.dtype)
    if dtype == torch.float32 and _wide_output():
        y = torch.mm(x, values.T, out_dtype=torch.float32)
        return y if bias is None else y + bias
    y = torch.nn.functional.linear(x, values, None if bias is None else bias.to(x.dtype))
    return y if y.dtype == dtype else y.to(dtype)


def _fused_kind(x: torch.Tensor, w: recipes.Operand, block: tuple[int, int]) -> str | None:
    """The weight format's name to the Hopper kernels that decode inside the product, None where they do not run."""
    if torch.cuda.get_device_capability(x.device)[0] != 9 or w.zero_point is not None:
        return None
    from breccia.kernels.triton.products.weights_matmul import kind_of, takes

    kind = kind_of(w.element, w.sfmt, block)
    return kind if takes(x, w.codes, kind) else None


def _exact_in_bf16(x: recipes.Operand) -> bool:
    return x.sfmt == "e8m0" and x.element not in ("int8",)


def _plain(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    """Decode, then multiply: bf16 where that loses nothing, else float32."""
    operands = [recipes.operand(t) if isinstance(t, ScaledTensor) else t for t in (a, b)]
    exact = [_exact_in_bf16(t) if isinstance(t, recipes.Operand) else t.dtype == torch.bfloat16 for t in operands]
    made = torch.bfloat16 if all(exact) else torch.float32
    values = [dequantize(t, made) if isinstance(t, ScaledTensor) else t.to(made) for t in (a, b)]
    if made == torch.bfloat16 and dtype == torch.float32 and values[0].ndim == values[1].ndim == 2 and _wide_output():
        return torch.mm(values[0], values[1], out_dtype=torch.float32)
    if made == torch.bfloat16 and dtype != torch.bfloat16:
        values = [v.float() for v in values]
    return torch.matmul(values[0], values[1])


def _wide_output() -> bool:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


def _check(a: Any, b: Any) -> None:
    for name, t in (("a", a), ("b", b)):
        data = t.data if isinstance(t, ScaledTensor) else t
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor or a ScaledTensor of one, got {type(t).__name__}")
        if not isinstance(t, ScaledTensor) and t.dtype not in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
        ):
            raise TypeError(f"{name} must be a float tensor or a ScaledTensor, got dtype {t.dtype}")
    devices = [(t.data if isinstance(t, ScaledTensor) else t).device for t in (a, b)]
    if devices[0] != devices[1]:
        raise TypeError(f"operands must be on one device, got {devices[0]} and {devices[1]}")
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a (..., M, K) and b (..., K, N) must agree in K, got {tuple(a.shape)} and {tuple(b.shape)}")
