# SPDX-License-Identifier: Apache-2.0
"""Files whose shapes nobody writes: of no axes, or of very many rows without columns. Each gets an answer at once."""

import json
import struct
import subprocess
import sys

import breccia
import pytest
from breccia import layouts, recipes

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
