# SPDX-License-Identifier: Apache-2.0
"""ONNX models that breccia wrote, run by ONNX Runtime."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
from programs import onnx_models as models

# Codes that version 1.32 has no kernels for, of which only onnx's evaluator and OpenVINO make values.
NOT_THERE = ("onnx:mxfp4", "onnx:mxfp8", "onnx:nvfp4")
RUN = [to for to in models.TARGETS if to not in NOT_THERE]


@pytest.mark.parametrize("to", RUN)
def test_a_model_gives_what_its_recipe_costs(to: str, tmp_path: Path) -> None:
    """Within 2.5 % of the float model with the same weights: products of codes round their inputs to INT8."""
    for source, x in (
        (models.mlp(tmp_path / "mlp.onnx", width=256), models.inputs(5, 256)),
        (models.transformer(tmp_path / "transformer.onnx"), models.inputs(7, 128)[None]),
    ):
        out = tmp_path / f"out-{source.name}"
        report = models.written(source, to, out)
        got = models.onnxruntime(out)(x)
        same = models.onnxruntime(models.dequantized(out, source, tmp_path / "same.onnx"))(x)
        assert report["tensors"]["cast"] == (4 if source.name == "mlp.onnx" else 6)
        assert models.distance(got, same) < (0.025 if to in models.FUSED else 1e-4), source.name
        assert models.distance(same, models.onnxruntime(source)(x)) > 0.001, "nothing was quantized"


@pytest.mark.parametrize("to", models.FUSED)
@pytest.mark.parametrize("product", ["MatMul", "Gemm", "Gemm transB", "Transpose"])
def test_every_product_is_fused_with_its_codes(product: str, to: str, tmp_path: Path) -> None:
    for dtype in (np.float32, np.float16):
        source = models.mlp(tmp_path / "float.onnx", product, width=256, dtype=dtype)
        models.written(source, to, tmp_path / "out.onnx", force=True)
        run = models.onnxruntime(tmp_path / "out.onnx", tmp_path / "run.onnx")
        there = models.operators(tmp_path / "run.onnx")
        assert (there["MatMulNBits"], there["DequantizeLinear"]) == (4, 0), (dtype, there)
        x = models.inputs(3, 256, dtype)
        same = models.onnxruntime(models.dequantized(tmp_path / "out.onnx", source, tmp_path / "same.onnx"))(x)
        assert models.distance(run(x), same) < 0.025


@pytest.mark.parametrize("to", models.FUSED)
def test_every_product_of_a_transformer_is_fused(to: str, tmp_path: Path) -> None:
    source = models.transformer(tmp_path / "float.onnx")
    models.written(source, to, tmp_path / "out.onnx")
    models.onnxruntime(tmp_path / "out.onnx", tmp_path / "run.onnx")
    there = models.operators(tmp_path / "run.onnx")
    assert (there["MatMulNBits"], there["DequantizeLinear"]) == (6, 0), there


def test_codes_take_less_time_than_floats(tmp_path: Path) -> None:
    """One row of four products with 1024² weights: INT4 at most 0.6 of float's time, INT8 at most all of it."""
    source = models.mlp(tmp_path / "float.onnx")
    runs = {"float": models.onnxruntime(source)}
    for to in models.FUSED:
        models.written(source, to, tmp_path / f"{to[5:]}.onnx")
        runs[to] = models.onnxruntime(tmp_path / f"{to[5:]}.onnx")
    took = models.times(runs, models.inputs(1, models.WIDTH))
    assert took["onnx:int4"] <= 0.6 * took["float"], took
    assert took["onnx:int4-asym"] <= 0.6 * took["float"], took
    assert took["onnx:int8"] <= took["float"], took


@pytest.mark.parametrize("to", NOT_THERE)
def test_what_it_refuses_it_refuses_in_its_own_words(to: str, tmp_path: Path) -> None:
    """Once a version has such a kernel this fails, and the target belongs among those that are run."""
    models.written(models.mlp(tmp_path / "float.onnx", width=256), to, tmp_path / "out.onnx")
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        models.onnxruntime(tmp_path / "out.onnx")
