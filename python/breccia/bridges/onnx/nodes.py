# SPDX-License-Identifier: Apache-2.0
"""What a DequantizeLinear node means: value = (x - x_zero_point) · x_scale, by tensor, along an axis, or in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, codes, float32, turned_shape
from breccia.bridges.fp8 import FP8_DTYPES
from breccia.bridges.packing import pack_nibbles, unpack_nibbles
from breccia.bridges.scales import SCALE_NAMES, made, row_blocks
from breccia.formats import decode
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

# Types of whole bytes, by their names in safetensors; and those of which two share a byte, with a name in `decode`.
PLAIN = {
    "FLOAT": "F32",
    "FLOAT16": "F16",
    "BFLOAT16": "BF16",
    "DOUBLE": "F64",
    "BOOL": "BOOL",
    "INT8": "I8",
    "UINT8": "U8",
    "INT16": "I16",
    "UINT16": "U16",
    "INT32": "I32",
    "UINT32": "U32",
    "INT64": "I64",
    "UINT64": "U64",
    "FLOAT8E4M3FN": "F8_E4M3",
    "FLOAT8E5M2": "F8_E5M2",
    "FLOAT8E4M3FNUZ": "F8_E4M3FNUZ",
    "FLOAT8E5M2FNUZ": "F8_E5M2FNUZ",
    "FLOAT8E8M0": "F8_E8M0",
}
HALVES = {"INT4": "int4", "UINT4": "uint4", "FLOAT4E2M1": "float4_e2m1fn"}
FLOATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
_CODES = {
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
}


def swapped_codes(raw: Array, shape: tuple[int, ...], halves: bool) -> Array:
    """Codes or scales of a shape with its last two axes swapped, flat; ``halves``: of which two share a byte."""
    flat = raw.reshape(-1)
    flat = unpack_nibbles(flat, math.prod(shape)) if halves else flat
    turned = np.swapaxes(flat.reshape(shape), -1, -2).reshape(-1)
    return pack_nibbles(turned) if halves else turned


@dataclass(frozen=True)
class Node:
    """A node whose inputs are all stored.

    Attributes:
        element: ONNX's type of the codes.
        shape: of the codes.
        scale: ONNX's type of the scales as they are stored.
        scale_shape: of the scales.
        axis: along which scales differ, or blocks lie; from the front.
        block: elements of a block; 0 where there are none.
        zeros: whether there are zero points that are not 0.
        two_level: whether scales are codes themselves, with one number for all.
        by_columns: whether products sum over the matrix's rows: it is the transpose of one that holds a ScaledTensor.
        swapped: whether the graph transposes it.
    """

    element: str
    shape: tuple[int, ...]
    scale: str
    scale_shape: tuple[int, ...]
    axis: int
    block: int
    zeros: bool = False
    two_level: bool = False
    by_columns: bool = False
    swapped: bool = False

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of the tensor that the graph makes."""
        return turned_shape(self.shape) if self.swapped else self.shape

    @property
    def _turned(self) -> Node | None:
        """The same of the transpose, where scales lie along what products sum over."""
        last = len(self.shape) - 1
        along = {last: last - 1, last - 1: last}.get(self.axis)
        if not self.by_columns or last < 1 or (along is None and not self._of_tensor):
            return None
        if not self.swapped and (self._of_tensor or self.axis != (last - 1 if self.block else last)):
            return None
        shape, scales = turned_shape(self.shape), self.scale_shape
        scales = turned_shape(scales) if self.block else scales
        return replace(self, shape=shape, scale_shape=scales, axis=along or 0, by_columns=False, swapped=False)

    @property
    def kind(self) -> str:
        """In words, for reports."""
        where = f"blocks of {self.block} along axis {self.axis}" if self.block else f"axis {self.axis}"
        return f"{self.element} {'per tensor' if self._of_tensor else where}"

    @property
    def _of_tensor(self) -> bool:
        return not self.block and math.prod(self.scale_shape) == 1

    def check(self) -> None:
        """Refuses shapes that do not fit, as the operator's specification has them."""
        shape = self.shape
        if self.block < 0 or (not self._of_tensor and not 0 <= self.axis < len(shape)):
            raise ValueError(f"axis and block_size must be those of shape {shape}, got {self.axis} and {self.block}")
        if self._of_tensor:
            return
        wanted: tuple[int, ...] = (shape[self.axis],)
        if self.block:
            wanted = (*shape[: self.axis], -(-shape[self.axis] // self.block), *shape[self.axis + 1 :])
        if self.scale_shape != wanted:
            raise ValueError(f"x_scale must have shape {wanted}, got {self.scale_shape}")

    def form(self) -> tuple[ScalingRecipe, Layout] | None:
        """Recipe and layout of the ScaledTensor that holds the same numbers; None where there is none."""
        if (turned := self._turned) is not None:
            form = turned.form()
            return form if form is None or self.swapped else (form[0], form[1].T)
        shape, last = self.shape, self.axis == len(self.shape) - 1
        if len(shape) < 2 or 0 in shape or (self.element in HALVES and shape[-1] % 2) or (self.block and not last):
            return None
        rows = not self.block and len(shape) == 2 and self.axis == 0 and not self._of_tensor
        rows = rows or self.block >= shape[-1]
        if self.element == "FLOAT4E2M1":
            return self._of_fp4()
        name = SCALE_NAMES.get(FLOATS.get(self.scale, ""))
        if self.element in ("INT4", "UINT4"):
            if not self.block or name is None:
                return None
            plain = self.element == "INT4" and not self.zeros
            int4 = recipes.INT4Scaling(group_size=self.block, signed=plain, symmetric=plain, scale_dtype=name)
            return int4, row_blocks(self.block, shape[-1])
        if self.element in ("INT8", "UINT8"):
            if name is None or not (rows or self._of_tensor or self.block):
                return None
            size = None if rows or not self.block else self.block
            plain = self.element == "INT8" and not self.zeros
            int8 = recipes.INT8Scaling(group_size=size, scale_dtype=name, symmetric=plain)
            return int8, PerChannel() if size is None else row_blocks(size, shape[-1])
        return None if self.zeros else self._of_fp8(rows, name)

    def _of_fp4(self) -> tuple[ScalingRecipe, Layout] | None:
        whole = self.block and self.shape[-1] % self.block == 0 and not self.zeros
        if whole and self.two_level and self.block == 16 and self.scale == "FLOAT8E4M3FN":
            return recipes.NVFP4BlockScaling(), PerBlockMN(1, 16)
        if whole and self.block == 32 and self.scale == "FLOAT8E8M0":
            return recipes.MXFP4BlockScaling(), PerBlockMN(1, 32)
        return None

    def _of_fp8(self, rows: bool, name: str | None) -> tuple[ScalingRecipe, Layout] | None:
        fp8 = FP8_DTYPES.get(PLAIN[self.element])
        if fp8 is None or self.two_level:
            return None
        if self.scale == "FLOAT8E8M0":
            mx = self.block == 32 and self.shape[-1] % 32 == 0
            return (recipes.MXFP8BlockScaling(fp8_format=fp8), PerBlockMN(1, 32)) if mx else None
        if name is None or name == "fp16":
            return None
        if self._of_tensor:
            return recipes.Float8CurrentScaling(fp8_format=fp8), PerTensor()
        if rows:
            return recipes.Float8CurrentScaling(fp8_format=fp8, granularity="row"), PerChannel()
        if not self.block:
            return None
        recipe = recipes.Float8BlockScaling(fp8_format=fp8, block_k=self.block, scale_format=name)
        return recipe, row_blocks(self.block, self.shape[-1])

    def tensor(self, raw: Array, scale: Array, zero: Array | None, second: Array | None) -> ScaledTensor | Array:
        """The tensor of its arrays as they are stored: a ScaledTensor where `form` has one, else its values. Raises
        ValueError where they do not fit."""
        form = self.form()
        if form is None:
            values = self._values(raw, scale, zero, second)
            return np.swapaxes(values, -1, -2) if self.swapped else values
        if (turned := self._turned) is not None:
            halves = self.element in HALVES
            raw = swapped_codes(codes(raw, "x"), self.shape, halves)
            if self.block:
                scale = swapped_codes(scale, self.scale_shape, False)
            if self.block and zero is not None:
                zero = swapped_codes(codes(zero, "x_zero_point"), self.scale_shape, halves)
            upright = turned.tensor(raw, scale, zero, second)
            assert isinstance(upright, ScaledTensor)
            return upright if self.swapped else upright.mT
        recipe, layout = form
        shape = layout.scale_shape(self.shape)
        if self.element in HALVES:
            data = codes(raw, "x").reshape(*self.shape[:-1], self.shape[-1] // 2)
        else:
            data = codes(raw, "x").reshape(self.shape)
        zeros = None
        if not getattr(recipe, "symmetric", True):
            every = np.zeros(self.scale_shape, np.uint8) if zero is None else self._zeros(zero)
            flip = {"INT4": 8, "UINT8": 128}.get(self.element, 0)
            data = data ^ np.uint8(0x88 if flip == 8 else flip)
            zeros = np.broadcast_to((every ^ np.uint8(flip)).reshape(self._along_rows(shape)), shape)
            zeros = np.ascontiguousarray(zeros).view(np.int8 if self.element in ("INT8", "UINT8") else np.uint8)
        if recipe.name in ("mxfp4", "mxfp8", "nvfp4"):
            scales = codes(scale, "x_scale").reshape(shape)
        else:
            scales = np.broadcast_to(scale.reshape(self._along_rows(shape)), shape).copy()
        one = None if second is None else float32(as_numpy(second, "scale of scales")).reshape(())
        return made(data, scales, recipe, layout, zeros, global_scale=one, shape=self.shape)

    def _along_rows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which stored scales are spread over those of a layout."""
        return (1,) * len(shape) if self._of_tensor else shape

    def _zeros(self, zero: Array) -> Array:
        """Zero points, one to a byte."""
        flat = codes(zero, "x_zero_point").reshape(-1)
        if self.element in HALVES:
            flat = unpack_nibbles(flat, math.prod(self.scale_shape))
        return flat.reshape(self.scale_shape)

    def _values(self, raw: Array, scale: Array, zero: Array | None, second: Array | None) -> Array:
        x = self._numbers(codes(raw, "x").reshape(-1), self.shape)
        by = decode(codes(scale, "x_scale"), _CODES[self.scale]) if self.scale in _CODES else float32(scale)
        by = by.reshape(self.scale_shape)
        if second is not None:
            by = by * float32(as_numpy(second, "scale of scales")).reshape(())
        if zero is not None:
            x = x - self._spread(self._numbers(codes(zero, "x_zero_point").reshape(-1), self.scale_shape))
        values: Array = x * self._spread(by)
        return values.astype(np.float32)

    def _numbers(self, raw: Array, shape: tuple[int, ...]) -> Array:
        if self.element in HALVES:
            nibbles = unpack_nibbles(raw, math.prod(shape))
            if self.element == "FLOAT4E2M1":
                return decode(nibbles, "float4_e2m1fn").reshape(shape)
            low = 16 * ((nibbles > 7) & (self.element == "INT4"))
            return (nibbles - low.astype(np.float32)).reshape(shape)
        if self.element in _CODES:
            return decode(raw, _CODES[self.element]).reshape(shape)
        return raw.view(np.int8 if self.element == "INT8" else np.uint8).astype(np.float32).reshape(shape)

    def _spread(self, array: Array) -> Array:
        """One number for each element."""
        if array.size == 1:
            return array.reshape(())
        if self.block:
            return np.repeat(array, self.block, self.axis).take(range(self.shape[self.axis]), self.axis)
        return array.reshape([-1 if i == self.axis else 1 for i in range(len(self.shape))])
