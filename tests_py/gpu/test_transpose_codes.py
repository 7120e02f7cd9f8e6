# SPDX-License-Identifier: Apache-2.0
"""`breccia.transpose` by a kernel, byte for byte the core's."""

from __future__ import annotations

from typing import Any

import breccia
import numpy as np
import pytest
import torch
from breccia.kernels.triton import ops
from breccia.kernels.triton.conversions import transpose as turning

pytestmark = pytest.mark.interpreted
RECIPES = {
    "fp8": breccia.Float8BlockScaling(scale_format="e8m0"),
    "fp8 e5m2 32": breccia.Float8BlockScaling("E5M2", block_k=32, scale_format="e8m0"),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp8 e5m2": breccia.MXFP8BlockScaling("E5M2"),
    "mxfp6 e2m3": breccia.MXFP6BlockScaling("E2M3"),
    "mxfp6 e3m2": breccia.MXFP6BlockScaling("E3M2"),
}
EACH = pytest.mark.parametrize("name", RECIPES)


def group_of(recipe: Any) -> int:
    return int(getattr(recipe, "block_k", None) or recipe.block_size)


def random_codes(recipe: Any, rows: int, columns: int, nan: bool = False) -> breccia.ScaledTensor:
    """Any codes, NaN and infinity too, under scales up to 2^30 apart."""
    draw = np.random.default_rng(0)
    bits = breccia.formats.finfo(recipe.element).bits
    like = breccia.cast(torch.ones(128, 128), recipe)
    data = torch.from_numpy(draw.integers(0, 1 << bits, (rows, columns)).astype(np.uint8))
    scale = torch.from_numpy(draw.integers(110, 141, (rows, columns // group_of(recipe))).astype(np.uint8))
    if nan:
        scale[::5, 0] = 255
        scale[: group_of(recipe), -1] = 255
    return breccia.from_buffer(data.view(like.data.dtype), scale.view(like.scale.dtype), recipe, like.layout)


def same(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours.view(torch.uint8).cpu(), theirs.view(torch.uint8).cpu())


@EACH
@pytest.mark.parametrize("nan", [False, True])
def test_it_is_the_cores(name: str, nan: bool, device: str) -> None:
    recipe = RECIPES[name]
    group, has_nan = group_of(recipe), breccia.formats.finfo(recipe.element).has_nan
    q = random_codes(recipe, 3 * group, 128 + group, nan and has_nan)
    wanted = breccia.transpose(q)
    made = ops.transpose(q.to(device), group)
    assert made is not None
    assert same(made[0].data, wanted.value.data)
    assert same(made[0].scale, wanted.value.scale)
    assert made[1:] == wanted[1:]
    assert made[0].layout == wanted.value.layout


@EACH
def test_rows_in_another_order_and_one_scale_for_a_square(name: str, device: str) -> None:
    recipe = RECIPES[name]
    group = group_of(recipe)
    q = random_codes(recipe, 2 * group, 128)
    source = torch.randint(-1, 2 * group, (3 * group,), dtype=torch.int32)
    source[group : 2 * group] = -1  # a square of nothing
    taken = q.map(lambda part: torch.where((source >= 0)[:, None], part.view(torch.uint8)[source], 0))
    taken = breccia.from_buffer(taken.data.view(q.data.dtype), taken.scale.view(q.scale.dtype), recipe, q.layout)
    wanted = breccia.transpose(taken).value
    codes, scale = (part.view(torch.uint8).to(device) for part in (q.data, q.scale))
    short = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2"}
    made = turning.transpose(codes, scale, short[recipe.element], group, source.to(device), True, False)
    assert same(made.codes, wanted.data)
    assert same(made.scale, wanted.scale[::group])
    assert made.counts is None


def test_what_no_kernel_turns(device: str) -> None:
    """The core says what is wrong, and turns blocks that are no power of two."""
    six = random_codes(RECIPES["mxfp6 e2m3"], 32, 128, nan=True).to(device)
    assert ops.transpose(six, 32) is None
    with pytest.raises(ValueError, match="scaled must have scales that are numbers"):
        breccia.transpose(six)
    odd = breccia.Float8BlockScaling(block_k=48, scale_format="e8m0")
    q = breccia.cast(torch.randn(48, 96), odd)
    assert ops.transpose(q.to(device), 48) is None
    assert breccia.transpose(q.to(device)).value.cpu() == breccia.transpose(q).value


def test_the_verb_takes_it(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter has no CUDA tensors")
    q = breccia.cast(torch.randn(256, 384) * torch.logspace(-6, 0, 256)[:, None], RECIPES["fp8"])
    found, wanted = breccia.transpose(q.cuda()), breccia.transpose(q)
    assert found.value.data.is_cuda
    assert found.value.cpu() == wanted.value
    assert found[1:] == wanted[1:]
    assert wanted.rounded > 0
