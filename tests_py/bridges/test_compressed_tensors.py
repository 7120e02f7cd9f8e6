# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors 0.20's compressors on the CPU, both ways."""

from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import common, from_compressed_tensors, scales, to_compressed_tensors
from breccia.bridges import compressed_tensors as bridge
from breccia.bridges import parts as _parts
from breccia.bridges.written import Written

ml_dtypes = pytest.importorskip("ml_dtypes")

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")


def scheme(recipe: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = bridge.BRIDGE.dialect.write(Written({"a": recipe}))["quantization_config"]["config_groups"]["group_0"]
    args = {k: v for k, v in group["weights"].items() if v is not None}
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args)), group["format"]


def compressor(name: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


def weight() -> Any:
    return np.random.default_rng(11).normal(0, 0.02, (256, 384)).astype(np.float32)


@pytest.mark.parametrize("key", bridge.RECIPES)
def test_they_decode_ours(key: str) -> None:
    recipe = bridge.RECIPES[key]
    scaled = breccia.cast(weight(), recipe)
    parts = _parts.materialize(bridge.lay_out(scaled))
    state = {role: common.to_torch(array) for role, array in parts.items()}
    its_scheme, name = scheme(recipe)
    if key == "int4-asym" or "weight_zero_point" in state:
        assert its_scheme.weights.symmetric is False
    values = compressor(name).decompress(state, its_scheme)["weight"]
    assert same_numbers(values, breccia.dequantize(scaled))


def same_numbers(theirs: Any, ours: Any) -> bool:
    """Theirs, made in float32 or bfloat16, are ours rounded to that type once."""
    return bool(torch.from_numpy(np.array(ours)).to(theirs.dtype).equal(theirs))


@pytest.mark.parametrize("key", bridge.RECIPES)
def test_we_decode_theirs(key: str) -> None:
    """They quantize with our scales, so that codes may be compared byte for byte."""
    recipe = bridge.RECIPES[key]
    scaled = breccia.cast(weight(), recipe)
    parts = _parts.materialize(bridge.lay_out(scaled))
    its_scheme, name = scheme(recipe)
    scale = torch.from_numpy(common.float32(np.asarray(_decoded_scale(scaled))).copy())
    state = {"weight": torch.from_numpy(weight()), "weight_scale": scale}
    if "weight_global_scale" in parts:
        state["weight_global_scale"] = common.to_torch(parts["weight_global_scale"])
    if scaled.zero_point is not None:
        state["weight_zero_point"] = torch.from_numpy(scaled.zero_point.astype(np.int16) - 8).to(torch.int8)
    theirs = compressor(name).compress(state, its_scheme)
    stored = {role: common.as_numpy(t, role) for role, t in theirs.items()}
    back = from_compressed_tensors(stored)
    assert same_numbers(compressor(name).decompress(theirs, its_scheme)["weight"], breccia.dequantize(back))
    again = _parts.materialize(bridge.lay_out(back))
    for role, array in stored.items():
        np.testing.assert_array_equal(again[role].reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8), role)


def _decoded_scale(scaled: Any) -> Any:
    if scaled.scale.dtype.itemsize > 1:
        return scaled.scale.reshape(1) if scaled.scale.ndim == 0 else scaled.scale
    fmt = "float8_e4m3fn" if scaled.recipe.name == "nvfp4" else "float8_e8m0fnu"
    return breccia.formats.decode(scaled.scale.view(np.uint8), fmt)


def test_the_global_scale_divides() -> None:
    """Their float32 arithmetic on random codes, scales and divisors: the same bits."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rng = np.random.default_rng(3)
    its_scheme, _ = scheme(bridge.RECIPES["nvfp4"])
    for divisor in rng.uniform(1, 5e4, 20).astype(np.float32):
        parts = {
            "weight_packed": rng.integers(0, 256, (64, 128), dtype=np.uint8),
            "weight_scale": rng.integers(0, 0x7F, (64, 16), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
            "weight_global_scale": divisor.reshape(1),
        }
        scaled = from_compressed_tensors(parts)
        state = {role: common.to_torch(array) for role, array in parts.items()}
        wanted = dequantize(
            unpack_fp4_from_uint8(state["weight_packed"], 64, 256, dtype=torch.float32),
            state["weight_scale"].float(),
            args=its_scheme.weights,
            global_scale=state["weight_global_scale"],
            dtype=torch.float32,
        )
        np.testing.assert_array_equal(breccia.dequantize(scaled).view(np.uint32), wanted.numpy().view(np.uint32))
        for role, array in to_compressed_tensors(scaled).items():
            assert array.tobytes() == parts[role].tobytes(), role


def test_reciprocals_turn_into_each_other_where_they_can() -> None:
    x = np.float32(2688) / np.random.default_rng(0).uniform(0.01, 2, 2000).astype(np.float32)
    back = np.float32(1) / scales.reciprocal(x)
    assert (np.abs(back - x) <= np.spacing(x)).all()
    assert (back == x).sum() > 0.6 * x.size


@pytest.mark.parametrize("group_size", [None, 64])
def test_int8_byte_by_byte(group_size: Any) -> None:
    scaled = breccia.cast(weight(), breccia.INT8Scaling(group_size=group_size))
    parts = to_compressed_tensors(scaled, packed=False)
    state = {role: common.to_torch(array) for role, array in parts.items()}
    assert same_numbers(
        compressor("int-quantized").decompress(state, scheme(scaled.recipe)[0])["weight"], breccia.dequantize(scaled)
    )
    for role, array in to_compressed_tensors(from_compressed_tensors(parts), packed=False).items():
        assert array.tobytes() == parts[role].tobytes(), role
