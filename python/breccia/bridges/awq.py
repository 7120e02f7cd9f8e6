# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoints (GEMM): (K, N / 8) words whose nibbles hold columns 0, 2, 4, 6, 1, 3, 5, 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import _core
from breccia.bridges.checks import check_axes, flag, float_name, shown
from breccia.bridges.common import Array, as_numpy, check_matrix, get_matrix
from breccia.bridges.contract import FileFormat
from breccia.bridges.integers import integer_zero_point, offset_bits, turned
from breccia.bridges.packing import pack_nibbles, packed_codes, unpack_nibbles, word_matrix
from breccia.bridges.parts import Found, Part, materialize, rows_only
from breccia.bridges.scales import made, row_blocks, scale_name
from breccia.bridges.written import Dialect, Written
from breccia.recipes import INT4Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import integers

NAME = "awq"
RECIPES: dict[str, ScalingRecipe] = {"int4": INT4Scaling(signed=False, symmetric=False)}

__all__ = ["from_awq", "to_awq"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_awq`."""

    symmetric: bool


def from_awq(parts: Mapping[str, Any], symmetric: bool = False) -> ScaledTensor:
    """The tensors of one module as a ScaledTensor. Codes are transposed to rows.

    Args:
        parts: arrays by role: ``qweight`` int32 ``(K, N / 8)``, ``qzeros`` int32 ``(K / g, N / 8)``, ``scales`` float
            ``(K / g, N)``.
        symmetric: whether every zero point must be 8, as files without zero points say.

    Returns:
        Unsigned INT4 with zero points, of shape ``(N, K)``.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit, or a zero point is not 8 though all must be.
    """
    qweight, qzeros, scales = (get_matrix(parts, role, NAME) for role in ("qweight", "qzeros", "scales"))
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    groups = scales.shape[0]
    if scales.shape != (groups, rows) or qzeros.shape != (groups, rows // 8) or groups == 0 or columns % groups:
        raise ValueError(
            f"{NAME}: qweight (K, N / 8), qzeros (K / g, N / 8) and scales (K / g, N) must fit, "
            f"got {qweight.shape}, {qzeros.shape}, {scales.shape}"
        )
    size = columns // groups
    zero_point = unpack_nibbles(_core.codes_from_awq(word_matrix(qzeros, "qzeros"), 0), groups)
    _check_symmetric(zero_point, symmetric)
    recipe = INT4Scaling(group_size=size, signed=False, symmetric=False, scale_dtype=scale_name(scales.dtype.name))
    return made(
        _core.codes_from_awq(word_matrix(qweight, "qweight"), 0),
        np.ascontiguousarray(scales.T),
        recipe,
        row_blocks(size, columns),
        np.ascontiguousarray(zero_point),
        shape=(rows, columns),
    )


def _check_symmetric(zero_point: Array, symmetric: bool) -> None:
    if symmetric and (zero_point != 8).any():
        raise ValueError(
            f"{NAME}: zero points (qzeros) must all be 8 where config.json says zero_point false, they are from "
            f"{zero_point.min()} to {zero_point.max()}"
        )


def to_awq(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_awq`. Symmetric tensors get zero points of 8.

    Args:
        scaled: INT4 of shape ``(N, K)``, N a multiple of 8.

    Returns:
        ``qweight`` int32 ``(K, N / 8)``, ``qzeros`` int32 ``(K / g, N / 8)`` and ``scales`` ``(K / g, N)``.

    Raises:
        ValueError: the tensor is not INT4, or its rows are not a multiple of 8.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_awq`, each tensor made when it is asked for."""
    if not carries(scaled.recipe):
        raise ValueError(f"scaled must be INT4Scaling, got {scaled.recipe}")
    check_matrix(scaled, NAME)
    rows, columns = scaled.shape
    if rows % 8:
        raise ValueError(f"scaled must have a multiple of 8 rows, got shape {scaled.shape}")
    scale = as_numpy(scaled.scale, "scale")
    groups = scale.shape[-1]

    def words(packed: Array, of_row: int, flip: int) -> Array:
        return _core.codes_to_awq(packed, of_row, flip).view("<i4")

    codes, zeros = (columns, rows // 8), (groups, rows // 8)
    return {
        "qweight": Part("I32", codes, lambda: words(packed_codes(scaled), columns, offset_bits(scaled))),
        "qzeros": Part("I32", zeros, lambda: words(pack_nibbles(integer_zero_point(scaled, 15)), groups, 0)),
        "scales": turned(scale),
    }


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    return isinstance(recipe, INT4Scaling)


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix = name.removesuffix("qweight")
    qweight, qzeros, scales = entries[name], entries.get(prefix + "qzeros"), entries.get(prefix + "scales")
    if qzeros is None or scales is None:
        return None
    check_axes(2, qweight, qzeros, scales, most=2)
    if qweight.shape[1] != qzeros.shape[1]:
        return None
    if scales.shape[1] != qweight.shape[1] * 8:
        return None
    rows, columns = scales.shape[1], qweight.shape[0]
    said = context.get("quantization_config") or {}
    said = said if said.get("quant_method") == NAME else {}
    _check_said(name, said, columns // scales.shape[0], columns)
    dtype, size = float_name(scales), columns // scales.shape[0]
    recipe = INT4Scaling(group_size=size, signed=False, symmetric=False, scale_dtype=scale_name(dtype))
    parts = {role: prefix + role for role in ("qweight", "qzeros", "scales")}
    return Found(
        prefix + "weight",
        NAME,
        "gemm 4 bits",
        parts,
        (rows, columns),
        recipe,
        row_blocks(size, columns),
        dtype,
        details=Details(said.get("zero_point") is False),
    )


def _check_said(name: str, said: Mapping[str, Any], size: int, columns: int) -> None:
    """Whether config.json says of such tensors what they are. Raises ValueError where it says something else."""
    version, bits = said.get("version"), said.get("bits")
    if version is not None and str(version).lower() not in ("gemm", "exllama", "exllamav2"):
        raise ValueError(f"{name}: version must be 'gemm' of tensors (K, N / 8), config.json says {shown(version)}")
    if bits not in (None, 4):
        raise ValueError(f"{name}: bits must be 4 of such tensors, config.json says {shown(bits)}")
    groups = said.get("group_size", said.get("q_group_size"))
    if groups not in (None, size, -1) or (groups == -1 and size != columns):
        raise ValueError(f"{name}: group_size must be {size} of such tensors, config.json says {shown(groups)}")
    flag(said.get("zero_point"), f"{name}: zero_point")


def refine(found: Found, array: Any) -> Found:
    """Looks whether zero points are what config.json says of them."""
    if found.record(Details).symmetric:
        packed = _core.codes_from_awq(word_matrix(array(found.parts["qzeros"]), "qzeros"), 0)
        _check_symmetric(unpack_nibbles(packed, array(found.parts["scales"]).shape[0]), True)
    return found


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here, where programs look for names inside of names."""
    for name in written.ignored:
        if inside := next((module for module in written.recipes if name in module), None):
            raise ValueError(
                f"{NAME}: {inside!r} must not be quantized where {name!r} is not: programs leave out all layers whose "
                "names have such a name in them"
            )
    return {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": getattr(written.only(NAME), "group_size", 128),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": written.ignored,
        }
    }


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers with GPTQModel"),
    calibrated=True,
    recipes=RECIPES,
    anchors=(".qweight",),
    find=find,
    refine=refine,
    row_axis=-1,
    read=lambda parts, found: from_awq(parts, found.record(Details).symmetric),
    carries=carries,
    lay_out=lambda scaled, place: lay_out(scaled),
    dialect=Dialect(read=integers.scheme, write=config, **integers.SAID),
)
