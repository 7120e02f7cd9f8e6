# SPDX-License-Identifier: Apache-2.0
"""ScaledTensor as a node of JAX's trees, and as a state that flax's serialization stores."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breccia.delayed import AmaxHistory
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS, Form
from breccia.verbs.packed import PackedWeight
from breccia.verbs.prepared import PreparedWeight

_KINDS = (ScaledTensor, PreparedWeight, PackedWeight)


def _flatten(scaled: ScaledTensor) -> Any:
    keyed = [(jax.tree_util.GetAttrKey(key), part) for key, part in zip(PARTS, scaled._held, strict=True)]
    return keyed, scaled._meaning


def _unflatten(kind: type[ScaledTensor], form: Form, parts: Any) -> ScaledTensor:
    return kind._of(form, *parts)


def _to_state(scaled: ScaledTensor) -> dict[str, Any]:
    return {name: part for name, part in zip(PARTS, scaled._held, strict=True) if part is not None}


def _from_state(target: ScaledTensor, state: dict[str, Any]) -> ScaledTensor:
    wanted = _to_state(target)
    if state.keys() != wanted.keys():
        raise ValueError(f"state must have {', '.join(wanted)} as target has, got {', '.join(state)}")
    # What flax has read is NumPy's.
    read = state if isinstance(target.data, np.ndarray) else jax.tree.map(jnp.asarray, state)
    return _unflatten(type(target), target._meaning, map(read.get, PARTS))


_with_flax: list[Any] = []


def register_with_flax() -> None:
    """Tell flax's serialization of ScaledTensors, once flax is imported."""
    if not _with_flax and "flax.serialization" in sys.modules:
        _with_flax.append(sys.modules["flax.serialization"])
        for kind in _KINDS:
            _with_flax[0].register_serialization_state(kind, _to_state, _from_state, override=True)


for _kind in _KINDS:
    jax.tree_util.register_pytree_with_keys(_kind, _flatten, functools.partial(_unflatten, _kind))
jax.tree_util.register_pytree_node(
    AmaxHistory, lambda state: ((state.amax, state.scale), None), lambda _, parts: AmaxHistory(*parts)
)
register_with_flax()
