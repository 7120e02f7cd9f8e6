# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a weight of floats, as FSDP2 cuts it, and what it sends as codes.

FSDP2 cuts rows as ``torch.chunk`` does, through blocks of several rows too. The scale of a block that two ranks hold
follows from both: its amax is agreed upon, and each rank casts its rows below or above rows that stand for the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from breccia import verbs
from breccia.distributed.gather.groups import device_of, gather_into, place
from breccia.distributed.gather.statistics import finite_amax
from breccia.formats import finfo
from breccia.frameworks.torch.launches import contiguous
from breccia.frameworks.torch.tensors import raw
from breccia.frameworks.torch.weights import codes_of, packed
from breccia.recipes import ScalingRecipe, choices
from breccia.scaled_tensor import ScaledTensor

# Stands for a NaN in the maxima that ranks exchange, which are of finite numbers.
_NAN = torch.inf


@dataclass(frozen=True)
class Shard:
    """Where a part of shape ``part`` lies in a weight of shape ``whole``, and how it is quantized."""

    recipe: ScalingRecipe
    square_blocks: bool
    whole: tuple[int, ...]
    part: tuple[int, ...]
    group: Any

    @property
    def by_columns(self) -> bool:
        """Whether columns are cut, not rows."""
        return self.part[1] != self.whole[1]

    @property
    def rows_sent(self) -> int:
        """By each rank: those of the first, which has the most."""
        return self.whole[0] if self.by_columns else -(-self.whole[0] // dist.get_world_size(self.group))

    @property
    def begin(self) -> int:
        """The first row of this part."""
        return 0 if self.by_columns else min(dist.get_rank(self.group) * self.rows_sent, self.whole[0])

    @property
    def block_rows(self) -> int:
        """Rows that share a scale, where it is not all."""
        if self.square_blocks:
            return self.recipe.layout.block.columns
        return self.recipe.layout.block.rows or 1

    @property
    def cut_blocks(self) -> list[int]:
        """The rows of blocks that more than one rank holds, counted in blocks."""
        if self.by_columns:
            return []
        cuts = range(self.rows_sent, self.whole[0], self.rows_sent)
        return sorted({cut // self.block_rows for cut in cuts if cut % self.block_rows})

    def statistics(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers, flat, whose maxima over the ranks `sent` needs; none where each scale lies within a part."""
        self._check()
        found = []
        if self.one_for_all:
            found.append(finite_amax(x, False).reshape(1))
        elif self._one_per_row:
            found.append(self._marked(finite_amax(x, True), x, -1))
        found += [self._of_cut_block(x, block) for block in self.cut_blocks]
        return torch.cat(found) if found else x.new_empty(0, dtype=torch.float32)

    @property
    def one_for_all(self) -> bool:
        """Whether a scale follows from the whole weight; then the first of `statistics` is its amax."""
        return choices(self.recipe).one_for_all

    @property
    def _one_per_row(self) -> bool:
        return self.recipe.layout.block == (1, 0) and self.by_columns

    def _marked(self, amax: torch.Tensor, x: torch.Tensor, axes: Any) -> torch.Tensor:
        if finfo(self.recipe.element).has_nan:
            return amax
        return torch.where(torch.isnan(x).any(axes), _NAN, amax)

    def _of_cut_block(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """The amax of this rank's rows of a row of blocks, block by block; 0 where it has none."""
        side, rows = self.recipe.layout.block.columns, self.block_rows
        low, high = (min(max(edge - self.begin, 0), self.part[0]) for edge in (block * rows, (block + 1) * rows))
        blocks = -(-x.shape[1] // side)
        if high == low:
            return x.new_zeros(blocks, dtype=torch.float32)
        held = torch.nn.functional.pad(x[low:high].float(), (0, -x.shape[1] % side))
        held = held.reshape(high - low, blocks, side)
        magnitude = torch.where(torch.isfinite(held), held.abs(), 0.0)
        return self._marked(magnitude.amax((0, 2)), held.transpose(0, 1), (1, 2))

    def _check(self) -> None:
        if self.by_columns:
            block = self.recipe.layout.block.columns or 1
            if self.part[1] % block:
                raise ValueError(
                    f"{place(self.group)} must hold whole blocks of {block} columns, got {self.part[1]} of "
                    f"{self.whole[1]}: legal cuts are the multiples of {block}"
                )
        elif self.cut_blocks and choices(self.recipe).searches:
            raise ValueError(
                f"a search for scales must have whole blocks of {self.block_rows} rows on {place(self.group)}, got "
                f"cuts every {self.rows_sent} rows: legal cuts are the multiples of {self.block_rows}"
            )

    def cast(self, x: torch.Tensor, agreed: torch.Tensor) -> ScaledTensor:
        """The part quantized to the bytes that the whole has there; scales of several rows repeat for each row where
        blocks are cut."""
        amax, cut = self._split(agreed)
        if not cut:
            return verbs.cast(x, self.recipe, amax=amax, square_blocks=self.square_blocks)
        rows, end = self.block_rows, self.begin + self.part[0]
        above, below = self.begin % rows, -end % rows if end < self.whole[0] else 0
        x = torch.nn.functional.pad(x, (0, 0, above, below))
        side = self.recipe.layout.block.columns
        if above and self.begin // rows in cut:
            x[0, ::side] = cut[self.begin // rows].to(x.dtype)
        if below and end // rows in cut:
            x[-1, ::side] = cut[end // rows].to(x.dtype)
        made = verbs.cast(x, self.recipe, amax=amax, square_blocks=self.square_blocks)
        kept = slice(above, above + self.part[0])
        scale = made.scale if self.square_blocks else raw(made.scale).repeat_interleave(rows, 0).view(made.scale.dtype)
        return made._with(data=made.data[kept], scale=scale[kept])

    def _split(self, agreed: torch.Tensor) -> tuple[Any, dict[int, torch.Tensor]]:
        """amax= of the cast, and that of each row of blocks that is cut."""
        amax: Any = None
        if self.one_for_all:
            amax, agreed = agreed[0], agreed[1:]
        elif self._one_per_row:
            amax, agreed = agreed[: self.whole[0]], agreed[self.whole[0] :]
            amax = torch.where(torch.isinf(amax), torch.nan, amax)
        blocks = self.cut_blocks
        if not blocks:
            return amax, {}
        agreed = torch.where(torch.isinf(agreed), torch.nan, agreed)
        return amax, dict(zip(blocks, agreed.reshape(len(blocks), -1), strict=True))

    def sent(self, x: torch.Tensor, agreed: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        """What FSDP2 gathers of this part, and the function of what it gathered that makes the whole: a ScaledTensor,
        and the tensors of it that do not lie in FSDP2's memory."""
        made = self.cast(x, agreed)
        return self._sent_columns(made) if self.by_columns else self._sent_rows(made)

    def _sent_rows(self, made: ScaledTensor) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        form, blocks, repeated = made._form, self.block_rows, bool(self.cut_blocks)
        stored = 1 if self.square_blocks or repeated else blocks  # rows that one row of scales is for
        inputs, kept = [], {}
        alone = dist.get_world_size(self.group) == 1  # then FSDP2 hands over the first of the inputs only
        for name in form.parts:
            part = getattr(made, name)
            if part.ndim < 2 or (alone and name != "data"):
                kept[name] = part
                continue
            rows = -(-self.rows_sent // (1 if name == "data" else stored))
            inputs.append(_with_rows(part, rows))
        dtypes = {name: getattr(made, name).dtype for name in form.parts}

        def whole(outs: Sequence[torch.Tensor]) -> tuple[ScaledTensor, tuple[Any, ...]]:
            parts = {name: _also_read_here(part) for name, part in kept.items()}
            own, rest = list(parts.values()), iter(outs)
            for name in form.parts:
                if name in kept:
                    continue
                bits = next(rest)
                per = 1 if name == "data" else stored
                bits = bits[: -(-self.whole[0] // per)]
                if repeated and name != "data" and not self.square_blocks:
                    bits = bits[::blocks].clone(memory_format=torch.contiguous_format)
                    own.append(bits)
                parts[name] = bits.view(dtypes[name])
            return ScaledTensor._of(form, *form.place([parts[name] for name in form.parts])), tuple(own)

        return tuple(inputs), whole

    def _sent_columns(self, made: ScaledTensor) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        """FSDP2 gathers columns of tensors of the parameter's shape alone: the scales go by a collective of their own,
        begun here. Codes of 4 bits go one to a byte, for FSDP2 wants as many bytes as the parameter has elements."""
        world, form = dist.get_world_size(self.group), made._form.with_columns(self.whole[1])
        flying = {}
        for name in form.parts[1:]:
            part = getattr(made, name)
            if part.ndim == 2 and not (self._one_per_row and name == "scale"):
                mine = part.contiguous().view(torch.uint8)
                everyone = mine.new_empty(world, *mine.shape)
                work = gather_into(everyone.view(-1), mine.view(-1), group=self.group, async_op=True)
                flying[name] = work, everyone
        dtypes = {name: getattr(made, name).dtype for name in form.parts}

        def whole(outs: Sequence[torch.Tensor]) -> tuple[ScaledTensor, tuple[Any, ...]]:
            codes, own = outs[0].view(self.whole), []
            if form.packing != "one":
                codes = packed(codes, form.packing)
                own.append(codes)
            parts = {"data": codes.view(dtypes["data"])}
            for name in form.parts[1:]:
                if name not in flying:
                    parts[name] = _also_read_here(getattr(made, name))
                    continue
                work, everyone = flying[name]
                work.wait()
                joined = torch.cat(list(_also_read_here(everyone)), 1)
                own.append(joined)
                parts[name] = joined.view(dtypes[name])
            return ScaledTensor._of(form, *form.place([parts[name] for name in form.parts])), tuple(own)

        return (contiguous(codes_of(made)),), whole


def _also_read_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which was made on another stream: FSDP2 casts and gathers on streams of its own, well ahead of the
    products. Without this its memory would go to the next gather as soon as nothing holds the tensor."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    """The bytes of a part, with rows of zeros to make so many."""
    bits = part.contiguous().view(torch.uint8)
    short = rows - bits.shape[0]
    return torch.nn.functional.pad(bits, (0, 0, 0, short)) if short else bits


def mesh_of(parameter: Any) -> Any:
    """The axis of a parameter's mesh along which FSDP2 shards it: the first that does, for it comes before those of
    tensor parallelism."""
    mesh = parameter.device_mesh
    if mesh.ndim == 1:
        return mesh
    axis = next(i for i, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return mesh[mesh.mesh_dim_names[axis]]


def reduced(statistics: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """The maxima over the ranks of a group, by one all-reduce for all of them; by none where there is nothing."""
    sizes = [found.numel() for found in statistics]
    if not sum(sizes) or dist.get_world_size(group) == 1:
        return list(statistics)
    packed = torch.cat(list(statistics))
    home = packed.device
    packed = packed.to(device_of(group))
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    return list(packed.to(home).split(sizes))
