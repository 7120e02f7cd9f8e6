# SPDX-License-Identifier: Apache-2.0
"""torchao 0.18's tensors, made by torchao on the CPU: read to the values of its own dequantize()."""

import json
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import OutsideTensor, from_torchao, to_torchao
from breccia.bridges import torchao as bridge
from breccia.bridges.torchao import files
from breccia.checkpoint.files.safetensors_file import SafetensorsFile

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")


def weight(dtype: Any = None, shape: tuple[int, ...] = (256, 384)) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(0.02).to(dtype or torch.float32)


def quantized(config: Any, dtype: Any = None) -> Any:
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(384, 256, bias=False, dtype=dtype or torch.float32)
    with torch.no_grad():
        layer.weight.copy_(weight(dtype))
    quantize_(layer, config)
    return layer.weight.data if hasattr(layer.weight, "data") else layer.weight


def float8(granularity: Any, dtype: Any) -> Any:
    from torchao.quantization import Float8Tensor

    return Float8Tensor.from_hp(weight(), dtype, granularity)


def mx(element: Any, swizzled: bool = False) -> Any:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(weight(), element, 32, ScaleCalculationMode.RCEIL, is_swizzled_scales=swizzled)


def nvfp4(two_level: bool, swizzled: bool = False) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    w = weight()
    second = per_tensor_amax_to_scale(w.abs().max()) if two_level else None
    return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=second, is_swizzled_scales=swizzled)


def cases() -> dict[str, Any]:
    from torchao.quantization import (
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerBlock,
        PerGroup,
        PerRow,
        PerTensor,
    )

    return {
        "float8 tensor": lambda: float8(PerTensor(), torch.float8_e4m3fn),
        "float8 row": lambda: float8(PerRow(), torch.float8_e4m3fn),
        "float8 e5m2": lambda: float8(PerRow(), torch.float8_e5m2),
        "float8 128x128": lambda: float8(PerBlock([128, 128]), torch.float8_e4m3fn),
        "float8 1x128": lambda: float8(PerBlock([1, 128]), torch.float8_e4m3fn),
        "int8": lambda: quantized(Int8WeightOnlyConfig()),
        "int8 group": lambda: quantized(Int8WeightOnlyConfig(granularity=PerGroup(64))),
        "intx int4": lambda: quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
        "intx int4 asymmetric": lambda: quantized(
            IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC)
        ),
        "mx e4m3": lambda: mx(torch.float8_e4m3fn),
        "mx e5m2": lambda: mx(torch.float8_e5m2),
        "mx fp6 e2m3": lambda: mx("fp6_e2m3"),
        "mx fp6 e3m2": lambda: mx("fp6_e3m2"),
        "mx fp4": lambda: mx(torch.float4_e2m1fn_x2),
        "mx e4m3 swizzled": lambda: mx(torch.float8_e4m3fn, True),
        "mx fp4 swizzled": lambda: mx(torch.float4_e2m1fn_x2, True),
        "nvfp4": lambda: nvfp4(True),
        "nvfp4 one level": lambda: nvfp4(False),
        "nvfp4 swizzled": lambda: nvfp4(True, True),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_values_are_torchaos_both_ways(name: str) -> None:
    tensor = CASES[name]()
    wanted = tensor.dequantize(torch.float32) if "intx" not in name else tensor.dequantize()
    scaled = from_torchao(tensor)
    assert tuple(scaled.shape) == tuple(tensor.shape)
    got = np.asarray(breccia.dequantize(scaled))
    np.testing.assert_array_equal(got, wanted.float().numpy())
    back = to_torchao(scaled, torch.float32)
    assert type(back) is type(tensor)
    np.testing.assert_array_equal(
        (back.dequantize() if "intx" in name else back.dequantize(torch.float32)).float().numpy(), wanted.numpy()
    )
    assert back.qdata.view(torch.uint8).equal(tensor.qdata.contiguous().view(torch.uint8))
    if "swizzled" not in name:
        assert back.scale.dtype == tensor.scale.dtype
        assert back.scale.contiguous().view(torch.uint8).equal(tensor.scale.contiguous().view(torch.uint8))


def test_int4_tensor_keeps_its_float_zero_points() -> None:
    from torchao.quantization import Int4Tensor

    generator = torch.Generator().manual_seed(0)
    qdata = torch.randint(-128, 127, (64, 64), generator=generator, dtype=torch.int8)
    scale = torch.rand(4, 64, generator=generator).to(torch.bfloat16)
    zero = torch.randn(4, 64, generator=generator).to(torch.bfloat16)
    tensor = Int4Tensor(qdata, scale, zero, [1, 32], torch.Size([64, 128]))
    outside = from_torchao(tensor)
    assert isinstance(outside, OutsideTensor)
    low, high = (qdata << 4) >> 4, qdata >> 4
    q = torch.stack([low, high], -1).reshape(64, 128).float()
    wanted = q * scale.T.float().repeat_interleave(32, 1) + zero.T.float().repeat_interleave(32, 1)
    np.testing.assert_array_equal(outside.dequantize(), wanted.numpy())
    back = to_torchao(outside)
    assert back.qdata.equal(qdata)
    assert back.scale.equal(scale)
    assert back.zero_point.equal(zero)


def test_opaque_classes_are_refused_with_the_way_out() -> None:
    class Int4TilePackedTo4dTensor:
        pass

    with pytest.raises(TypeError, match=r"Int4TilePackedTo4dTensor.*IntxWeightOnlyConfig"):
        from_torchao(Int4TilePackedTo4dTensor())
    with pytest.raises(TypeError, match="torchao's tensor classes, got Tensor"):
        from_torchao(torch.zeros(2))


@pytest.mark.parametrize("name", CASES)
def test_safetensors_layout_is_torchaos(name: str, tmp_path: Path) -> None:
    """torchao writes, breccia reads without it; breccia writes, torchao reads."""
    from breccia.checkpoint.files.safetensors_file import SafetensorsWriter
    from safetensors.torch import load_file, save_file
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    tensor = CASES[name]()
    flat, metadata = flatten_tensor_state_dict({"layer.weight": tensor, "layer.bias": torch.zeros(3)})
    save_file({k: v.contiguous() for k, v in flat.items()}, tmp_path / "a.safetensors", metadata)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    (found,) = bridge.BRIDGE.find_all(file.entries, file.metadata)
    parts = {role: file[full] for role, full in found.parts.items() if role != "global_scale"}
    scaled = bridge.BRIDGE.open(parts, found)
    assert found.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(breccia.dequantize(scaled), breccia.dequantize(from_torchao(tensor)))
    ours, text = files.store("layer.weight", scaled, "float32")
    with SafetensorsWriter(
        tmp_path / "b.safetensors",
        {k: (p.dtype, p.shape) for k, p in ours.items()},
        {"layer.weight": text, "tensor_names": json.dumps(["layer.weight"])},
    ) as writer:
        for full, value in ours.items():
            writer.write(full, value.make())
    state, _ = unflatten_tensor_state_dict(
        load_file(tmp_path / "b.safetensors"), SafetensorsFile(tmp_path / "b.safetensors").metadata
    )
    back = state["layer.weight"]
    assert type(back) is type(tensor)
    np.testing.assert_array_equal(back.dequantize().float().numpy(), tensor.dequantize().float().numpy())
    assert "torchao" in sys.modules
