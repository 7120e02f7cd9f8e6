# SPDX-License-Identifier: Apache-2.0
"""GPTQ, AWQ, DeepSeek and bitsandbytes against their formats written out element by element."""

import json
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import (
    OutsideTensor,
    from_awq,
    from_bitsandbytes,
    from_deepseek_v3,
    from_gptq,
    to_awq,
    to_deepseek_v3,
    to_gptq,
)

N, K, GROUP = 16, 64, 32
RNG = np.random.default_rng(2)


def words(shape: tuple[int, ...]) -> Any:
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def nibble(word: Any, i: int) -> int:
    return int(np.uint32(np.int32(word)) >> np.uint32(4 * i)) & 15


def gptq_parts(act_order: bool) -> dict[str, Any]:
    order = np.arange(K) // GROUP
    return {
        "qweight": words((K // 8, N)),
        "qzeros": words((K // GROUP, N // 8)),
        "scales": RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float16),
        "g_idx": (RNG.permutation(order) if act_order else order).astype(np.int32),
    }


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(version: str, act_order: bool) -> None:
    parts = gptq_parts(act_order)
    made = from_gptq(parts, version=version)
    wanted = np.empty((N, K), np.float32)
    for n in range(N):
        for k in range(K):
            g = parts["g_idx"][k]
            zero = nibble(parts["qzeros"][g, n // 8], n % 8) + (version == "gptq")
            wanted[n, k] = np.float32(parts["scales"][g, n]) * (nibble(parts["qweight"][k // 8, n], k % 8) - zero)
    assert isinstance(made, OutsideTensor) == act_order
    values = made.dequantize() if isinstance(made, OutsideTensor) else breccia.dequantize(made)
    np.testing.assert_array_equal(values, wanted)
    back = to_gptq(made, version=version)
    for role, array in parts.items():
        np.testing.assert_array_equal(back[role], array, role)


def test_gptq_of_8_bits() -> None:
    parts = {
        "qweight": words((K // 4, N)),
        "qzeros": words((K // GROUP, N // 4)),
        "scales": RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float16),
    }
    codes = parts["qweight"].T.copy().view(np.uint8).astype(np.float32)
    zeros = parts["qzeros"].view(np.uint8).T.astype(np.float32) + 1
    scales = parts["scales"].T.astype(np.float32)
    wanted = (codes - zeros.repeat(GROUP, 1)) * scales.repeat(GROUP, 1)
    np.testing.assert_array_equal(breccia.dequantize(from_gptq(parts)), wanted)


def test_gptq_refusals() -> None:
    scaled = breccia.cast(
        RNG.uniform(0, 1, (N, K)).astype(np.float32), breccia.INT4Scaling(GROUP, signed=False, symmetric=False)
    )
    assert scaled.zero_point.min() == 0
    with pytest.raises(ValueError, match="from 1 to 16 in version 'gptq', got 0"):
        to_gptq(scaled)
    assert set(to_gptq(scaled, version="gptq_v2")) == {"qweight", "qzeros", "scales", "g_idx"}
    with pytest.raises(ValueError, match="version must be"):
        from_gptq({}, version="v3")
    parts = gptq_parts(False)
    with pytest.raises(ValueError, match="g_idx must be 64 numbers below 2"):
        from_gptq({**parts, "g_idx": parts["g_idx"] + 1})
    with pytest.raises(ValueError, match="must all be 8"):
        from_gptq(parts, symmetric=True)


def test_awq() -> None:
    parts = {
        "qweight": words((K, N // 8)),
        "qzeros": words((K // GROUP, N // 8)),
        "scales": RNG.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float16),
    }
    columns = [0, 2, 4, 6, 1, 3, 5, 7]
    wanted = np.empty((N, K), np.float32)
    for k in range(K):
        for word in range(N // 8):
            for i, column in enumerate(columns):
                n = 8 * word + column
                q, zero = nibble(parts["qweight"][k, word], i), nibble(parts["qzeros"][k // GROUP, word], i)
                wanted[n, k] = np.float32(parts["scales"][k // GROUP, n]) * (q - zero)
    scaled = from_awq(parts)
    np.testing.assert_array_equal(breccia.dequantize(scaled), wanted)
    back = to_awq(scaled)
    for role, array in parts.items():
        np.testing.assert_array_equal(back[role], array, role)


@pytest.mark.parametrize("shape", [(576, 7168), (2112, 640), (256, 256), (1, 256)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepseek_tiles(shape: tuple[int, int], dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    data = RNG.integers(0, 0x70, shape, dtype=np.uint8)
    scale = RNG.uniform(0.5, 2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    )
    scaled = from_deepseek_v3(data, scale)
    wide = scale.astype(np.float32).repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    wanted = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide
    np.testing.assert_array_equal(breccia.dequantize(scaled), wanted)
    back_data, back_scale = to_deepseek_v3(scaled)
    assert back_data is data
    assert back_scale is scale


def test_deepseek_rows_as_the_seed_has_them() -> None:
    scaled = from_deepseek_v3(np.zeros((4, 256), np.uint8), np.ones((4, 2), np.float32))
    assert scaled.layout == breccia.PerBlockK(128)
    assert scaled.recipe == breccia.Float8BlockScaling()
    with pytest.raises(ValueError, match=r"scale.shape must be \(1, 2\) \(tiles\) or \(4, 2\)"):
        from_deepseek_v3(np.zeros((4, 256), np.uint8), np.ones((3, 2), np.float32))
    with pytest.raises(TypeError, match="data must be an array"):
        from_deepseek_v3([1], np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match="must be Float8BlockScaling or MXFP4"):
        to_deepseek_v3(breccia.cast(np.ones((4, 256), np.float32), breccia.MXFP8BlockScaling()))


def test_deepseek_v4_experts_are_fp4_in_bytes_called_int8() -> None:
    w = RNG.normal(0, 1, (64, 256)).astype(np.float32)
    scaled = breccia.cast(w, breccia.MXFP4BlockScaling())
    data, scale = to_deepseek_v3(scaled)
    assert data.dtype == np.int8
    back = from_deepseek_v3(data, scale)
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(scaled))


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested: bool) -> None:
    shape, block = (32, 48), 64
    count = shape[0] * shape[1]
    book = np.sort(RNG.normal(0, 0.5, 16)).astype(np.float32)
    packed = RNG.integers(0, 256, (count // 2, 1), dtype=np.uint8)
    absmax = RNG.uniform(0.5, 1, count // block).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"weight": packed, "quant_map": book, "absmax": absmax}
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        codes = RNG.integers(0, 256, absmax.size, dtype=np.uint8)
        table = np.linspace(-1, 1, 256).astype(np.float32)
        outer = np.array([0.5], np.float32)
        parts |= {"absmax": codes, "nested_absmax": outer, "nested_quant_map": table}
        absmax = table[codes] * outer + np.float32(0.25)
    parts["quant_state"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    got = from_bitsandbytes(parts)
    flat = [book[b >> 4] if half == 0 else book[b & 15] for b in packed.reshape(-1) for half in (0, 1)]
    np.testing.assert_array_equal(got.reshape(-1), np.array(flat, np.float32) * absmax.repeat(block))
    for bad in (b"[]", b"\xff", b'{"shape": [1]}'):
        with pytest.raises(ValueError, match="quant_state must be"):
            from_bitsandbytes({**parts, "quant_state": np.frombuffer(bad, np.uint8)})
