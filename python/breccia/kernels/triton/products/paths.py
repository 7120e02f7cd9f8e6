# SPDX-License-Identifier: Apache-2.0
"""Which kernel takes a product: the first of `PATHS` that does. `breccia.gpu_info` and the table of docs/gpu.md say
what this list says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from breccia.kernels.triton import recipes
from breccia.kernels.triton.device.elements import ELEMENTS
from breccia.kernels.triton.ops import dequantize, dequantize_operand, source_of
from breccia.kernels.triton.products import blackwell, configs, gemm, pairs
from breccia.scaled_tensor import ScaledTensor

HOPPER, BLACKWELL = 9, 10  # the major numbers of their compute capabilities; those after the latter have its units


@dataclass
class Fp8:
    """FP8 rows (M, K) and weights (N, K), each with a scale for all, one per row, or (`blocks`) one per 1 x 128 or
    128 x 128; float32."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    blocks: bool
    fast: bool = False  # leave sums to the tensor cores' short accumulator

    @property
    def mode(self) -> str:
        return "block" if self.blocks else "fast" if self.fast else "precise"


@dataclass
class Integers:
    """INT8 rows (M, K) and weights (N, K), each with a scale for all or one per row, and perhaps as many zero points of
    int8."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    x_zero: torch.Tensor | None = None
    w_zero: torch.Tensor | None = None


@dataclass
class Product:
    """A product as the paths look at it. What it is not stays None."""

    dtype: torch.dtype
    bias: Any = None
    fp8: Fp8 | None = None  # both sides are FP8
    ints: Integers | None = None  # both sides are INT8
    pair: tuple[recipes.Operand, recipes.Operand] | None = None  # (..., M, K) and a weight (N, K), both quantized
    rows: torch.Tensor | None = None  # (M, K) of 16-bit floats, to be multiplied by w
    w: recipes.Operand | None = None  # a weight (N, K), or with offsets one per expert
    offsets: torch.Tensor | None = None  # rows offsets[e] to offsets[e + 1] are expert e's
    operands: tuple[Any, Any] | None = None  # (..., M, K) and (..., K, N), floats or ScaledTensors

    @cached_property
    def device(self) -> torch.device:
        first: Any = self.rows if self.fp8 is None else self.fp8.x
        if first is None:
            assert self.operands is not None
            first = self.operands[0]
            first = first.data if isinstance(first, ScaledTensor) else first
        device: torch.device = first.device
        return device

    @cached_property
    def major(self) -> int:
        """Of the compute capability, 0 where there is none."""
        return int(torch.cuda.get_device_capability(self.device)[0]) if self.device.type == "cuda" else 0

    @cached_property
    def on_hopper(self) -> bool:
        return self.major == HOPPER

    @cached_property
    def scaled(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """The weight's scales with the axes that kernels want, and the rows and columns of each, 0 for all."""
        w = self.w
        assert w is not None
        if self.offsets is not None:
            return w.scale if w.scale.ndim == 3 else w.scale.reshape(-1, 1, 1).expand(w.shape[0], 1, 1), w.block
        return (w.scale, w.block) if w.scale.numel() > 1 else (w.scale.reshape(1, 1), (0, 0))

    @cached_property
    def kind(self) -> str | None:
        """The name of the weight's format to the Hopper kernels that decode inside the product."""
        if self.rows is None or self.w is None or self.w.zero_point is not None:
            return None
        from breccia.kernels.triton.products.weights_matmul import kind_of, takes

        kind = kind_of(self.w.element, self.w.sfmt, self.scaled[1])
        return kind if takes(self.rows, self.w.codes, kind) else None

    def configured(self, choice: str) -> bool:
        """Whether `configs.weight_only` wants rows by a weight to run so."""
        if self.rows is None or self.w is None or self.offsets is not None:
            return False
        return configs.weight_only(self.rows.shape[0], self.w.shape[-2], self.w.shape[-1], self.w.element) == choice

    def few_rows(self, most: int) -> bool:
        """Whether at most so many rows meet a weight whose scales `gemv` finds."""
        rows, w = self.rows, self.w
        if rows is None or w is None or self.offsets is not None or rows.shape[0] > most or w.zero_point is not None:
            return False
        cols = self.scaled[1][1]
        powers = cols & (cols - 1) == 0 and (w.sfmt != "float" or cols == 0 or cols >= 16)
        return powers and w.shape[-1] % 256 == 0


def _takes_gemv8(p: Product) -> bool:
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


def _takes_scaled_mm(p: Product) -> bool:
    if p.fp8 is None or p.bias is not None:
        return False
    m, n, k = p.fp8.x.shape[0], p.fp8.w.shape[0], p.fp8.x.shape[1]
    return configs.prefers_cublas(m, n, k, p.fp8.mode) and _scaled_mm_scales(p.fp8, p.dtype) is not None


def _run_scaled_mm(p: Product) -> torch.Tensor:
    assert p.fp8 is not None
    scales = _scaled_mm_scales(p.fp8, p.dtype)
    assert scales is not None
    left, right = scales
    return torch._scaled_mm(p.fp8.x, p.fp8.w.T, scale_a=left, scale_b=right, out_dtype=p.dtype, use_fast_accum=False)


def _run_fp8_hopper(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    f = p.fp8
    assert f is not None
    return dense_matmul(f.x, f.w, f.x_scale, f.w_scale, p.dtype, p.bias, f.blocks, f.fast)


def _run_fp8_blocks(p: Product) -> torch.Tensor:
    f = p.fp8
    assert f is not None
    rows = 1 if f.w_scale.shape[0] == f.w.shape[0] else 128
    element = "e4m3" if f.w.dtype == torch.float8_e4m3fn else "e5m2"
    # Tiles of activations as rows.
    x_scale = f.x_scale if f.x_scale.shape[0] == len(f.x) else f.x_scale.repeat_interleave(128, 0)[: len(f.x)]
    return gemm.gemm(f.x, f.w, f.w_scale, element, "float", (rows, 128), False, p.dtype, x_scale, bias=p.bias)


def _run_fp8_decoded(p: Product) -> torch.Tensor:
    f = p.fp8
    assert f is not None
    if f.x.device.type == "cuda" and _wide_output():
        y = torch.mm(f.x.bfloat16(), f.w.bfloat16().mT, out_dtype=torch.float32) * f.x_scale * f.w_scale.reshape(1, -1)
    else:
        y = (f.x.float() * f.x_scale) @ (f.w.float() * f.w_scale).mT
    return (y if p.bias is None else y + p.bias).to(p.dtype)


def _run_rows(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.w4_gemv import w4_gemv

    assert p.rows is not None
    assert p.w is not None
    assert p.kind is not None
    return w4_gemv(p.rows, p.w.codes, p.scaled[0], p.kind, p.dtype, p.w.global_scale, p.bias)


def _run_fused(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.weights_matmul import weights_matmul

    assert p.rows is not None
    assert p.w is not None
    assert p.kind is not None
    (scale, block), level = p.scaled, p.w.global_scale
    if p.offsets is not None and level is not None:
        level = pairs.for_each(level, p.w.shape[0])
    return weights_matmul(p.rows, p.w.codes, scale, p.kind, p.w.element, block, p.dtype, level, p.bias, p.offsets)


def _run_gemv(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.gemv import gemv

    assert p.rows is not None
    assert p.w is not None
    scale, block = p.scaled
    return gemv(p.rows, p.w.codes, scale, p.w.element, p.w.sfmt, block, p.dtype, p.w.global_scale, p.bias)


def _run_gemv8(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.gemv import gemv8

    assert p.rows is not None
    assert p.w is not None
    scale, block = p.scaled
    return gemv8(p.rows, p.w.codes, scale, p.w.element, p.w.sfmt, block, p.dtype, p.bias, early=p.on_hopper)


def _run_decoded_weight(p: Product) -> torch.Tensor:
    assert p.rows is not None
    assert p.w is not None
    values = dequantize_operand(p.w, p.rows.dtype)
    if p.dtype == torch.float32 and _wide_output():
        y = torch.mm(p.rows, values.T, out_dtype=torch.float32)
        return y if p.bias is None else y + p.bias
    y = torch.nn.functional.linear(p.rows, values, None if p.bias is None else p.bias.to(p.rows.dtype))
    return y if y.dtype == p.dtype else y.to(p.dtype)


def _run_grouped(p: Product) -> torch.Tensor:
    w = p.w
    assert w is not None
    x, x_scale = (p.rows, None) if p.fp8 is None else (p.fp8.x, p.fp8.x_scale)
    assert x is not None
    (scale, block), level = p.scaled, w.global_scale
    level = None if level is None else pairs.for_each(level, w.shape[0])
    zero = w.zero_point if w.element != "int8" or w.zero_point is None else w.zero_point.view(torch.int8)
    return gemm.gemm(
        x, w.codes, scale, w.element, w.sfmt, block, w.packed, p.dtype, x_scale, zero, level, None, p.offsets
    )


def _takes_experts(p: Product) -> bool:
    """FP8 by FP8 with scales that the kernel finds, in rows that TMA can address."""
    if p.fp8 is None or p.offsets is None or p.w is None:
        return False
    f, (e, n, k) = p.fp8, p.w.shape
    scaled = f.w_scale.ndim == 3 and f.w_scale.shape[1] == (n if p.w.block[0] == 1 else -(-n // 128))
    one_e4m3 = torch.float8_e4m3fn in (f.x.dtype, f.w.dtype)
    aligned = f.w.is_contiguous() and f.w.data_ptr() % 16 == 0 and k % 16 == 0 and k > 0
    return scaled and p.w.block[0] in (1, 128) and one_e4m3 and aligned and e * n < 2**31


def _run_experts(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import experts_matmul

    f = p.fp8
    assert f is not None
    assert p.offsets is not None
    return experts_matmul(f.x, f.w, f.x_scale, f.w_scale, p.offsets, p.dtype)


def _exact_in_bf16(x: Any) -> bool:
    if not isinstance(x, ScaledTensor):
        return bool(x.dtype == torch.bfloat16)
    op = recipes.operand(x)
    return op.sfmt == "e8m0" and op.element != "int8"


def _all_quantized(p: Product) -> bool:
    return p.operands is not None and all(isinstance(x, ScaledTensor) for x in p.operands)


def _takes_exact(p: Product) -> bool:
    return p.operands is not None and all(_exact_in_bf16(x) for x in p.operands)


def _decoded(p: Product, dtype: torch.dtype) -> list[torch.Tensor]:
    assert p.operands is not None
    return [dequantize(x, dtype) if isinstance(x, ScaledTensor) else x.to(dtype) for x in p.operands]


def _run_exact(p: Product) -> torch.Tensor:
    a, b = _decoded(p, torch.bfloat16)
    if p.dtype == torch.float32 and a.ndim == b.ndim == 2 and _wide_output():
        return _biased(torch.mm(a, b, out_dtype=torch.float32), p.bias)
    return _biased(torch.matmul(a, b) if p.dtype == torch.bfloat16 else torch.matmul(a.float(), b.float()), p.bias)


def _run_int8_hopper(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    i = p.ints
    assert i is not None
    return dense_matmul(
        i.x, i.w, i.x_scale.float(), i.w_scale.float(), p.dtype, p.bias, a_zero=i.x_zero, b_zero=i.w_zero
    )


def _run_int8(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.int8_gemm import int8_gemm

    i = p.ints
    assert i is not None
    return int8_gemm(i.x, i.w, i.x_scale, i.w_scale, p.dtype, p.bias, i.x_zero, i.w_zero)


def _pair(p: Product) -> tuple[recipes.Operand, recipes.Operand]:
    assert p.pair is not None
    return p.pair


def _takes_integers(p: Product) -> bool:
    """Many rows, or float32 results that rounded scales would spoil."""
    if p.pair is None or not all(pairs.is_integer(op) for op in p.pair):
        return False
    return p.dtype == torch.float32 or _rows_of(p) >= configs.UNPACKED_ROWS


def _rows_of(p: Product) -> int:
    return math.prod(_pair(p)[0].shape[:-1])


def _run_integers(p: Product) -> torch.Tensor:
    return _run_dense(p, *((pairs.integers(op), pairs.flat_scale(op)) for op in _pair(p)))


def _takes_halves(p: Product) -> bool:
    """float32 results that rounded scales would spoil, or many rows whose scales wait until the end."""
    if p.pair is None:
        return False
    kinds = [pairs.scale_of(op) for op in p.pair]
    if p.dtype == torch.float32 and not all(pairs.is_exact(op) for op in p.pair):
        return None not in kinds
    return kinds == ["whole", "whole"] and _rows_of(p) > configs.FUSED_ROWS


def _run_halves(p: Product) -> torch.Tensor:
    return _run_dense(p, *(pairs.halves(op) for op in _pair(p)))


def _run_rows_dense(p: Product) -> torch.Tensor:
    """Scales per block that are floats go into the weights, which rounds them once."""
    assert p.rows is not None
    assert p.w is not None
    one = pairs.one(p.rows.device.index)
    exact = pairs.scale_of(p.w) == "whole"
    return _run_dense(p, (p.rows, one), pairs.halves(p.w) if exact else (dequantize_operand(p.w, torch.bfloat16), one))


def _run_dense(
    p: Product, left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """By `dense_matmul`: operands of one type, each with its scales."""
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    (x, xs), (w, ws) = left, right
    blocks = any(s.shape[1] > 1 or s.shape[0] not in (1, len(t)) for t, s in (left, right))
    if blocks:
        xs, ws = (pairs.by_blocks(s, *t.shape) for t, s in (left, right))
    return dense_matmul(x, w, xs, ws, p.dtype, p.bias, blocks)


def _takes_decoded_in_order(p: Product) -> bool:
    """More rows than the product itself orders, and no more than let it turn the weights instead."""
    if not _takes_rows_by_weight(p):
        return False
    from breccia.kernels.triton.products.weights_matmul import kind_of, takes_weight

    x, w = _pair(p)
    rows, (n, k) = _rows_of(p), w.shape
    kind = kind_of(w.element, w.sfmt, Product(p.dtype, w=w).scaled[1])
    fused = configs.weight_only(rows, n, k, w.element) == "fused" and w.zero_point is None
    if kind is None or not fused or not takes_weight(w.codes, k, kind) or x.codes.stride(-1) != 1:
        return False
    return configs.weight_tile(rows, n, kind).order == "" and source_of(x) is not None


def _run_decoded_in_order(p: Product) -> torch.Tensor:
    from breccia.kernels.triton.products.weights_matmul import kind_of, weights_matmul

    x, w = _pair(p)
    source, (scale, block) = source_of(x), Product(p.dtype, w=w).scaled
    kind = kind_of(w.element, w.sfmt, block)
    assert source is not None
    assert kind is not None
    tile = configs.weight_tile(_rows_of(p), w.shape[0], kind)
    return weights_matmul(source, w.codes, scale, kind, w.element, block, p.dtype, w.global_scale, p.bias, tile=tile)


def _takes_rows_by_weight(p: Product) -> bool:
    return p.pair is not None and (p.dtype != torch.float32 or pairs.is_exact(p.pair[0]))


def _run_rows_by_weight(p: Product) -> torch.Tensor:
    rows, w = pairs.rows_by_weight(*_pair(p))
    return run(Product(p.dtype, p.bias, rows=rows, w=w))


def _run_bf16(p: Product) -> torch.Tensor:
    return _biased(torch.matmul(*_decoded(p, torch.bfloat16)).to(p.dtype), p.bias)


def _run_float32(p: Product) -> torch.Tensor:
    return _biased(torch.matmul(*_decoded(p, torch.float32)), p.bias)


def _biased(y: torch.Tensor, bias: Any) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _wide_output() -> bool:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


@dataclass(frozen=True)
class Path:
    """A way to make a product. `takes` looks at nothing but the product, not at the device."""

    name: str  # what runs
    verb: str  # whose product it is, to `breccia.gpu_info`
    operands: str  # what it takes, in words
    takes: Callable[[Product], bool]
    run: Callable[[Product], torch.Tensor]
    hopper: bool = False  # the kernel is Hopper's
    blackwell: bool = False  # it needs tensor cores that multiply by block scales

    def runs_on(self, major: int) -> bool:
        """Whether GPUs of a compute capability of that major number have what it needs."""
        return (major == HOPPER or not self.hopper) and (major >= BLACKWELL or not self.blackwell)

    @property
    def where(self) -> str:
        return "Hopper" if self.hopper else "Blackwell, not run by us" if self.blackwell else "any"


GROUPED, FP8_FP8, INT8_INT8 = "grouped_matmul", "fp8 matmul", "int8 matmul"
PAIR, WEIGHTS, OTHER = "matmul of two quantized", "weight-only matmul", "other matmul"
_CODES = "NVFP4, MXFP4, INT4 g128"

PATHS = [
    Path(
        "Gluon, codes decode on their way to wgmma",
        GROUPED,
        f"bf16 × {_CODES}, FP8, INT8 or MXFP8",
        lambda p: p.offsets is not None and p.kind is not None,
        _run_fused,
        hopper=True,
    ),
    Path(
        "Gluon, TMA and wgmma",
        GROUPED,
        "FP8 × FP8 with scales per 1 × 128 (weights: also 128 × 128), K a multiple of 16",
        _takes_experts,
        _run_experts,
        hopper=True,
    ),
    Path(
        "Triton, codes decode on their way to the product",
        GROUPED,
        "16-bit floats × any weights; FP8 × FP8 with scales per 1 × 128 (weights: also 128 × 128)",
        lambda p: p.offsets is not None,
        _run_grouped,
    ),
    Path(
        "torch._scaled_mm",
        FP8_FP8,
        "large matrices of whole tiles, bf16 results, where it was measured faster",
        _takes_scaled_mm,
        _run_scaled_mm,
        hopper=True,
    ),
    Path(
        "Gluon, TMA and wgmma",
        FP8_FP8,
        "scales per tensor, row, 1 × 128 or 128 × 128",
        lambda p: p.fp8 is not None,
        _run_fp8_hopper,
        hopper=True,
    ),
    Path(
        "Triton",
        FP8_FP8,
        "scales per 1 × 128 or 128 × 128, of one side at least",
        lambda p: p.fp8 is not None and p.fp8.blocks,
        _run_fp8_blocks,
    ),
    Path(
        "decode to bf16, then cuBLAS, then scales",
        FP8_FP8,
        "scales per tensor or row",
        lambda p: p.fp8 is not None,
        _run_fp8_decoded,
    ),
    Path(
        "Gluon, TMA and wgmma",
        INT8_INT8,
        "INT8 × INT8 with scales and zero points per tensor or row",
        lambda p: p.ints is not None,
        _run_int8_hopper,
        hopper=True,
    ),
    Path(
        "Triton",
        INT8_INT8,
        "INT8 × INT8 with scales and zero points per tensor or row",
        lambda p: p.ints is not None,
        _run_int8,
    ),
    Path(
        "torch._scaled_mm by block scales",
        PAIR,
        "MXFP8 × MXFP8, NVFP4 × NVFP4",
        lambda p: p.pair is not None and blackwell.takes(*p.pair),
        lambda p: blackwell.product(*_pair(p), p.dtype, p.bias),
        blackwell=True,
    ),
    Path(
        "codes as INT8, then Gluon, TMA and wgmma",
        PAIR,
        f"INT4 or INT8, scales per tensor, row or 128 of K; {configs.UNPACKED_ROWS} rows and more, or float32 results",
        _takes_integers,
        _run_integers,
        hopper=True,
    ),
    Path(
        "codes as bf16, then Gluon, TMA and wgmma, scales in float32",
        PAIR,
        f"float32 results: MX, NVFP4, scales per tensor, row or 128 of K; more than {configs.FUSED_ROWS} rows without "
        "the last",
        _takes_halves,
        _run_halves,
        hopper=True,
    ),
    Path(
        "the left side decodes into the order of the right one's codes, which decode on their way to wgmma",
        PAIR,
        f"16-bit results of any × {_CODES}, FP8, INT8 or MXFP8, from 17 or 33 to some 256 rows",
        _takes_decoded_in_order,
        _run_decoded_in_order,
        hopper=True,
    ),
    Path(
        "the left side decodes to bf16, then as weight-only matmul",
        PAIR,
        "MX and NVFP4 on the left; 16-bit results of any",
        _takes_rows_by_weight,
        _run_rows_by_weight,
    ),
    Path(
        "Gluon, codes decode in registers for mma.sync",
        WEIGHTS,
        f"up to 8 rows of bf16 × {_CODES}",
        lambda p: p.configured("rows") and p.kind in configs.FOUR_BITS,
        _run_rows,
        hopper=True,
    ),
    Path(
        "Triton, by rows",
        WEIGHTS,
        "1 or 2 rows × 8 bits, where it was measured faster",
        _takes_gemv8,
        _run_gemv8,
    ),
    Path(
        "Gluon, codes decode on their way to wgmma",
        WEIGHTS,
        f"up to {configs.FUSED_ROWS} rows of bf16 × {_CODES}, FP8, INT8 or MXFP8",
        lambda p: (p.configured("fused") or p.configured("rows")) and p.kind is not None,
        _run_fused,
        hopper=True,
    ),
    Path(
        "Triton, by rows",
        WEIGHTS,
        "1 row × 4 bits",
        lambda p: p.few_rows(1) and p.w is not None and p.w.packed,
        _run_gemv,
    ),
    Path(
        "decode to bf16, then Gluon, TMA and wgmma",
        WEIGHTS,
        "bf16 × any other weights, or more rows",
        lambda p: p.rows is not None and p.rows.dtype == torch.bfloat16,
        _run_rows_dense,
        hopper=True,
    ),
    Path(
        "decode to the type of the activations, then cuBLAS",
        WEIGHTS,
        "16-bit floats × any other weights",
        lambda p: p.rows is not None,
        _run_decoded_weight,
    ),
    Path(
        "decode to bf16, then cuBLAS",
        OTHER,
        "formats exact in bf16 (MX, and bf16 itself) on both sides",
        _takes_exact,
        _run_exact,
    ),
    Path(
        "decode to bf16, then cuBLAS",
        OTHER,
        "16-bit results of quantized operands",
        lambda p: p.dtype != torch.float32 and _all_quantized(p),
        _run_bf16,
    ),
    Path("decode to float32, then a float32 product", OTHER, "everything else", lambda p: True, _run_float32),
]


def find(p: Product) -> Path:
    """The path that takes a product."""
    return next(path for path in PATHS if path.runs_on(p.major) and path.takes(p))


def run(p: Product) -> torch.Tensor:
    return find(p).run(p)


def on(capability: tuple[int, int]) -> dict[str, str]:
    """Verb -> what takes its products on a GPU of that compute capability, in order."""
    made: dict[str, str] = {}
    for path in PATHS:
        if path.runs_on(capability[0]):
            said = f"{path.name}: {path.operands}"
            made[path.verb] = f"{made[path.verb]}; {said}" if path.verb in made else said
    return made


def table() -> str:
    """`PATHS` in Markdown."""
    lines = ["| product | operands | what runs | where |", "| --- | --- | --- | --- |"]
    for path in PATHS:
        name = path.name.replace("torch._scaled_mm", "`torch._scaled_mm`").replace("wgmma", "`wgmma`")
        name = name.replace("mma.sync", "`mma.sync`")
        lines.append(f"| {path.verb} | {path.operands} | {name} | {path.where} |")
    return "\n".join(lines)
