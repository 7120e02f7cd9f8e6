# SPDX-License-Identifier: Apache-2.0
"""GPTQ by torch's operations on the CPU, or by the kernel on a GPU, beside the core's."""

import breccia
import numpy as np
import pytest
from breccia.calibration import error_feedback
from breccia.calibration.error_feedback import gptq_reported
from breccia.kernels.triton import TRITON_AVAILABLE
from breccia.moments import Moments
from test_gptq import NAMES, layer, output_error
from test_importance import RECIPES, parts

torch = pytest.importorskip("torch")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def by_torch(request):
    """`gptq_reported` by torch on a device; NumPy parts of what it gives."""

    def run(w, moments, recipe, order="act", damp=0.02):
        w = (torch.from_numpy(w) if isinstance(w, np.ndarray) else w).to(request.param)
        given = torch.from_numpy(moments).to(request.param) if isinstance(moments, np.ndarray) else moments
        recipe = breccia.recipe_names.resolve(recipe)
        made, report = error_feedback.gptq_by_torch(w, given, recipe, order, damp)
        assert made.data.device.type == request.param and made.shape == tuple(w.shape) and made.recipe == recipe
        return made.to("cpu").to("numpy"), report

    return run


@pytest.mark.in_turn
@pytest.mark.parametrize("order", ["act", "natural"])
@pytest.mark.parametrize("name", RECIPES)
def test_scales_are_the_cores_and_so_are_codes_but_beside_ties(name, order, by_torch):
    w, x = layer(512, 256)  # so many rows that one which parts at a tie moves the error of all by little
    h = (x.T @ x).astype(np.float32)
    recipe = RECIPES[name]
    core, report = gptq_reported(w, h, recipe, order=order)
    made, own = by_torch(w, h, recipe, order)
    assert parts(made)[1:] == parts(core)[1:]
    assert own == report
    # What follows a code that went the other way differs with it.
    assert (made.numpy() == core.numpy()).mean() > 0.98
    mine, cores = output_error(w, made, h), output_error(w, core, h)
    assert abs(mine / cores - 1) < 1e-3


@pytest.mark.in_turn
@pytest.mark.parametrize("name", NAMES)
def test_diagonal_moments_give_the_nearest(name, by_torch):
    w, x = layer(40, 384)
    diagonal = (x * x).sum(0).astype(np.float32)
    wanted = parts(breccia.cast(w, RECIPES[name], importance=diagonal))
    made, report = by_torch(w, diagonal, RECIPES[name])
    assert parts(made) == wanted and report.level == "diag"
    assert parts(by_torch(w, np.diag(diagonal).copy(), RECIPES[name], "natural")[0]) == wanted


def test_values_and_columns_without_a_remainder(by_torch):
    w, x = layer()
    x[:, [3, 77]] = 0
    h = (x.T @ x).astype(np.float32)
    w[0, 5], w[1, 9], w[2] = np.nan, np.inf, 0
    for name in ("nvfp4", "int4", "int4 asymmetric", "fp8 block", "int8"):
        made, report = by_torch(w, h, RECIPES[name])
        core, wanted = gptq_reported(w, h, RECIPES[name])
        near = breccia.cast(w, RECIPES[name], importance=np.diag(h)).numpy()
        q = made.numpy()
        assert report == wanted and report.dead == 2
        assert np.array_equal(np.isnan(q), np.isnan(near))
        assert q[1, 9] == near[1, 9] and not q[2].any()
        assert (made.numpy()[3:] == core.numpy()[3:]).mean() > 0.98


def test_damping_experts_and_levels(by_torch):
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    low = np.linalg.eigvalsh(h.astype(np.float64))[0]
    shifted = h - np.eye(256, dtype=np.float32) * np.float32(low + 0.2 * np.diag(h).mean())
    shifted[np.diag_indices(256)] = np.maximum(np.diag(shifted), 0)
    opposed = np.full((256, 256), -1.0, np.float32) + np.eye(256, dtype=np.float32) * 2
    lower = h + np.triu(np.ones_like(h), 1)  # of which the lower half is read
    block = np.stack([h[i : i + 16, i : i + 16] for i in range(0, 256, 16)])
    known = {"diag": np.diag(h).copy(), "count": np.asarray(len(x))}
    both = np.stack([h, opposed])
    for name, weight, moments in (
        ("int4", w, shifted),
        ("int4", w, opposed),
        ("int4", w, lower),
        ("mxfp4", w, Moments(**known, block=block)),
        ("mxfp4", w, Moments(**known, full=h)),
        ("int4", w, block),
        ("int4", np.stack([w, w * 3]), np.stack([block, block[::-1]])),
        ("nvfp4", np.stack([w, w * 3]), both),
        ("nvfp4", np.stack([w, w * 3]), h),
        ("int8", w.astype(np.float64), h.astype(np.float64)),
    ):
        core, wanted = gptq_reported(weight, moments, RECIPES[name])
        made, report = by_torch(weight, moments, RECIPES[name])
        assert report == wanted
        assert parts(made)[1:] == parts(core)[1:]
        assert (made.numpy() == core.numpy()).mean() > 0.98
    assert wanted.nearest == 0
    half = torch.from_numpy(w).bfloat16()
    made, _ = by_torch(half, h, "nvfp4")
    core = breccia.gptq(half, h, "nvfp4").to("numpy")
    assert made.original_dtype == "bfloat16" and parts(made)[1:] == parts(core)[1:]
    empty, _ = by_torch(np.empty((0, 256), np.float32), h, "int4")
    assert empty.shape == (0, 256)


def test_what_is_refused(by_torch):
    w, x = layer()
    h = (x.T @ x).astype(np.float32)
    above = h.copy()
    above[0, -1] = np.inf
    for error, arguments, message in (
        (ValueError, (w, h[:-1, :-1].copy(), "int4"), r"moments must be \(256, 256\) for w of shape \(24, 256\)"),
        (ValueError, (w, np.ones((16, 8, 8)), "int4"), r"moments must be \(256, 256\) for w of shape \(24, 256\), got"),
        (ValueError, (w, above, "int4"), "moments must be finite, got inf"),
        (ValueError, (w, -h, "int4"), "moments must not be negative on the diagonal, got -"),
        (ValueError, (w, h, "int4", "act", 2), "damp must be from 0 to 1"),
        (ValueError, (w[0], h, "int4"), r"INT4Scaling requires x.ndim >= 2, got 1"),
        (TypeError, (w.astype(np.int32), h, "int4"), "w must be a float32, float64, float16 or bfloat16 array"),
    ):
        with pytest.raises(error, match=message):
            by_torch(*arguments)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
def test_the_verb_rounds_tensors_of_a_gpu_there():
    w, x = layer(256, 1024, 2048)
    h = (x.T @ x).astype(np.float32)
    for name in ("nvfp4", "mxfp4", "int4 asymmetric", "fp8 tile"):
        core = breccia.gptq(w, h, RECIPES[name])
        for moments in (h, torch.from_numpy(h), torch.from_numpy(h).cuda()):
            made = breccia.gptq(torch.from_numpy(w).cuda(), moments, RECIPES[name])
            assert made.data.is_cuda and TRITON_AVAILABLE
            assert abs(output_error(w, made.to("cpu").to("numpy"), h) / output_error(w, core, h) - 1) < 1e-3
