# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors whose parts, shapes or configuration do not fit, of every method that is read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from breccia.checkpoint.files.dtypes import nbytes_of

from hostile import Hostile
from hostile.headers import stored

Spec = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], Any]


def tensors(specs: dict[str, Spec], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of (dtype, shape) or (dtype, shape, NumPy array of the bytes): zeros otherwise."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, *values) in specs.items():
        raw = np.asarray(values[0]).tobytes() if values else bytes(nbytes_of(dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return stored(json.dumps(header), data)


def model(specs: dict[str, Spec], said: Any = None, says: str = "", metadata: dict[str, str] | None = None) -> Hostile:
    """A directory of one file, whose config.json says something of quantization."""
    config = json.dumps({} if said is None else {"quantization_config": said}).encode()
    return Hostile({"config.json": config, "a.safetensors": tensors(specs, metadata)}, says, ("bf16", "mxfp8"))


def varied(base: dict[str, Spec], said: Any, prefix: str, *, odd: dict[str, Spec | None]) -> dict[str, Hostile]:
    """A good checkpoint with one part missing, of another shape, or of another dtype at a time."""
    found = {f"{prefix}, good": model(base, said)}
    shapes: dict[str, tuple[int, ...]] = {
        "0-d": (),
        "1-d": (7,),
        "empty": (0,),
        "no columns": (3, 0),
        "4-d": (1, 2, 1, 3),
    }
    for part, (dtype, _, *_) in base.items():
        short = part.rpartition(".")[2]
        found[f"{prefix}, {short} missing"] = model({k: v for k, v in base.items() if k != part}, said, "*")
        for name, shape in shapes.items():
            found[f"{prefix}, {short} {name}"] = model({**base, part: (dtype, shape)}, said, "*")
        for other in ("BOOL", "I64", "F64", "C64"):
            found[f"{prefix}, {short} of {other}"] = model({**base, part: (other, base[part][1])}, said, "*")
    for name, spec in odd.items():
        part, _, what = name.partition(" ")
        whole = next(k for k in [*base, f"a.{part}"] if k.rpartition(".")[2] == part)
        changed = {k: v for k, v in base.items() if k != whole}
        found[f"{prefix}, {part} {what}"] = model({**changed, **({whole: spec} if spec else {})}, said, "*")
    return found


INTS = np.arange(64, dtype=np.int32)
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4}}},
}
CT_INT4: dict[str, Spec] = {
    "a.weight_packed": ("I32", (64, 8)),
    "a.weight_scale": ("F32", (64, 2)),
    "a.weight_shape": ("I64", (2,), np.array([64, 64])),
    "a.weight_zero_point": ("I32", (8, 2)),
}
CT_FP8: dict[str, Spec] = {"a.weight": ("F8_E4M3", (64, 64)), "a.weight_scale": ("F32", (64, 1))}
CT_NVFP4: dict[str, Spec] = {
    "a.weight_packed": ("U8", (64, 32)),
    "a.weight_scale": ("F8_E4M3", (64, 4)),
    "a.weight_global_scale": ("F32", (1,), np.ones(1, np.float32)),
}
CT_INT8: dict[str, Spec] = {"a.weight": ("I8", (64, 64)), "a.weight_scale": ("F32", (64, 1))}
MODELOPT: dict[str, Spec] = {
    "a.weight": ("U8", (64, 32)),
    "a.weight_scale": ("F8_E4M3", (64, 4)),
    "a.weight_scale_2": ("F32", (), np.float32(1)),
}
DEEPSEEK: dict[str, Spec] = {"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))}
GPTQ: dict[str, Spec] = {
    "a.qweight": ("I32", (8, 64)),
    "a.scales": ("F16", (2, 64)),
    "a.qzeros": ("I32", (2, 8)),
    "a.g_idx": ("I32", (64,), INTS // 32),
}
AWQ: dict[str, Spec] = {"a.qweight": ("I32", (64, 8)), "a.scales": ("F16", (2, 64)), "a.qzeros": ("I32", (2, 8))}
GPT_OSS: dict[str, Spec] = {
    "m.experts.down_proj_blocks": ("U8", (2, 16, 2, 16)),
    "m.experts.down_proj_scales": ("U8", (2, 16, 2)),
}
MLX: dict[str, Spec] = {"a.weight": ("U32", (64, 8)), "a.scales": ("F16", (64, 1)), "a.biases": ("F16", (64, 1))}


def state(**said: Any) -> Spec:
    raw = json.dumps({"shape": [64, 64], "blocksize": 64, "dtype": "float16", **said}).encode()
    return "U8", (len(raw),), np.frombuffer(raw, np.uint8)


STATE = "a.weight.quant_state.bitsandbytes__nf4"
NF4: dict[str, Spec] = {
    "a.weight": ("U8", (2048, 1)),
    "a.weight.absmax": ("F32", (64,)),
    "a.weight.quant_map": ("F32", (16,)),
    STATE: state(),
}
NESTED: dict[str, Spec] = {
    **NF4,
    "a.weight.absmax": ("U8", (64,), np.full(64, 255, np.uint8)),
    "a.weight.nested_absmax": ("F32", (1,)),
    "a.weight.nested_quant_map": ("F32", (256,)),
    STATE: state(nested_blocksize=256, nested_offset=0.0),
}
OWN: dict[str, Spec] = {"w.data": ("F8_E4M3", (64, 64)), "w.scale": ("F32", (64, 1))}
RECIPE = {"name": "block", "fields": {"fp8_format": "E4M3", "block_k": 64}}
LAYOUT = {"name": "per_block_k", "fields": {"block_size": 64}}


def own(says: str = "*", text: str | None = None, specs: dict[str, Spec] | None = None, **changes: Any) -> Hostile:
    said = {"recipe": RECIPE, "layout": LAYOUT, "shape": [64, 64], **changes}
    return model(specs or OWN, None, says, {"w.config": json.dumps(said) if text is None else text})


CASES: dict[str, Hostile] = {
    **varied(
        CT_INT4,
        CT,
        "compressed-tensors int4",
        odd={
            "weight_shape huge": ("I64", (2,), np.array([2**40, 2**40])),
            "weight_shape of 2^62": ("I64", (2,), np.array([2**62, 2**62])),
            "weight_shape negative": ("I64", (2,), np.array([-64, 64])),
            "weight_shape other": ("I64", (2,), np.array([64, 4096])),
            "weight_shape of 3": ("I64", (3,), np.array([64, 64, 1])),
            "weight_shape of floats": ("F32", (2,), np.array([64, np.inf], np.float32)),
            "weight_scale of no groups": ("F32", (64, 0)),
            "weight_scale of too many groups": ("F32", (64, 999)),
            "weight_g_idx there": ("I32", (64,), INTS + 1000),
        },
    ),
    **varied(CT_FP8, {"quant_method": "compressed-tensors"}, "compressed-tensors fp8", odd={}),
    **varied(CT_INT8, {"quant_method": "compressed-tensors"}, "compressed-tensors int8", odd={}),
    **varied(CT_NVFP4, {"quant_method": "compressed-tensors"}, "compressed-tensors nvfp4", odd={}),
    **varied(MODELOPT, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", odd={}),
    **varied(DEEPSEEK, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "deepseek", odd={}),
    **varied(
        GPTQ,
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        "gptq",
        odd={
            "g_idx past the groups": ("I32", (64,), INTS * 0 + 99),
            "g_idx negative": ("I32", (64,), INTS * 0 - 1),
            "g_idx of 2^31 - 1": ("I32", (64,), INTS * 0 + (2**31 - 1)),
            "g_idx short": ("I32", (63,), INTS[:63] // 32),
        },
    ),
    **varied(AWQ, {"quant_method": "awq", "bits": 4, "group_size": 32}, "awq", odd={}),
    **varied(GPT_OSS, {"quant_method": "mxfp4"}, "gpt-oss", odd={}),
    **varied(MLX, {"bits": 4, "group_size": 64}, "mlx", odd={}),
    **varied(
        NF4,
        {"quant_method": "bitsandbytes"},
        "bitsandbytes",
        odd={
            f"bitsandbytes__nf4 {name}": spec
            for name, spec in {
                "not JSON": ("U8", (3,)),
                "a list": ("U8", (2,), np.frombuffer(b"[]", np.uint8)),
                "deep": ("U8", (50_000,), np.full(50_000, ord("["), np.uint8)),
                "shape a number": state(shape=4),
                "shape of strings": state(shape=["a"]),
                "shape negative": state(shape=[-64, -64]),
                "shape huge": state(shape=[2**40, 2**40]),
                "shape 1e999": state(shape=[float("inf")]),
                "shape null": state(shape=None),
                "blocksize 0": state(blocksize=0),
                "blocksize negative": state(blocksize=-64),
                "blocksize huge": state(blocksize=2**70),
                "blocksize a list": state(blocksize=[64]),
            }.items()
        },
    ),
    **varied(
        NESTED,
        {"quant_method": "bitsandbytes"},
        "bitsandbytes, nested",
        odd={
            "nested_quant_map short": ("F32", (3,)),
            "bitsandbytes__nf4 nested_blocksize 0": state(nested_blocksize=0, nested_offset=0.0),
            "bitsandbytes__nf4 nested_blocksize missing": state(),
            "bitsandbytes__nf4 nested_blocksize 2^62": state(nested_blocksize=2**62, nested_offset=0.0),
            "bitsandbytes__nf4 nested_offset a list": state(nested_blocksize=256, nested_offset=[]),
        },
    ),
    "own, good": own(""),
}
CASES |= {
    f"own, {part} {name}": own(specs={**OWN, part: (OWN[part][0], shape)})
    for part in OWN
    for name, shape in {"0-d": (), "1-d": (7,), "empty": (0,), "no columns": (3, 0), "4-d": (1, 2, 1, 3)}.items()
}
CASES |= {
    f"own, config {text}"[:60]: own(text=text)
    for text in ("", "{", "[]", "1", "null", "{}", "[" * 50_000, '"' + "x" * 1000)
}
CASES |= {
    f"own, {key} {value!r}"[:80]: own(**{key: value})
    for key, value in (
        ("shape", [2**31, 2**31]),
        ("shape", [2**70]),
        ("shape", [-1]),
        ("shape", [64]),
        ("shape", []),
        ("shape", [64, 0]),
        ("shape", [0, 2**40]),
        ("shape", [64, 64.0]),
        ("shape", "64"),
        ("shape", {"a": 1}),
        ("shape", [1] * 100),
        ("recipe", None),
        ("recipe", []),
        ("recipe", {"name": "x", "fields": {}}),
        ("recipe", {"name": [], "fields": {}}),
        ("recipe", {"name": "block", "fields": {"block_k": 0}}),
        ("recipe", {"name": "block", "fields": {"block_k": -1}}),
        ("recipe", {"name": "block", "fields": {"block_k": 2**70}}),
        ("recipe", {"name": "block", "fields": {"block_k": "64"}}),
        ("recipe", {"name": "block", "fields": {"block_k": 1e999}}),
        ("recipe", {"name": "block", "fields": {"fp8_format": []}}),
        ("recipe", {"name": "block", "fields": {"x": 1}}),
        ("recipe", {"name": "block", "fields": 1}),
        ("layout", None),
        ("layout", {"name": "x", "fields": {}}),
        ("layout", {"name": "per_block_k", "fields": {"block_size": 0}}),
        ("layout", {"name": "per_block_k", "fields": {"block_size": -1}}),
        ("layout", {"name": "per_block_k", "fields": {"block_size": 2**70}}),
        ("layout", {"name": "per_block_k", "fields": {"block_size": "\x1b"}}),
        ("layout", {"name": "per_block_k", "fields": {"axis": 7, "block_size": 64}}),
        ("layout", {"name": "per_block_mn", "fields": {"block_m": 0, "block_n": 0}}),
    )
}
CASES |= {f"own, original_dtype {value!r}": own("*", original_dtype=value) for value in ("x", None, [], "\x1b[31m")}
CASES |= {
    f"torchao, {text}"[:80]: model(
        {"a.weight_qdata": ("U8", (64, 32)), "a.weight_scale": ("F8_E4M3", (64, 4))},
        None,
        "*",
        {"a.weight": text, "tensor_names": names},
    )
    for text, names in (
        ("{", '["a.weight"]'),
        ("[]", '["a.weight"]'),
        ("1", '["a.weight"]'),
        ('{"_type":1}', '["a.weight"]'),
        ('{"_type":"NVFP4Tensor"}', '["a.weight"]'),
        ('{"_type":"NVFP4Tensor","_data":1}', '["a.weight"]'),
        ('{"_type":"NVFP4Tensor","_data":{"block_size":0}}', '["a.weight"]'),
        ('{"_type":"MXTensor","_data":{"block_size":-1}}', '["a.weight"]'),
        ('{"_type":"Int4Tensor","_data":{"shape":[1e999]}}', '["a.weight"]'),
        ('{"_type":"Tensor"}', "{"),
        ('{"_type":"Tensor"}', "1"),
        ('{"_type":"Tensor"}', "[[]]"),
        ('{"_type":"Tensor"}', '["x"]'),
        ("[" * 50_000, '["a.weight"]'),
    )
}
CONFIGS: tuple[tuple[str, dict[str, Spec], dict[str, Any]], ...] = (
    ("gptq", GPTQ, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    ("awq", AWQ, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    ("mlx", MLX, {"bits": 4, "group_size": 64, "mode": "affine"}),
    ("deepseek", DEEPSEEK, {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}),
    ("modelopt", MODELOPT, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    ("compressed-tensors", CT_INT4, {**CT, "ignore": []}),
)
CASES |= {
    f"{name}, {key} {value!r}"[:80]: model(specs, {**said, key: value}, "*")
    for name, specs, said in CONFIGS
    for key in said
    for value in (None, 0, -1, 3, 2**70, float("inf"), "x", [], [0, 0], {"a": 1}, True)
}
