# SPDX-License-Identifier: Apache-2.0
"""Which kernel takes a product: the first of `PATHS` that does. `breccia.gpu_info` and docs/design/0012 say
what this list says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from breccia.kernels.triton.products import blackwell, configs, pairs, running
from breccia.kernels.triton.products.product import BLACKWELL, HOPPER, Product


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


def _run_rows_by_weight(p: Product) -> torch.Tensor:
    rows, w = pairs.rows_by_weight(*running.given(p.pair))
    return run(Product(p.dtype, p.bias, rows=rows, w=w))


GROUPED, FP8_FP8, INT8_INT8 = "grouped_matmul", "fp8 matmul", "int8 matmul"
PAIR, WEIGHTS, OTHER = "matmul of two quantized", "weight-only matmul", "other matmul"
_CODES = "NVFP4, MXFP4, INT4 g128"

PATHS = [
    Path(
        "Gluon, codes decode on their way to wgmma",
        GROUPED,
        f"bf16 × {_CODES}, FP8, INT8 or MXFP8",
        lambda p: p.offsets is not None and p.kind is not None,
        running.run_fused,
        hopper=True,
    ),
    Path(
        "Gluon, TMA and wgmma",
        GROUPED,
        "FP8 × FP8 with scales per 1 × 128 (weights: also 128 × 128), K a multiple of 16",
        running.takes_experts,
        running.run_experts,
        hopper=True,
    ),
    Path(
        "Triton, codes decode on their way to the product",
        GROUPED,
        "16-bit floats × any weights; FP8 × FP8 with scales per 1 × 128 (weights: also 128 × 128)",
        lambda p: p.offsets is not None,
        running.run_grouped,
    ),
    Path(
        "torch._scaled_mm",
        FP8_FP8,
        "large matrices of whole tiles, bf16 results, where it was measured faster",
        running.takes_scaled_mm,
        running.run_scaled_mm,
        hopper=True,
    ),
    Path(
        "Gluon, TMA and wgmma",
        FP8_FP8,
        "scales per tensor, row, 1 × 128 or 128 × 128",
        lambda p: p.fp8 is not None,
        running.run_fp8_hopper,
        hopper=True,
    ),
    Path(
        "Triton",
        FP8_FP8,
        "scales per 1 × 128 or 128 × 128, of one side at least",
        lambda p: p.fp8 is not None and p.fp8.blocks,
        running.run_fp8_blocks,
    ),
    Path(
        "decode to bf16, then cuBLAS, then scales",
        FP8_FP8,
        "scales per tensor or row",
        lambda p: p.fp8 is not None,
        running.run_fp8_decoded,
    ),
    Path(
        "Gluon, TMA and wgmma",
        INT8_INT8,
        "INT8 × INT8 with scales and zero points per tensor or row",
        lambda p: p.ints is not None,
        running.run_int8_hopper,
        hopper=True,
    ),
    Path(
        "Triton",
        INT8_INT8,
        "INT8 × INT8 with scales and zero points per tensor or row",
        lambda p: p.ints is not None,
        running.run_int8,
    ),
    Path(
        "torch._scaled_mm by block scales",
        PAIR,
        "MXFP8 × MXFP8, NVFP4 × NVFP4",
        lambda p: p.pair is not None and blackwell.takes(*p.pair),
        lambda p: blackwell.product(*running.given(p.pair), p.dtype, p.bias),
        blackwell=True,
    ),
    Path(
        "codes as INT8, then Gluon, TMA and wgmma",
        PAIR,
        f"INT4 or INT8, scales per tensor, row or 128 of K; {configs.UNPACKED_ROWS} rows and more, or float32 results",
        running.takes_integers,
        running.run_integers,
        hopper=True,
    ),
    Path(
        "codes as bf16, then Gluon, TMA and wgmma, scales in float32",
        PAIR,
        f"float32 results: MX, NVFP4, scales per tensor, row or 128 of K; more than {configs.FUSED_ROWS} rows without "
        "the last",
        running.takes_halves,
        running.run_halves,
        hopper=True,
    ),
    Path(
        "the left side decodes into the order of the right one's codes, which decode on their way to wgmma",
        PAIR,
        f"16-bit results of any × {_CODES}, FP8, INT8 or MXFP8, in tiles whose activations a kernel orders ahead",
        running.takes_decoded_in_order,
        running.run_decoded_in_order,
        hopper=True,
    ),
    Path(
        "the left side decodes to bf16, then as weight-only matmul",
        PAIR,
        "MX and NVFP4 on the left; 16-bit results of any",
        running.takes_rows_by_weight,
        _run_rows_by_weight,
    ),
    Path(
        "Gluon, codes decode in registers for mma.sync",
        WEIGHTS,
        f"up to 8 rows of bf16 × {_CODES}",
        lambda p: p.configured("rows") and p.kind in configs.FOUR_BITS,
        running.run_rows,
        hopper=True,
    ),
    Path(
        "Triton, by rows",
        WEIGHTS,
        "1 or 2 rows × 8 bits, where it was measured faster",
        running.takes_gemv8,
        running.run_gemv8,
    ),
    Path(
        "Gluon, codes decode on their way to wgmma",
        WEIGHTS,
        f"up to {configs.FUSED_ROWS} rows of bf16 × {_CODES}, FP8, INT8 or MXFP8",
        lambda p: (p.configured("fused") or p.configured("rows")) and p.kind is not None,
        running.run_fused,
        hopper=True,
    ),
    Path(
        "Triton, by rows",
        WEIGHTS,
        "1 row × 4 bits",
        lambda p: p.few_rows(1) and p.w is not None and p.w.packed,
        running.run_gemv,
    ),
    Path(
        "decode to bf16, then Gluon, TMA and wgmma",
        WEIGHTS,
        "bf16 × any other weights, or more rows",
        lambda p: p.rows is not None and p.rows.dtype == torch.bfloat16,
        running.run_rows_dense,
        hopper=True,
    ),
    Path(
        "decode to the type of the activations, then cuBLAS",
        WEIGHTS,
        "16-bit floats × any other weights",
        lambda p: p.rows is not None,
        running.run_decoded_weight,
    ),
    Path(
        "decode to bf16, then cuBLAS",
        OTHER,
        "formats exact in bf16 (MX, and bf16 itself) on both sides",
        running.takes_exact,
        running.run_exact,
    ),
    Path(
        "decode to bf16, then cuBLAS",
        OTHER,
        "bf16 by a weight as it lies, as its layer's backward pass wants it; bf16 results",
        running.takes_values,
        running.run_bf16,
    ),
    Path(
        "decode to bf16, then cuBLAS",
        OTHER,
        "16-bit results of quantized operands",
        lambda p: p.dtype != torch.float32 and running.all_quantized(p),
        running.run_bf16,
    ),
    Path("decode to float32, then a float32 product", OTHER, "everything else", lambda p: True, running.run_float32),
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
