# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints: (K, N) words, eight rows per word; zero points stored minus one ("gptq") or as
they are ("gptq_v2"); columns in the order of activation where ``g_idx`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from breccia import _core
from breccia.bridges._bridge import FileFormat, Place
from breccia.bridges._checks import StoredTypeError, check_axes, float_name, shown
from breccia.bridges._common import (
    STORED_SCALES,
    Array,
    as_numpy,
    check_matrix,
    from_words,
    get,
    get_matrix,
    made,
    pack_nibbles,
    packed_codes,
    row_blocks,
    scale_name,
    unpack_nibbles,
    word_matrix,
    words,
)
from breccia.bridges._integers import int4, integer_zero_point, offset_bits
from breccia.bridges._outside import OutsideTensor
from breccia.bridges._parts import Found, Part, materialize, rows_or_outside
from breccia.bridges._written import Written
from breccia.recipes import INT4Scaling, INT8Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

NAME = "gptq"
PEER = None
EXTRA = ""
RECIPES: dict[str, ScalingRecipe] = {
    "int4": INT4Scaling(),
    "int4-asym": INT4Scaling(signed=False, symmetric=False),
}
_IN_ORDER = np.zeros(0, np.int64)  # columns of the core stay where they are

__all__ = ["from_gptq", "to_gptq"]


def from_gptq(
    parts: Mapping[str, Any], *, version: str = "gptq", symmetric: bool | None = None
) -> ScaledTensor | OutsideTensor:
    """The tensors of one module, by the last part of their names.

    Args:
        parts: ``qweight`` (K / 8, N), ``qzeros`` (K / g, N / 8), ``scales`` (K / g, N), ``g_idx`` (K).
        version: "gptq" (zero points stored minus one) or "gptq_v2".
        symmetric: whether every zero point is 8 (128 for 8 bits); looked at if None.

    Returns:
        A ScaledTensor (N, K); an OutsideTensor where ``g_idx`` reorders the columns.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
    """
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"version must be 'gptq' or 'gptq_v2', got {version!r}")
    qweight, qzeros, scales = (get_matrix(parts, role, NAME) for role in ("qweight", "qzeros", "scales"))
    groups, rows = scales.shape
    bits = 32 * qzeros.shape[1] // rows if rows else 4
    if bits not in (4, 8) or qzeros.shape != (groups, rows * bits // 32) or qweight.shape[1] != rows:
        raise ValueError(
            f"{NAME}: qweight (K / 8, N), qzeros (K / g, N / 8) and scales (K / g, N) must fit (4 bits; half as many "
            f"to a word for 8), got {qweight.shape}, {qzeros.shape}, {scales.shape}"
        )
    columns = qweight.shape[0] * 32 // bits
    stored = word_matrix(qweight, "qweight")
    zeros = words(qzeros, "qzeros")
    zeros = unpack_nibbles(zeros, rows) if bits == 4 else zeros
    zero_point = np.ascontiguousarray(zeros.T).astype(np.int16) + (1 if version == "gptq" else 0)
    scale = np.ascontiguousarray(scales.T)
    middle = 1 << (bits - 1)
    if symmetric is None:
        symmetric = bool((zero_point == middle).all())
    elif symmetric and not (zero_point == middle).all():
        raise ValueError(f"{NAME}: qzeros must all be {middle} for a symmetric checkpoint, they are not")
    order, size = _order(parts, columns, groups)
    order_of_columns = _IN_ORDER if order is None else order
    if bits == 4:
        data = _core.codes_from_gptq(stored, 4, order_of_columns, 0x88888888 if symmetric else 0)
        scaled = int4(data, scale, None if symmetric else zero_point.astype(np.uint8), (rows, columns), size)
    else:
        data = _core.codes_from_gptq(stored, 8, order_of_columns, 0x80808080)
        recipe = INT8Scaling(group_size=size, scale_dtype=scale_name(scale.dtype.name), symmetric=symmetric)
        zero = None if symmetric else (zero_point - 128).astype(np.float32)
        scaled = made(data, scale, recipe, row_blocks(size, columns), zero)
    return scaled if order is None else OutsideTensor(scaled, columns=np.argsort(order, kind="stable"))


def _order(parts: Mapping[str, Any], columns: int, groups: int) -> tuple[Array | None, int]:
    """Places of the columns sorted by group (None where they are sorted), and the group size."""
    size = -(-columns // groups)
    if "g_idx" not in parts:
        return None, size
    g_idx = get(parts, "g_idx", NAME)
    if g_idx.dtype.kind not in "iu":
        raise StoredTypeError(f"{NAME}: g_idx must be of integers, got dtype {g_idx.dtype}")
    if g_idx.shape != (columns,) or (columns and (g_idx.min() < 0 or g_idx.max() >= groups)):
        raise ValueError(f"{NAME}: g_idx must be {columns} numbers below {groups}, got shape {g_idx.shape}")
    if np.array_equal(g_idx, np.arange(columns) // size):
        return None, size
    counts = np.bincount(g_idx, minlength=groups)
    if (counts[:-1] != size).any():
        raise ValueError(f"{NAME}: g_idx must give every group {size} columns, got {counts.min()} to {counts.max()}")
    return np.argsort(g_idx, kind="stable"), size


def to_gptq(scaled: ScaledTensor | OutsideTensor, *, version: str = "gptq") -> dict[str, Array]:
    """The inverse of `from_gptq`.

    Args:
        scaled: INT4 of shape ``(N, K)``, both multiples of 8; an OutsideTensor where columns are in another order.
        version: "gptq" (zero points stored minus one) or "gptq_v2".

    Returns:
        ``qweight`` int32 ``(K / 8, N)``, ``qzeros`` int32 ``(K / g, N / 8)``, ``scales`` ``(K / g, N)`` and ``g_idx``
        int32 ``(K,)``.

    Raises:
        ValueError: the tensor is not INT4, or a zero point is 0, which version "gptq" cannot store.
    """
    return materialize(lay_out(scaled, version=version))


@rows_or_outside
def lay_out(scaled: ScaledTensor | OutsideTensor, *, version: str = "gptq") -> dict[str, Part]:
    """`to_gptq`, each tensor made when it is asked for."""
    columns_at = None
    if isinstance(scaled, OutsideTensor):
        if scaled.bias is not None or scaled.columns is None:
            raise ValueError(f"scaled must have no bias, for GPTQ's zero points are whole, got {scaled}")
        columns_at, scaled = scaled.columns, scaled.scaled
    if not isinstance(scaled.recipe, INT4Scaling):
        raise ValueError(f"scaled must be INT4Scaling, got {scaled.recipe}")
    if version == "gptq" and not carries(scaled.recipe):
        raise ValueError(f"scaled must be signed or have zero points for version 'gptq', got {scaled.recipe}")
    check_matrix(scaled, NAME)
    rows, columns = scaled.shape
    scale = as_numpy(scaled.scale, "scale")
    groups = scale.shape[-1]
    if rows % 8 or columns % 8:
        raise ValueError(f"scaled must have rows and columns in multiples of 8, got shape {scaled.shape}")
    size = scaled.recipe.group_size
    final = scaled

    def qweight() -> Array:
        order = _IN_ORDER if columns_at is None else np.asarray(columns_at, np.int64)
        return _core.codes_to_gptq(packed_codes(final), 4, order, offset_bits(final)).view("<i4")

    def qzeros() -> Array:
        zero = integer_zero_point(final)
        if zero is None:
            zero = np.full((rows, groups), 8 if final.recipe.element == "int4" else 0, np.uint8)
        lowest, highest = (1, 16) if version == "gptq" else (0, 15)
        if zero.size and (zero.min() < lowest or zero.max() > highest):
            raise ValueError(
                f"zero_point must be from {lowest} to {highest} in version {version!r}, "
                f"got {zero.min()} to {zero.max()}: use the other version"
            )
        return from_words(pack_nibbles(zero.T - np.uint8(1 if version == "gptq" else 0)))

    group_of = np.arange(columns, dtype=np.int32) // np.int32(size)
    if columns_at is not None:
        group_of = (columns_at // size).astype(np.int32)
    return {
        "qweight": Part("I32", (columns // 8, rows), qweight),
        "qzeros": Part("I32", (groups, rows // 8), qzeros),
        "scales": Part(STORED_SCALES[scale.dtype.name], (groups, rows), lambda: np.ascontiguousarray(scale.T)),
        "g_idx": Part("I32", (columns,), lambda: group_of),
    }


def lay_out_for_checkpoint(scaled: ScaledTensor, place: Place) -> dict[str, Part]:
    """As `lay_out`; asymmetric tensors in version "gptq_v2", which alone can store every zero point."""
    return lay_out(scaled, version="gptq" if scaled.zero_point is None else "gptq_v2")


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    return isinstance(recipe, INT4Scaling) and (recipe.signed or not recipe.symmetric)


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    if not name.endswith(".qweight"):
        return None
    prefix = name.removesuffix("qweight")
    qzeros, scales = entries.get(prefix + "qzeros"), entries.get(prefix + "scales")
    qweight = entries[name]
    if qzeros is None or scales is None:
        return None
    check_axes(2, qweight, qzeros, scales, most=2)
    if qweight.shape[1] != scales.shape[1]:
        return None
    said = context.get("quantization_config") or {}
    rows, groups = scales.shape[1], scales.shape[0]
    bits = 32 * qzeros.shape[1] // rows
    if bits not in (4, 8):
        return None
    columns = qweight.shape[0] * 32 // bits
    size = -(-columns // groups)
    symmetric = bool(said.get("sym", False))
    version = said.get("checkpoint_format")
    version = "gptq" if version is None else version
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"{name}: checkpoint_format must be 'gptq' or 'gptq_v2', got {shown(version)}")
    dtype = float_name(scales)
    recipe: ScalingRecipe | None = INT4Scaling(
        group_size=size, signed=symmetric, symmetric=symmetric, scale_dtype=scale_name(dtype)
    )
    findings: tuple[str, ...] = ()
    if bits == 8:
        recipe = INT8Scaling(group_size=size, symmetric=symmetric, scale_dtype=scale_name(dtype))
    if said.get("desc_act"):
        recipe = None  # the columns' order has no ScaledTensor form
        findings = ("columns are in order of activation (desc_act)",)
    if "sym" not in said:
        findings += ("config.json does not say whether zero points are symmetric",)
    parts = {role: prefix + role for role in ("qweight", "qzeros", "scales", "g_idx") if prefix + role in entries}
    layout = row_blocks(size, columns)
    kind = f"{version} {bits} bits"
    return Found(
        prefix + "weight",
        NAME,
        kind,
        parts,
        (rows, columns),
        recipe,
        layout,
        dtype,
        options={"version": version, "symmetric": symmetric},
        findings=findings,
    )


def refine(found: Found, array: Any) -> Found:
    """Whether zero points are symmetric and columns in order, which headers do not say."""
    parts = {role: array(name) for role, name in found.parts.items() if role != "qweight"}
    columns, (groups, rows) = found.shape[1], parts["scales"].shape
    bits = 8 if found.kind.endswith("8 bits") else 4
    order, size = _order(parts, columns, groups)
    stored = words(parts["qzeros"], "qzeros")
    zero = unpack_nibbles(stored, rows) if bits == 4 else stored
    middle = (1 << (bits - 1)) - (1 if found.options["version"] == "gptq" else 0)
    symmetric = bool((zero == middle).all())
    dtype = scale_name(found.scale_dtype)
    recipe: ScalingRecipe | None = INT4Scaling(size, signed=symmetric, symmetric=symmetric, scale_dtype=dtype)
    if bits == 8:
        recipe = INT8Scaling(size, symmetric=symmetric, scale_dtype=dtype)
    return replace(
        found, recipe=None if order is not None else recipe, options={**found.options, "symmetric": symmetric}
    )


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here. Readers take every linear layer for quantized but those
    whose names a pattern in ``dynamic`` takes out."""
    recipe = written.only(NAME)
    symmetric = getattr(recipe, "symmetric", True)
    said = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": getattr(recipe, "group_size", 128),
        "desc_act": False,
        "sym": symmetric,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        "modules_in_block_to_quantize": None,
    }
    if written.ignored:
        names = [*written.ignored, *_fused(written.ignored)]
        said["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in names}
    return {"quantization_config": said}


def _fused(modules: list[str]) -> list[str]:
    """The layers that servers make of parts which are all left alone: they look for those names."""
    there = set(modules)
    names = []
    for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        prefixes = (module.removesuffix(parts[0]) for module in modules if module.endswith(f".{parts[0]}"))
        names += [prefix + whole for prefix in prefixes if all(prefix + part in there for part in parts)]
    return names


BRIDGE = FileFormat(
    name=NAME,
    peer=PEER,
    extra=EXTRA,
    recipes=RECIPES,
    anchors=(".qweight",),
    find=find,
    refine=refine,
    row_axis=-1,
    read=from_gptq,
    carries=carries,
    lay_out=lay_out_for_checkpoint,
    config=config,
)
