# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers opens quantized checkpoints and keeps their codes.

Importing this module imports transformers and registers two quantizers with it: "breccia", for what
``breccia convert`` writes in its own format and for quantizing on load, and "modelopt", for NVIDIA's NVFP4, FP8, MXFP8
and INT4. From then on ``AutoModelForCausalLM.from_pretrained(directory)`` makes `breccia.nn.QuantizedLinear` layers.
"""

from __future__ import annotations

from breccia.peers import require_version

require_version("transformers", "transformers")

from breccia.transformers.configs import BrecciaConfig, ModelOptConfig  # noqa: E402
from breccia.transformers.quantizers import BrecciaQuantizer, ModelOptQuantizer, mark  # noqa: E402

__all__ = ["BrecciaConfig", "BrecciaQuantizer", "ModelOptConfig", "ModelOptQuantizer", "mark"]
