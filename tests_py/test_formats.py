# SPDX-License-Identifier: Apache-2.0
"""breccia.formats against ml_dtypes and gfloat. All 2^32 inputs: benchmarks/exhaustive_encode.py."""

import functools

import breccia
import numpy as np
import oracles
import pytest
from breccia import formats

ml_dtypes = pytest.importorskip("ml_dtypes")

NAMES = list(formats.names())
FLOATS = [name for name in NAMES if name not in oracles.INTEGERS]
FOUR_BIT = ["float4_e2m1fn", "int4", "uint4"]


@functools.cache
def sample(name):
    x = oracles.interesting_floats(name)
    return x, oracles.expected_codes(x, name)


def test_every_format_of_the_project_is_there():
    expected = [
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float6_e2m3fn",
        "float6_e3m2fn",
    ]
    expected += ["float4_e2m1fn", "float8_e8m0fnu", "int8", "int4", "uint4"]
    assert set(expected) <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_decode_every_code(name):
    codes = np.arange(1 << oracles.width(name), dtype=np.uint8)
    oracles.assert_same_bits(formats.decode(codes, name), oracles.table(name), name)


@pytest.mark.parametrize("name", [name for name in NAMES if name in oracles.GFLOAT_NAMES])
def test_decode_equals_gfloat(name):
    gfloat = pytest.importorskip("gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), "format_info_" + oracles.GFLOAT_NAMES[name])
    codes = np.arange(1 << oracles.width(name), dtype=np.uint8)
    expected = gfloat.decode_ndarray(info, codes).astype(np.float32)
    oracles.assert_same_bits(formats.decode(codes, name), expected, name)


@pytest.mark.parametrize("name", NAMES)
def test_encode_where_it_can_go_wrong(name):
    x, expected = sample(name)
    actual = formats.encode(x, name)
    assert actual.dtype == np.uint8
    wrong = np.nonzero(actual != expected)[0]
    assert wrong.size == 0, (
        f"{wrong.size} differ; {x[wrong[0]]!r} -> {actual[wrong[0]]:#x}, not {expected[wrong[0]]:#x}"
    )


@pytest.mark.parametrize("name", [name for name in oracles.GFLOAT_NAMES if name != "float8_e8m0fnu"])
def test_encode_equals_gfloat(name):
    """A second opinion on finite input; gfloat's E8M0 rounds halves to even, ml_dtypes' and breccia's up."""
    gfloat = pytest.importorskip("gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), "format_info_" + oracles.GFLOAT_NAMES[name])
    x, _ = sample(name)
    x = x[np.isfinite(x)][:: 7 if name.startswith("float8") else 11]
    rounded = gfloat.round_ndarray(info, x.astype(np.float64), sat=True)
    np.testing.assert_array_equal(formats.encode(x, name), gfloat.encode_ndarray(info, rounded))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_encode_every_half(name, half):
    x = np.arange(1 << 16, dtype=np.uint16).view(half)
    with np.errstate(invalid="ignore"):
        expected = oracles.expected_codes(x.astype(np.float32), name)
    np.testing.assert_array_equal(formats.encode(x, name), expected)


@pytest.mark.parametrize("name", NAMES)
def test_encode_float64_rounds_to_float32_first(name):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(10_000) * oracles.max_finite(name) ** rng.uniform(-1, 1, 10_000)
    with np.errstate(over="ignore"):
        expected = oracles.expected_codes(x.astype(np.float32), name)
    np.testing.assert_array_equal(formats.encode(x, name), expected)


@pytest.mark.parametrize("name", NAMES)
def test_encode_undoes_decode(name):
    values = oracles.table(name)
    finite = np.isfinite(values)
    codes = np.arange(values.size, dtype=np.uint8)[finite]
    np.testing.assert_array_equal(formats.encode(formats.decode(codes, name), name), codes)


@pytest.mark.parametrize("name", NAMES)
def test_any_shape_stride_and_byte_order(name):
    x = np.random.default_rng(2).standard_normal((6, 10, 7)).astype(np.float32) * 4
    expected = oracles.expected_codes(x, name)
    for view, of_expected in [
        (x.T, expected.T),
        (x[::2, ::-1, 1::3], expected[::2, ::-1, 1::3]),
        (x.astype(">f4"), expected),
        (x[0, 0, 0], expected[0, 0, 0]),
        (x[:, :0], expected[:, :0]),
        (np.broadcast_to(x[:1], x.shape), np.broadcast_to(expected[:1], x.shape)),
    ]:
        actual = formats.encode(view, name)
        assert actual.shape == of_expected.shape
        np.testing.assert_array_equal(actual, of_expected)
    codes = expected[::2, ::-1, 1::3]
    oracles.assert_same_bits(formats.decode(codes, name), oracles.table(name)[codes], name)


@pytest.mark.parametrize("name", FOUR_BIT)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 32, 33, 64, 255, 1000])
def test_pack_puts_the_even_element_in_the_low_nibble(name, n):
    codes = np.random.default_rng(n).integers(0, 16, n, dtype=np.uint8)
    padded = np.append(codes, np.zeros(n % 2, np.uint8))
    packed = formats.pack(padded)
    np.testing.assert_array_equal(packed, padded[::2] | padded[1::2] << 4)
    np.testing.assert_array_equal(formats.unpack(packed, n), codes)


def test_pack_runs_along_the_last_axis():
    codes = np.random.default_rng(3).integers(0, 16, (3, 4, 10), dtype=np.uint8)
    packed = formats.pack(codes)
    assert packed.shape == (3, 4, 5)
    np.testing.assert_array_equal(packed, codes[..., ::2] | codes[..., 1::2] << 4)
    np.testing.assert_array_equal(formats.unpack(packed, 10), codes)


def test_pack_equals_torchao():
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    torch = pytest.importorskip("torch")
    codes = np.random.default_rng(4).integers(0, 16, (8, 64), dtype=np.uint8)
    np.testing.assert_array_equal(formats.pack(codes), kernels.pack_uint4(torch.from_numpy(codes)).numpy())


@pytest.mark.parametrize("n", [-1, 0, 4, 7, 9])
def test_unpack_refuses_a_length_that_does_not_fit(n):
    with pytest.raises(ValueError, match="n_values must be 6 or 5"):
        formats.unpack(np.zeros(3, np.uint8), n)


@pytest.mark.parametrize("name", FLOATS)
def test_finfo_equals_ml_dtypes(name):
    actual, expected = formats.finfo(name), ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert actual.name == name
    assert actual.bits == expected.bits
    assert (actual.max, actual.min) == (float(expected.max), float(expected.min))
    assert actual.smallest == float(expected.smallest_subnormal)
    assert actual.mantissa_bits == expected.nmant
    assert actual.max_exponent == expected.maxexp - 1
    assert actual.has_nan == np.isnan(oracles.table(name)).any()


@pytest.mark.parametrize("name", oracles.INTEGERS)
def test_finfo_of_integers(name):
    info = formats.finfo(name)
    assert (info.min, info.max) == oracles.INTEGERS[name]
    assert (info.bits, info.smallest, info.has_nan) == (oracles.width(name), 1, False)


@pytest.mark.parametrize(
    "call",
    [
        lambda n: formats.encode(np.zeros(2, np.float32), n),
        lambda n: formats.decode(np.zeros(2, np.uint8), n),
        formats.finfo,
    ],
)
@pytest.mark.parametrize("name", ["float8_e9m9", "", "FLOAT8_E4M3FN", "float32"])
def test_unknown_format_names_the_known_ones(call, name):
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        call(name)


@pytest.mark.parametrize("bad", [None, 8, np.float32])
def test_format_must_be_a_name(bad):
    with pytest.raises(TypeError, match=rf"^format must be a string, got {type(bad).__name__}$"):
        formats.encode(np.zeros(2, np.float32), bad)


@pytest.mark.parametrize(
    "x",
    [np.array(["a"]), np.array([None]), np.array([1j]), np.array([{}])],
    ids=["str", "None", "complex", "dict"],
)
def test_encode_refuses_what_is_not_a_real_number(x):
    with pytest.raises(TypeError, match=rf"^x must be an array of real numbers, got dtype {x.dtype}$"):
        formats.encode(x, "float8_e4m3fn")


def test_decode_refuses_floats():
    with pytest.raises(TypeError, match=r"^codes must be a uint8 array, got dtype float32$"):
        formats.decode(np.zeros(4, np.float32), "float8_e4m3fn")


def test_formats_is_reachable_from_the_top():
    assert breccia.formats is formats
