# SPDX-License-Identifier: Apache-2.0
"""Files whose shapes nobody writes: of no axes, or of very many rows without columns. Each gets an answer at once."""

import json
import struct
import subprocess
import sys

import breccia
import numpy as np
import pytest
from breccia import layouts, recipes
from numpy.lib.stride_tricks import as_strided

LIMIT = 20  # seconds, most of them for starting Python


def write(path, tensors, metadata):
    """A safetensors file of any header: name → (dtype, shape, bytes)."""
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


def config(recipe, layout, shape):
    fields = {name: value for name, value in recipe.to_dict().items() if name != "name"}
    kept = {"block_size", "block_m", "block_n"} & set(vars(layout))
    return json.dumps(
        {
            "recipe": {"name": recipe.name, "fields": fields},
            "layout": {"name": layout.name, "fields": {name: getattr(layout, name) for name in kept}},
            "shape": shape,
            "original_dtype": "float32",
        }
    )


def cli(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "breccia", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


LAYOUTS = [breccia.PerTensor(), breccia.PerBlockK(32), breccia.PerChannel(), breccia.PerBlockMN(1, 32)]


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_tensor_of_no_axes(tmp_path, layout, command):
    path = write(
        tmp_path / "x.safetensors",
        {"w.data": ("I8", [], 1), "w.scale": ("F32", [], 4)},
        {"w.config": config(breccia.INT8Scaling(), layout, [])},
    )
    done = cli(command, path, path) if command == "verify" else cli(command, path)
    assert done.returncode >= 0, f"killed by signal {-done.returncode}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_very_many_rows_without_columns(tmp_path, command):
    rows = 2**40
    layout = breccia.PerBlockMN(1, 32)
    path = write(
        tmp_path / "x.safetensors",
        {"w.data": ("U8", [rows, 0], 0), "w.scale": ("U8", [rows, 0], 0), "v": ("F32", [rows, 0], 0)},
        {"w.config": config(breccia.MXFP8BlockScaling(), layout, [rows, 0])},
    )
    done = cli(command, path, path) if command == "verify" else cli(command, path)
    assert done.returncode >= 0, f"killed by signal {-done.returncode}"
    assert "Traceback" not in done.stderr


def test_the_layouts_above_are_all_there_are():
    assert {type(layout) for layout in LAYOUTS} == set(layouts.Layout.__subclasses__())
    assert recipes.from_dict(breccia.INT8Scaling().to_dict()) == breccia.INT8Scaling()


STRIDES = [0, 3, -1, 2**55, 2**62, -(2**62), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("stride", STRIDES)
def test_the_stride_of_one_row_may_be_any_number(stride):
    """NumPy lets it: nothing may be computed with it."""
    rows = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    x = as_strided(rows, rows.shape, (stride, 4))
    for recipe in (breccia.INT4Scaling(), breccia.NVFP4BlockScaling(), breccia.Float8CurrentScaling("E4M3", "row")):
        plain = breccia.cast(rows, recipe)
        w = breccia.cast(x, recipe)
        data = as_strided(w.data, w.data.shape, (stride, 1))
        scale = as_strided(w.scale, w.scale.shape, (stride, w.scale.itemsize))
        view = breccia.from_buffer(data, scale, recipe, w.layout, global_scale=w.global_scale)
        out = as_strided(np.zeros((1, 256), np.float32), (1, 256), (stride, 4))
        np.testing.assert_array_equal(breccia.dequantize(view), breccia.dequantize(plain))
        np.testing.assert_array_equal(breccia.linear(x, view), breccia.linear(rows, plain))
        np.testing.assert_array_equal(breccia.matmul(x, view.T), breccia.matmul(rows, plain.T))
        assert breccia.requantize(view, "fp8") == breccia.requantize(plain, "fp8")
        np.testing.assert_array_equal(breccia.dequantize(view, out=out), breccia.dequantize(plain))


@pytest.mark.parametrize("stride", [s for s in STRIDES if s >= 0])
def test_the_stride_of_one_row_of_torch(stride):
    """torch counts strides in elements: those of one element may not fit in bytes."""
    torch = pytest.importorskip("torch")
    rows = torch.linspace(-2, 2, 256).reshape(1, 256)
    x = torch.as_strided(rows, (1, 256), (stride, 1))
    plain = breccia.cast(rows, "int4")
    assert breccia.cast(x, "int4").to("numpy") == plain.to("numpy")
    torch.testing.assert_close(breccia.linear(x, plain), breccia.linear(rows, plain), rtol=0, atol=0)
