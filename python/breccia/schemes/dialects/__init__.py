# SPDX-License-Identifier: Apache-2.0
"""Ways of saying what a model is: each module reads one, or several that are alike, as a format's `Dialect` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from breccia import bridges
from breccia.schemes.dialects import others
from breccia.schemes.dialects.common import Said
from breccia.schemes.value import ModelScheme

if TYPE_CHECKING:
    from breccia.bridges.written import Dialect

__all__ = ["Said", "dialect_of", "methods", "scheme_of"]


def methods() -> list[str]:
    """The ``quant_method`` of every configuration that is read; "" stands for none."""
    return ["", *(method for method, dialect in _dialects().items() if dialect.read is not None)]


def _dialects() -> dict[str, Dialect]:
    """The dialect of each ``quant_method``."""
    every = bridges.registry().values()
    return {method: one.dialect for one in every for method in (*one.methods, *one.dialect.methods)}


def dialect_of(quantization: Any) -> Dialect | None:
    """That in which an object of config.json says what a model is; None where nobody here knows it."""
    if "quant_method" not in quantization and "bits" in quantization:
        return bridges.bridge("mlx").dialect
    return _dialects().get(str(quantization.get("quant_method")))


def scheme_of(said: Said) -> ModelScheme:
    """The scheme of a checkpoint by its ``quant_method``; by its tensors alone where that is not known. Raises
    ValueError where the configuration is not of its method's form."""
    dialect = dialect_of(said.quantization)
    return (others.scheme if dialect is None or dialect.read is None else dialect.read)(said)
