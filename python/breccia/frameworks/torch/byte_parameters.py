# SPDX-License-Identifier: Apache-2.0
"""Parameters of bytes that ``fully_shard`` shards.

torch before 2.13 first makes each sharded parameter one that requires a gradient, which no tensor of integers can.
There the bytes look like codes of FP8, and stay bytes for all that torch does with them:

    dtype that torch sees    float8_e4m3fn (rows, bytes)
    memory                   uint8 (rows, bytes)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_SEEN = torch.float8_e4m3fn
# Results of these are bytes of a parameter too: FSDP2 cuts, pads and moves with them.
_KEPT = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten._pin_memory.default,
    _aten._to_copy.default,
}
_integers_shard = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 13)


def seen_as(cls: Any, data: torch.Tensor, dtype: torch.dtype) -> Any:
    """A tensor of a subclass that looks like another of a dtype, and has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        data.shape,
        strides=data.stride(),
        storage_offset=data.storage_offset(),
        dtype=dtype,
        layout=data.layout,
        device=data.device,
        pin_memory=data.is_pinned(),
    )


def parameter_of(data: Any) -> Any:
    """A frozen parameter of bytes over the memory of a plain tensor or a DTensor."""
    if not _integers_shard:
        data = _with_local(data, BytesSeenAsFloats)
    return torch.nn.Parameter(data, requires_grad=False)


def disguised(tensor: Any) -> bool:
    """Whether a tensor, or the local part of a DTensor, holds bytes that look like floats."""
    return isinstance(getattr(tensor, "_local_tensor", tensor), BytesSeenAsFloats)


def bytes_in(tensor: Any) -> Any:
    """The same memory as uint8, where `disguised`; otherwise the tensor as it is."""
    return _with_local(tensor.detach(), lambda local: local._bytes) if disguised(tensor) else tensor


def applied(fn: Any, tensor: Any) -> Any:
    """The result of a function that moves a module's tensors: of bytes, where `disguised`."""
    if not disguised(tensor):
        return fn(tensor)
    return _with_local(fn(bytes_in(tensor)), BytesSeenAsFloats)


def _with_local(tensor: Any, change: Any) -> Any:
    """The tensor with another local part of the same shape."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return change(tensor)
    return type(tensor).from_local(
        change(local),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class BytesSeenAsFloats(torch.Tensor):  # type: ignore[misc]
    """Bytes of the dtype float8_e4m3fn: operators copy and cut them, and get uint8 for all else."""

    _bytes: Any

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> BytesSeenAsFloats:
        made: BytesSeenAsFloats = seen_as(cls, data, _SEEN)
        made._bytes = data
        return made

    def __init__(self, data: torch.Tensor) -> None:
        pass

    # --- how FSDP2 gathers it ---------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """FSDP2's hook before a gather: this rank's bytes, with rows of zeros where the first rank has more."""
        whole_rows = self._bytes.shape[1:] == outer_size[1:]
        short = -(-outer_size[0] // mesh.size()) - self._bytes.shape[0] if whole_rows else 0
        padding = [0, 0] * (self._bytes.ndim - 1) + [0, short]
        return (torch.nn.functional.pad(self._bytes, padding) if short else self._bytes.contiguous(),), None

    def fsdp_post_all_gather(
        self, outs: tuple[Any, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """FSDP2's hook after a gather: the bytes of all ranks, and no tensors besides; None with ``out``, the result of
        an earlier gather over the same memory."""
        return None if out is not None else (outs[0].view(_SEEN), ())

    # --- how torch sees it ------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_bytes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], about: Any, size: Any, stride: Any) -> BytesSeenAsFloats:
        return BytesSeenAsFloats(inner["_bytes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[0] if args else None
        kept = func in _KEPT and isinstance(source, BytesSeenAsFloats)
        plain_args, plain_kwargs = tree_map_only(BytesSeenAsFloats, lambda held: held._bytes, (args, kwargs or {}))
        if kept or func is _aten.copy_.default:
            plain_kwargs = {name: value for name, value in plain_kwargs.items() if name != "dtype"}
        if func is _aten.copy_.default:
            plain_args = tuple(_as_bytes(arg) for arg in plain_args[:2]) + tuple(plain_args[2:])
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return source if isinstance(result, torch.Tensor) else result
        return tree_map_only(torch.Tensor, BytesSeenAsFloats, result) if kept else result

    def __deepcopy__(self, memo: dict[int, Any]) -> BytesSeenAsFloats:
        copy = BytesSeenAsFloats(self._bytes.clone())
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = getattr(self, "_is_param", False)
        # Files hold ordinary tensors.
        plain = torch.nn.Parameter(self._bytes, requires_grad=False) if is_parameter else self._bytes
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"BytesSeenAsFloats({self._bytes!r})"


def _as_bytes(tensor: Any) -> Any:
    """The bytes of a tensor of the dtype that torch sees; another tensor as it is."""
    return tensor.view(torch.uint8) if isinstance(tensor, torch.Tensor) and tensor.dtype == _SEEN else tensor
