# SPDX-License-Identifier: Apache-2.0
"""Copying a part of a tensor that was read into a part of a torch tensor."""

from __future__ import annotations

from typing import Any

import torch

from breccia import verbs
from breccia.bridges.common import check_upright, to_torch
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import packed_codes
from breccia.bridges.parts import Found, as_torch
from breccia.checkpoint.files.dtypes import DTYPES, stored_name
from breccia.formats import finfo
from breccia.scaled_tensor import ScaledTensor
from breccia.value.slicing import block_along

_HEADERS = {row.torch: row.name for row in DTYPES.values() if row.torch}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def header_dtype(dtype: torch.dtype) -> str:
    """A header's name of torch's type; KeyError where there is none."""
    return _HEADERS[str(dtype).removeprefix("torch.")]


def floats_of(found: Found, tensor: Any, turned: bool, place: list[slice], into: Any) -> None:
    """The values of ``tensor[place]``, in the dtype of ``into``; ``turned``: of its matrices transposed."""
    if found.format != "plain" and into.dtype not in _FLOATS:
        raise ValueError(
            f"the parameter for {found.name!r} must be of a float dtype to hold a {found.format} tensor's values, "
            f"got {into.dtype}"
        )
    if isinstance(tensor, ScaledTensor):
        part, place = (tensor, place) if turned else _narrowed(tensor, place)
        values = verbs.dequantize(part.to("torch"), into.dtype)
    else:
        array = tensor.dequantize() if isinstance(tensor, OutsideTensor) else tensor
        values = as_torch(array, found.dtype if found.format == "plain" else stored_name(array), array.shape)
    into.copy_((values.mT if turned else values)[tuple(place)])


def bytes_of_part(tensor: ScaledTensor, part: str, shape: tuple[int, ...], place: list[slice], into: Any) -> None:
    """The bytes of ``tensor``'s part; ``shape`` is that of all of the part's bytes, () for one number."""
    if part == "data" and finfo(tensor.recipe.element).bits == 4:
        check_upright(tensor)
        array = to_torch(packed_codes(tensor))
    else:
        array = getattr(tensor.to("torch"), part)
    if not shape:
        into.copy_(array.reshape(()))
        return
    raw = array.contiguous().view(torch.uint8).reshape(-1, *shape[1:])
    (into if into.dtype == torch.uint8 else into.view(torch.uint8)).copy_(raw[tuple(place)])


def _narrowed(tensor: ScaledTensor, place: list[slice]) -> tuple[ScaledTensor, list[slice]]:
    """Of a matrix, the blocks that have the columns of ``place``, and the place in these."""
    if tensor.ndim != 2:
        return tensor, place
    rows, columns = place
    block = block_along(tensor.layout, tensor.is_packed, -1)
    start = columns.start // block * block
    stop = min(-(-columns.stop // block) * block, tensor.shape[-1])
    if (start, stop) == (0, tensor.shape[-1]):
        return tensor, place
    return tensor[:, start:stop], [rows, slice(columns.start - start, columns.stop - start)]
