# SPDX-License-Identifier: Apache-2.0
"""ModelOpt 0.47, AutoAWQ 0.2.9, GPTQModel 7.7 and bitsandbytes 0.50 on the CPU: what they make, to the values that
they decode it to; what is made here, to the same values by them."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import breccia
import numpy as np
import pytest
from bare_packages import bare
from breccia.bridges import (
    OutsideTensor,
    common,
    from_awq,
    from_bitsandbytes,
    from_gptq,
    from_modelopt,
    to_awq,
    to_gptq,
    to_modelopt,
)

torch = pytest.importorskip("torch")
N, K, GROUP = 64, 256, 32


def weight() -> Any:
    return torch.from_numpy(np.random.default_rng(9).normal(0, 0.02, (N, K)).astype(np.float32))


def arrays(tensors: dict[str, Any]) -> dict[str, Any]:
    return {role: common.as_numpy(t, role) for role, t in tensors.items()}


def tensors(parts: dict[str, Any]) -> dict[str, Any]:
    return {role: common.to_torch(array) for role, array in parts.items()}


def same_numbers(ours: Any, theirs: Any) -> None:
    """Bit for bit, ours rounded once to their dtype."""
    values = ours.dequantize() if isinstance(ours, OutsideTensor) else breccia.dequantize(ours)
    assert torch.from_numpy(values).to(theirs.dtype).equal(theirs)


def same_bytes(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for role, array in theirs.items():
        assert ours[role].dtype == array.dtype, role
        assert ours[role].tobytes() == array.tobytes(), role


# --- ModelOpt ---


@pytest.fixture(scope="module")
def modelopt() -> Any:
    pytest.importorskip("omegaconf")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "megatron", None)  # else it wants all of TransformerEngine
        warnings.simplefilter("ignore")
        pytest.importorskip("modelopt.torch.export.quant_utils")
        return importlib.import_module("modelopt.torch.quantization.qtensor")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modelopt_nvfp4(modelopt: Any, dtype: str) -> None:
    made, scale, second = modelopt.NVFP4QTensor.quantize(weight().to(getattr(torch, dtype)), 16)
    parts = arrays({"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": second.float()})
    scaled = from_modelopt(parts)
    same_numbers(scaled, made.dequantize(torch.float32, scale=scale, double_scale=second.float(), block_sizes={-1: 16}))
    same_bytes(to_modelopt(scaled), parts)


def test_modelopt_decodes_our_nvfp4(modelopt: Any) -> None:
    scaled = breccia.cast(weight().numpy(), breccia.NVFP4BlockScaling())
    t = tensors(to_modelopt(scaled))
    theirs = modelopt.NVFP4QTensor((N, K), torch.float32, t["weight"])
    scales = {"scale": t["weight_scale"], "double_scale": t["weight_scale_2"], "block_sizes": {-1: 16}}
    same_numbers(scaled, theirs.dequantize(**scales))


def test_modelopt_mxfp8(modelopt: Any) -> None:
    made, scale = modelopt.MXFP8QTensor.quantize(weight())
    parts = arrays({"weight": made._quantized_data, "weight_scale": scale})
    scaled = from_modelopt(parts)
    same_numbers(scaled, made.dequantize(scale=scale))
    same_bytes(to_modelopt(scaled), parts)
    same_bytes(to_modelopt(breccia.cast(weight().numpy(), breccia.MXFP8BlockScaling())), parts)


@pytest.mark.parametrize("granularity", ["tensor", "row", "tiles"])
def test_modelopt_fp8(modelopt: Any, granularity: str) -> None:
    options: dict[str, Any] = {"tensor": {}, "row": {"axis": 0}, "tiles": {"block_sizes": {-1: 32, -2: 32}}}[
        granularity
    ]
    made, scale = modelopt.FP8QTensor.quantize(weight(), **options)
    scale = scale.float()
    stored = scale[:, 0] if granularity == "row" else scale
    parts = arrays({"weight": made._quantized_data, "weight_scale": stored})
    scaled = from_modelopt(parts)
    options.pop("axis", None)
    same_numbers(scaled, made.dequantize(torch.float32, scale=scale, **options))
    same_bytes(to_modelopt(scaled), parts)


def test_modelopt_int4_awq(modelopt: Any) -> None:
    """Their exporter packs; codes are rounded weights by their own scales."""
    export = importlib.import_module("modelopt.torch.export.quant_utils")
    w = weight()
    scale = w.reshape(N, K // GROUP, GROUP).abs().amax(-1) / 7
    packed = export.to_quantized_weight(w, scale, "int4_awq", None, GROUP)
    parts = arrays({"weight": packed, "weight_scale": scale})
    scaled = from_modelopt(parts)
    wide = scale.repeat_interleave(GROUP, 1)
    same_numbers(scaled, (w / wide).round().clamp(-8, 7) * wide)
    same_bytes(to_modelopt(scaled), parts)


# --- AutoAWQ ---


@pytest.fixture(scope="module")
def awq() -> Iterator[Any]:
    stand_ins = ["accelerate", "awq.modules.triton", "awq.modules.triton.gemm"]
    with bare("awq", ["awq.modules", "awq.modules.linear", "awq.utils"], stand_ins):
        yield importlib.import_module("awq.modules.linear.gemm")


def test_awq(awq: Any) -> None:
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight()
    groups = linear.weight.data.reshape(N, K // GROUP, GROUP)
    scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half().float()
    zeros = (-groups.amin(-1) / scales).round().clamp(0, 15)
    made = awq.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    state = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    scaled = from_awq(arrays(state))
    same_numbers(scaled, awq.dequantize_gemm(*state.values(), 4, GROUP).T)
    same_bytes(to_awq(scaled), arrays(state))


def test_awq_decodes_ours(awq: Any) -> None:
    scaled = breccia.cast(weight().numpy(), breccia.INT4Scaling(GROUP, signed=False, symmetric=False))
    t = tensors(to_awq(scaled))
    same_numbers(scaled, awq.dequantize_gemm(t["qweight"], t["qzeros"], t["scales"], 4, GROUP).T)


# --- GPTQModel ---


@pytest.fixture(scope="module")
def gptq() -> Iterator[Any]:
    named = ("adapter", "adapter.adapter", "models._const", "quantization", "utils.env", "utils.logger", "utils.safe")
    stand_ins = ["pcre", "logbar", *(f"gptqmodel.{name}" for name in (*named, "utils.torch"))]
    with bare("gptqmodel", ["gptqmodel.utils", "gptqmodel.models"], stand_ins):
        yield importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear


def gptq_layer(cls: Any, bits: int) -> Any:
    """A layer of theirs, made without what its constructor asks of the machine."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.bits, layer.maxq, layer.pack_dtype_bits, layer.pack_factor = bits, 2**bits - 1, 32, 32 // bits
    layer.in_features, layer.out_features, layer.enable_wf_unsqueeze, layer.planar = K, N, True, False
    layer.pack_dtype, layer.pack_np_dtype, layer.pack_np_math_dtype = torch.int32, np.int32, np.uint32
    layer.dequant_dtype, layer._triton_dequant_enabled = torch.int8 if bits == 4 else torch.int16, False
    return layer


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(gptq: Any, bits: int, act_order: bool) -> None:
    linear = torch.nn.Linear(K, N, bias=False)
    g_idx = torch.arange(K, dtype=torch.int32) // GROUP
    linear.weight.data = weight()
    if act_order:
        g_idx = g_idx[torch.randperm(K, generator=torch.Generator().manual_seed(0))]
    scales = (
        torch.full((N, K // GROUP), 0.12 / 2**bits).half().float() * torch.linspace(1, 2, N).half().float()[:, None]
    )
    zeros = torch.full((N, K // GROUP), float(2 ** (bits - 1)) + 1)
    layer = gptq_layer(gptq, bits)
    layer.pack_original(linear, scales, zeros, g_idx)
    state = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    made = from_gptq(arrays(state), version="gptq_v2")
    assert isinstance(made, OutsideTensor) == act_order
    same_numbers(made, layer.dequantize_weight().T)
    if bits == 4:
        same_bytes(to_gptq(made, version="gptq_v2"), arrays(state))


def test_gptq_decodes_ours(gptq: Any) -> None:
    scaled = breccia.cast(weight().numpy(), breccia.INT4Scaling(GROUP, signed=False, symmetric=False))
    layer = gptq_layer(gptq, 4)
    for name, tensor in tensors(to_gptq(scaled, version="gptq_v2")).items():
        layer.register_buffer(name, tensor)
    same_numbers(scaled, layer.dequantize_weight().T)


# --- bitsandbytes ---


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 256])
def test_bitsandbytes(kind: str, nested: bool, block: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(weight(), blocksize=block, quant_type=kind, compress_statistics=nested)
    parts = {"weight": data, **state.as_dict(packed=True)}
    parts["quant_state"] = parts.pop(f"quant_state.bitsandbytes__{kind}")
    wanted = functional.dequantize_4bit(data, state)
    np.testing.assert_array_equal(from_bitsandbytes(arrays(parts)), wanted.numpy())
