# SPDX-License-Identifier: Apache-2.0
"""SGLang with breccia beside it: checkpoints in breccia's own format.

SGLang finds `register` by its entry point ``sglang.srt.plugins`` and calls it in every process.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the format to SGLang's lists, once. Where this version of SGLang has no place for it, it is left out with a
    warning."""
    import importlib

    from breccia._serving.plugin import add_to

    module = "breccia.sglang.quantization"
    add_to("SGLang", {"checkpoints in breccia's format": lambda: importlib.import_module(module)})
