# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose states are quantized.

Importing this module imports torch.
"""

from __future__ import annotations

from breccia.optim.adamw import AdamW

__all__ = ["AdamW"]
