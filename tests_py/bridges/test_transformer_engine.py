# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine 2.20's own Python classes on the CPU, its compiled module stubbed."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import common as _common
from breccia.bridges import from_transformer_engine, to_transformer_engine
from breccia.bridges import transformer_engine as bridge

sys.path.insert(0, str(Path(__file__).parents[1]))
import te_stub

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def te() -> Iterator[Any]:
    te_stub.load("tensor")  # once, so that the package's circular imports are done
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    with te_stub._stubbed(Path(spec.submodule_search_locations[0])):
        yield importlib.import_module("transformer_engine.pytorch.tensor")


def weight(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(5).normal(0, 0.02, shape).astype(np.float32)


@pytest.mark.parametrize("key", bridge.RECIPES)
@pytest.mark.parametrize("swizzled", [False, True])
def test_round_trip(te: Any, key: str, swizzled: bool) -> None:
    shape = (300, 520) if key == "block-2d" else (300, 640)
    scaled = breccia.cast(weight(shape), bridge.RECIPES[key])
    tensor = to_transformer_engine(scaled, torch.float32, swizzled=swizzled)
    assert type(tensor).__module__.startswith("transformer_engine.pytorch.tensor")
    assert tuple(tensor.shape) == shape
    back = from_transformer_engine(tensor, bridge.RECIPES[key])
    for field in ("data", "scale", "global_scale"):
        a, b = getattr(back, field), getattr(scaled, field)
        assert (a is None) == (b is None)
        if a is not None:
            assert _common.as_numpy(a, field).tobytes() == np.asarray(b).tobytes(), field


@pytest.mark.parametrize("key", ["current", "delayed", "block-1d", "block-2d"])
def test_their_dequantize_is_ours(te: Any, key: str) -> None:
    scaled = breccia.cast(weight((256, 384)), bridge.RECIPES[key])
    tensor = to_transformer_engine(scaled, torch.float32)
    if key in ("current", "delayed"):  # the compiled kernel's job; the formula is x = data · scale_inv
        values = tensor._data.view(torch.float8_e4m3fn).float() * tensor._scale_inv
    else:
        values = tensor.dequantize(dtype=torch.float32)
    np.testing.assert_array_equal(values.numpy(), breccia.dequantize(scaled))


@pytest.mark.parametrize(("key", "shape"), [("block-2d", (300, 520)), ("block-1d", (300, 640))])
def test_scale_shapes_are_those_of_their_quantizer(te: Any, key: str, shape: tuple[int, int]) -> None:
    tensor = to_transformer_engine(breccia.cast(weight(shape), bridge.RECIPES[key]))
    module = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    quantizer = module.Float8BlockQuantizer.__new__(module.Float8BlockQuantizer)
    quantizer.block_len, quantizer.block_scaling_dim = 128, 2 if key == "block-2d" else 1
    wanted = quantizer.get_scale_shape(shape, columnwise=False)
    assert tuple(tensor._rowwise_scale_inv.shape) == tuple(wanted)


def test_columnwise_only_tensors(te: Any) -> None:
    constants = importlib.import_module("transformer_engine.pytorch.constants")
    common = {"shape": torch.Size((256, 384)), "dtype": torch.float32, "device": torch.device("cpu")}
    w = weight((256, 384))
    tiles = breccia.cast(np.ascontiguousarray(w.T), breccia.Float8BlockScaling(block_m=128))
    scale = np.pad(tiles.scale, [(0, 0), (0, -tiles.scale.shape[1] % 4)])
    tensor = te.Float8BlockwiseQTensor(
        **common,
        rowwise_data=None,
        rowwise_scale_inv=None,
        columnwise_data=_common.to_torch(tiles.data.view(np.uint8)),
        columnwise_scale_inv=_common.to_torch(scale),
        fp8_dtype=constants.DType.kFloat8E4M3,
        quantizer=None,
        is_2D_scaled=True,
    )
    back = from_transformer_engine(tensor)
    assert back.shape == (256, 384)
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(tiles).T)
    down = breccia.cast(np.ascontiguousarray(w.T), breccia.MXFP8BlockScaling())
    tensor = te.MXFP8Tensor(
        **common,
        rowwise_data=None,
        rowwise_scale_inv=None,
        columnwise_data=_common.to_torch(np.ascontiguousarray(down.data.view(np.uint8).T)),
        columnwise_scale_inv=_common.to_torch(np.ascontiguousarray(np.pad(down.scale, [(0, 0), (0, 0)]).T)),
        fp8_dtype=constants.DType.kFloat8E4M3,
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )
    np.testing.assert_array_equal(breccia.dequantize(from_transformer_engine(tensor)), breccia.dequantize(down).T)


def test_nvfp4_is_their_references_bytes(te: Any) -> None:
    w = torch.from_numpy(weight((128, 256)))
    reference = importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
    q = reference.NVFP4QuantizerRef.__new__(reference.NVFP4QuantizerRef)
    amax = w.abs().max().reshape(1)
    data, scale = q._quantize_blockwise_reference(w, amax, 16, 1, pow_2_scales=False, eps=0.0)[:2]
    ours = breccia.cast(w.numpy(), breccia.NVFP4BlockScaling())
    np.testing.assert_array_equal(ours.data, data.view(torch.uint8).numpy())
    np.testing.assert_array_equal(ours.scale.view(np.uint8), scale.view(torch.uint8).numpy())
    tensor = to_transformer_engine(ours)
    np.testing.assert_array_equal(tensor._amax_rowwise.numpy(), amax.numpy())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="te_t must be Float8Tensor"):
        from_transformer_engine(object())
