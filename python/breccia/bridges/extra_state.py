# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``_extra_state``: what a layer with delayed scaling keeps beside its weight, a pickle of its
scales and amax histories (`TransformerEngineBaseModule.get_extra_state`, 2.20). It is read without TransformerEngine
and without calling anything that the pickle names."""

from __future__ import annotations

import collections
import functools
import io
import math
import pickle
import struct
from typing import Any

import numpy as np

from breccia.bridges.common import Array

ENDING = "._extra_state"
_MOST = 16 << 20  # bytes; a history of 1024 numbers of three tensors takes 12 KiB
_PARTS = 3  # inputs, weight and outputs of each product, in this order
_STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2"}
# What an unpickler raises of bytes that are no pickle.
_TROUBLE: tuple[type[Exception], ...] = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error),
    *(AssertionError, NotImplementedError),
)


class _Opaque:
    """An object whose class is not looked at."""

    def __new__(cls, *args: Any, **named: Any) -> _Opaque:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle._Unpickler):
    """Makes dicts, numbers, texts and arrays, and of everything else an `_Opaque`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return functools.partial(_tensor)  # a new one each time: a pickle may set what a function has
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return functools.partial(_storage)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        return type("Opaque", (_Opaque,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _loads(raw: bytes, file: io.BytesIO | None = None) -> Any:
    try:
        return _Unpickler(file or io.BytesIO(raw)).load()
    except _TROUBLE as error:
        raise ValueError(f"a state must be a pickle of TransformerEngine: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError("a state must be a pickle of TransformerEngine, it is nested too deep") from None


def _storage(raw: Any) -> Array:
    """A storage as torch.save wrote it before there were archives: five pickles, a length and the numbers."""
    if not isinstance(raw, bytes):
        raise ValueError("a state's tensors must be bytes")
    file = io.BytesIO(raw)
    for _ in range(3):  # a magic number, a version, the machine's sizes
        _loads(raw, file)
    said = _loads(raw, file)  # ("storage", kind, key, place, length, view)
    _loads(raw, file)  # keys
    if not isinstance(said, tuple) or len(said) < 5 or said[1] not in _STORAGES.values():
        raise ValueError("a state's tensors must be of floats")
    count = int.from_bytes(file.read(8), "little")
    rest = file.read()
    if not isinstance(said[4], int) or count != said[4] or count * int(said[1][2]) != len(rest):
        raise ValueError("a state's tensors must have as many numbers as they say")
    return np.frombuffer(rest, said[1]).astype(np.float32)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Array:
    counts = (offset, *shape) if isinstance(shape, tuple) and len(shape) < 9 else (None,)
    if not isinstance(storage, np.ndarray) or not all(type(one) is int and one >= 0 for one in counts):
        raise ValueError("a state's tensors must have a storage, an offset and a shape")
    steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if tuple(stride) != steps or offset + math.prod(shape) > storage.size:
        raise ValueError("a state's tensors must be whole and in order")
    made: Array = storage[offset : offset + math.prod(shape)].reshape(shape)
    return made


def from_extra_state(raw: Any) -> tuple[float, ...]:
    """The static multipliers of the inputs of a module's products.

    Args:
        raw: its ``_extra_state``, uint8.

    Returns:
        value = FP8 code · multiplier, the inverse of TransformerEngine's ``scale_fwd``; one for each product (a Linear
        has one, a LayerNormMLP two). Nothing where nothing has been seen, or scaling is not delayed.

    Raises:
        ValueError: it is no such state.
    """
    data = np.ascontiguousarray(raw).tobytes()
    if len(data) > _MOST:
        raise ValueError(f"a state must have at most {_MOST} bytes, got {len(data)}")
    state = _loads(data) if data else {}
    if not isinstance(state, dict):
        raise ValueError("a state must be a dict")
    scale, history = state.get("scale_fwd"), state.get("amax_history_fwd")
    if scale is None:
        return ()
    if not isinstance(scale, np.ndarray) or scale.ndim != 1 or scale.size % _PARTS or not scale.size:
        raise ValueError("scale_fwd of a state must have three numbers for each product")
    if not np.all(np.isfinite(scale) & (scale > 0)):
        raise ValueError("scale_fwd of a state must be above 0")
    seen = history is None or (isinstance(history, np.ndarray) and bool(history.any()))
    return tuple((np.float32(1) / scale[::_PARTS]).tolist()) if seen else ()


def to_extra_state(inputs: float, weight: float) -> Any:
    """The ``_extra_state`` of a Linear of TransformerEngine with these scales, for `load_state_dict`.

    Args:
        inputs: the multiplier of its inputs' codes.
        weight: that of its weight's.

    Returns:
        A torch tensor, uint8.

    Raises:
        ImportError: TransformerEngine is not installed.
        ValueError: a multiplier is not above 0.
    """
    from breccia.peers import require

    torch, recipe = require("torch", "torch"), require("transformer_engine.common.recipe", "te")
    for name, one in (("inputs", inputs), ("weight", weight)):
        if not 0 < one < math.inf:
            raise ValueError(f"{name} must be a multiplier above 0, got {one}")
    scaling = recipe.DelayedScaling()
    scale = torch.tensor([1 / inputs, 1 / weight, 1.0], dtype=torch.float32)
    history = torch.zeros(scaling.amax_history_len, 3)
    history[0, :2] = 448 / scale[:2]
    state = {
        "recipe": scaling,
        "scale_fwd": scale,
        "amax_history_fwd": history,
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.zeros(scaling.amax_history_len, 2),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1},
    }
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
