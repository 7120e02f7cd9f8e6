# SPDX-License-Identifier: Apache-2.0
"""The kernel of GPTQ's columns, in Triton's interpreter or on a GPU, against torch's operations a column at a time."""

from __future__ import annotations

import breccia
import cases
import numpy as np
import pytest
import torch
from breccia.frameworks.torch import error_feedback
from breccia.kernels.triton.recipes import decodes
from breccia.kernels.whole_array.spec import Spec

pytestmark = pytest.mark.interpreted


def kinds():
    """A recipe of each element format, with and without zero points, with codes and numbers as scales."""
    found = {}
    for name, recipe in cases.RECIPES.items():
        spec = Spec.of(recipe)
        found.setdefault((spec.element, spec.scale in ("e8m0", "e4m3"), spec.rule == "asymmetric"), name)
    return list(found.values())


@pytest.mark.parametrize("name", kinds())
def test_codes_are_those_of_a_column_after_the_other(name, device, monkeypatch):
    recipe = cases.RECIPES[name]
    width = max(32, cases.block_width(recipe))
    columns = width * (5 if width == 32 else 2)  # of two runs
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3 * columns, columns)) @ rng.normal(size=(columns, columns)) + rng.normal(size=columns)
    moments = torch.from_numpy((x.T @ x).astype(np.float32))
    w = torch.from_numpy(rng.normal(size=(19, columns)).astype(np.float32))
    w[2, 3], w[3, 4], w[4] = float("nan"), float("inf"), 0.0
    nearest = breccia.cast(w, recipe, importance=moments.diagonal()).to(device)
    w, moments = w.to(device), moments.to(device)
    kernel, ran = error_feedback._round_by_kernel, []
    monkeypatch.setattr(error_feedback, "_round_by_kernel", lambda *given: (ran.append(True), kernel(*given)))
    made = error_feedback.rounded(w, moments, nearest, True, 0.02)
    assert bool(ran) == decodes(nearest)
    monkeypatch.setattr(error_feedback, "_round_by_kernel", error_feedback._round_run)
    plain = error_feedback.rounded(w, moments, nearest, True, 0.02)
    mine, theirs = (one.scaled.to("cpu").to("numpy").numpy() for one in (made, plain))
    assert np.array_equal(np.isnan(mine), np.isnan(theirs))
    # A GPU rounds a product and a sum at once, which moves codes beside ties and what follows them.
    assert (mine == theirs)[~np.isnan(mine)].mean() > (0.98 if device == "cuda" else 0.999)
    assert made[1:] == plain[1:]


def test_runs_that_are_no_power_of_two(device):
    w, moments = torch.from_numpy(cases.normal((7, 150))), np.eye(150, dtype=np.float32) + np.float32(0.2)
    recipe = breccia.INT8Scaling()
    nearest = breccia.cast(w, recipe, importance=np.diag(moments).copy())
    given = torch.from_numpy(moments).to(device)
    made = error_feedback.rounded(w.to(device), given, nearest.to(device), False, 0.02).scaled.to("cpu").to("numpy")
    core = breccia.gptq(w, moments, recipe).to("numpy")
    assert (np.asarray(made.data) == np.asarray(core.data)).mean() > 0.99
