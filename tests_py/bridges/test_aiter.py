# SPDX-License-Identifier: Apache-2.0
"""The order in which AITER's products read scales of MX, against its own function."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import common

SHAPES = ((256, 8), (512, 24), (1, 1), (300, 11), (32, 8))


def aiters_own(torch: Any) -> Any:
    """e8m0_shuffle of its source: the package imports a GPU's libraries."""
    found = importlib.util.find_spec("aiter")
    if found is None or not found.submodule_search_locations:
        pytest.skip("amd-aiter is not installed")
    source = Path(found.submodule_search_locations[0], "utility", "fp4_utils.py").read_text()
    functions = [node for node in ast.parse(source).body if getattr(node, "name", "") == "e8m0_shuffle"]
    names = {"torch": torch}
    exec(compile(ast.Module(functions, []), "fp4_utils.py", "exec"), names)
    return names["e8m0_shuffle"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_is_aiters(shape):
    torch = pytest.importorskip("torch")
    rows, columns = shape
    scale = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    padded = np.zeros((-(-rows // 256) * 256, -(-columns // 8) * 8), np.uint8)  # theirs leaves what pads unset
    padded[:rows, :columns] = scale
    wanted = aiters_own(torch)(torch.from_numpy(padded)).numpy()
    assert np.array_equal(common.to_aiter_scales(scale), wanted)
    assert np.array_equal(common.from_aiter_scales(wanted, rows, columns), scale)


def test_the_index_of_the_page():
    """docs/formats.md: the byte of each scale."""
    columns = 16
    scale = np.arange(256 * columns).reshape(256, columns)
    found = np.zeros(scale.size, np.uint8)
    for r in range(256):
        for c in range(columns):
            tile = (r // 32 * (columns // 8) + c // 8) * 256
            found[tile + c % 4 * 64 + r % 16 * 4 + c // 4 % 2 * 2 + r // 16 % 2] = scale[r, c] % 251
    made = common.to_aiter_scales((scale % 251).astype(np.uint8))
    assert np.array_equal(made.reshape(-1), found)


@pytest.mark.parametrize(("rows", "columns"), [(32, 8), (64, 16), (96, 24), (50, 13), (300, 11)])
def test_hipblaslts_scales_are_the_first_rows(rows, columns):
    """BLK32_UE8M0_32_8_EXT: the byte that XLA's test of it has, of rows filled up to 32 and columns to 8."""
    scale = np.random.default_rng(2).integers(1, 255, (rows, columns), dtype=np.uint8)
    tiles = -(-columns // 8)
    wanted = np.zeros((-(-rows // 32) * 32, tiles * 8), np.uint8)
    for r, c in np.ndindex(rows, columns):
        inside = c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16
        wanted.reshape(-1)[(r // 32 * tiles + c // 8) * 256 + inside] = scale[r, c]
    assert np.array_equal(common.to_aiter_scales(scale)[: len(wanted)], wanted)


def test_scales_of_a_tensor_go_there_and_back():
    q = breccia.cast(np.random.default_rng(1).standard_normal((70, 352), dtype=np.float32), "mxfp4")
    made = common.to_aiter_scales(q.scale)
    assert made.shape == (256, 16)
    again = breccia.from_buffer(q.data, common.from_aiter_scales(made, *q.scale.shape), q.recipe, q.layout)
    assert again == q


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"scale must be \(rows, columns\), got shape \(8,\)"):
        common.to_aiter_scales(np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="scale must have 2048 bytes for 100 x 3 scales in AITER's order, got 300"):
        common.from_aiter_scales(np.zeros((100, 3), np.uint8), 100, 3)
