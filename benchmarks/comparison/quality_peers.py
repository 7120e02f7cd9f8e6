# SPDX-License-Identifier: Apache-2.0
"""Other programs' own functions that round one weight to 4 bits, given the same moments as ours.

A program that takes inputs instead of their moments is given K rows that have these moments: the transposed Cholesky
factor. What is not installed gives no rows: llm-compressor's wheel (with what it imports) and pywhispercpp's, which
carries the ggml that `llama-quantize` calls, may be in a folder of their own on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from breccia.moments import Moments

# (name of the layer, weight, moments, group) → what the codes stand for, bits of a weight
Rounded = tuple[np.ndarray, float]


@dataclass(frozen=True)
class Peer:
    """A program's way to round.

    Attributes:
        package: what must be installed.
        method: what it does.
        format: the format, as `quality_methods.recipes` begins its name, or a kind of GGUF.
        round: of one weight.
        models: those that it is run on; none: all. A search over scales takes llm-compressor seconds a layer.
    """

    package: str
    method: str
    format: str
    round: Callable[[str, np.ndarray, Moments, int], Rounded]
    models: tuple[str, ...] = ()


def _rows(moments: Moments) -> np.ndarray:
    """K inputs that have these moments, in their mean."""
    h = np.asarray(moments.full, np.float64) / max(int(moments.count), 1)
    jitter = 1e-7 * np.trace(h) / len(h)
    rows: np.ndarray = np.linalg.cholesky(h + jitter * np.eye(len(h))).T
    return rows


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# ---- torchao ----


def _torchao(config: Callable[[int], Any], bits: Callable[[int], float]) -> Any:
    def rounded(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
        from torchao.quantization import quantize_

        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        layer.weight.data = torch.from_numpy(w.copy())
        quantize_(layer, config(group))
        return layer.weight.dequantize().float().numpy(), bits(group)

    return rounded


def _torchao_nvfp4(group: int) -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


def _torchao_int4(group: int) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(torch.int4, PerGroup(group))


def _torchao_mxfp4(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    made = MXTensor.to_mx(torch.from_numpy(w.copy()), torch.float4_e2m1fn_x2, 32)
    return made.dequantize(torch.float32).numpy(), 4.25


def _hqq(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq as hqq

    x = torch.from_numpy(w.copy())
    codes, scale, zero, _ = hqq(
        x, nbits=4, group_size=group, axis=1, compute_dtype=x.dtype, device="cpu", raw_output=True
    )
    groups = (w.shape[0], w.shape[1] // group, -1)
    made = (codes.float().reshape(groups) - zero.reshape(groups)) * scale.reshape(groups)
    return made.reshape(w.shape).numpy(), 4 + 32 / group  # zero points are not whole numbers


# ---- llm-compressor ----

MSE = "memoryless_mse"


def _llm_compressor(kind: str, symmetric: bool, observer: str = "memoryless_minmax") -> Any:
    def rounded(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]  # its package is empty on CPUs
        from compressed_tensors.quantization import QuantizationArgs
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
        from llmcompressor.observers import Observer

        floats: dict[str, Any] = {"type": "float", "strategy": "tensor_group", "group_size": 16}
        floats["scale_dtype"] = floats["zp_dtype"] = torch.float8_e4m3fn
        integers = {"type": "int", "strategy": "group", "group_size": group}
        more = floats if kind == "NVFP4" else integers
        args = QuantizationArgs(num_bits=4, symmetric=symmetric, actorder="static", observer=observer, **more)
        found = Observer.load_from_registry(args.observer, base_name="weight", args=args)
        x = torch.from_numpy(w.copy())
        found(x)
        made = found.get_qparams()
        level = made["global_scale"]
        values, _, _ = quantize_weight(
            weights=x[None],
            hessians=torch.from_numpy(np.asarray(moments.full) / max(int(moments.count), 1))[None],
            scale=made["scale"][None],
            zero_point=made["zero_point"][None],
            global_scale=None if level is None else level[None],
            quant_args=args,
        )
        return values[0].numpy(), 4.5 if kind == "NVFP4" else 4 + (16 + 4 * (not symmetric)) / group

    return rounded


# ---- GPTQModel ----


def _gptqmodel(symmetric: bool, **options: Any) -> Any:
    def rounded(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
        with contextlib.redirect_stdout(io.StringIO()):
            from gptqmodel.quantization.config import QuantizeConfig
            from gptqmodel.quantization.gptq import GPTQ

            layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
            layer.weight.data = torch.from_numpy(w.copy())
            work = GPTQ(layer, QuantizeConfig(bits=4, group_size=group, sym=symmetric, **options))
            work.quantizer.configure(perchannel=True)
            rows = np.ascontiguousarray(_rows(moments), np.float32)
            work.add_batch(torch.from_numpy(rows)[None], torch.empty(0))
            values = work.quantize()[0]
        return values.float().numpy(), 4 + 20 / group  # its files keep zero points of symmetric codes, too

    return rounded


# ---- ModelOpt, of whose calibrations those of NVFP4 want CUDA's kernels or Triton's ----


def _modelopt_nvfp4(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]  # its package is empty on CPUs
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scale, level = NVFP4QTensor.quantize(torch.from_numpy(w.copy()), 16)
    options = {"dtype": torch.float32, "scale": scale, "double_scale": level, "block_sizes": {-1: 16}}
    return made.dequantize(**options).numpy(), 4.5


def _modelopt_awq(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    import modelopt.torch.quantization as mtq

    model = torch.nn.Sequential(torch.nn.Linear(w.shape[1], w.shape[0], bias=False))
    model[0].weight.data = torch.from_numpy(w.copy())
    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    for one in config["quant_cfg"]:
        if "block_sizes" in (said := one.get("cfg") or {}):
            said["block_sizes"] = {-1: group, "type": "static"}
    rows = _rows(moments)
    # What it looks at in a column is the mean magnitude: rows are turned, so that all have something of each.
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=rows.shape))[0]
    x = torch.from_numpy((turn @ rows).astype(np.float32))
    with contextlib.redirect_stdout(io.StringIO()), torch.inference_mode(False), torch.no_grad():
        (layer,) = mtq.quantize(model, config, lambda model: model(x))
        values = layer.weight_quantizer(layer.weight) * layer.input_quantizer.pre_quant_scale
    return values.numpy(), 4 + 16 / group


# ---- ggml, which llama-quantize calls for each tensor ----

_GGML: dict[str, Any] = {}
KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ4_NL": 20, "MXFP4": 39, "NVFP4": 40}
# What llama-quantize takes where K is no multiple of 256.
INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def _more_bits(name: str) -> bool:
    """Whether Q4_K_M keeps a layer in 6 bits: of SmolLM2's 30, as `use_more_bits` of llama-quantize has it."""
    found = re.search(r"layers\.(\d+)\..*(v_proj|down_proj)", name)
    if not found:
        return False
    layer, layers = int(found[1]), 30
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _ggml(kind: str, weighted: bool) -> Any:
    def rounded(name: str, w: np.ndarray, moments: Moments, group: int) -> Rounded:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        from comparison.ggml import Ggml, find

        if "ggml" not in _GGML:
            folder = find()
            assert folder is not None
            _GGML["ggml"] = Ggml(folder, 1)
        base, n, k = _GGML["ggml"]._base, *w.shape
        own = kind
        if kind == "Q4_K_M":
            own = "Q6_K" if _more_bits(name) else "Q4_K"
            own = own if k % 256 == 0 else INSTEAD[own]
        size = base.ggml_row_size(KINDS[own], k)
        codes, x = np.zeros((n, size), np.uint8), np.ascontiguousarray(w)
        mean = np.ascontiguousarray(moments.diag / max(int(moments.count), 1), np.float32)
        base.ggml_quantize_chunk(
            KINDS[own], x.ctypes.data, codes.ctypes.data, 0, n, k, mean.ctypes.data if weighted else None
        )
        return dequantize(codes, GGMLQuantizationType(KINDS[own])), 8 * size / k

    return rounded


# Its mix follows the names and the number of a language model's layers.
MIXED: dict[str, tuple[str, ...]] = {"Q4_K_M": ("SmolLM2-135M",)}
PEERS = [
    Peer("torchao", "nearest", "NVFP4", _torchao(_torchao_nvfp4, lambda group: 4.5)),
    Peer("torchao", "nearest", "MXFP4", _torchao_mxfp4),
    Peer("torchao", "nearest", "INT4, symmetric", _torchao(_torchao_int4, lambda group: 4 + 16 / group)),
    Peer("torchao", "HQQ", "INT4, asymmetric", _hqq),
    Peer("llmcompressor", "GPTQ, static order", "NVFP4", _llm_compressor("NVFP4", True)),
    Peer("llmcompressor", "GPTQ, static order", "INT4, symmetric", _llm_compressor("INT4", True)),
    Peer("llmcompressor", "GPTQ, static order", "INT4, asymmetric", _llm_compressor("INT4", False)),
    Peer("llmcompressor", "GPTQ, static order, mse", "NVFP4", _llm_compressor("NVFP4", True, MSE), ("MiniLM-L6",)),
    Peer(
        "llmcompressor",
        "GPTQ, static order, mse",
        "INT4, symmetric",
        _llm_compressor("INT4", True, MSE),
        ("MiniLM-L6",),
    ),
    Peer("gptqmodel", "GPTQ", "INT4, symmetric", _gptqmodel(True)),
    Peer("gptqmodel", "GPTQ, mse", "INT4, symmetric", _gptqmodel(True, mse=2.4)),
    Peer("gptqmodel", "GPTQ", "INT4, asymmetric", _gptqmodel(False)),
    Peer("nvidia-modelopt", "nearest", "NVFP4", _modelopt_nvfp4),
    Peer("nvidia-modelopt", "AWQ", "INT4, symmetric", _modelopt_awq),
    *(
        Peer("pywhispercpp", "imatrix" if weighted else "nearest", kind, _ggml(kind, weighted), models)
        for kind, models in {**dict.fromkeys(("Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "NVFP4"), ()), **MIXED}.items()
        for weighted in (False, True)
    ),
]
MODULES = {"pywhispercpp": "_pywhispercpp", "nvidia-modelopt": "modelopt"}
NAMES = {
    "pywhispercpp": "ggml",
    "llmcompressor": "llm-compressor",
    "gptqmodel": "GPTQModel",
    "nvidia-modelopt": "ModelOpt",
}


def peers(model: str) -> Iterator[tuple[str, Peer]]:
    """Those that are installed, with the program's name and version."""
    for peer in PEERS:
        if not _installed(MODULES.get(peer.package, peer.package)):
            continue
        if peer.models and model not in peer.models:
            continue
        yield f"{NAMES.get(peer.package, peer.package)} {_version(peer.package)}", peer


def _version(package: str) -> str:
    if package != "pywhispercpp":
        return version(package)
    from comparison.ggml import Ggml, find

    folder = find()
    if folder is None:
        raise FileNotFoundError("pywhispercpp has no folder of libraries")
    _GGML.setdefault("ggml", Ggml(folder, 1))
    return str(_GGML["ggml"]._base.ggml_version().decode())
