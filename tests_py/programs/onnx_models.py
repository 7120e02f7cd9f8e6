# SPDX-License-Identifier: Apache-2.0
"""Small float ONNX models, what breccia makes of them, and runs of both in ONNX Runtime and OpenVINO:
`python onnx_models.py` prints a row for each target and program, as JSON."""

import importlib.metadata
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import onnx
from breccia import bridges
from breccia.checkpoint import Checkpoint, convert
from onnx import helper, numpy_helper

TARGETS = [f"onnx:{key}" for key in bridges.bridge("onnx").recipes]
FUSED = ("onnx:int4", "onnx:int4-asym", "onnx:int8")  # with products, in ONNX Runtime
WIDTH = 1024


def model(path: Path, nodes: list[Any], weights: dict[str, Any], shape: tuple[Any, ...], opset: int) -> Path:
    """A model of one input x and one output y, both of a shape."""
    kind = helper.np_dtype_to_tensor_dtype(next(iter(weights.values())).dtype)
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = helper.find_min_ir_version_for(made.opset_import)
    onnx.checker.check_model(made, full_check=True)
    onnx.save(made, path)
    return path


def mlp(path: Path, product: str = "MatMul", opset: int = 17, width: int = WIDTH, dtype: Any = np.float32) -> Path:
    """Four products with Relu between, as `product` has them: "MatMul", "Gemm", "Gemm transB", "Transpose"."""
    rng, nodes, weights, x = np.random.default_rng(0), [], {}, "x"
    for i in range(4):
        w = (rng.normal(0, 1.4, (width, width)) / np.sqrt(width)).astype(dtype)
        weights[f"l{i}.weight"] = np.ascontiguousarray(w.T) if product in ("Gemm transB", "Transpose") else w
        name = f"l{i}.weight"
        if product == "Transpose":
            nodes.append(helper.make_node("Transpose", [name], [f"{name}.t"], perm=[1, 0]))
            name += ".t"
        if product.startswith("Gemm"):
            weights[f"l{i}.bias"] = rng.normal(0, 0.1, width).astype(dtype)
            inputs = [x, name, f"l{i}.bias"]
            nodes.append(helper.make_node("Gemm", inputs, [f"h{i}"], transB=int(product != "Gemm")))
        else:
            nodes.append(helper.make_node("MatMul", [x, name], [f"h{i}"]))
        x = "y" if i == 3 else f"r{i}"
        nodes.append(helper.make_node("Relu", [f"h{i}"], [x]))
    return model(path, nodes, weights, ("rows", width), opset)


def transformer(path: Path, opset: int = 17, width: int = 128) -> Path:
    """A layer of a transformer as torch's exporter has it: attention, a norm, and two products with GELU between."""
    rng, heads = np.random.default_rng(1), 4
    weights: dict[str, Any] = {"scale": np.float32(np.sqrt(width / heads)).reshape(())}
    nodes: list[Any] = []

    def add(kind: str, inputs: list[str], output: str, **said: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **said))
        return output

    def linear(x: str, name: str, columns: int, rows: int) -> str:
        weights[f"{name}.weight"] = rng.normal(0, columns**-0.5, (columns, rows)).astype(np.float32)
        weights[f"{name}.bias"] = rng.normal(0, 0.02, rows).astype(np.float32)
        return add("Add", [add("MatMul", [x, f"{name}.weight"], f"{name}.product"), f"{name}.bias"], f"{name}.out")

    def norm(x: str, name: str) -> str:
        weights[f"{name}.weight"] = np.ones(width, np.float32)
        return add("LayerNormalization", [x, f"{name}.weight"], f"{name}.out", axis=-1)

    weights["split"] = np.array([0, 0, heads, width // heads])
    weights["together"] = np.array([0, 0, width])
    x = norm("x", "norm1")
    for name in ("q", "k", "v"):
        parts = add("Reshape", [linear(x, name, width, width), "split"], f"{name}.split")
        add("Transpose", [parts], f"{name}.heads", perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])
    scores = add("Div", [add("MatMul", ["q.heads", "k.heads"], "scores"), "scale"], "scaled")
    mixed = add("MatMul", [add("Softmax", [scores], "probabilities", axis=-1), "v.heads"], "mixed")
    mixed = add("Reshape", [add("Transpose", [mixed], "mixed.back", perm=[0, 2, 1, 3]), "together"], "mixed.all")
    x = add("Add", ["x", linear(mixed, "o", width, width)], "residual")
    up = linear(norm(x, "norm2"), "up", width, 4 * width)
    weights |= {"root": np.float32(np.sqrt(2)).reshape(()), "one": np.float32(1).reshape(())}
    weights["half"] = np.float32(0.5).reshape(())
    erf = add("Add", [add("Erf", [add("Div", [up, "root"], "up.1")], "up.2"), "one"], "up.3")
    gelu = add("Mul", [add("Mul", [up, erf], "up.4"), "half"], "gelu")
    add("Add", [x, linear(gelu, "down", 4 * width, width)], "y")
    floats = {name: value for name, value in weights.items() if name not in ("split", "together", "scale")}
    return model(path, nodes, floats | weights, (1, "tokens", width), opset)


def inputs(rows: int, width: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(2).normal(0, 1, (rows, width)).astype(dtype)


def written(source: Path, to: str, out: Path, **options: Any) -> dict[str, Any]:
    """The report of a conversion."""
    report: dict[str, Any] = convert(source, out, to, **options)
    return report


def dequantized(path: Path, source: Path, out: Path) -> Path:
    """The float model with the values of what was written: how far from float the recipe is, whatever runs it."""
    made, opened = onnx.load(source), Checkpoint(path)
    by_name = {one.name: one for one in opened.found}
    for one in made.graph.initializer:
        if (found := by_name.get(one.name)) is not None and found.recipe is not None:
            values = breccia.dequantize(opened.load(found)).astype(numpy_helper.to_array(one).dtype)
            one.CopyFrom(numpy_helper.from_array(values, one.name))
    opened.close()
    onnx.save(made, out)
    return out


def distance(got: Any, wanted: Any) -> float:
    """The norm of what is off, to that of what is wanted."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted))


Run = Callable[[Any], Any]


def onnxruntime(path: Path, dump: Path | None = None) -> Run:
    """What runs a model in ONNX Runtime on one thread; ``dump`` gets the graph as it is run."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if dump is not None:
        options.optimized_model_filepath = str(dump)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def openvino(path: Path) -> Run:
    """What runs a model in OpenVINO on one thread."""
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"})
    return lambda x: compiled(x)[0]


PROGRAMS: dict[str, Callable[..., Run]] = {"onnxruntime": onnxruntime, "openvino": openvino}


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def times(runs: dict[str, Run], x: Any, rounds: int = 20) -> dict[str, float]:
    """The shortest time of each in milliseconds, measured in turn, so that a busy machine is busy for all."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(4):
                run(x)
            best[name] = min(best[name], (time.perf_counter() - start) / 4 * 1e3)
    return best


def why_not(error: Exception) -> str:
    """The program's own reason, of its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][-160:]


def rows(folder: Path, program: str) -> list[dict[str, Any]]:
    """A row for each target: whether a program runs the MLP, how far from float it is and the recipe is, and its time
    for one row to that of float."""
    run, x, found = PROGRAMS[program], inputs(1, WIDTH), []
    source = mlp(folder / "float.onnx")
    base = run(source)
    wanted = PROGRAMS["onnxruntime" if "onnxruntime" in sys.modules else program](source)(x)
    for to in TARGETS:
        out = folder / f"{to.replace(':', '-')}.onnx"
        written(source, to, out)
        row: dict[str, Any] = {"target": to, "program": program, "version": importlib.metadata.version(program)}
        try:
            made = run(out)
            row["loads"], row["from float"] = "yes", round(distance(made(x), wanted), 4)
            row["recipe from float"] = round(distance(run(dequantized(out, source, folder / "d.onnx"))(x), wanted), 4)
            took = times({"float": base, "made": made}, x)
            row["time to float's"] = round(took["made"] / took["float"], 2)
        except Exception as error:  # of the program
            row["loads"] = why_not(error)
        found.append(row)
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        with tempfile.TemporaryDirectory() as place:
            for line in rows(Path(place), name):
                print(json.dumps(line), flush=True)
