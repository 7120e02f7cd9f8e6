# SPDX-License-Identifier: Apache-2.0
"""Scales that follow from more than one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from breccia import verbs
from breccia.distributed.gather import agreement
from breccia.distributed.gather.groups import check_tensor, exchanges_nothing, tells, wait
from breccia.distributed.sharding import Plan, check_plan
from breccia.formats import finfo
from breccia.frameworks.torch import launches
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe, crosses
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.cast_options import Rounding

_BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


@tells(2)
def amax(
    tensors: Sequence[torch.Tensor], recipe: ScalingRecipe | str, group: Any = None, dim: int = 0
) -> list[torch.Tensor | None]:
    """``amax=`` of `breccia.cast` for this rank's part of each tensor, by one all-reduce for all of them. The
    ranks first tell each other the shapes, once for each list of shapes.

    Args:
        tensors: this rank's parts, on one device; all ranks pass parts of the same tensors in one order.
        recipe: what they will be cast to, or its name.
        group: the ranks that hold the parts; None for all.
        dim: the axis that is cut.

    Returns:
        For each tensor a float32 tensor on its device: of shape () for one scale per tensor and for two levels, of
        one number per row for one scale per row where rows are cut. None where every scale lies within one part.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        TypeError: ``tensors`` is no list of torch tensors.
        ValueError: a tensor has no such axis, or ranks have parts of other tensors.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors must be a list of torch tensors, got {type(tensors).__name__}")
    for i, x in enumerate(tensors):
        check_tensor(x, f"tensors[{i}]")
    return _amax(tensors, resolve(recipe), group, dim)


def _amax(tensors: Sequence[torch.Tensor], recipe: ScalingRecipe, group: Any, dim: int) -> list[torch.Tensor | None]:
    needed = [crossing(recipe, dim, x.ndim) for x in tensors]
    if not any(needed):
        exchanges_nothing(group)
        return [None] * len(tensors)
    by_rows = recipe.layout.block == (1, 0)
    whole = [[n for i, n in enumerate(x.shape) if i != dim % x.ndim] for x in tensors]
    agreement.check_alike("tensors", (whole, recipe), tensors[0].device, group)
    asked = [x for x, wanted in zip(tensors, needed, strict=True) if wanted]
    found = [finite_amax(x, by_rows) for x in asked]
    if by_rows and not finfo(recipe.element).has_nan:  # one NaN makes the scale of the whole row NaN
        found += [torch.isnan(x).any(-1).float() for x in asked]
    sent = found[0] if len(found) == 1 else torch.cat([x.reshape(-1) for x in found])
    wait(dist.all_reduce(sent, dist.ReduceOp.MAX, group=group, async_op=True), group)
    sizes = [x.numel() for x in found]
    reduced = [part.reshape(x.shape) for part, x in zip(sent.reshape(-1).split(sizes), found, strict=True)]
    values, nans = reduced[: len(asked)], reduced[len(asked) :]
    if nans:
        values = [torch.where(nan > 0, torch.nan, x) for x, nan in zip(values, nans, strict=True)]
    rest = iter(values)
    return [next(rest) if wanted else None for wanted in needed]


@tells(2)
def cast(
    x: torch.Tensor,
    recipe: ScalingRecipe | str,
    group: Any = None,
    dim: int = 0,
    *,
    plan: Plan | None = None,
    rounding: Rounding = "nearest",
    seed: Any = None,
) -> ScaledTensor:
    """Quantize this rank's part of a tensor to the bytes that the whole tensor has there.

    Args:
        x: this rank's part.
        recipe: what to quantize to, or its name.
        group: the ranks that hold the parts; None for all.
        dim: the axis that is cut; ``plan.dim`` where a plan is given.
        plan: how the tensor is dealt out; needed for ``rounding="stochastic"``, which draws on positions.
        rounding, seed: as of `breccia.cast`.

    Returns:
        The part, with the scales of the whole tensor.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        TypeError: ``x`` is not a torch tensor.
        ValueError: ``x`` is not the part that the plan gives this rank, or stochastic rounding has no plan.
    """
    recipe = resolve(recipe)
    check_tensor(x, "x")
    check_plan(plan)
    rank = dist.get_rank(group)
    dim = dim if plan is None else plan.dim
    found = _amax([x], recipe, group, dim)[0]  # before any check: the other ranks wait for it
    options: dict[str, Any] = {"rounding": rounding, "seed": seed}
    if plan is not None:
        wanted = plan.shape_of(rank)
        if tuple(x.shape) != wanted:
            raise ValueError(f"x must have the shape that the plan gives rank {rank}, {wanted}, got {tuple(x.shape)}")
        options["offset"] = plan.offset(rank) if rounding == "stochastic" else 0
    elif rounding == "stochastic":
        raise ValueError("plan is required for rounding='stochastic', which draws on positions in the whole tensor")
    made = verbs.cast(x, recipe, amax=found, **options)
    if found is not None:
        agreement.note_one_scale(made, group)
    return made


def crossing(recipe: ScalingRecipe, dim: int, ndim: int) -> bool:
    """Whether a scale follows from both sides of a cut."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be from {-ndim} to {ndim - 1}, got {dim}")
    return crosses(recipe, dim % ndim - ndim)


def finite_amax(x: torch.Tensor, by_rows: bool) -> torch.Tensor:
    """The largest finite magnitude, of each row or of all; 0 of nothing."""
    x = x.detach()
    if x.numel() == 0:
        return torch.zeros(x.shape[:-1] if by_rows else (), dtype=torch.float32, device=x.device)
    if not by_rows and x.dtype in _BY_KERNEL and launches.quiet(x):
        return launches.finite_amax(x)
    if not x.is_cuda:  # where looking at a number waits for nothing
        low, high = (x.amin(-1), x.amax(-1)) if by_rows else torch.aminmax(x)
        found = torch.maximum(high, -low).float()
        if bool(torch.isfinite(found).all()):
            return found
    magnitude = x.float().abs()
    magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    return magnitude.amax(-1) if by_rows else magnitude.amax()
