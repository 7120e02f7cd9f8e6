# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints: (K, N) words, eight rows per word; zero points stored minus one ("gptq") or as
they are ("gptq_v2"); columns in the order of activation where ``g_idx`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from breccia import _core
from breccia.bridges.checks import check_axes, flag, float_name, shown
from breccia.bridges.common import Array, as_numpy, check_matrix, codes, get_matrix
from breccia.bridges.contract import FileFormat, Place
from breccia.bridges.integers import int4, integer_zero_point, offset_bits, order_of_columns, turned
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import from_words, pack_nibbles, packed_codes, unpack_bits, unpack_nibbles, word_matrix
from breccia.bridges.parts import Found, Part, materialize, rows_or_outside
from breccia.bridges.scales import made, row_blocks, scale_name
from breccia.bridges.written import Dialect, Written, fused_layers
from breccia.recipes import INT4Scaling, INT8Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import integers

NAME = "gptq"
RECIPES: dict[str, ScalingRecipe] = {
    "int4": INT4Scaling(),
    "int4-asym": INT4Scaling(signed=False, symmetric=False),
}
_BITS = (2, 3, 4, 8)
_IN_ORDER = np.zeros(0, np.int64)  # columns of the core stay where they are

__all__ = ["from_gptq", "to_gptq"]


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_gptq`."""

    version: str
    symmetric: bool | None


def from_gptq(
    parts: Mapping[str, Any], *, version: str = "gptq", symmetric: bool | None = None
) -> ScaledTensor | OutsideTensor:
    """The tensors of one module, by the last part of their names.

    Args:
        parts: ``qweight`` (K / 8, N), ``qzeros`` (K / g, N / 8), ``scales`` (K / g, N), ``g_idx`` (K); of codes of 2, 3
            and 8 bits as many words as they take.
        version: "gptq" (zero points stored minus one) or "gptq_v2". Files name the wrong one: where ``symmetric`` is
            true and one of them gives the middle of the codes everywhere, it is that one.
        symmetric: whether every zero point is the middle of the codes (8 of 4 bits); looked at if None.

    Returns:
        A ScaledTensor (N, K), INT4 of codes of 2 and 3 bits; an OutsideTensor where ``g_idx`` reorders the columns.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit, or zero points are not symmetric though they
            are said to be.
    """
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"version must be 'gptq' or 'gptq_v2', got {version!r}")
    qweight, qzeros, scales = (get_matrix(parts, role, NAME) for role in ("qweight", "qzeros", "scales"))
    groups, rows = scales.shape
    bits = 32 * qzeros.shape[1] // rows if rows else 4
    if bits not in _BITS or qzeros.shape != (groups, rows * bits // 32) or qweight.shape[1] != rows:
        raise ValueError(
            f"{NAME}: qweight (K · bits / 32, N), qzeros (K / g, N · bits / 32) and scales (K / g, N) must fit codes "
            f"of 2, 3, 4 or 8 bits, got {qweight.shape}, {qzeros.shape}, {scales.shape}"
        )
    columns = qweight.shape[0] * 32 // bits
    stored = word_matrix(qweight, "qweight")
    zeros = _stored_zeros(qzeros, bits, rows)
    version = _decided(zeros, bits, version, symmetric)
    zero_point = np.ascontiguousarray(zeros.T).astype(np.int16) + (1 if version == "gptq" else 0)
    scale = np.ascontiguousarray(scales.T)
    if symmetric is None:
        symmetric = bool((zero_point == 1 << (bits - 1)).all())
    order, size = order_of_columns(parts.get("g_idx"), columns, groups, f"{NAME}: g_idx")
    at = _IN_ORDER if order is None else order
    if bits < 4:
        codes = unpack_bits(np.ascontiguousarray(stored.T).view(np.uint8), bits)
        data = pack_nibbles(codes if order is None else codes[:, order])
        scaled = int4(data, scale, zero_point.astype(np.uint8), (rows, columns), size)
    elif bits == 4:
        data = _core.codes_from_gptq(stored, 4, at, 0x88888888 if symmetric else 0)
        scaled = int4(data, scale, None if symmetric else zero_point.astype(np.uint8), (rows, columns), size)
    else:
        data = _core.codes_from_gptq(stored, 8, at, 0x80808080)
        recipe = INT8Scaling(group_size=size, scale_dtype=scale_name(scale.dtype.name), symmetric=symmetric)
        zero = None if symmetric else (zero_point - 128).astype(np.float32)
        scaled = made(data, scale, recipe, row_blocks(size, columns), zero)
    return scaled if order is None else OutsideTensor(scaled, columns=np.argsort(order, kind="stable"))


def _stored_zeros(qzeros: Array, bits: int, rows: int) -> Array:
    """Zero points as they are stored, (K / g, N)."""
    packed = word_matrix(qzeros, "qzeros").view(np.uint8)
    return unpack_nibbles(packed, rows) if bits == 4 else packed if bits == 8 else unpack_bits(packed, bits)


def _decided(zeros: Array, bits: int, version: str, symmetric: bool | None) -> str:
    """The version of stored zero points: the one that is said, unless they are said to be symmetric and the other one
    alone makes them so. Programs differ in which of the two they believe."""
    middle = 1 << (bits - 1)
    if not symmetric or zeros.size == 0:
        return version
    if (zeros == zeros.flat[0]).all() and zeros.flat[0] in (middle - 1, middle):
        return "gptq" if zeros.flat[0] == middle - 1 else "gptq_v2"
    shift = 1 if version == "gptq" else 0
    raise ValueError(
        f"{NAME}: zero points (qzeros) must all be {middle} for a symmetric checkpoint (sym), they are from "
        f"{zeros.min() + shift} to {zeros.max() + shift}: programs that believe one compute other values than those "
        "that believe the other"
    )


def to_gptq(scaled: ScaledTensor | OutsideTensor, *, version: str = "gptq") -> dict[str, Array]:
    """The inverse of `from_gptq`.

    Args:
        scaled: INT4 of shape ``(N, K)``, both multiples of 8; an OutsideTensor where columns are in another order; or
            symmetric INT8, whose words have four codes.
        version: "gptq" (zero points stored minus one) or "gptq_v2".

    Returns:
        ``qweight`` int32 ``(K / 8, N)``, ``qzeros`` int32 ``(K / g, N / 8)``, ``scales`` ``(K / g, N)`` and ``g_idx``
        int32 ``(K,)``.

    Raises:
        ValueError: the tensor is neither, or a zero point is 0, which version "gptq" cannot store.
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
    if isinstance(scaled.recipe, INT8Scaling) and columns_at is None:
        return _lay_out8(scaled, version)
    if not isinstance(scaled.recipe, INT4Scaling):
        raise ValueError(f"scaled must be INT4Scaling, or INT8Scaling with its columns in order, got {scaled.recipe}")
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
        "scales": turned(scale),
        "g_idx": Part("I32", (columns,), lambda: group_of),
    }


def _lay_out8(scaled: ScaledTensor, version: str) -> dict[str, Part]:
    """Codes of 8 bits, four of a column to a word, offset by 128, which is every zero point."""
    check_matrix(scaled, NAME)
    rows, columns = scaled.shape
    if scaled.zero_point is not None:
        raise ValueError(f"scaled must have no zero points for {NAME}'s 8 bits, got {scaled.recipe}")
    if rows % 4 or columns % 4:
        raise ValueError(f"scaled must have rows and columns in multiples of 4, got shape {scaled.shape}")
    scale = as_numpy(scaled.scale, "scale").reshape(rows, -1)
    groups = scale.shape[-1]

    def qweight() -> Array:
        by_column = (codes(scaled.data, "data").view(np.uint8) ^ np.uint8(0x80)).T
        return np.ascontiguousarray(by_column.reshape(columns // 4, 4, rows).transpose(0, 2, 1)).view("<i4")[..., 0]

    def qzeros() -> Array:
        return np.full((groups, rows), 127 if version == "gptq" else 128, np.uint8).view("<i4")

    return {
        "qweight": Part("I32", (columns // 4, rows), qweight),
        "qzeros": Part("I32", (groups, rows // 4), qzeros),
        "scales": turned(scale),
        "g_idx": Part("I32", (columns,), lambda: np.arange(columns, dtype=np.int32) // np.int32(columns // groups)),
    }


def lay_out_for_checkpoint(scaled: ScaledTensor, place: Place) -> dict[str, Part]:
    """As `lay_out`; asymmetric tensors in version "gptq_v2", which alone can store every zero point."""
    return lay_out(scaled, version="gptq" if scaled.zero_point is None else "gptq_v2")


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, INT8Scaling):
        return recipe.symmetric
    return isinstance(recipe, INT4Scaling) and (recipe.signed or not recipe.symmetric)


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
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
    if bits not in _BITS or 32 * qzeros.shape[1] != rows * bits:
        raise ValueError(f"{name}: codes must have 2, 3, 4 or 8 bits, qzeros has shape {qzeros.shape} for {rows} rows")
    columns = qweight.shape[0] * 32 // bits
    size = -(-columns // groups)
    sym = said.get("sym")
    symmetric = None if sym is None else flag(sym, f"{name}: sym")
    version = said.get("checkpoint_format")
    version = "gptq" if version is None else version
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"{name}: checkpoint_format must be 'gptq' or 'gptq_v2', got {shown(version)}")
    if said.get("quant_method") == NAME and not said.get("dynamic"):  # which says others of some modules
        for key, there in (("bits", (bits,)), ("group_size", (size, -1) if groups == 1 else (size,))):
            told = said.get(key)
            if told is not None and told not in there:
                raise ValueError(f"{name}: {key} must be {there[0]} of such tensors, config.json says {shown(told)}")
    dtype = float_name(scales)
    recipe: ScalingRecipe | None = _recipe(bits, size, bool(symmetric), scale_name(dtype))
    findings: tuple[str, ...] = ()
    if said.get("desc_act"):
        recipe = None  # the columns' order has no ScaledTensor form
        findings = ("columns are in order of activation (desc_act)",)
    if symmetric is None:
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
        details=Details(version, symmetric),
        findings=findings,
    )


def refine(found: Found, array: Any) -> Found:
    """Whether zero points are symmetric and columns in order, which headers do not say, and their version."""
    parts = {role: array(name) for role, name in found.parts.items() if role != "qweight"}
    columns, (groups, rows) = found.shape[1], parts["scales"].shape
    bits, said = int(found.kind.split()[1]), found.record(Details)
    order, size = order_of_columns(parts.get("g_idx"), columns, groups, f"{NAME}: g_idx")
    zero = _stored_zeros(parts["qzeros"], bits, rows)
    version = _decided(zero, bits, said.version, said.symmetric)
    symmetric = bool((zero == (1 << (bits - 1)) - (1 if version == "gptq" else 0)).all())
    findings = found.findings
    if version != said.version:
        told = f"zero points are stored as {version} has them, though config.json says {said.version}: they are read so"
        findings += (told,)
    return replace(
        found,
        kind=found.kind.replace(said.version, version),
        recipe=None if order is not None else _recipe(bits, size, symmetric, scale_name(found.scale_dtype)),
        details=Details(version, symmetric),
        findings=findings,
    )


def _recipe(bits: int, size: int, symmetric: bool, dtype: str) -> ScalingRecipe:
    """What codes of so many bits are here: those of 2 and 3 bits are INT4 with zero points."""
    if bits == 8:
        return INT8Scaling(size, symmetric=symmetric, scale_dtype=dtype)
    symmetric = symmetric and bits == 4
    return INT4Scaling(size, signed=symmetric, symmetric=symmetric, scale_dtype=dtype)


def _keeps(found: Found) -> bool:
    """Columns in order of activation, where config.json says of them what they are."""
    said = found.record(Details)
    return found.recipe is None and found.kind.startswith(f"{said.version} ") and not _mislabelled(found)


def _mislabelled(found: Found) -> bool:
    return any(text.startswith("zero points are stored as") for text in found.findings)


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here. Readers take every linear layer for quantized but those
    whose names a pattern in ``dynamic`` takes out."""
    if written.kept:
        said = written.original.get("quantization_config")
        if not said:
            raise ValueError(
                f"{NAME}: config.json or quantize_config.json must say bits, group_size and desc_act of weights whose "
                "columns are in order of activation, which are written as they are: neither does"
            )
        return {"quantization_config": dict(said)}
    (recipe, _), *others = written.groups()
    symmetric = getattr(recipe, "symmetric", True)
    dynamic = _dynamic(recipe, others)
    said = {
        "quant_method": "gptq",
        "bits": _bits(recipe),
        "group_size": getattr(recipe, "group_size", 128),
        "desc_act": False,
        "sym": symmetric,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        "modules_in_block_to_quantize": None,
    }
    if "lm_head" in written.recipes:
        said["lm_head"] = True  # which readers leave in high precision else
    if written.ignored:
        names = [*written.ignored, *fused_layers(written.ignored)]
        dynamic |= {f"-:^{re.escape(name)}$": {} for name in names}
    return {"quantization_config": said | ({"dynamic": dynamic} if dynamic else {})}


def _bits(recipe: ScalingRecipe) -> int:
    return 8 if isinstance(recipe, INT8Scaling) else 4


def _dynamic(first: ScalingRecipe, others: list[tuple[ScalingRecipe, list[str]]]) -> dict[str, Any]:
    """What ``dynamic`` says of modules that have another recipe than most."""
    said: dict[str, Any] = {}
    for recipe, modules in others:
        if getattr(recipe, "symmetric", True) != getattr(first, "symmetric", True):
            raise ValueError(
                f"{NAME}: all modules must have one recipe, or zero points alike, which is all config.json says: most "
                f"have {first}, {modules[0]!r} has {recipe}; name a recipe in --to, or another format"
            )
        own = {"bits": _bits(recipe), "group_size": getattr(recipe, "group_size", None) or -1}
        names = [*modules, *fused_layers(modules)]
        said |= {f"+:^{re.escape(name)}$": own for name in names}
    return said


def of_file(said: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder whose config.json has none, of AutoGPTQ's file, which AWQ's tools wrote,
    too."""
    return {"quant_method": "awq" if "w_bit" in said else NAME, **said}


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers with GPTQModel"),
    refused={"int4-asym": ("vLLM",)},  # "Unsupported quantization config: bits=4, sym=False", 0.32
    calibrated=True,
    recipes=RECIPES,
    anchors=(".qweight",),
    find=find,
    refine=refine,
    row_axis=-1,
    read=lambda parts, found: from_gptq(parts, **asdict(found.record(Details))),
    keeps=_keeps,
    carries=carries,
    lay_out=lay_out_for_checkpoint,
    dialect=Dialect(("auto-round",), integers.scheme, config, file="quantize_config", of_file=of_file, **integers.SAID),
)
