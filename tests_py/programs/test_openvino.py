# SPDX-License-Identifier: Apache-2.0
"""ONNX models that breccia wrote, run by OpenVINO."""

from pathlib import Path

import pytest

pytest.importorskip("openvino")
pytest.importorskip("onnx")
from programs import onnx_models as models


@pytest.mark.parametrize("to", models.TARGETS)
def test_a_model_gives_what_its_recipe_costs(to: str, tmp_path: Path) -> None:
    """As far from float as the recipe is: the product may run in bfloat16, which is 1 % at most."""
    for source, x in (
        (models.mlp(tmp_path / "mlp.onnx", width=256), models.inputs(5, 256)),
        (models.mlp(tmp_path / "gemm.onnx", "Gemm transB", width=256), models.inputs(5, 256)),
        (models.transformer(tmp_path / "transformer.onnx"), models.inputs(7, 128)[None]),
    ):
        out = tmp_path / f"out-{source.name}"
        models.written(source, to, out)
        wanted = models.openvino(source)(x)
        got = models.openvino(out)(x)
        same = models.openvino(models.dequantized(out, source, tmp_path / "same.onnx"))(x)
        assert models.distance(got, same) < 0.015, source.name
        assert models.distance(same, wanted) > 0.001, "nothing was quantized"
        if to == "onnx:int8":
            assert models.distance(got, wanted) <= 0.025, source.name


def test_codes_take_less_time_than_floats(tmp_path: Path) -> None:
    """One row of four products with 1024² weights. OpenVINO holds codes of 4 bits as they are."""
    source = models.mlp(tmp_path / "float.onnx")
    runs = {"float": models.openvino(source)}
    for to in ("onnx:int4", "onnx:int8"):
        models.written(source, to, tmp_path / f"{to[5:]}.onnx")
        runs[to] = models.openvino(tmp_path / f"{to[5:]}.onnx")
    took = models.times(runs, models.inputs(1, models.WIDTH))
    assert took["onnx:int4"] < took["float"], took
    assert took["onnx:int8"] < took["float"], took
