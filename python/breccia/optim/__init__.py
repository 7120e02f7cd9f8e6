# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose states are quantized, and the expansion that makes a moment fill the range of its format.

Importing this module imports torch.
"""

from __future__ import annotations

from breccia.optim.adamw import AdamW
from breccia.optim.expanded import ExpandedTensor, expand

__all__ = ["AdamW", "ExpandedTensor", "expand"]
