# SPDX-License-Identifier: Apache-2.0
"""A small sweep of products on the GPU, to run under a sanitizer:

compute-sanitizer --tool memcheck python tests_py/gpu/sanitize.py
compute-sanitizer --tool racecheck python tests_py/gpu/sanitize.py --few
"""

from __future__ import annotations

import argparse

import breccia
import torch
from breccia.kernels import triton as kernels

WEIGHTS = (
    breccia.NVFP4BlockScaling(),
    breccia.MXFP4BlockScaling(),
    breccia.INT4Scaling(),
    breccia.Float8BlockScaling(block_m=128),
    breccia.MXFP8BlockScaling(),
    breccia.INT8Scaling(),
)
SHAPES = ((1, 200, 1152), (3, 200, 1152), (5, 200, 1024), (64, 333, 640), (100, 264, 512), (300, 136, 384))


def difference(y: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> float:
    """The largest, on the CPU: a sanitizer need not watch cuBLAS."""
    return float((y.cpu().double() - a.cpu().double() @ w.cpu().double().T).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="one format to a shape")
    few = parser.parse_args().few
    torch.manual_seed(0)
    products = [(w, shape) for i, shape in enumerate(SHAPES) for j, w in enumerate(WEIGHTS) if not few or i == j]
    for recipe, (m, n, k) in products:
        x, w = torch.randn(m, k).bfloat16().cuda(), kernels.cast(torch.randn(n, k).cuda(), recipe)
        y = kernels.linear(x, w)
        print(type(recipe).__name__, m, n, k, difference(y, x, kernels.dequantize(w)), flush=True)
    for m, n, k in ((16, 200, 512), (150, 264, 512)):
        a = kernels.cast(torch.randn(m, k).cuda(), breccia.Float8BlockScaling())
        b = kernels.cast(torch.randn(n, k).cuda(), breccia.Float8BlockScaling(block_m=128))
        print("FP8 by FP8", m, n, k, difference(kernels.linear(a, b), kernels.dequantize(a), kernels.dequantize(b)))


if __name__ == "__main__":
    main()
