"""A user's program, which `.ci/lint` checks and nobody runs: what goes in says what comes out, and nothing is Any."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import breccia
import numpy as np
import numpy.typing as npt
from breccia.bridges import NAMED, FileFormat, Found, Part, from_gptq, register, registry, to_modelopt
from breccia.checkpoint import Checkpoint, complete, convert, inspect, target_names, verify
from typing_extensions import assert_type

Floats = npt.NDArray[np.float32]
Codes = breccia.ScaledTensor[Floats]


def verbs(w: Floats, x: Floats) -> None:
    q = breccia.cast(w, "nvfp4", rounding="stochastic", seed=1)
    assert_type(q, Codes)
    assert_type(breccia.cast(w, breccia.INT8Scaling(scale_search="mse")), Codes)
    assert_type(breccia.dequantize(q), Floats)
    assert_type(q.dequantize(), Floats)
    assert_type(breccia.requantize(q, "mxfp8"), Codes)
    assert_type(breccia.linear(x, q), Floats)
    assert_type(breccia.linear(q, q, precision="fast"), Floats)
    assert_type(breccia.matmul(x, q.T), Floats)
    assert_type(breccia.matmul(q, q.T), Floats)
    assert_type(breccia.matmul(q, w), Floats)
    assert_type(breccia.concatenate([q[:32], q[32:]]), Codes)
    assert_type(breccia.gptq(w, x, "int4", order="natural"), Codes)
    assert_type(breccia.compare(w, q).sqnr_db, float)
    assert_type(q.shape, tuple[int, ...])
    assert_type(breccia.cpu_info()["threads"], int)


def modules() -> tuple[ModuleType, ...]:
    print(breccia.nn.QuantizedLinear, breccia.ModelScheme, breccia.distributed.Plan)
    return breccia.bridges, breccia.dlpack, breccia.schemes


def files(source: Path, out: Path) -> str:
    report = convert(source, out, target_names()[0], method="gptq", moments="m.safetensors", unmarked="comfyui")
    assert_type(report["bits_per_weight"], "float | None")
    assert_type(report["notes"], list[str])
    assert_type(verify(source, out)["tensors"][0]["cosine"], float)
    assert_type(inspect(out)["total"]["bits_per_weight"], float)
    problems = complete(out)["problems"]
    with breccia.open(out) as tensors:
        names = tensors.keys()
    with Checkpoint(out) as checkpoint:
        names += [found.name for found in checkpoint.found]
    return ", ".join([*names, *(problem["problem"] for problem in problems)])


def read(parts: dict[str, Floats], found: Found) -> Codes:
    return breccia.ScaledTensor(parts["codes"], parts["size"], breccia.INT8Scaling(), breccia.PerChannel())


def claims(said: dict[str, object]) -> int:
    return NAMED if said.get("quant_method") == "rows" else registry()["gptq"].name.count("no")


def bridges(parts: dict[str, Floats], q: Codes) -> Floats:
    register(FileFormat("rows", recipes={"int8": breccia.INT8Scaling()}, anchors=(".codes",), read=read))
    print(Part("F32", q.shape, q.dequantize), to_modelopt(q)["weight"])
    return from_gptq(parts).dequantize()
