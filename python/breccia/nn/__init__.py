# SPDX-License-Identifier: Apache-2.0
"""torch modules: `ScaledLinear` trains in low precision, `ScaledExperts` a mixture of experts in FP8 between two casts;
`QuantizedLinear` serves quantized weights. `functional` has what comes before a linear layer, quantized in the same
kernel.

Importing this module imports torch.
"""

from __future__ import annotations

from breccia.nn import functional
from breccia.nn.experts import ScaledExperts
from breccia.nn.layers import QuantizedLinear, ScaledLinear
from breccia.nn.quantizing import pack_
from breccia.verbs.quantize_model import quantize, quantize_

__all__ = ["QuantizedLinear", "ScaledExperts", "ScaledLinear", "functional", "pack_", "quantize", "quantize_"]
