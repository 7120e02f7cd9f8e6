# SPDX-License-Identifier: Apache-2.0
"""Collectives of ScaledTensors. Each sends one buffer of bytes, or the parts from where they lie in one operation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from breccia import verbs
from breccia.distributed.gather import agreement, in_place
from breccia.distributed.gather.buffers import Wire
from breccia.distributed.gather.groups import Handle, check_tensor, device_of, gather_into, tells, wait
from breccia.distributed.sharding import Plan, check_plan, deal, plan
from breccia.frameworks.torch.meta import flatten, unflatten
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor, check_kernels
from breccia.value import joining, slicing

_HEADER_BYTES = 4096


@tells(1)
def all_gather(
    scaled: ScaledTensor, group: Any = None, dim: int = 0, *, plan: Plan | None = None, async_op: bool = False
) -> Any:
    """The whole tensor, from the parts that the ranks hold along axis ``dim``.

    Args:
        scaled: this rank's part, of torch tensors; whole blocks long along ``dim`` on every rank but the last that
            holds any. Transposed views are welcome.
        group: the ranks; None for all.
        dim: the axis along which the parts lie; may be negative. ``plan.dim`` where a plan is given.
        plan: how the tensor is dealt out, where `plan` did it. Without it the ranks first tell each other the form and
            how long their parts are, 16 bytes each; with it they do so at the first gather of a form by that plan, and
            later gathers trust each rank to hold that form. Parts that `breccia.distributed.cast` made are trusted to
            be of one tensor: their scales are not compared.
        async_op: return a `Handle` at once; its ``wait()`` returns the tensor.

    Returns:
        ScaledTensor on every rank, with the bytes of the whole tensor's own cast where `cast` made the parts.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        TypeError: ``scaled`` is not a ScaledTensor of torch tensors.
        ValueError: a part cuts a block, ranks hold parts of different forms, or they have different scales where the
            tensor can have only one (`amax` makes it); or another rank has failed before it came here, which ends the
            use of the group: its ranks are no longer in step.
    """
    check_plan(plan)
    return _result(_gathered(_checked(scaled), group, dim if plan is None else plan.dim, plan), async_op)


def _gathered(scaled: ScaledTensor, group: Any, dim: int, plan: Plan | None) -> Handle:
    if plan is not None and (gathering := in_place.known(scaled, dim, plan, group)) is not None:
        return gathering.start(scaled, group)
    if scaled.layout.axis == -2:
        turned = _gathered(scaled.mT, group, _swapped(dim, scaled.ndim), _turned(plan))
        return turned.then(lambda whole: whole.mT)
    axis = _axis(dim, scaled.ndim)
    world = dist.get_world_size(group)
    extents = agreement.extents(scaled, axis, group) if plan is None else agreement.planned(scaled, axis, plan, group)
    _check_cuts(scaled, axis, extents)
    if in_place.suits(scaled, axis, extents):
        gathering = in_place.Gathering.of(scaled, group)
        if plan is not None:
            in_place.keep(gathering, scaled, dim, plan, group)
        return gathering.start(scaled, group)
    wires = [Wire(scaled, axis, extent) for extent in extents]
    size = max(wire.bytes for wire in wires)
    mine = _buffer(scaled, size)
    wires[dist.get_rank(group)].write(scaled, mine)
    everyone = mine.new_empty(world * size)
    work = gather_into(everyone, mine, group=group, async_op=True)

    def finish() -> ScaledTensor:
        return _joined([wire.read(everyone[i * size : i * size + wire.bytes]) for i, wire in enumerate(wires)], axis)

    return Handle(work, finish, group)


@tells(3)
def all_to_all(
    scaled: ScaledTensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: Any = None,
    *,
    async_op: bool = False,
) -> Any:
    """Send runs of axis 0 to the ranks, and join what they send: tokens to their experts, and back.

    Args:
        scaled: what this rank sends, the run for rank 0 first.
        out_splits: how much of axis 0 comes from each rank.
        in_splits: how much of axis 0 goes to each rank; whole blocks each.
        group, async_op: as of `all_gather`.

    Returns:
        ScaledTensor of ``sum(out_splits)`` along axis 0.

    Raises:
        RuntimeError, TypeError: see `all_gather`.
        ValueError: the splits do not suit the tensor or the number of ranks, a block would be cut, or the runs have
            different scales where the tensor can have only one.
    """
    scaled = _checked(scaled)
    if scaled.layout.axis != -1:
        raise ValueError("scaled must not be a transposed view: send its .mT, then take .mT of the result")
    axis, world = -scaled.ndim, dist.get_world_size(group)
    for name, splits in (("out_splits", out_splits), ("in_splits", in_splits)):
        if len(splits) != world or min(splits) < 0:
            raise ValueError(f"{name} must have {world} numbers, one for each rank, none negative, got {list(splits)}")
    if sum(in_splits) != scaled.shape[0]:
        raise ValueError(f"in_splits must sum to scaled.shape[0], {scaled.shape[0]}, got {sum(in_splits)}")
    for name, splits in (("in_splits", in_splits), ("out_splits", out_splits)):
        _check_cuts(scaled, axis, splits, name)
    agreement.check_alike("scaled", agreement.form(scaled, axis), scaled.data.device, group)
    received = [Wire(scaled, axis, n) for n in out_splits]
    work, buffer = _exchange(scaled, axis, in_splits, received, group)
    return _result(Handle(work, lambda: _joined(_read_all(received, buffer), axis), group), async_op)


@tells(2)
def reduce_scatter(
    x: torch.Tensor, recipe: ScalingRecipe | str, group: Any = None, dim: int = 0, *, async_op: bool = False
) -> Any:
    """This rank's part of the sum of all ranks' tensors, which travel quantized: cast, all-to-all, and a sum in
    float32 in the order of ranks.

    Args:
        x: float tensor of one shape on all ranks.
        recipe: what travels, or its name. Each rank's tensor has scales of its own.
        group, async_op: as of `all_gather`.
        dim: the axis to deal out, by `plan`.

    Returns:
        float32 tensor: ``plan(x.shape, recipe, world, dim).cut(sum, rank)``, the same on every run.

    Raises:
        RuntimeError, TypeError, ValueError: see `all_gather` and `breccia.cast`.
    """
    recipe = resolve(recipe)
    check_tensor(x, "x")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    dealt = plan(tuple(x.shape), recipe, world, dim)
    agreement.check_alike("x", (dealt.shape, dealt.dim, recipe), x.device, group)
    axis = dealt.dim - x.ndim
    scaled = verbs.cast(x, recipe)
    lengths = [end - begin for begin, end in dealt.ranges]
    received = [Wire(scaled, axis, lengths[rank])] * world
    work, buffer = _exchange(scaled, axis, lengths, received, group)

    def finish() -> torch.Tensor:
        parts = map(verbs.dequantize, _read_all(received, buffer))
        total: torch.Tensor = next(parts)
        for values in parts:
            total.add_(values)
        return total

    return _result(Handle(work, finish, group), async_op)


@tells(2)
def broadcast(scaled: ScaledTensor | None, src: int = 0, group: Any = None, *, async_op: bool = False) -> Any:
    """The tensor of rank ``src`` of the group, on every rank.

    Args:
        scaled: on ``src`` the tensor; elsewhere it does not matter, None.
        src: rank within the group.
        group, async_op: as of `all_gather`. The form of the tensor is sent before it, and waited for.

    Returns:
        A ScaledTensor; with ``async_op`` a `Handle` of it.

    Raises:
        RuntimeError, TypeError: see `all_gather`.
        ValueError: ``src`` is not a rank of the group.
    """
    like, turned, _ = _announced(scaled, src, group)
    wire = Wire(like, -1, like.shape[-1])
    buffer = torch.empty(wire.bytes, dtype=torch.uint8, device=device_of(group))
    if dist.get_rank(group) == src:
        wire.write(like, buffer)
    work = dist.broadcast(buffer, _global_rank(src, group), group=group, async_op=True)
    made = Handle(work, lambda: wire.read(buffer), group)
    return _result(made.then(lambda whole: whole.mT) if turned else made, async_op)


@tells(2)
def scatter(
    scaled: ScaledTensor | None, src: int = 0, group: Any = None, dim: int = 0, *, async_op: bool = False
) -> Any:
    """This rank's part of the tensor of rank ``src``, dealt out by `plan`.

    Args:
        scaled: on ``src`` the whole tensor; elsewhere it does not matter, None.
        src: rank within the group.
        dim: the axis to deal out; may be negative.
        group, async_op: as of `broadcast`.

    Returns:
        A ScaledTensor; with ``async_op`` a `Handle` of it.

    Raises:
        RuntimeError, TypeError: see `all_gather`.
        ValueError: ``src`` is not a rank of the group, or there is no axis ``dim``.
    """
    like, turned, dims = _announced(scaled, src, group, dim)
    axes = [_swapped(one, like.ndim) if turned else _axis(one, like.ndim) for one in dims]
    agreement.check_one("dim must be alike", axes, group, "passed another")
    axis = axes[0]
    block = slicing.block_along(like.layout, like.is_packed, axis)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranges = deal(like.shape[axis], block, world)
    wires = [Wire(like, axis, end - begin) for begin, end in ranges]
    size = max(wire.bytes for wire in wires)
    mine = torch.empty(size, dtype=torch.uint8, device=device_of(group))
    lists = None
    if rank == src:
        lists = [torch.empty_like(mine) for _ in wires]
        for wire, buffer, cut in zip(wires, lists, ranges, strict=True):
            wire.write(like[(slice(None),) * (like.ndim + axis) + (slice(*cut),)], buffer)
    work = dist.scatter(mine, lists, _global_rank(src, group), group=group, async_op=True)
    made = Handle(work, lambda: wires[rank].read(mine[: wires[rank].bytes]), group)
    return _result(made.then(lambda part: part.mT) if turned else made, async_op)


def _result(handle: Handle, async_op: bool) -> Any:
    return handle if async_op else handle.wait()


def _checked(scaled: Any) -> ScaledTensor:
    if not isinstance(scaled, ScaledTensor) or not isinstance(scaled.data, torch.Tensor):
        kind = f"one of {type(scaled.data).__name__}" if isinstance(scaled, ScaledTensor) else type(scaled).__name__
        raise TypeError(f"scaled must be a ScaledTensor of torch tensors, got {kind}")
    check_kernels(scaled)
    return scaled


def _axis(dim: int, ndim: int) -> int:
    """An axis, counted from the end."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be from {-ndim} to {ndim - 1}, got {dim}")
    return dim % ndim - ndim


def _swapped(dim: int, ndim: int) -> int:
    """The axis of a transposed view that is axis ``dim``."""
    axis = _axis(dim, ndim)
    return {-1: -2, -2: -1}.get(axis, axis)


def _turned(dealt: Plan | None) -> Plan | None:
    if dealt is None:
        return None
    *batch, rows, columns = dealt.shape
    ndim = len(dealt.shape)
    return replace(dealt, shape=(*batch, columns, rows), dim=_swapped(dealt.dim, ndim) % ndim)


def _buffer(like: ScaledTensor, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.data.device)


def _check_cuts(scaled: ScaledTensor, axis: int, extents: Sequence[int], name: str = "") -> None:
    block = slicing.block_along(scaled.layout, scaled.is_packed, axis)
    held = [i for i, extent in enumerate(extents) if extent]
    for rank in held[:-1]:
        if extents[rank] % block:
            what = f"{name}[{rank}]" if name else f"the part of rank {rank}"
            raise ValueError(
                f"{what} must be whole blocks of {block} long along axis {axis}, got {extents[rank]}: legal cuts are "
                f"the multiples of {block}"
            )


def _joined(parts: list[ScaledTensor], axis: int) -> ScaledTensor:
    held = [part for part in parts if part.shape[axis]] or parts[:1]
    try:
        return held[0] if len(held) == 1 else joining.concatenate(held, axis)
    except ValueError as error:
        raise ValueError(f"{error} (cast with amax=breccia.distributed.amax(...) for one scale on all ranks)") from None


def _exchange(
    scaled: ScaledTensor, axis: int, lengths: Sequence[int], received: list[Wire], group: Any
) -> tuple[Any, torch.Tensor]:
    """Send runs of the tensor to the ranks. The work, and the buffer that what they send comes into."""
    sent = [Wire(scaled, axis, n) for n in lengths]
    send = _buffer(scaled, sum(wire.bytes for wire in sent))
    at = row = 0
    for wire in sent:
        run = scaled[(slice(None),) * (scaled.ndim + axis) + (slice(row, row + wire.extent),)]
        wire.write(run, send[at : at + wire.bytes])
        at, row = at + wire.bytes, row + wire.extent
    receive = send.new_empty(sum(wire.bytes for wire in received))
    sizes = [wire.bytes for wire in received], [wire.bytes for wire in sent]
    return dist.all_to_all_single(receive, send, *sizes, group=group, async_op=True), receive


def _read_all(wires: list[Wire], buffer: torch.Tensor) -> list[ScaledTensor]:
    parts, at = [], 0
    for wire in wires:
        parts.append(wire.read(buffer[at : at + wire.bytes]))
        at += wire.bytes
    return parts


def _global_rank(rank: int, group: Any) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _announced(scaled: Any, src: int, group: Any, dim: int = 0) -> tuple[ScaledTensor, bool, list[int]]:
    """The tensor itself on ``src``, upright; elsewhere one of its form without memory. Whether it was turned, and what
    each rank passed as ``dim``."""
    if not 0 <= src < dist.get_world_size(group):
        raise ValueError(f"src must be a rank of the group, 0 to {dist.get_world_size(group) - 1}, got {src}")
    passed = agreement.tell([src, dim], device_of(group), group)
    agreement.check_one("src must be alike", [one for one, _ in passed], group, "passed another")
    dims = [one for _, one in passed]
    here = dist.get_rank(group) == src
    message = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    text, problem = b"", None
    if here:
        try:
            text = _header(_checked(scaled))
        except TypeError as error:  # the others wait for a message: they get this one
            text, problem = json.dumps({"error": str(error)[: _HEADER_BYTES // 8]}).encode(), error
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    message = message.to(device_of(group))
    wait(dist.broadcast(message, _global_rank(src, group), group=group, async_op=True), group)
    if problem is not None:
        raise problem
    told = json.loads(text if here else bytes(message.cpu().numpy()).rstrip(b"\0"))
    if "error" in told:
        raise RuntimeError(f"rank {src} of the group had nothing to send: {told['error']}")
    if here:
        return (scaled.mT if told["turned"] else scaled), told["turned"], dims
    empty = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in told["parts"]]
    like: ScaledTensor = unflatten(empty, told["key"])
    return like, told["turned"], dims


def _header(scaled: ScaledTensor) -> bytes:
    """The form of a tensor, of its transpose where it is a transposed view."""
    turned = scaled.layout.axis == -2
    tensors, key = flatten(scaled.mT if turned else scaled)
    parts = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    return json.dumps({"key": key, "parts": parts, "turned": turned}).encode()
