# SPDX-License-Identifier: Apache-2.0
"""A step of AdamW with moments as codes: the bytes are those of the core, on a GPU or in Triton's interpreter, but for
codes with exponents, which on a GPU follow from its own logarithms."""

from __future__ import annotations

from typing import Any

import breccia
import pytest
import torch
from breccia.kernels.triton.adamw import adamw_step
from breccia.optim import AdamW, adamw

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def gradient(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes, with rows of zeros, of subnormal numbers, of one number alone, and of what is not finite."""
    draw = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-6, 1, shape, generator=draw)
    g[:9] = 0
    g[9:12] *= 1e-38
    g[12:16] = 0.25
    if seed == 2:
        g[20, 3], g[30, 4] = torch.inf, torch.nan
    return g.to(dtype)


def bytes_of(parts: Any) -> list[bytes]:
    return [part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts]


@pytest.mark.parametrize("states", ["fp8", "int8", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_are_those_of_the_core(states: str, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to bfloat16")
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(70, 101).to(dtype))
    optimizer = AdamW([p], lr=1e-2, states=states)
    own = p.detach().clone().to(device)
    moments: list[list[torch.Tensor]] = []
    recipe = adamw._STATES[states]
    names = adamw._names(recipe)
    for step in range(1, 4):
        p.grad = gradient((70, 101), step, dtype)
        optimizer.step()
        if not moments:
            fresh = adamw._fresh(own, states)
            moments = [adamw._arrays(fresh[name]) for name in names]
        options = adamw._Options(1e-2, 0.9, 0.999, 1e-8, 1e-2, step)
        adamw_step(own, p.grad.to(device), *moments, recipe, options.factors(), 2 * step)
        wanted = [adamw._arrays(optimizer.state[p][name]) for name in names]
        exact = device == "cpu" or states == "mxfp8"
        if exact or step == 1:  # moments of zero are read alike
            assert nan_free(own) == nan_free(p), step
        else:
            assert torch.allclose(own.cpu().float(), p.detach().float(), rtol=torch.finfo(dtype).eps, equal_nan=True)
            own.copy_(p.detach())
        for found, core in zip(moments, wanted, strict=True):
            if exact:
                assert bytes_of(found) == bytes_of(core), step
            else:
                close(found, core, step)
        for moment, core in zip(moments, wanted, strict=True):  # the next step is of the same moments
            for part, other in zip(moment, core, strict=True):
                part.copy_(other)


@pytest.mark.parametrize("states", ["fp8", "int8"])
def test_a_moment_of_the_largest_float32_stays_finite(states: str, device: str) -> None:
    """INT8's scale of it is rounded up: 127 times as much is beyond float32."""
    recipe = adamw._STATES[states]
    rows, width = adamw._rows(8192)
    moment = torch.ones(rows, width)
    moment[0, 0] = torch.finfo(torch.float32).max
    parameters = torch.zeros(2, rows * width)  # and gradients
    options = adamw._Options(1e-2, 0.9, 0.999, 1.0, 0.0, 2)
    steps = []
    for where in ("cpu", device):
        weights, gradients = parameters.clone().to(where)
        moments = [[part.to(where) for part in adamw._arrays(breccia.cast(moment * m, recipe))] for m in (1, 0)]
        if len(steps) == 0:
            adamw._step_of_codes(weights, gradients, *moments, recipe, options)
        else:
            adamw_step(weights, gradients, *moments, recipe, options.factors(), 4)
        steps.append((weights.cpu(), adamw._moment([part.cpu() for part in moments[0]], recipe).dequantize()))
    assert steps[0][0].isfinite().all()
    assert torch.allclose(steps[1][0], steps[0][0], rtol=1e-5)
    for _, found in steps:
        assert torch.allclose(found[0, 0], 0.9 * moment[0, 0], rtol=1e-5)


def close(found: list[torch.Tensor], core: list[torch.Tensor], step: int) -> None:
    """Scales are those of values that were read by other logarithms, exponents are equal to a unit in the last place,
    and codes but for some to neighbours."""
    codes, scale, exponents = (part.cpu() for part in found)
    assert torch.allclose(scale, core[1], rtol=0 if step == 1 else 1e-6, atol=0, equal_nan=True)
    apart = exponents.view(torch.int16).int() - core[2].view(torch.int16).int()
    assert apart.abs().max() <= 1
    steps = codes.view(torch.uint8).int() - core[0].view(torch.uint8).int()
    same = (apart == 0).repeat_interleave(codes.numel() // apart.numel(), 1)
    assert steps[same].abs().max() <= 1 and steps[same].count_nonzero() <= 1e-3 * steps.numel()


def nan_free(x: torch.Tensor) -> list[bytes]:
    """A NaN's bits are the processor's."""
    return bytes_of([torch.where(x.isnan(), torch.nan, x)])
