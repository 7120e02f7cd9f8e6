# SPDX-License-Identifier: Apache-2.0
"""SGLang with breccia beside it: checkpoints in breccia's own format.

SGLang finds `register` by its entry point ``sglang.srt.plugins`` and calls it in every process.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the format to SGLang's lists, once."""
    import importlib

    importlib.import_module("breccia.sglang.quantization")
