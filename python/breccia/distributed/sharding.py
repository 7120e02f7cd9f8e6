# SPDX-License-Identifier: Apache-2.0
"""Where a block-scaled tensor may be cut, and how it is dealt out to ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from breccia.formats import finfo
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.value.slicing import block_along


@dataclass(frozen=True)
class Plan:
    """Which elements of axis ``dim`` each rank holds.

    Attributes:
        shape: logical shape of the whole tensor.
        dim: the axis that is cut, counted from 0.
        block: elements of that axis that stay together; the last block may be short.
        ranges: (begin, end) of each rank, in the order of ranks. Ranks beyond the last block hold nothing.
    """

    shape: tuple[int, ...]
    dim: int
    block: int
    ranges: tuple[tuple[int, int], ...]

    def cut(self, tensor: Any, rank: int) -> Any:
        """The part of rank ``rank``: a view of an array or ScaledTensor of the whole shape.

        Args:
            tensor: an array or ScaledTensor of the whole shape.
            rank: from 0.

        Returns:
            Of the type of ``tensor``.
        """
        begin, end = self.ranges[rank]
        return tensor[(slice(None),) * self.dim + (slice(begin, end),)]

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Logical shape of the part of rank ``rank``.

        Args:
            rank: from 0.

        Returns:
            The shape; 0 along the axis where the rank has nothing.
        """
        begin, end = self.ranges[rank]
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    def offset(self, rank: int) -> tuple[int, int]:
        """``offset=`` of `breccia.cast` for the part of rank ``rank``.

        Args:
            rank: from 0.

        Returns:
            The place of the part's first element in the whole tensor, counted row by row, and that tensor's columns.

        Raises:
            ValueError: the part's elements do not follow each other row by row, which they do where the first
                axis longer than 1, or the last axis, is cut.
        """
        begin, columns = self.ranges[rank][0], self.shape[-1]
        if self.dim == len(self.shape) - 1:
            return begin, columns
        if math.prod(self.shape[: self.dim]) > 1:
            raise ValueError(
                f"dim must be the first axis longer than 1, or the last, for positions to follow, got {self.dim} "
                f"of shape {self.shape}"
            )
        return begin * math.prod(self.shape[self.dim + 1 :]), columns


def plan(shape: tuple[int, ...], recipe: ScalingRecipe | str, world: int, dim: int = 0) -> Plan:
    """Deal the blocks of axis ``dim`` out to ``world`` ranks, as ``torch.chunk`` deals out elements: each rank gets
    ⌈blocks / world⌉, the last ones get what is left. Where blocks are one element long, these are the parts of
    DTensor's ``Shard(dim)``.

    Args:
        shape: logical shape of the whole tensor.
        recipe: a recipe or its name.
        world: number of ranks.
        dim: the axis to cut; may be negative.

    Returns:
        What each rank has.

    Raises:
        TypeError: ``recipe`` is not a recipe, or an argument is not of integers.
        ValueError: ``world`` is not positive, or there is no such axis.
    """
    recipe = resolve(recipe)
    if not isinstance(shape, Iterable) or not all(hasattr(extent, "__index__") for extent in shape):
        raise TypeError(f"shape must be a tuple of integers, got {shape!r}")
    shape = tuple(shape)
    for name, value in (("world", world), ("dim", dim)):
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    if world < 1:
        raise ValueError(f"world must be 1 or more, got {world}")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim must be from {-len(shape)} to {len(shape) - 1} for shape {shape}, got {dim}")
    dim %= len(shape)
    block = block_along(recipe.layout, finfo(recipe.element).bits == 4, dim - len(shape))
    return Plan(shape, dim, block, deal(shape[dim], block, world))


def deal(extent: int, block: int, world: int) -> tuple[tuple[int, int], ...]:
    """(begin, end) of each rank of an axis ``extent`` long, in whole blocks."""
    blocks = math.ceil(extent / block)
    per_rank = math.ceil(blocks / world) * block
    cuts = [min(rank * per_rank, extent) for rank in range(world + 1)]
    return tuple(itertools.pairwise(cuts))


def check_plan(given: Any) -> None:
    """Raise TypeError unless given is a `Plan` or None."""
    if given is not None and not isinstance(given, Plan):
        raise TypeError(f"plan must be a Plan, which breccia.distributed.plan makes, got {type(given).__name__}")
