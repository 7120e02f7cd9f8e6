# SPDX-License-Identifier: Apache-2.0
"""torch modules: `ScaledLinear` trains in low precision, `ScaledExperts` a mixture of experts in FP8 between two casts;
`QuantizedLinear` serves quantized weights. `functional` has what comes before a linear layer, quantized in the same
kernel.

Importing this module imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from breccia import _moved
from breccia.nn import functional
from breccia.nn.experts import ScaledExperts
from breccia.nn.layers import QuantizedLinear, ScaledLinear
from breccia.nn.quantizing import pack_
from breccia.verbs.quantize_model import quantize_, quantize_layer

__all__ = ["QuantizedLinear", "ScaledExperts", "ScaledLinear", "functional", "pack_", "quantize_", "quantize_layer"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return _moved.renamed(__name__, name)
