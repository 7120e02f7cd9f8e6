# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS' MXFP4 experts: ``*_blocks`` (E, OUT, IN / 32, 16) and ``*_scales`` (E, OUT, IN / 32)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breccia.bridges.common import Array, codes, get
from breccia.bridges.contract import FileFormat, Readers, Sample
from breccia.bridges.packing import packed_codes, scale_part
from breccia.bridges.parts import Found, Part, materialize, part, rows_only
from breccia.bridges.scales import made
from breccia.bridges.written import Dialect, Written
from breccia.layouts import PerBlockMN
from breccia.recipes import MXFP4BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import fp8 as words

NAME = "gpt-oss"
RECIPES: dict[str, ScalingRecipe] = {"mxfp4": MXFP4BlockScaling()}

__all__ = ["from_gpt_oss", "to_gpt_oss"]


def from_gpt_oss(parts: Mapping[str, Any]) -> ScaledTensor:
    """Wrap ``blocks`` and ``scales``, without copying: logical shape (E, OUT, IN). Gate and up rows of
    ``gate_up_proj`` stay interleaved as stored.

    Args:
        parts: ``blocks`` uint8 ``(E, OUT, IN / 32, 16)`` and ``scales`` uint8 ``(E, OUT, IN / 32)``.

    Returns:
        MXFP4 of shape ``(E, OUT, IN)``.

    Raises:
        ValueError: the shapes do not fit.
    """
    blocks, scales = codes(get(parts, "blocks", NAME), "blocks"), codes(get(parts, "scales", NAME), "scales")
    if blocks.ndim < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"{NAME}: blocks must be (..., OUT, IN / 32, 16) and scales (..., OUT, IN / 32), "
            f"got {blocks.shape} and {scales.shape}"
        )
    data = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * 16)
    return made(data, scales, MXFP4BlockScaling(), PerBlockMN(1, 32), shape=(*data.shape[:-1], data.shape[-1] * 2))


def to_gpt_oss(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_gpt_oss`.

    Args:
        scaled: MXFP4, IN a multiple of 32.

    Returns:
        ``blocks`` and ``scales``, both uint8.

    Raises:
        ValueError: the tensor is not MXFP4.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_gpt_oss`, each tensor made when it is asked for."""
    if not carries(scaled.recipe):
        raise ValueError(f"scaled must be MXFP4BlockScaling, got {scaled.recipe}")
    data = packed_codes(scaled)
    if data.shape[-1] % 16:
        raise ValueError(f"scaled must have a multiple of 32 columns, got shape {scaled.shape}")
    return {
        "blocks": part(data.reshape(*data.shape[:-1], data.shape[-1] // 16, 16), "U8"),
        "scales": scale_part(scaled),
    }


def stored_name(name: str, role: str) -> str:
    """Where a role of a logical tensor is stored."""
    return f"{name.removesuffix('.weight')}_{role}"


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    return isinstance(recipe, MXFP4BlockScaling)


def takes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the format has a place for a weight: it has for experts alone, parameters without a module."""
    return len(shape) == 3 and not name.endswith(".weight")


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    base = name.removesuffix("_blocks")
    blocks, scales = entries[name], entries.get(base + "_scales")
    if scales is None or blocks.dtype != "U8" or blocks.shape[-1:] != (16,) or blocks.shape[:-1] != scales.shape:
        return None
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return Found(
        base,
        NAME,
        "mxfp4",
        {"blocks": name, "scales": scales.name},
        shape,
        MXFP4BlockScaling(),
        PerBlockMN(1, 32),
    )


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here."""
    return {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": written.ignored}}


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "transformers"),
    needs="experts of gpt-oss alone",
    methods=("mxfp4",),
    recipes=RECIPES,
    anchors=("_blocks",),
    readers=Readers(
        fused_experts=True,
    ),
    sample=Sample("model.layers.0.mlp.experts.down_proj", (2, 128, 256)),
    find=find,
    row_axis=0,
    read=lambda parts, found: from_gpt_oss(parts),
    carries=carries,
    takes=takes,
    lay_out=lambda scaled, place: lay_out(scaled),
    role_name=stored_name,
    dialect=Dialect(read=words.scheme, write=config, **words.SAID),
)
