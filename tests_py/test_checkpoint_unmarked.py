# SPDX-License-Identifier: Apache-2.0
"""Block scales of which no mark says whether they are in rows or in tiles: other tensors tell it, or their numbers;
where neither does, they are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import comfyui, compressed_tensors, modelopt
from breccia.bridges import parts as _parts
from breccia.checkpoint import Checkpoint, convert, finish, plan, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from breccia.cli import main

pytest.importorskip("ml_dtypes")  # without it arrays of codes are of plain bytes, which files say, too
RNG = np.random.default_rng(11)
RECIPES = {"nvfp4": breccia.NVFP4BlockScaling(), "mxfp8": breccia.MXFP8BlockScaling()}
KINDS = [(recipe, tiles) for recipe in RECIPES for tiles in (True, False)]


def weights(rows: int, columns: int, of_rows: float, of_columns: float) -> Any:
    """Normal numbers whose rows and columns have sizes that differ by so much, in logarithms."""
    sizes = np.exp(RNG.normal(0, of_rows, (rows, 1)) + RNG.normal(0, of_columns, (1, columns)))
    return (RNG.normal(0, 0.02, (rows, columns)) * sizes).astype(np.float32)


def stored(prefix: str, w: Any, recipe: str, tiles: bool) -> dict[str, Any]:
    """Tensors of a layer as ComfyUI or others store them, without a mark."""
    others = modelopt if recipe == "nvfp4" else compressed_tensors
    parts = _parts.materialize((comfyui if tiles else others).lay_out(breccia.cast(w, RECIPES[recipe])))
    return {f"{prefix}.{role}": array for role, array in parts.items() if role != "comfy_quant"}


def read(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    return {one.name: values(checkpoint.load(checkpoint.refined(one))) for one in checkpoint.found}


def check(path: Path, wanted: dict[str, Any], recipe: str) -> None:
    for name, w in wanted.items():
        np.testing.assert_array_equal(
            read(path)[f"{name}.weight"], breccia.dequantize(breccia.cast(w, RECIPES[recipe]))
        )


@pytest.mark.parametrize(("recipe", "tiles"), KINDS)
@pytest.mark.parametrize(("of_rows", "of_columns"), [(0.3, 0), (0, 0.5), (0.2, 0.2)])
@pytest.mark.parametrize("shape", [(128, 1024), (512, 512), (1024, 256)])
def test_numbers_tell(recipe: str, tiles: bool, of_rows: float, of_columns: float, shape: Any, tmp_path: Path) -> None:
    if recipe == "mxfp8" and not of_rows:
        of_columns = 1.0  # blocks of 32 columns, and exponents alone
    w = weights(*shape, of_rows, of_columns)
    path = tmp_path / "in.safetensors"
    save_arrays(stored("a", w, recipe, tiles), path)
    try:
        check(path, {"a": w}, recipe)
    except ValueError as error:  # never the wrong order
        assert "must tell whether it is in rows" in str(error)
        assert not of_rows
    convert_to = tmp_path / "out.safetensors"
    if of_rows:
        convert(path, convert_to, "fp32")
        assert verify(path, convert_to, min_sqnr_db=1e9)["ok"]


@pytest.mark.parametrize(("recipe", "tiles"), KINDS)
def test_where_nothing_tells_it_is_refused(recipe: str, tiles: bool, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    w = weights(256, 512, 0, 0)
    save_arrays(stored("a", w, recipe, tiles), path)
    message = r"in rows, as ModelOpt stores it, or in tiles, as ComfyUI does.*config\.json"
    for to in ("fp32", "mxfp4", "comfyui"):
        with pytest.raises(ValueError, match=message):
            convert(path, tmp_path / "out.safetensors", to)
    checkpoint = Checkpoint(path)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(checkpoint.found[0])
    (tmp_path / "in").mkdir()
    path.rename(tmp_path / "in" / "model.safetensors")
    methods = {(True, "nvfp4"): "comfyui", (True, "mxfp8"): "comfyui", (False, "nvfp4"): "modelopt"}
    method = methods.get((tiles, recipe), "compressed-tensors")
    said = json.dumps({"quantization_config": {"quant_method": method}})
    (tmp_path / "in" / "config.json").write_text(said)
    check(tmp_path / "in", {"a": w}, recipe)


@pytest.mark.parametrize(("recipe", "tiles"), KINDS)
def test_another_layers_shape_tells(recipe: str, tiles: bool, tmp_path: Path) -> None:
    """Scales of 100 rows have one shape in rows and another in tiles."""
    w, odd = weights(256, 512, 0, 0), weights(96, 512, 0, 0)
    save_arrays(stored("a", w, recipe, tiles) | stored("b", odd, recipe, tiles), tmp_path / "in.safetensors")
    check(tmp_path / "in.safetensors", {"a": w, "b": odd}, recipe)


def test_another_layers_mark_tells(tmp_path: Path) -> None:
    w, other = weights(256, 512, 0, 0), weights(128, 128, 0, 0)
    marked = _parts.materialize(comfyui.lay_out(breccia.cast(other, "int8")))
    arrays = stored("a", w, "nvfp4", True) | {f"b.{role}": array for role, array in marked.items()}
    save_arrays(arrays, tmp_path / "in.safetensors")
    check(tmp_path / "in.safetensors", {"a": w}, "nvfp4")


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_option_tells(recipe: str, tiles: bool, tmp_path: Path) -> None:
    w, method = weights(256, 512, 0, 0), "comfyui" if tiles else "modelopt"
    path = tmp_path / "in.safetensors"
    save_arrays(stored("a", w, recipe, tiles), path)
    wanted = breccia.dequantize(breccia.cast(w, RECIPES[recipe]))
    with pytest.raises(ValueError, match="--unmarked modelopt or --unmarked comfyui"):
        breccia.load(path)
    np.testing.assert_array_equal(values(breccia.load(path, unmarked=method)["a.weight"]), wanted)
    convert(path, tmp_path / "a.safetensors", "fp32", unmarked=method)
    np.testing.assert_array_equal(breccia.load(tmp_path / "a.safetensors")["a.weight"], wanted)
    assert verify(tmp_path / "a.safetensors", path, min_sqnr_db=1e9, unmarked=method)["ok"]
    other = {"comfyui": "modelopt", "modelopt": "comfyui"}[method]
    assert not verify(tmp_path / "a.safetensors", path, unmarked=other)["ok"]
    pieces = plan(path, tmp_path / "b.safetensors", "fp32", 1, unmarked=method)
    for piece in pieces:
        dataclasses.replace(piece).run()
    with pytest.raises(ValueError, match="must be made from this source and target"):
        finish(path, tmp_path / "b.safetensors", "fp32", unmarked=other)
    finish(path, tmp_path / "b.safetensors", "fp32", unmarked=method)
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    code = main(
        ["convert", "--quiet", str(path), str(tmp_path / "c.safetensors"), "--to", "fp32", "--unmarked", method]
    )
    assert code == 0
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(ValueError, match="unmarked must be one of comfyui, modelopt, or None, got 'comfy'"):
        breccia.load(path, unmarked="comfy")


@pytest.mark.parametrize("other", ["modelopt", "comfyui"])
def test_the_option_is_for_files_that_say_nothing(other: str, tmp_path: Path) -> None:
    """Marked ones are read as they say."""
    w = weights(256, 512, 0, 0)
    for to in ("comfyui:nvfp4", "modelopt:nvfp4"):
        save_arrays({"a.weight": w}, tmp_path / "in.safetensors")
        convert(tmp_path / "in.safetensors", tmp_path / f"{to}.safetensors", to)
        found = breccia.load(tmp_path / f"{to}.safetensors", unmarked=other)["a.weight"]
        np.testing.assert_array_equal(breccia.dequantize(found), breccia.dequantize(breccia.cast(w, RECIPES["nvfp4"])))
