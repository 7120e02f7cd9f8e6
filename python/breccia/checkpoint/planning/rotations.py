# SPDX-License-Identifier: Apache-2.0
"""Which layers of a checkpoint have rotated inputs or outputs, that programs of its format turn as they run:
compressed-tensors' ``transform_config``, GPTQ's ``rotation``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from breccia.bridges.parts import Found
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.reading.rotation import Rotation, is_known
from breccia.checkpoint.reading.source import Checkpoint
from breccia.schemes.dialects.compressed_tensors import target as target_of

KEYS = ("transform_config", "rotation")  # of what config.json says of quantization
_SIDES = ("input", "output")
_OF_ATTENTION = {"q_attn", "k_cache"}  # queries and keys, whose products stay where both are rotated by one matrix
_INSIDE = ("weight_input", "weight_output")  # what is in the weights of neighbours, too


class Rotations(NamedTuple):
    """What is rotated.

    Attributes:
        layers: the rotations of each layer that has some, in the order in which programs apply them.
        stored: names of the tensors that hold their matrices.
        key: of config.json, that says so.
    """

    layers: dict[str, tuple[Rotation, ...]]
    stored: frozenset[str]
    key: str

    def undone(self, found: Found) -> Found:
        """A tensor of a plain layer; one that is not rotated as it is."""
        module, _, kind = found.name.rpartition(".")
        rotations = self.layers.get(module if kind in ("weight", "bias") else found.name, ())
        kept = tuple(one for one in rotations if kind != "bias" or one.side == "output")
        if not kept or (kind == "bias" and len(found.shape) != 1):
            return found
        origin = dataclasses.replace(found.origin, rotations=kept)
        return dataclasses.replace(found, recipe=None, layout=None, dtype=found.dtype and "F32", origin=origin)

    def note(self) -> Remark:
        """What the report says where they are turned back."""
        where = some(sorted(self.layers)) if self.layers else "no layer"
        return Remark(f"rotations ({self.key}) are turned back in weights: of inputs and outputs of {where}")


def rotations_of(checkpoint: Checkpoint) -> Rotations:
    """What is rotated in a checkpoint. Raises ValueError where what is said has no known form, or a matrix is neither
    in the files nor known."""
    said = checkpoint.quantization
    shapes = {one.name.removesuffix(".weight"): one.shape for one in checkpoint.found if len(one.shape) > 1}
    layers: dict[str, tuple[Rotation, ...]] = {}
    stored: set[str] = set()
    if rotation := said.get("rotation"):
        if rotation not in ("hadamard", "random"):
            raise ValueError(f"{checkpoint.path}: rotation must be 'hadamard' or 'random', got {str(rotation)[:80]!r}")
        for module in (name for name in shapes if name.endswith("mlp.down_proj")):
            layers[module] = (_checked(checkpoint, module, Rotation("input", shapes[module][-1])),)
    for group, scheme, arg in _applied(checkpoint, said.get("transform_config")):
        targets, left = ([target_of(text) for text in arg.get(key) or ()] for key in ("targets", "ignore"))
        mark = re.compile(rf".*\.{re.escape(group)}_[a-z_]+\.(weight|perm)")
        own = {name for name in checkpoint.entries if mark.fullmatch(name)}
        stored |= own
        side = arg["location"]
        if side not in _SIDES:
            continue
        for module, shape in shapes.items():
            if f"{module}.weight" in own or any(one.matches(module, ("Linear",)) for one in left):
                continue
            if any(one.matches(module, ("Linear",)) for one in targets):
                size = int(scheme.get("head_dim") or shape[-1 if side == "input" else -2])
                made = _rotation(checkpoint, scheme, arg, size, module, group, own)
                layers[module] = (*layers.get(module, ()), _checked(checkpoint, module, made))
    return Rotations(layers, frozenset(stored), next(key for key in KEYS if said.get(key)))


def _applied(checkpoint: Checkpoint, said: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each place of each group of compressed-tensors' transforms."""
    groups = (said.get("config_groups") if isinstance(said, dict) else said) or {}
    listed: dict[str, Any] = groups if isinstance(groups, dict) else {"": None}
    for group, given in listed.items():
        scheme: dict[str, Any] = given if isinstance(given, dict) else {}
        args = scheme.get("apply")
        if not isinstance(args, list) or not all(isinstance(arg, dict) for arg in args):
            raise ValueError(f"{checkpoint.path}: transform_config must have groups with places to apply each")
        places = {str(arg.get("location")) for arg in args}
        if unknown := places.difference(_SIDES, _OF_ATTENTION, _INSIDE):
            raise ValueError(f"{checkpoint.path}: transform_config has a location that is not known: {unknown.pop()!r}")
        if places & _OF_ATTENTION not in (set(), _OF_ATTENTION) or (
            places & _OF_ATTENTION and "hadamard" not in str(scheme.get("type"))
        ):
            raise ValueError(
                f"{checkpoint.path}: transform_config must rotate queries and keys by one Hadamard matrix, so that "
                f"their products stay: group {group!r} does not"
            )
        yield from ((group, scheme, arg) for arg in args)


def _rotation(
    checkpoint: Checkpoint,
    scheme: dict[str, Any],
    arg: dict[str, Any],
    size: int,
    module: str,
    group: str,
    own: set[str],
) -> Rotation:
    """One layer's; its matrix may be stored under the name of another that has the same."""

    def tensor(part: str, shape: tuple[int, ...]) -> str:
        first = f"{module}.{group}_{arg['location']}.{part}"
        names = [first] if first in own else sorted(name for name in own if name.endswith(f".{part}"))
        return next((name for name in names if checkpoint.entries[name].shape == shape), "")

    kind = scheme.get("type")
    matrix, order = tensor("weight", (size, size)), tensor("perm", (size,)) if scheme.get("randomize") else ""
    if (kind != "hadamard" and not matrix) or (scheme.get("randomize") and kind != "random-matrix" and not order):
        raise ValueError(
            f"{checkpoint.path}: transform_config's group {group!r} must have its matrix of size {size} in the files, "
            f"{module!r} has none: a {kind} one cannot be made again"
        )
    inverse = bool(arg.get("inverse")) and kind != "random-matrix"  # of which the inverse itself is stored
    return Rotation(arg["location"], size, matrix, order, kind != "random-matrix", inverse)


def _checked(checkpoint: Checkpoint, module: str, one: Rotation) -> Rotation:
    """The same. Raises ValueError where nobody knows its matrix."""
    if one.stored or is_known(one.size):
        return one
    raise ValueError(
        f"{checkpoint.path}: {module!r} must have a rotation that can be turned back: no Hadamard matrix of size "
        f"{one.size} is known"
    )
