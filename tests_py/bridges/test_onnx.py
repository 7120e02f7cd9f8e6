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
from breccia import bridges
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


def test_a_model_of_an_old_opset_is_refused(tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", opset=17)
    with pytest.raises(ValueError, match=r"model must be of opset 25 or more, got 17: onnx\.version_converter"):
        convert(path, tmp_path / "out.onnx", "onnx:int4", include=["*.weight"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.onnx"]


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
