# SPDX-License-Identifier: Apache-2.0
"""The named kernels of the public API, and what this machine would run."""

from __future__ import annotations

from typing import Any

import torch

from breccia.device import GpuInfo
from breccia.frameworks.torch.tensors import float_dtype
from breccia.kernels.triton import recipes
from breccia.kernels.triton.products import paths
from breccia.kernels.triton.products.dispatch import FP8
from breccia.kernels.triton.products.product import HOPPER, Fp8, Product
from breccia.scaled_tensor import ScaledTensor


def _operands(a: Any, b: Any) -> tuple[recipes.Operand, recipes.Operand]:
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, ScaledTensor):
            raise TypeError(f"{name} must be a ScaledTensor, got {type(t).__name__}")
        if not isinstance(t.data, torch.Tensor) or not t.data.is_cuda:
            raise TypeError(f"{name} must hold CUDA tensors, got {getattr(t.data, 'device', type(t.data).__name__)}")
        if len(t.shape) != 2:
            raise ValueError(f"{name} must be 2-D, got shape {t.shape}")
    if a.data.device != b.data.device:
        raise TypeError(f"operands must be on one device, got {a.data.device} and {b.data.device}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a (M, K) and b (K, N) must agree in K, got {a.shape} and {b.shape}")
    left, right = recipes.operand(a), recipes.operand(b)
    for name, op in (("a", left), ("b", right)):
        if op.element not in FP8:
            raise TypeError(f"{name} must have FP8 codes, got {op.tensor.recipe.element}")
    if left.element == right.element == "e5m2":
        raise TypeError("one operand at least must be E4M3: the hardware does not multiply E5M2 by E5M2")
    return left, right


def _codes(op: recipes.Operand, along: int) -> torch.Tensor:
    """FP8 codes as (rows, K); `along` is the tensor's axis that is K."""
    codes = op.codes.view(FP8[op.element])
    k_last = (along == 1) != op.transposed
    return codes if k_last else codes.mT


def _product(out_dtype: Any, bias: torch.Tensor | None, operands: Fp8, autotune: bool) -> torch.Tensor:
    product = Product(torch.bfloat16 if out_dtype is None else float_dtype(out_dtype), bias, operands)
    if not autotune or product.major != HOPPER:
        return paths.run(product)
    from breccia.kernels.triton.products.autotune import tuned

    return tuned(product.dtype, bias, operands)


def scaled_matmul_triton(
    a: ScaledTensor,
    b: ScaledTensor,
    out_dtype: Any = None,
    autotune: bool = False,
    fast_accumulate: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """FP8 a (M, K) times FP8 b (K, N) with a scale per tensor, or per row of a and column of b.

    Args:
        out_dtype: bfloat16 (default), float16 or float32.
        autotune: time the candidate configurations on this shape once and keep the best on disk, instead of the
            shipped table.
        fast_accumulate: leave sums to the tensor cores' short accumulator; the default adds up in float32 every 128
            elements of K.
    """
    left, right = _operands(a, b)
    scales = []
    for name, op, per_row in (("a", left, not left.transposed), ("b", right, right.transposed)):
        if op.scale.numel() > 1 and not (op.block == (1, 0) and per_row):
            raise ValueError(
                f"{name} must have a scale per tensor, or per row of a and column of b; got {op.tensor.layout}"
            )
        scales.append(op.scale.reshape(-1, 1).float())
    operands = Fp8(_codes(left, 1), _codes(right, 0), scales[0], scales[1], False, fast_accumulate)
    return _product(out_dtype, bias, operands, autotune)


def block_scaled_matmul_triton(
    a: ScaledTensor, b: ScaledTensor, out_dtype: Any = None, autotune: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """FP8 a (M, K) with scales per 1 x 128, times the transpose view of a weight (N, K) with scales per 1 x 128 or
    128 x 128.

    Every slice of 128 along K is scaled and added up in float32. `out_dtype` as in `scaled_matmul_triton`.
    """
    left, right = _operands(a, b)
    if left.transposed or left.block != (1, 128) or left.sfmt != "float":
        raise ValueError(f"a must have a float scale per 1 x 128 along K, got {a.layout}")
    if not right.transposed or right.block not in ((1, 128), (128, 128)) or right.sfmt != "float":
        raise ValueError(f"b must be the transpose of a weight (N, K) scaled per 1 x 128 or 128 x 128, got {b.layout}")
    operands = Fp8(_codes(left, 1), _codes(right, 0), left.scale.float(), right.scale.float(), True)
    return _product(out_dtype, bias, operands, autotune)


def gpu_info(device: int = 0) -> GpuInfo:
    """`breccia.gpu_info` where there is a GPU."""
    import triton

    if not 0 <= device < torch.cuda.device_count():
        raise ValueError(f"device must be between 0 and {torch.cuda.device_count() - 1}, got {device}")
    capability = torch.cuda.get_device_capability(device)
    conversions = dict.fromkeys(("cast", "dequantize", "requantize"), "Triton")
    return GpuInfo(
        available=True,
        device=torch.cuda.get_device_name(device),
        capability=f"{capability[0]}.{capability[1]}",
        torch=torch.__version__,
        triton=triton.__version__,
        kernels={**conversions, **paths.on(capability)},
    )
