# SPDX-License-Identifier: Apache-2.0
"""The weight of a training layer under FSDP2: floats at rest, codes on the way.

rank 0: rows 0 …        rank 1: rows …          floats, which the optimizer updates
  │  cast, with the amax of the whole             `ScaledParameter.fsdp_pre_all_gather`
  ▼                       ▼
codes │ scales          codes │ scales
└──── bytes, with those of the FSDP unit's other parameters, in one all-gather ────┘
  ▼                       ▼
the whole weight's codes, for the layer's products: a `QuantizedWeight`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from breccia import verbs
from breccia.distributed import rules
from breccia.distributed.fsdp import shards
from breccia.distributed.fsdp.resting import EQUAL, resting_of
from breccia.distributed.fsdp.shards import Shard
from breccia.frameworks.torch.byte_parameters import seen_as
from breccia.frameworks.torch.weights import LinearWeight, MadeWeight, QuantizedWeight
from breccia.recipe_names import resolve
from breccia.recipes import DelayedScaling, ScalingRecipe

_aten = torch.ops.aten
_VIEWS = {_aten.detach.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default}
# Results of these are parts or copies of the parameter, on any device: FSDP2 cuts and pads with them.
_KEPT = _VIEWS | EQUAL | {_aten.new_zeros.default, _aten.empty_like.default}


@dataclass(frozen=True)
class About:
    """What the parts of a parameter have in common."""

    recipe: ScalingRecipe
    square_blocks: bool
    shape: tuple[int, ...]  # of the whole, or of what a tensor-parallel rank has of it
    peers: Any = None  # the tensor-parallel group whose ranks have the rest


class Clock:
    """How often the memory that views share was written to."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1


class ScaledParameter(LinearWeight):
    """A parameter of floats (N, K) that ``torch.distributed.fsdp.fully_shard`` shards as floats and gathers as codes.

    `breccia.nn.ScaledLinear` multiplies by the codes as they come; other layers see their values. Optimizers, gradients
    and checkpoints see floats. Where the scale of a part follows from other ranks' parts, the ranks first agree on it:
    `precompute_amax_` does that for all parameters of a model by one all-reduce, otherwise each gather does.

    Args:
        w: float tensor (N, K) or parameter, whose memory is used; a DTensor that a tensor-parallel style has dealt out
            gives one, whose scales are those of the whole weight.
        recipe: what to gather, or its name.
        at_rest: "bf16": the shards keep the floats of ``w`` in their own dtype, for an optimizer. "codes": they hold
            codes and scales, which checkpoints hold and ``copy_`` alone writes to, and gradients pass to the layer's
            input alone.
        square_blocks: as of `breccia.cast`.

    Raises:
        TypeError: ``w`` is no float tensor, or the recipe takes its scale from a history.
        ValueError: ``w`` is not 2-D, or the recipe does not suit its shape.
    """

    _tensor: Any
    _about: About
    _clock: Clock
    _reduced: tuple[int, Any] | None

    @staticmethod
    def __new__(
        cls, w: torch.Tensor, recipe: ScalingRecipe | str, at_rest: str = "bf16", *, square_blocks: bool = False
    ) -> Any:
        if isinstance(w, DTensor):
            return _dealt(w, resolve(recipe), at_rest, square_blocks)
        recipe = resolve(recipe)
        if at_rest not in ("bf16", "codes"):
            raise ValueError(f"at_rest must be 'bf16' or 'codes', got {at_rest!r}")
        _check(w, recipe, square_blocks)
        if at_rest == "codes":
            scaled = verbs.cast(w.detach(), recipe, square_blocks=square_blocks)
            resting = resting_of(scaled, w.dtype, square_blocks)
            resting._is_param = True  # for torch.nn.Module, which then registers it
            return resting
        about = About(recipe, square_blocks, tuple(w.shape))
        made = _made(w.detach().contiguous(), about, Clock())
        made._is_param = True
        made.requires_grad_(w.requires_grad)
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Any, ...], Any]:
        """FSDP2's hook before a gather: what this rank sends.

        Args:
            mesh: of the ranks that hold the parts.

        Returns:
            The bytes of its part, padded to the rows that each rank sends, and what `fsdp_post_all_gather` needs.

        Raises:
            ValueError: the cut goes through blocks of a recipe that allows none.
        """
        shard = self._shard(mesh)
        known = self._reduced
        if known is None or known[0] != self._clock.ticks:
            _agree([(self, shard)])
        assert self._reduced is not None
        return shard.sent(self._tensor, self._reduced[1])

    def fsdp_post_all_gather(
        self, outs: tuple[Any, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """FSDP2's hook after a gather: the whole weight, over the memory that the ranks' bytes came to.

        Args:
            outs: the gathered bytes.
            metadata: what `fsdp_pre_all_gather` gave besides them.
            param_dtype: what the weight looks like to torch.
            out: the weight of an earlier gather, which is filled again.

        Returns:
            The weight, and the tensors of it that do not lie in ``outs``; None with ``out``.

        Raises:
            TypeError: ``out`` was not made here.
        """
        scaled, own = metadata(outs)
        if out is None:
            return QuantizedWeight(scaled, param_dtype, self._about.square_blocks), own
        here = getattr(out, "_local_tensor", out)
        if not isinstance(here, QuantizedWeight):
            raise TypeError(f"out must be the QuantizedWeight of the first gather, got {type(here).__name__}")
        here.refill_(scaled)
        return None

    def _shard(self, mesh: Any) -> Shard:
        about = self._about
        return Shard(about.recipe, about.square_blocks, about.shape, tuple(self.shape), mesh.get_group())

    def _keep_reduced(self, reduced: Any) -> None:
        self._reduced = (self._clock.ticks, reduced)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_tensor"], self._about

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], about: Any, size: Any, stride: Any) -> ScaledParameter:
        return _made(inner["_tensor"], about, Clock())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(ScaledParameter, lambda p: p._tensor, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable or func.namespace == "c10d":  # whose collectives do not say what they write to
            tree_map_only(ScaledParameter, lambda p: p._clock.tick(), (args, kwargs))
        if func._schema.is_mutable:
            return args[0] if isinstance(args[0], ScaledParameter) and isinstance(result, torch.Tensor) else result
        if func not in _KEPT or not isinstance(args[0], ScaledParameter):
            return result
        source = args[0]

        def part(tensor: Any) -> Any:
            made = _made(tensor, source._about, source._clock if func in _VIEWS else Clock())
            known = source._reduced
            if func in EQUAL and tensor.dtype == source.dtype and known and known[0] == source._clock.ticks:
                made._keep_reduced(known[1])
            return made

        return tree_map_only(torch.Tensor, part, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tensor.__reduce_ex__(protocol)  # files hold ordinary tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledParameter:
        made = _made(self._tensor.clone(), self._about, Clock())
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    def __repr__(self) -> str:
        return f"ScaledParameter({self._tensor!r}, recipe={self._about.recipe})"


def _quantized(parameter: ScaledParameter) -> MadeWeight:
    """See `LinearWeight`; where nothing is sharded."""
    about = parameter._about
    scaled = verbs.cast(parameter._tensor, about.recipe, square_blocks=about.square_blocks)
    return MadeWeight(scaled, about.square_blocks)


ScaledParameter._quantize = staticmethod(_quantized)


def precompute_amax_(model: torch.nn.Module) -> torch.nn.Module:
    """Let the ranks agree on the scales of all `ScaledParameter` of a model by one all-reduce for each group that
    shards them. Call it after the optimizer's step; without it, each gather asks the other ranks for itself.

    Args:
        model: after ``fully_shard``. What it was told lasts until the parameters change.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    groups: dict[Any, list[tuple[ScaledParameter, Shard]]] = {}
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", None)
        if isinstance(local, ScaledParameter):
            shard = local._shard(shards.mesh_of(parameter))
            groups.setdefault((shard.group, local._about.peers), []).append((local, shard))
    with torch.no_grad():
        for held in groups.values():
            _agree(held)
    return model


def _agree(held: list[tuple[ScaledParameter, Shard]]) -> None:
    """Let the ranks of one group, and of one tensor-parallel group, agree on the scales of parameters."""
    agreed = shards.reduced([shard.statistics(local._tensor) for local, shard in held], held[0][1].group)
    peers = held[0][0]._about.peers
    if peers is not None:
        wide = [i for i, (_, shard) in enumerate(held) if shard.one_for_all]
        for i, first in zip(wide, shards.reduced([agreed[i][:1] for i in wide], peers), strict=True):
            agreed[i] = torch.cat([first, agreed[i][1:]])
    for (local, _), found in zip(held, agreed, strict=True):
        local._keep_reduced(found)


def _dealt(w: DTensor, recipe: ScalingRecipe, at_rest: str, square_blocks: bool) -> Any:
    """The parameter of a weight that a tensor-parallel style has dealt out: a DTensor still."""
    if at_rest != "bf16" or w.device_mesh.ndim != 1:
        raise ValueError("w must be a plain tensor for at_rest='codes', or dealt out along one axis, got a DTensor")
    placement = w.placements[0]
    if placement.is_shard():
        world = w.device_mesh.size()
        rules.check_cut(tuple(w.shape), recipe.layout, recipe, placement.dim, world, "w", square_blocks)
    local = w.detach().to_local().contiguous()
    _check(local, recipe, square_blocks)
    peers = w.device_mesh.get_group() if placement.is_shard() else None
    about = About(recipe, square_blocks, tuple(local.shape), peers)
    part = _made(local, about, Clock())
    whole = DTensor.from_local(part, w.device_mesh, w.placements, run_check=False, shape=w.shape, stride=w.stride())
    return torch.nn.Parameter(whole, requires_grad=w.requires_grad)


def _made(tensor: Any, about: About, clock: Clock) -> ScaledParameter:
    made: ScaledParameter = seen_as(ScaledParameter, tensor, tensor.dtype)
    made._tensor, made._about, made._clock, made._reduced = tensor, about, clock, None
    return made


def _check(w: Any, recipe: ScalingRecipe, square_blocks: bool) -> None:
    if not isinstance(w, torch.Tensor) or not w.is_floating_point():
        raise TypeError(f"w must be a float tensor, got {getattr(w, 'dtype', type(w).__name__)}")
    if w.ndim != 2:
        raise ValueError(f"w must have two axes, (N, K), got shape {tuple(w.shape)}")
    if isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"recipe must take its scale from the weight itself, got {recipe}, which takes it from a history: use "
            "breccia.Float8CurrentScaling"
        )
    row = torch.zeros(1, w.shape[1])
    verbs.cast(row, recipe, square_blocks=square_blocks)  # raises what the recipe has against the columns
