# SPDX-License-Identifier: Apache-2.0
"""A step of AdamW with moments as codes: the bytes are those of the core, on a GPU or in Triton's interpreter, but for
codes with exponents, which on a GPU follow from its own logarithms."""

from __future__ import annotations

from typing import Any

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
