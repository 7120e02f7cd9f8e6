# SPDX-License-Identifier: Apache-2.0
"""The verbs as whole-array operations, written once over a small array namespace.

They run wherever a framework's arrays live, and produce the core's bytes (``cpp/src/kernels``). The core
is many times faster on a CPU: these are for devices it cannot reach, for tracing, and for the options of
`breccia.cast` that it does not have.
"""

from breccia.kernels.whole_array.exact import requantize
from breccia.kernels.whole_array.quantize import Parts, cast, cast_scaled
from breccia.kernels.whole_array.random import hadamard
from breccia.kernels.whole_array.values import dequantize, saturation

__all__ = ["Parts", "cast", "cast_scaled", "dequantize", "hadamard", "requantize", "saturation"]
