# SPDX-License-Identifier: Apache-2.0
"""What quantized models are, layer by layer: `ModelScheme`, as `breccia.load_scheme` reads it of any checkpoint."""

from __future__ import annotations

from breccia.schemes.matching import Match
from breccia.schemes.reading import differences, folded, modules_of, of_checkpoint
from breccia.schemes.value import UNSAID, Activations, KVCache, ModelScheme, Rule, StoredScale

__all__ = [
    "UNSAID",
    "Activations",
    "KVCache",
    "Match",
    "ModelScheme",
    "Rule",
    "StoredScale",
    "differences",
    "folded",
    "modules_of",
    "of_checkpoint",
]
