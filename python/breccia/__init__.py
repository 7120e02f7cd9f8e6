# SPDX-License-Identifier: Apache-2.0
"""Block-scaled low-precision tensors whose scale, recipe and layout travel with the data."""

from breccia import formats, kernels, layouts, recipes
from breccia._version import __version__
from breccia.cpu import cpu_info, num_threads, set_backend, set_num_threads
from breccia.layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.ops import cast, dequantize, linear, matmul, requantize
from breccia.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.scaled_tensor import ScaledTensor, from_buffer

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "INT4Scaling",
    "INT8Scaling",
    "Layout",
    "MXFP4BlockScaling",
    "MXFP6BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "PerBlockK",
    "PerBlockMN",
    "PerChannel",
    "PerTensor",
    "ScaledTensor",
    "ScalingRecipe",
    "__version__",
    "cast",
    "cpu_info",
    "dequantize",
    "formats",
    "from_buffer",
    "kernels",
    "layouts",
    "linear",
    "matmul",
    "num_threads",
    "recipes",
    "requantize",
    "set_backend",
    "set_num_threads",
]
