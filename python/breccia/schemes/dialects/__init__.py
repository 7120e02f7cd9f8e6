# SPDX-License-Identifier: Apache-2.0
"""One module per way of saying what a model is, each with the methods that it reads and a function ``scheme``."""

from __future__ import annotations

from collections.abc import Callable

from breccia.schemes.dialects import compressed_tensors, fp8, integers, modelopt, others, quark
from breccia.schemes.dialects.common import Said
from breccia.schemes.value import ModelScheme

__all__ = ["Said", "methods", "scheme_of"]

_READERS: dict[str, Callable[[Said], ModelScheme]] = {
    method: module.scheme
    for module in (compressed_tensors, fp8, integers, modelopt, others, quark)
    for method in module.METHODS
}


def methods() -> list[str]:
    """The ``quant_method`` of every configuration that is read; "" stands for none."""
    return list(_READERS)


def scheme_of(said: Said) -> ModelScheme:
    """The scheme of a checkpoint by its ``quant_method``; by its tensors alone where that is not known. Raises
    ValueError where the configuration is not of its method's form."""
    method = str(said.quantization.get("quant_method", ""))
    return _READERS.get(method, others.scheme)(said)
