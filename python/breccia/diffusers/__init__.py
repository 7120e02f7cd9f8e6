# SPDX-License-Identifier: Apache-2.0
"""Hugging Face diffusers opens models quantized by breccia and keeps their codes.

Importing this module imports diffusers and adds the quantizer "breccia" to its lists: for what ``breccia convert``
writes in its own format, and for quantizing on load. From then on ``from_pretrained`` of a model of diffusers makes
`breccia.nn.QuantizedLinear` layers.
"""

from __future__ import annotations

from breccia.peers import require_version

require_version("diffusers", "diffusers")

from breccia.diffusers.configs import BrecciaConfig  # noqa: E402
from breccia.diffusers.quantizer import BrecciaQuantizer, mark  # noqa: E402

__all__ = ["BrecciaConfig", "BrecciaQuantizer", "mark"]
