# SPDX-License-Identifier: Apache-2.0
"""ONNX models: what is written is what onnx's own evaluator computes, and what it computes is what is read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import INT4Scaling, bridges
from breccia.checkpoint import Checkpoint, convert, save_arrays, verify

pytest.importorskip("ml_dtypes")
onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

RECIPES = bridges.bridge("onnx").recipes
OPSET = [helper.make_opsetid("", 25)]


def weight(rows: int = 64, columns: int = 256) -> Any:
    return np.random.default_rng(7).normal(0, 0.02, (rows, columns)).astype(np.float32)


def checkpoint(path: Path) -> Path:
    path.mkdir()
    arrays = {"a.weight": weight(), "b.weight": weight(32, 384), "norm.weight": np.ones(256, np.float32)}
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def outputs(path: Path) -> dict[str, Any]:
    """What the graph of weights gives."""
    model = onnx.load(path)
    names = [one.name for one in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, {}), strict=True))


@pytest.mark.parametrize("key", RECIPES)
def test_the_evaluator_gives_the_same_numbers(key: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in")
    report = convert(source, tmp_path / "out.onnx", f"onnx:{key}")
    assert report["tensors"] == {"cast": 2, "copy": 1}
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)
    given = outputs(tmp_path / "out.onnx")
    assert given.keys() == {"a.weight", "b.weight", "norm.weight"}
    for name, values in (("a.weight", weight()), ("b.weight", weight(32, 384))):
        expected = breccia.dequantize(breccia.cast(values, RECIPES[key]))
        np.testing.assert_array_equal(given[name].astype(np.float32), expected)
    verify(tmp_path / "out.onnx", source)
    report = convert(tmp_path / "out.onnx", f"{tmp_path}/back/", "breccia")
    assert report["tensors"] == {"repack": 2, "copy": 1}
    assert "the graph of the ONNX model is left out: its tensors alone are converted" in report["notes"]


CODES: dict[str, tuple[int, Any]] = {
    "INT4": (TensorProto.INT4, lambda rng, shape: rng.integers(-8, 8, shape)),
    "UINT4": (TensorProto.UINT4, lambda rng, shape: rng.integers(0, 16, shape)),
    "INT8": (TensorProto.INT8, lambda rng, shape: rng.integers(-128, 128, shape)),
    "UINT8": (TensorProto.UINT8, lambda rng, shape: rng.integers(0, 256, shape)),
    "FLOAT8E4M3FN": (TensorProto.FLOAT8E4M3FN, lambda rng, shape: rng.normal(0, 10, shape).astype(np.float32)),
    "FLOAT8E5M2": (TensorProto.FLOAT8E5M2, lambda rng, shape: rng.normal(0, 10, shape).astype(np.float32)),
    "FLOAT4E2M1": (TensorProto.FLOAT4E2M1, lambda rng, shape: rng.normal(0, 2, shape).astype(np.float32)),
}
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, int], bool]] = {
    "tensor": ((), {}, True),
    "rows": ((64,), {"axis": 0}, True),
    "columns": ((128,), {"axis": 1}, False),
    "blocks of rows": ((64, 4), {"axis": 1, "block_size": 32}, True),
    "blocks from behind": ((64, 2), {"axis": -1, "block_size": 64}, True),
    "blocks of columns": ((2, 128), {"axis": 0, "block_size": 32}, False),
}


def tensor(name: str, kind: str, values: Any) -> Any:
    """As torch's exporter has it: bytes."""
    array = np.asarray(values, helper.tensor_dtype_to_np_dtype(CODES[kind][0]))
    return numpy_helper.from_array(array, name)


def graph(path: Path, kind: str, where: str, zero: bool) -> Path:
    """A model that is one matrix of codes."""
    rng, (shape, said, _) = np.random.default_rng(5), SHAPES[where]
    tensors = [
        tensor("w_quantized", kind, CODES[kind][1](rng, (64, 128))),
        numpy_helper.from_array(np.asarray(rng.random(shape) + 0.5, np.float32), "w_scale"),
    ]
    if zero:
        tensors.append(tensor("w_zero", kind, np.asarray(CODES[kind][1](rng, shape))))
    out = "w_DequantizeLinear_Output"
    node = helper.make_node("DequantizeLinear", [one.name for one in tensors], [out], **said)
    made = [helper.make_tensor_value_info(out, TensorProto.FLOAT, (64, 128))]
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], made, tensors), opset_imports=OPSET), path)
    return path


# The operator has no zero points of floats.
NODES = [(k, where, zero) for k in CODES for where in SHAPES for zero in (False, True) if not zero or "INT" in k]


@pytest.mark.parametrize(("kind", "where", "zero"), NODES)
def test_what_others_write_is_read(kind: str, where: str, zero: bool, tmp_path: Path) -> None:
    path = graph(tmp_path / "m.onnx", kind, where, zero)
    opened = Checkpoint(path)
    [found] = opened.found
    assert (found.name, found.format, found.shape) == ("w", "onnx", (64, 128))
    [expected] = ReferenceEvaluator(onnx.load(path)).run(None, {})
    loaded = opened.load(found)
    assert isinstance(loaded, breccia.ScaledTensor) is (found.recipe is not None)
    if kind.startswith(("INT8", "UINT8", "FLOAT8")) or (kind in ("INT4", "UINT4") and where.startswith("blocks")):
        assert (found.recipe is not None) is SHAPES[where][2], found
    got = breccia.dequantize(loaded) if isinstance(loaded, breccia.ScaledTensor) else loaded
    np.testing.assert_array_equal(got, expected.astype(np.float32))
    again = convert(path, tmp_path / "again.onnx", "onnx")
    assert again["tensors"] == ({"same": 1} if found.recipe is None else {"repack": 1})
    model = onnx.load(tmp_path / "again.onnx")
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {})[0], expected)


def linear(path: Path, dtype: Any = np.float32, opset: int = 25, external: bool = False) -> Path:
    """A model of two layers that is not quantized."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = [
        numpy_helper.from_array(weight(128, 256).astype(dtype), "first.weight"),
        numpy_helper.from_array(weight(256, 128).astype(dtype), "second.weight"),
        numpy_helper.from_array(np.ones(128, dtype), "bias"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "second.weight"], ["k"]),
        helper.make_node("Add", ["k", "bias"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, kind, (4, 128)) for name in ("x", "y")]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])
    onnx.save(model, path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    return path


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT8", "UINT8"])
def test_zero_points_that_are_all_zero_belong_to_their_tensor(kind: str, tmp_path: Path) -> None:
    path = graph(tmp_path / "m.onnx", kind, "blocks of rows", True)
    model = onnx.load(path)
    model.graph.initializer[2].raw_data = bytes(len(model.graph.initializer[2].raw_data))
    onnx.save(model, path)
    opened = Checkpoint(path)
    [found] = opened.found
    assert found.recipe.symmetric is not kind.startswith("U")
    [expected] = ReferenceEvaluator(model).run(None, {})
    np.testing.assert_array_equal(breccia.dequantize(opened.load(found)), expected)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("key", ["int4", "fp8", "nvfp4", "mxfp4"])
def test_a_model_keeps_its_graph(key: str, dtype: Any, external: bool, tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", dtype, external=external)
    x = np.random.default_rng(2).normal(0, 1, (4, 128)).astype(dtype)
    convert(path, tmp_path / "out.onnx", f"onnx:{key}", include=["*.weight"])
    model = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    given = ReferenceEvaluator(model).run(None, {"x": x})[0]
    read = dict(breccia.open(tmp_path / "out.onnx"))
    first, second = (breccia.dequantize(read[name]).astype(dtype) for name in ("first.weight", "second.weight"))
    assert given.dtype == dtype
    rtol = 1e-2 if dtype == np.float16 else 1e-5
    np.testing.assert_allclose(given, (x @ first) @ second + np.ones(128, dtype), rtol=rtol)
    assert [node.op_type for node in model.graph.node][-3:] == ["MatMul", "MatMul", "Add"]
    convert(tmp_path / "out.onnx", tmp_path / "other.onnx", "onnx:int8", include=["first.weight"])
    model = onnx.load(tmp_path / "other.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert ReferenceEvaluator(model).run(None, {"x": x})[0].dtype == dtype
    kinds = {one.name: one.kind for one in Checkpoint(tmp_path / "other.onnx").found}
    assert kinds["first.weight"].startswith("INT8")
    assert not kinds["second.weight"].startswith("INT8")


def test_a_model_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    convert(checkpoint(tmp_path / "in"), tmp_path / "out", "onnx")
    assert Checkpoint(tmp_path / "out").container is bridges.bridge("onnx").container
    path = linear(tmp_path / "m.onnx").rename(tmp_path / "other")
    assert Checkpoint(path).container is bridges.bridge("onnx").container
    assert Checkpoint(tmp_path / "in").container is not bridges.bridge("onnx").container


NAMES = ("first", "second")
OPSETS = {"nvfp4": 23, "mxfp4": 24, "mxfp8": 24}  # others need 21


@pytest.mark.parametrize("opset", [13, 17, 21, 25])
@pytest.mark.parametrize("key", RECIPES)
def test_the_opset_is_raised_as_far_as_it_must(key: str, opset: int, tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", opset=opset)
    report = convert(path, tmp_path / "out.onnx", f"onnx:{key}", include=["*.weight"])
    model = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    wanted = max(opset, OPSETS.get(key, 21))
    assert model.opset_import[0].version == wanted
    text = f"the model's opset is raised from {opset} to {wanted}, the first with what its weights need"
    assert report["notes"] == ([text] if wanted > opset else [])
    x = np.random.default_rng(2).normal(0, 1, (4, 128)).astype(np.float32)
    first, second = (breccia.dequantize(dict(breccia.open(tmp_path / "out.onnx"))[f"{n}.weight"]) for n in NAMES)
    given = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(given, (x @ first) @ second + 1, rtol=1e-5)


def test_an_opset_that_onnx_cannot_raise_is_named(tmp_path: Path) -> None:
    model = onnx.load(linear(tmp_path / "m.onnx", opset=17))
    node = helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(helper.make_function("own", "F", ["a"], ["b"], [node], model.opset_import))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"opset 21 or more, got 17, which onnx cannot raise \(it has functions"):
        convert(tmp_path / "m.onnx", tmp_path / "out.onnx", "onnx:int4", include=["*.weight"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.onnx"]


# What a graph does with a weight → the weight's shape, where blocks lie in what is stored, and what follows the node.
PRODUCTS: dict[str, tuple[tuple[int, ...], int, str]] = {
    "MatMul": ((256, 64), 0, "MatMul"),
    "MatMul of a batch": ((3, 256, 64), 1, "MatMul"),
    "Gemm": ((256, 64), 0, "Gemm"),
    "Gemm transB": ((64, 256), 0, "Transpose"),
    "Transpose": ((64, 256), 0, "Transpose"),
    "from the left": ((64, 256), 1, "MatMul"),
    "Gather too": ((256, 256), 1, "MatMul"),
}


def product(path: Path, how: str, dtype: Any = np.float32) -> Path:
    """A model that multiplies by one weight, then clips twice."""
    shape, kind = PRODUCTS[how][0], helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = [numpy_helper.from_array(np.random.default_rng(3).normal(0, 0.1, shape).astype(dtype), "w.weight")]
    name, x = "w.weight", (3, 5, 256) if len(shape) == 3 else (5, 256)
    nodes = []
    if how == "Transpose":
        nodes, name = [helper.make_node("Transpose", ["w.weight"], ["t"], perm=[1, 0])], "t"
    if how == "from the left":
        x = (256, 5)
    if how == "Gather too":
        tensors.append(numpy_helper.from_array(np.array([0, 3]), "rows"))
        nodes.append(helper.make_node("Gather", ["w.weight", "rows"], ["z"]))
    more = {"transB": 1} if how == "Gemm transB" else {}
    inputs = [name, "x"] if how == "from the left" else ["x", name]
    nodes.append(helper.make_node("Gemm" if how.startswith("Gemm") else "MatMul", inputs, ["p"], **more))
    for bound, value in (("least", -0.5), ("most", 0.75)):
        tensors.append(numpy_helper.from_array(np.asarray(value, dtype), bound))
    nodes += [helper.make_node("Clip", ["p", "least", "most"], ["c"]), helper.make_node("Relu", ["p"], ["r"])]
    made = [helper.make_tensor_value_info(one, kind, None) for one in ("c", "r")]
    made += [helper.make_tensor_value_info("z", kind, None)] if how == "Gather too" else []
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", kind, x)], made, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize("how", PRODUCTS)
def test_blocks_lie_along_what_products_sum_over(how: str, key: str, tmp_path: Path) -> None:
    shape, axis, behind = PRODUCTS[how]
    source, out = product(tmp_path / "m.onnx", how), tmp_path / "out.onnx"
    report = convert(source, out, f"onnx:{key}", include=["w.weight"])
    assert report["tensors"]["cast"] == 1, report
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    node = next(one for one in model.graph.node if one.name == "w.weight_DequantizeLinear")
    said = {one.name: one.i for one in node.attribute}
    turned = "block_size" in said or key != "fp8-tensor"
    if "block_size" in said:
        assert said["axis"] == axis
    takers = {one.op_type for one in model.graph.node if node.output[0] in one.input}
    assert behind in takers

    [read] = [dict(breccia.open(out))["w.weight"]]
    values = breccia.dequantize(read)
    weight = numpy_helper.to_array(next(one for one in onnx.load(source).graph.initializer if one.name == "w.weight"))
    assert values.shape == shape == read.shape
    by_rows = turned and (how in ("Gemm transB", "Transpose", "from the left", "Gather too"))
    upright = weight if by_rows or not turned else np.swapaxes(weight, -1, -2)
    expected = breccia.dequantize(breccia.cast(np.ascontiguousarray(upright), RECIPES[key]))
    np.testing.assert_array_equal(values, expected if upright is weight else np.swapaxes(expected, -1, -2))

    floats = onnx.load(source)
    floats.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "w.weight"))
    [x] = [one for one in floats.graph.input if one.name == "x"]
    x = np.random.default_rng(4).normal(0, 1, [one.dim_value for one in x.type.tensor_type.shape.dim])
    x = x.astype(np.float32)
    for got, wanted in zip(
        ReferenceEvaluator(model).run(None, {"x": x}), ReferenceEvaluator(floats).run(None, {"x": x}), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    verify(out, source)
    back = convert(out, tmp_path / "back.safetensors", "breccia")
    assert back["tensors"]["repack"] == 1
    held = dict(breccia.open(tmp_path / "back.safetensors"))["w.weight"]
    assert held.shape == upright.shape
    assert all(one["equal"] for one in verify(tmp_path / "back.safetensors", out)["tensors"])
    np.testing.assert_array_equal(breccia.dequantize(held), expected)
    again = convert(out, tmp_path / "again.onnx", "onnx")
    assert again["tensors"]["repack"] == 1
    for name in ("w.weight_quantized", "w.weight_scale"):
        one, two = (
            next(t for t in onnx.load(tmp_path / file).graph.initializer if t.name == name)
            for file in ("out.onnx", "again.onnx")
        )
        assert one == two
    convert(out, tmp_path / "other.onnx", "onnx:int8")
    model = onnx.load(tmp_path / "other.onnx")
    onnx.checker.check_model(model, full_check=True)
    got = dict(breccia.open(tmp_path / "other.onnx"))["w.weight"]
    assert got.shape == shape
    np.testing.assert_allclose(breccia.dequantize(got), values, atol=0.005)
    convert(out, tmp_path / "floats.safetensors", "fp32")
    np.testing.assert_array_equal(dict(breccia.open(tmp_path / "floats.safetensors"))["w.weight"], values)


def test_weights_of_products_need_no_name(tmp_path: Path) -> None:
    """As torch's exporter has them."""
    model = onnx.load(product(tmp_path / "m.onnx", "MatMul"))
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "onnx::MatMul_12"
    onnx.save(model, tmp_path / "m.onnx")
    report = convert(tmp_path / "m.onnx", tmp_path / "out.onnx", "onnx:int4")
    assert report["tensors"] == {"cast": 1, "copy": 2}
    assert "onnx::MatMul_12_quantized" in {one.name for one in onnx.load(tmp_path / "out.onnx").graph.initializer}


@pytest.mark.parametrize("how", ["MatMul", "Gemm transB"])
def test_blocks_along_outputs_are_read(how: str, tmp_path: Path) -> None:
    """As files have them that were written before a graph's products were looked at."""
    shape, values = PRODUCTS[how][0], weight(*PRODUCTS[how][0])
    model = onnx.load(product(tmp_path / "m.onnx", how))
    model.opset_import[0].version = 25
    scaled = breccia.cast(values, INT4Scaling(group_size=64, scale_dtype="fp32"))
    tensors = [
        helper.make_tensor("w.weight_quantized", TensorProto.INT4, shape, scaled.data.tobytes(), raw=True),
        numpy_helper.from_array(scaled.scale.reshape(shape[0], -1), "w.weight_scale"),
    ]
    model.graph.initializer[0].CopyFrom(tensors[0])
    model.graph.initializer.append(tensors[1])
    said = {"axis": 1, "block_size": 64}
    node = helper.make_node("DequantizeLinear", ["w.weight_quantized", "w.weight_scale"], ["w.weight"], **said)
    model.graph.node.insert(0, node)
    onnx.save(model, tmp_path / "old.onnx")
    read = dict(breccia.open(tmp_path / "old.onnx"))["w.weight"]
    expected = breccia.dequantize(scaled)
    np.testing.assert_array_equal(breccia.dequantize(read), expected)
    report = convert(tmp_path / "old.onnx", tmp_path / "new.onnx", "onnx")
    assert report["tensors"]["repack"] == 1
    np.testing.assert_array_equal(breccia.dequantize(dict(breccia.open(tmp_path / "new.onnx"))["w.weight"]), expected)
    x = np.random.default_rng(4).normal(0, 1, (5, 256)).astype(np.float32)
    old, new = (onnx.load(tmp_path / f"{name}.onnx") for name in ("old", "new"))
    for one, two in zip(*(ReferenceEvaluator(m).run(None, {"x": x}) for m in (old, new)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_integers_have_scales_of_the_products_type(dtype: Any, tmp_path: Path) -> None:
    source = product(tmp_path / "m.onnx", "MatMul", dtype)
    for key in ("int4", "int4-asym", "int8"):
        convert(source, tmp_path / "out.onnx", f"onnx:{key}", include=["w.weight"], force=True)
        [scale] = [one for one in onnx.load(tmp_path / "out.onnx").graph.initializer if one.name == "w.weight_scale"]
        assert helper.tensor_dtype_to_np_dtype(scale.data_type) == dtype


def test_tensors_that_share_a_file_take_its_memory_once(tmp_path: Path) -> None:
    """100 initializers of 8 MiB each, all the same bytes of one file."""
    (tmp_path / "weights.bin").write_bytes(bytes(8 << 20))
    tensors = []
    for i in range(100):
        one = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=(1024, 2048))
        one.data_location = TensorProto.EXTERNAL
        one.external_data.add(key="location", value="weights.bin")
        tensors.append(one)
    made = helper.make_graph([], "g", [], [], tensors)
    onnx.save(helper.make_model(made, opset_imports=OPSET), tmp_path / "m.onnx")
    code = (
        "import resource, sys, onnx, breccia.checkpoint as c\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = most(); opened = c.Checkpoint(sys.argv[1])\n"
        "total = sum(float(opened.load(one).sum()) + one.shape[0] for one in opened.found)\n"
        "print(total, most() - before)"
    )
    command = [sys.executable, "-c", code, tmp_path / "m.onnx"]
    total, grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert float(total) == 100 * 1024
    assert int(grown) < 100_000, "kilobytes: 8 MiB of the file and what the program is, not 800 MiB"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"offset": "64"}, "must have the bytes of its shape"),
        ({"offset": "0", "length": "9999"}, "must lie in the 128 bytes of 'weights.bin'"),
        ({"location": "../weights.bin"}, "must be an ONNX model: ."),
        ({"location": "absent.bin"}, "must be an ONNX model: ."),
    ],
)
def test_tensors_outside_of_their_file_are_refused(said: dict[str, str], why: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for place in (tmp_path, tmp_path / "in"):
        (place / "weights.bin").write_bytes(bytes(128))
    one = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(4, 8), data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": "weights.bin"} | said).items():
        one.external_data.add(key=key, value=value)
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], [one]), opset_imports=OPSET), tmp_path / "in/m.onnx")
    with pytest.raises(ValueError, match=why):
        Checkpoint(tmp_path / "in/m.onnx")


def test_a_reason_is_given_where_the_error_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linear(tmp_path / "m.onnx")

    def full(raw: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(onnx, "load_model_from_string", full)
    with pytest.raises(ValueError, match="file must be an ONNX model: MemoryError"):
        Checkpoint(path)


def test_numbers_that_are_no_bytes_are_read(tmp_path: Path) -> None:
    """Tensors of fields of numbers, as helper.make_tensor has them."""
    codes = np.random.default_rng(1).integers(-8, 8, 64 * 32)
    tensors = [
        helper.make_tensor("q", TensorProto.INT4, (64, 32), codes.tolist()),
        helper.make_tensor("s", TensorProto.FLOAT, (64, 1), [0.5] * 64),
    ]
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1, block_size=32)
    made = helper.make_graph(
        [node], "g", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, (64, 32))], tensors
    )
    onnx.save(helper.make_model(made, opset_imports=OPSET), tmp_path / "m.onnx")
    read = dict(breccia.open(tmp_path / "m.onnx"))["w"]
    np.testing.assert_array_equal(breccia.dequantize(read), codes.reshape(64, 32) * np.float32(0.5))


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_file_that_is_no_model_is_refused(cut: int, tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"m\.onnx: file must be an ONNX model"):
        Checkpoint(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"m\.onnx: file must be an ONNX model"):
        Checkpoint(path)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx", "INT4", "blocks of rows", False))
    del model.graph.initializer[1].dims[:]
    model.graph.initializer[1].dims.extend((32, 8))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"m\.onnx: tensor 'w': x_scale must have shape \(64, 4\), got \(32, 8\)"):
        Checkpoint(tmp_path / "m.onnx")


def test_a_killed_conversion_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Killed before every write, among them those of what stands between tensors."""
    source = checkpoint(tmp_path / "in")
    runner = Path(__file__).parents[1] / "kill_at_write_runner.py"
    command = [sys.executable, runner, source, tmp_path / "out.onnx", "onnx:int8", "onnx:nvfp4"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) > 20


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linear(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'breccia\[onnx\]'"):
        Checkpoint(path)


@pytest.mark.parametrize("kind", ["INT4", "FLOAT8E4M3FN"])
def test_any_bytes_are_a_model_or_refused(kind: str, tmp_path: Path) -> None:
    good = graph(tmp_path / "good.onnx", kind, "blocks of rows", kind == "INT4").read_bytes()
    rng, path, refused = np.random.default_rng(0), tmp_path / "bad.onnx", 0
    small = [at for at in range(len(good)) if at < 64 or at > len(good) - 400]
    for _ in range(400):
        bad = bytearray(good)
        for at in rng.choice(small, int(rng.integers(1, 4))):
            bad[at] = int(rng.integers(0, 256))
        path.write_bytes(bytes(bad))
        try:
            opened = Checkpoint(path)
            for found in opened.found:
                opened.load(found)
            opened.close()
        except ValueError as error:
            assert "bad.onnx" in str(error)
            refused += 1
    assert 20 < refused < 400


def test_layers_alike_are_each_described(tmp_path: Path) -> None:
    """A layer's metadata names its own tensors: it is no other layer's, whose name differs by a number alone."""
    rng = np.random.default_rng(0)
    weights = {f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((64, 256), np.float32) for i in range(3)}
    save_arrays(weights, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "model.onnx", "onnx:int4")
    with Checkpoint(tmp_path / "model.onnx") as written:
        assert {one.name: one.format for one in written.found} == dict.fromkeys(weights, "onnx")
