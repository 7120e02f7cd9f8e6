# SPDX-License-Identifier: Apache-2.0
"""What a ScaledTensor of wrong parts and verbs of wrong arguments are answered with, to the last word."""

import breccia
import numpy as np
from breccia import ScaledTensor
from messages import NAMES, X

# --- what a ScaledTensor is made of ---------------------------------------------------------------------------------

TENSOR, ROW_BLOCKS = breccia.PerTensor(), breccia.PerBlockMN(1, 16)
CURRENT, BLOCK, NVFP4 = breccia.Float8CurrentScaling(), breccia.Float8BlockScaling(), breccia.NVFP4BlockScaling()
ASYMMETRIC = breccia.INT4Scaling(symmetric=False, signed=False)
ARRAYS = "an array of dtype float32, float64, float16, bfloat16, uint8, int8 or one of ml_dtypes' formats"
NUMBERS = "a float32, float64, float16 or bfloat16 array (or integers)"
FLOATS = "float32, float64, float16 or bfloat16"
LIKE = "array-like with .shape and .dtype"
RECIPE = "such as breccia.NVFP4BlockScaling(), or"


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.ones(shape, np.float32)


ONE = f32()[()]
BLOCKS, FOUR_BITS = (u8(4, 128), f32(4, 1), BLOCK, breccia.PerBlockK()), (u8(4, 8), u8(4, 1), NVFP4, ROW_BLOCKS)


def made_of(arguments, position, instead, **others):
    """A call with one of its arguments replaced."""
    return lambda: breccia.from_buffer(*arguments[:position], instead, *arguments[position + 1 :], **others)


# Name → arguments, of which the last may be a zero point; error and sentence.
PARTS = {
    "data is a list": (([[1, 2]], ONE, CURRENT, TENSOR), TypeError, f"data must be {LIKE}, got list"),
    "data is None": ((None, ONE, CURRENT, TENSOR), TypeError, f"data must be {LIKE}, got NoneType"),
    "data is 0-D": ((u8(), ONE, CURRENT, TENSOR), ValueError, "data must be at least 1-D, got 0-D"),
    "data of floats": (
        (f32(4, 8), ONE, CURRENT, TENSOR),
        TypeError,
        "data must hold float8_e4m3fn codes (uint8 or float8_e4m3fn) for Float8CurrentScaling, got dtype float32",
    ),
    "data of int16": (
        (u8(4, 8).astype(np.int16), ONE, CURRENT, TENSOR),
        TypeError,
        f"data must be {ARRAYS}, got dtype int16",
    ),
    "data of objects": (
        (np.full((4, 8), None), ONE, CURRENT, TENSOR),
        TypeError,
        f"data must be {ARRAYS}, got dtype object",
    ),
    "scale is a float": ((u8(4, 8), 1.0, CURRENT, TENSOR), TypeError, f"scale must be {LIKE}, got float"),
    "E8M0 codes stored as float32, MXFP8": (
        (u8(4, 64), f32(4, 2), breccia.MXFP8BlockScaling(), breccia.PerBlockMN(1, 32)),
        TypeError,
        "scale must be uint8 or float8_e8m0fnu codes for MXFP8BlockScaling, got dtype float32",
    ),
    "E8M0 codes stored as float32, FP8 blocks": (
        (u8(4, 128), f32(4, 1), breccia.Float8BlockScaling(scale_format="e8m0"), breccia.PerBlockK(128)),
        TypeError,
        "scale must be uint8 or float8_e8m0fnu codes for Float8BlockScaling, got dtype float32",
    ),
    "MX scale of floats": (
        (u8(4, 16), f32(4, 1), breccia.MXFP4BlockScaling(), breccia.PerBlockMN(1, 32)),
        TypeError,
        "scale must be uint8 or float8_e8m0fnu codes for MXFP4BlockScaling, got dtype float32",
    ),
    "no recipe": ((u8(4, 8), ONE, None, TENSOR), ValueError, "recipe is required (see breccia.recipes)"),
    "no layout": ((u8(4, 8), ONE, CURRENT, None), ValueError, "layout is required (see breccia.layouts)"),
    "recipe is a class": (
        (u8(4, 8), ONE, breccia.Float8CurrentScaling, TENSOR),
        TypeError,
        "recipe must be a recipe, got the class Float8CurrentScaling: add (), Float8CurrentScaling()",
    ),
    "layout is a class": (
        (u8(4, 8), ONE, CURRENT, breccia.PerTensor),
        TypeError,
        "layout must be a layout such as breccia.PerTensor(), got <class 'breccia.layouts.PerTensor'>",
    ),
    "recipe is no recipe's name": (
        (u8(4, 8), ONE, "E4M3", TENSOR),
        ValueError,
        f"recipe must be the name of a recipe, got 'E4M3': known are {NAMES}",
    ),
    "zero_point is a list": (
        (u8(4, 64), f32(4, 1), ASYMMETRIC, breccia.PerBlockK(128), [[0]] * 4),
        TypeError,
        f"zero_point must be {LIKE}, got list",
    ),
    "zero_point of another shape": (
        (u8(4, 64), f32(4, 1), ASYMMETRIC, breccia.PerBlockK(128), u8(4, 2)),
        ValueError,
        "zero_point.shape ((4, 2)) must match scale.shape ((4, 1))",
    ),
    "zero_point for floats": (
        (*BLOCKS, u8(4, 1)),
        ValueError,
        "zero_point must be None for Float8BlockScaling: only integer codes have one",
    ),
    "zero_point missing": (
        (u8(4, 64), f32(4, 1), ASYMMETRIC, breccia.PerBlockK(128)),
        ValueError,
        "zero_point is required for INT4Scaling(symmetric=False)",
    ),
}
MESSAGES = {
    name: (error, lambda arguments=arguments: ScaledTensor(*arguments), sentence)
    for name, (arguments, error, sentence) in PARTS.items()
}
for name, dtype in {"integers": np.int64, "objects": object, "complex numbers": complex}.items():
    scale = f32(4, 1).astype(dtype)
    MESSAGES[f"scale of {name}"] = (
        TypeError,
        made_of(BLOCKS, 1, scale),
        f"scale must be {ARRAYS}, got dtype {scale.dtype}",
    )
MESSAGES |= {
    "global_scale missing": (
        ValueError,
        lambda: breccia.from_buffer(u8(4, 32), u8(4, 4), NVFP4, ROW_BLOCKS),
        "global_scale is required for NVFP4BlockScaling(two_level=True)",
    ),
    "global_scale of doubles": (
        TypeError,
        lambda: breccia.from_buffer(*FOUR_BITS, global_scale=np.float64(1)),
        "global_scale must be a float32 array, got dtype float64",
    ),
    "global_scale of another shape": (
        ValueError,
        lambda: breccia.from_buffer(*FOUR_BITS, global_scale=f32(3)),
        "global_scale.shape must be () or (1, 1), got (3,)",
    ),
    "shape that the data cannot have": (
        ValueError,
        lambda: breccia.from_buffer(*FOUR_BITS, shape=(4, 32)),
        "shape (4, 32) must be the logical shape of data, whose stored shape is (4, 8)",
    ),
    "negative shape": (
        ValueError,
        lambda: breccia.from_buffer(*FOUR_BITS, shape=(4, -16)),
        "shape (4, -16) must not have a negative extent",
    ),
    "shape beyond 63 bits": (
        ValueError,
        lambda: breccia.from_buffer(u8(4, 8), ONE, CURRENT, TENSOR, shape=(1 << 40, 1 << 40)),
        "shape (1099511627776, 1099511627776) must have fewer than 2^63 bytes",
    ),
    "packed rows that double beyond 63 bits": (
        ValueError,
        made_of(FOUR_BITS, 0, np.broadcast_to(np.uint8(0), (1, 1 << 62))),
        "shape (1, 4611686018427387904) must not have an extent above 2^60",
    ),
}

# --- verbs ----------------------------------------------------------------------------------------------------------

NOT_NUMBERS = {
    "objects": np.full((4, 128), None),
    "objects that are floats": np.full((4, 128), 1.0, object),
    "complex": np.ones((4, 128), np.complex64),
    "complex doubles": np.ones((4, 128), complex),
    "strings": np.full((4, 128), "1"),
    "dates": np.zeros((4, 128), "datetime64[s]"),
    "records": np.zeros((4, 128), [("a", "f4")]),
    "None": None,
    "a string": "x",
    "a dictionary": {},
}
SQUARE, SHAPED = breccia.cast(f32(2, 2), CURRENT), breccia.cast(f32(4, 128), BLOCK)
for name, x in NOT_NUMBERS.items():
    got = f"must be {NUMBERS}, got dtype {np.asarray(x).dtype}"
    MESSAGES[f"cast of {name}"] = (TypeError, lambda x=x: breccia.cast(x, BLOCK), f"x {got}")
    MESSAGES[f"{name} @ floats"] = (TypeError, lambda x=x: breccia.matmul(x, f32(2, 2)), f"a {got}")
    MESSAGES[f"codes @ {name}"] = (TypeError, lambda x=x: breccia.matmul(SQUARE, x), f"b {got}")
for name, x, recipe in (("a number", 1.0, BLOCK), ("a scalar", ONE, CURRENT)):
    told = f"{type(recipe).__name__} requires x.ndim >= 1, got 0"
    MESSAGES[f"cast of {name}"] = (ValueError, lambda x=x, recipe=recipe: breccia.cast(x, recipe), told)
for given in (None, breccia.Float8BlockScaling, TENSOR, 8):
    of_cast = of_requantize = f"breccia has no kernels for recipe {type(given).__name__}: {{}} must be a ScalingRecipe "
    of_cast = of_requantize = of_cast + f"{RECIPE} the name of one such as 'nvfp4'"
    if given is None:
        of_cast = f"{{}} must be a recipe {RECIPE} its name as 'nvfp4', got None"
    elif isinstance(given, type):
        of_cast = of_requantize = "{} must be a recipe, got the class Float8BlockScaling: add (), Float8BlockScaling()"
    MESSAGES |= {
        f"cast to {given}": (TypeError, lambda to=given: breccia.cast(f32(4, 128), to), of_cast.format("recipe")),
        f"requantize to {given}": (
            TypeError,
            lambda to=given: breccia.requantize(SHAPED, to),
            of_requantize.format("new_recipe"),
        ),
    }
for given in (None, X, "x", 1.0):
    told = f"scaled must be a ScaledTensor, got {type(given).__name__}"
    MESSAGES |= {
        f"dequantize of {type(given).__name__}": (TypeError, lambda of=given: breccia.dequantize(of), told),
        f"requantize of {type(given).__name__}": (TypeError, lambda of=given: breccia.requantize(of, CURRENT), told),
    }
for dtype in ("int32", "int8", "complex64", "float8_e4m3fn", "nonsense", "", 5, object):
    told = f"out_dtype must be {FLOATS}, got {dtype!r}"
    MESSAGES |= {
        f"dtype {dtype!r}": (TypeError, lambda dtype=dtype: breccia.dequantize(SHAPED, out_dtype=dtype), told),
        f"out_dtype {dtype!r}": (
            TypeError,
            lambda dtype=dtype: breccia.matmul(SQUARE, f32(2, 2), out_dtype=dtype),
            told,
        ),
    }
READ_ONLY = f32(4, 128)
READ_ONLY.flags.writeable = False
ONE_ELEMENT = np.broadcast_to(np.zeros((), np.float32), (4, 128))
WRONG_OUT = {
    "read-only": (ValueError, READ_ONLY, "out must be writable, got a read-only array"),
    "one element many times": (ValueError, ONE_ELEMENT, "out must be writable, got a read-only array"),
    "of another shape": (ValueError, f32(4, 127), "out.shape must be (4, 128), got (4, 127)"),
    "of another rank": (ValueError, f32(512), "out.shape must be (4, 128), got (512,)"),
    "a list": (TypeError, [[0.0] * 128] * 4, "out must be a NumPy array, got list"),
    **{
        f"of {dtype}": (TypeError, np.zeros((4, 128), dtype), f"out must be {ARRAYS}, got dtype {dtype}")
        for dtype in ("int32", "object", "complex64")
    },
}
for name, (error, out, sentence) in WRONG_OUT.items():
    MESSAGES[f"out {name}"] = (error, lambda out=out: breccia.dequantize(SHAPED, out=out), sentence)
WRONG_SHAPES = {
    ((2, 127), (128, 3)): "shape mismatch: b must be (..., 127, N) for a of shape (2, 127), got shape (128, 3)",
    ((2, 128), (127, 3)): "shape mismatch: b must be (..., 128, N) for a of shape (2, 128), got shape (127, 3)",
    ((2, 2, 128), (3, 128, 4)): "batch mismatch: the leading axes of a, (2,), and b, (3,), do not broadcast",
    ((128, 2), (3, 128)): "shape mismatch: b must be (..., 2, N) for a of shape (128, 2), got shape (3, 128)",
    ((2, 0), (1, 3)): "shape mismatch: b must be (..., 0, N) for a of shape (2, 0), got shape (1, 3)",
}
for shapes, sentence in WRONG_SHAPES.items():
    for kind in ("floats @ floats", "floats @ codes", "codes @ floats", "codes @ codes"):

        def product(shapes=shapes, kind=kind):
            kinds = kind.split(" @ ")
            operands = (f32(*shape) for shape in shapes)
            breccia.matmul(
                *(breccia.cast(x, CURRENT) if k == "codes" else x for x, k in zip(operands, kinds, strict=True))
            )

        MESSAGES[f"{kind} of {shapes}"] = (ValueError, product, f"matmul {sentence}")
for shape in ((), (3,)):
    told = f"b must be at least 2-D, got shape {shape}"
    MESSAGES[f"@ {shape}"] = (ValueError, lambda shape=shape: breccia.matmul(SQUARE, f32(*shape)), told)
MESSAGES["linear of other columns"] = (
    ValueError,
    lambda: breccia.linear(f32(2, 64), SHAPED),
    "x must be (..., 128) for w of shape (4, 128), got shape (2, 64)",
)
