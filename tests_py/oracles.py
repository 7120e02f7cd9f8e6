# SPDX-License-Identifier: Apache-2.0
"""What the right answer is, computed without breccia: ml_dtypes, gfloat, torchao, TransformerEngine, or plain
NumPy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

INTEGERS = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}
GFLOAT_NAMES = {
    "float8_e4m3fn": "ocp_e4m3",
    "float8_e5m2": "ocp_e5m2",
    "float6_e2m3fn": "ocp_e2m3",
    "float6_e3m2fn": "ocp_e3m2",
    "float4_e2m1fn": "ocp_e2m1",
    "float8_e8m0fnu": "ocp_e8m0",
}


# --- codecs -------------------------------------------------------------------------------------------------


def width(name: str) -> int:
    """Bits of one code."""
    info = ml_dtypes.iinfo if name in INTEGERS else ml_dtypes.finfo
    return int(info(np.dtype(np.int8) if name == "int8" else getattr(ml_dtypes, name)).bits)


def table(name: str) -> F32:
    """The value of every code."""
    codes = np.arange(1 << width(name), dtype=np.uint8)
    if name in INTEGERS:
        _, highest = INTEGERS[name]
        values = codes.astype(np.float32)
        return np.where(values > highest, values - 2 ** width(name), values).astype(np.float32)
    return codes.view(getattr(ml_dtypes, name)).astype(np.float32)


def max_finite(name: str) -> float:
    values = table(name)
    return float(values[np.isfinite(values)].max())


def expected_codes(x: F32, name: str) -> U8:
    """ml_dtypes' codes, with breccia's rules where they part: saturation, and zero for a scale format that
    has none."""
    if name in INTEGERS:
        clamped = np.clip(np.rint(np.where(np.isnan(x), 0, x)), *INTEGERS[name])
        return clamped.astype(np.int8).view(np.uint8) & np.uint8((1 << width(name)) - 1)
    with np.errstate(all="ignore"):
        codes = x.astype(getattr(ml_dtypes, name)).view(np.uint8)
    number = ~np.isnan(x)
    if name == "float8_e8m0fnu":  # no zero, no infinity: both saturate
        codes[x == 0] = 0x00
        codes[number & (codes == 0xFF) & (x > 0)] = 0xFE
        return codes
    values = table(name)
    top = np.uint8(np.nonzero(values == max_finite(name))[0][0])
    overflowed = number & ~np.isfinite(values[codes])
    sign = (np.signbit(x).astype(np.uint8)) << np.uint8(width(name) - 1)
    codes[overflowed] = (top | sign)[overflowed]
    return codes


def interesting_floats(name: str) -> F32:
    """Where an encoder can go wrong: every value, every midpoint between neighbours and the overflow
    threshold, each also one float32 ulp to either side, both signs; every float16 and bfloat16; random bit
    patterns; special values."""
    values = np.unique(table(name).astype(np.float64))
    values = values[np.isfinite(values)]
    step = values[-1] - values[-2]
    points = np.concatenate(
        [values, (values[1:] + values[:-1]) / 2, [values[-1] + step / 2, values[-1] + step, 2 * values[-1]]]
    )
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    inf = np.float32(np.inf)
    points = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
    halves = np.arange(1 << 16, dtype=np.uint16)
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    specials = [
        0x7F800000,
        0x7FC00000,
        0x7F800001,
        0x7FFFFFFF,
        0x7F7FFFFF,
        0x00000001,
        0x007FFFFF,
        0x00800000,
        0,
    ]
    specials += [s | 0x80000000 for s in specials]
    return np.concatenate(
        [
            points,
            -points,
            halves.view(np.float16).astype(np.float32),
            (halves.astype(np.uint32) << 16).view(np.float32),
            patterns.view(np.float32),
            np.array(specials, np.uint32).view(np.float32),
        ]
    )


def bits(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bit patterns with every NaN made the same, for comparisons that tell -0.0 from 0.0."""
    x = np.ascontiguousarray(x)
    if x.dtype.kind not in "fV":
        return x
    patterns = x.view(f"u{x.dtype.itemsize}").copy()
    patterns[np.isnan(x.astype(np.float64))] = np.iinfo(patterns.dtype).max
    return patterns


def assert_same_bits(actual: npt.NDArray[Any], expected: npt.NDArray[Any], what: str = "") -> None:
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    wrong = np.argwhere(bits(actual) != bits(expected))
    if len(wrong):
        at = tuple(wrong[0])
        first = f"first at {at}: {actual[at]!r} is not {expected[at]!r}"
        pytest.fail(f"{what}: {len(wrong)} of {actual.size} differ, {first}")


# --- a ScaledTensor's meaning -------------------------------------------------------------------------------


def element_format(recipe: Any) -> str:
    for field, names in {
        "fp8_format": {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"},
        "fp6_format": {"E2M3": "float6_e2m3fn", "E3M2": "float6_e3m2fn"},
        "fp4_format": {"E2M1": "float4_e2m1fn"},
    }.items():
        if hasattr(recipe, field):
            element: str = getattr(recipe, field)
            return names.get(element, element)  # those of vendors have ml_dtypes' names
    if type(recipe).__name__ in ("INT8Scaling", "INT8ExpandedScaling"):
        return "int8"
    return "int4" if recipe.signed else "uint4"


def has_one_zero(recipe: Any) -> bool:
    """Whether no code of a recipe is -0."""
    element = element_format(recipe)
    return element in INTEGERS or element.endswith("fnuz")


def codes_of(scaled: Any) -> U8:
    """One code per byte, in the logical shape."""
    data = np.ascontiguousarray(scaled.data).view(np.uint8)
    if data.shape == scaled.shape:
        return data
    pairs = np.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], -1)[..., : scaled.shape[-1]]


def scale_values(scaled: Any) -> F32:
    scale = np.asarray(scaled.scale)
    if scale.dtype == np.uint16:
        return (scale.astype(np.uint32) << 16).view(np.float32)
    if scale.dtype != np.uint8:
        return scale.astype(np.float32)
    is_nvfp4 = type(scaled.recipe).__name__ == "NVFP4BlockScaling"
    return table("float8_e4m3fn" if is_nvfp4 else "float8_e8m0fnu")[scale]


def spread(scale: npt.NDArray[Any], scaled: Any) -> npt.NDArray[Any]:
    """A scale array (or anything shaped like it) repeated to the logical shape."""
    block = {
        "PerTensor": lambda layout: (None, None),
        "PerChannel": lambda layout: (1, None),
        "PerBlockK": lambda layout: (1, layout.block_size),
        "PerBlockMN": lambda layout: (layout.block_m, layout.block_n),
    }[type(scaled.layout).__name__](scaled.layout)
    shape = scaled.shape
    if block[0] is not None:
        scale = np.repeat(scale, block[0], axis=-2)[..., : shape[-2], :]
    if block[1] is not None:
        scale = np.repeat(scale, block[1], axis=-1)[..., : shape[-1]]
    return np.broadcast_to(scale, shape)


def dequantized(scaled: Any) -> F32:
    """(decode(data) - zero point) * (global scale * scale), each step rounded to float32, as torchao computes
    it."""
    scale = scale_values(scaled)
    with np.errstate(all="ignore"):
        if scaled.global_scale is not None:
            level = np.asarray(scaled.global_scale, np.float32)
            divides = getattr(scaled.recipe, "global_scale_form", "multiplier") == "divisor"
            scale = scale / level if divides else level * scale
        codes = table(element_format(scaled.recipe))[codes_of(scaled)]
        if scaled.exponents is not None:
            largest = max_finite(element_format(scaled.recipe))
            return roots(codes, *(spread(x, scaled) for x in (scale, scaled.exponents)), largest)
        if scaled.zero_point is not None:
            codes = codes - spread(np.asarray(scaled.zero_point).astype(np.float32), scaled)
        return (codes * spread(scale, scaled)).astype(np.float32)


def log2(x: npt.NDArray[Any]) -> tuple[F32, F32]:
    """log2 of float32 numbers as whole numbers and parts, each operation rounded to float32."""
    significand, whole = np.frexp(x.astype(np.float32))
    small = significand < np.float32(0.70710677)
    significand, whole = np.where(small, 2 * significand, significand), np.where(small, whole - 1, whole)
    terms = ("0x1.7154c4p+0", "-0x1.71582ep-1", "0x1.ebff06p-2", "-0x1.6f93b2p-2", "0x1.30659cp-2")
    return whole.astype(np.float32), polynomial(significand - np.float32(1), *terms, "-0x1.173e24p-2", "0x1.5d75a4p-3")


def polynomial(x: F32, *terms: str) -> F32:
    total = np.full_like(x, np.float32(float.fromhex(terms[-1])))
    for term in terms[-2::-1]:
        total = total * x + np.float32(float.fromhex(term))
    return total * x


def roots(codes: F32, scale: npt.NDArray[Any], k: npt.NDArray[Any], largest: float) -> F32:
    """sign(c) · largest · scale · (|c| / largest)^(1 / k), by the root of the ratio; where k is 1, c · scale."""
    f = np.float32
    scale, half = scale.astype(f), f(0.5) / k.astype(f)
    (whole, part), (whole_of_largest, part_of_largest) = log2(np.abs(codes)), log2(np.asarray(largest, f))
    log = np.maximum(((whole - whole_of_largest) + (part - part_of_largest)) * half, f(-126))
    floor = np.rint(log)
    terms = ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")
    root = np.ldexp(polynomial((log - floor).astype(f), *terms) + f(1), floor.astype(np.int32)).astype(f)
    value = np.where(np.isfinite(codes) & (codes != 0), (root * (scale * f(largest))) * root, np.abs(codes))
    return np.where(k == 1, codes * scale, np.copysign(value, codes)).astype(f)


# --- torchao ------------------------------------------------------------------------------------------------


def torchao_float8(x: F32, granularity: str | tuple[int, int], name: str = "float8_e4m3fn") -> tuple[U8, F32, F32]:
    """(codes, scale, dequantized) of torchao's Float8Tensor; the granularity is "tensor", "row" or a block
    shape."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("torchao.quantization")
    float8_tensor = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    if granularity == "tensor":
        grain = quantization.PerTensor()
    elif granularity == "row":
        grain = quantization.PerRow()
    else:
        grain = quantization.PerBlock(list(granularity))
    t = float8_tensor.Float8Tensor.from_hp(torch.from_numpy(x), getattr(torch, name), grain)
    return t.qdata.view(torch.uint8).numpy(), t.scale.numpy(), t.dequantize().numpy()


MX_ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")


def torchao_mx(x: F32, name: str, rounding: str) -> tuple[U8, U8, F32]:
    """(bytes, E8M0 scale bytes, dequantized) of torchao's MXTensor; float4 packed, float6 one code per
    byte."""
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    element = {
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float6_e2m3fn": "fp6_e2m3",
        "float6_e3m2fn": "fp6_e3m2",
        "float4_e2m1fn": torch.float4_e2m1fn_x2,
    }[name]
    mode = mx_tensor.ScaleCalculationMode(rounding)
    t = mx_tensor.MXTensor.to_mx(torch.from_numpy(x), element, 32, scaling_mode=mode)
    return (
        t.qdata.view(torch.uint8).numpy(),
        t.scale.view(torch.uint8).numpy(),
        t.dequantize(torch.float32).numpy(),
    )


def torchao_nvfp4(x: F32, two_level: bool) -> tuple[U8, U8, F32, F32 | None]:
    """(packed bytes, E4M3 scale bytes, dequantized, global scale) of torchao's NVFP4Tensor."""
    torch = pytest.importorskip("torch")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    t = torch.from_numpy(x)
    level = nvfp4.per_tensor_amax_to_scale(t.abs().amax()) if two_level else None
    q = nvfp4.NVFP4Tensor.to_nvfp4(t, per_tensor_scale=level)
    return (
        q.qdata.view(torch.uint8).numpy(),
        q.scale.view(torch.uint8).numpy(),
        q.dequantize(torch.float32).numpy(),
        None if level is None else level.numpy(),
    )


# --- TransformerEngine --------------------------------------------------------------------------------------


def te_nvfp4(x: F32, four_over_six: bool = False) -> tuple[U8, U8]:
    """(packed bytes, E4M3 scale bytes) of TransformerEngine's NVFP4 reference, optionally with its "four over
    six" choice."""
    import te_stub

    reference = te_stub.load("custom_recipes.reference_nvfp4").NVFP4QuantizerRef
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(x)
    packed, scale = reference._quantize_blockwise_reference(
        t,
        t.abs().amax(),
        16,
        1,
        pow_2_scales=False,
        eps=0.0,
        nvfp4_use_4over6=four_over_six,
        nvfp4_4over6_err_mode="MSE",
    )
    # The reference compares with `x < -0.0`, so a product that is -0.0 gets the code of +0; the hardware,
    # torchao and breccia keep the sign.
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(x.shape)
    codes[(codes == 0) & np.signbit(x)] = 8
    return codes[..., ::2] | codes[..., 1::2] << 4, scale.view(torch.uint8).numpy()
