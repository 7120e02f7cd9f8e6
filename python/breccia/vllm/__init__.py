# SPDX-License-Identifier: Apache-2.0
"""vLLM with breccia beside it: checkpoints in breccia's own format, and kernels for CPUs where it has none.

vLLM finds `register` by its entry point ``vllm.general_plugins`` and calls it in every process.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Append the kernels of `breccia.vllm.kernels` to vLLM's lists, on a CPU and once, and register the format.

    vLLM does not catch what plugins raise: what its version has no place for is left out, with one warning.
    """
    import importlib

    from breccia._serving.plugin import add_to
    from breccia.vllm import kernels

    module = "breccia.vllm.quantization"
    add_to("vLLM", {"checkpoints in breccia's format": lambda: importlib.import_module(module), **kernels.parts()})
