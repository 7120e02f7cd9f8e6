# SPDX-License-Identifier: Apache-2.0
"""What becomes of each logical tensor on the way to a target: decided from headers alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import repeat, starmap
from operator import attrgetter, itemgetter
from typing import Any

from breccia import bridges, recipes
from breccia.bridges.common import turned_shape
from breccia.bridges.contract import BY_COLUMNS, Kind, Place
from breccia.bridges.file_kinds import Spec
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part, ghost
from breccia.bridges.written import same_grid
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of
from breccia.checkpoint.planning.targets import AUTO, KEEP, NO_KIND, Target, names_of
from breccia.checkpoint.reading import models
from breccia.checkpoint.reading.source import is_float
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import axis_of

QUANTIZED = frozenset(("repack", "requantize", "cast", "encode", "keep", "same"))  # actions that write codes
_SCALES = {"F16": "fp16", "BF16": "bf16"}
_GROUP_SIZES = (128, 64, 32)  # that programs have kernels for
_INTEGERS = recipes.INT4Scaling, recipes.INT8Scaling
_IN_GROUPS = *_INTEGERS, recipes.Float8ExpandedScaling, recipes.INT8ExpandedScaling
LATER = "heads for later tokens stay in floats"  # why one that is quantized does not stay so
LEFT = "left as it is"  # how a note begins on a tensor that has no place in the target


@dataclass(frozen=True, slots=True)
class Form:
    """What tensors that differ by their names alone become: `Choice` has the attributes. Names in ``outputs`` and
    ``metadata`` lack what the module's name is, where all begin with it, and no text of
    the metadata has it (``inside``)."""

    action: str
    outputs: dict[str, Spec]
    recipe: ScalingRecipe | None
    metadata: dict[str, str]
    note: str
    turned: bool
    values: tuple[float, ...]
    inside: bool
    nbytes: int


def _of_form(name: str) -> Any:
    return property(attrgetter(f"form.{name}"))


class Choice:
    """What happens to one tensor: "copy", "float", "repack", "requantize", "cast", "encode" (values as a format's own
    kind), "keep" (the blocks of one), "same" (all that is stored of one), "multiply" (a scale by the number in
    ``values``), "divide" (that number by it) or "make" (``values``, which no tensor of the source has), and what it
    gives.

    ``turned``: its matrices are written transposed. ``shared``: what it has in common with other tensors (`Shared`).
    ``nbytes``: that it takes in the output.
    """

    __slots__ = ("form", "found", "shared")
    form: Form
    found: Found
    shared: Any
    action: str = _of_form("action")
    recipe: ScalingRecipe | None = _of_form("recipe")
    note: str = _of_form("note")
    turned: bool = _of_form("turned")
    values: tuple[float, ...] = _of_form("values")
    nbytes: int = _of_form("nbytes")

    def __init__(
        self,
        found: Found,
        action: str,
        outputs: Mapping[str, Spec],
        recipe: ScalingRecipe | None = None,
        metadata: Mapping[str, str] | None = None,
        note: str = "",
        turned: bool = False,
        values: tuple[float, ...] = (),
    ) -> None:
        module, metadata = found.name.removesuffix(".weight"), metadata or {}
        inside = all(map(str.startswith, (*outputs, *metadata), repeat(module)))
        inside = inside and not any(module in text for text in metadata.values())
        cut = itemgetter(slice(len(module) if inside else 0, None))
        nbytes = sum(starmap(stored_bytes, outputs.values()))
        ends = dict(zip(map(cut, outputs), outputs.values(), strict=True))
        said = dict(zip(map(cut, metadata), metadata.values(), strict=True))
        self.found, self.shared = found, None
        self.form = Form(action, ends, recipe, said, note, turned, values, inside, nbytes)

    def but(self, **changes: Any) -> Choice:
        """The same with other values of some attributes."""
        made = self.of(self.found)
        made.shared = changes.pop("shared", self.shared)
        made.form = dataclasses.replace(self.form, **changes) if changes else self.form
        return made

    def of(self, found: Found) -> Choice:
        """What becomes of a tensor that differs by its name alone."""
        made = Choice.__new__(Choice)
        made.found, made.form, made.shared = found, self.form, None
        return made

    @property
    def outputs(self) -> dict[str, Spec]:
        """Dtype and shape of what is written, by name."""
        ends = self.form.outputs
        if not self.form.inside:
            return ends
        module = self.found.name.removesuffix(".weight")
        return dict(zip(map(module.__add__, ends), ends.values(), strict=True))

    @property
    def metadata(self) -> dict[str, str]:
        """Entries of the header's metadata."""
        ends = self.form.metadata
        if not (self.form.inside and ends):
            return ends
        module = self.found.name.removesuffix(".weight")
        return dict(zip(map(module.__add__, ends), ends.values(), strict=True))


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an output; ``dtype`` is safetensors' name or a type of another container."""
    if dtype in DTYPES:
        return nbytes_of(dtype, shape)
    block, nbytes = next(one.types[dtype] for one in bridges.containers() if dtype in one.types)
    return -(-math.prod(shape) // block) * nbytes


def upright(found: Found, target: Target) -> Found:
    """A weight by which a graph multiplies from the right, or the transposed view that one is read as, with its outputs
    first, as recipes and other formats have them; others as they are."""
    by_columns = target.products.get(found.name) == BY_COLUMNS and len(found.shape) > 1
    if not by_columns and (found.layout is None or axis_of(found.layout) == -1):
        return found
    layout = None if found.layout is None else found.layout.T
    return dataclasses.replace(
        found, shape=turned_shape(found.shape), layout=layout, origin=dataclasses.replace(found.origin, turned=True)
    )


def largest_group(columns: int, most: int) -> int | None:
    """The largest size of groups that readers know, up to ``most``, that divides the columns."""
    return next((size for size in _GROUP_SIZES if size <= most and columns % size == 0), None)


def wanted(found: Found, target: Target) -> bool:
    """Whether patterns and shape let a tensor be quantized."""
    if not _named(found, target) or (target.left_alone and not target.include):
        return False
    if target.names is not None and target.names.wide(found.name):
        return False
    known = models.is_layers_weight(found.name, found.shape) or found.name in target.products  # whatever its name
    if not known or min(found.shape[-2:]) < 16:
        return False
    return bool(target.include or target.named) or not target.alone.weight(found.name)


def _recipe(found: Found, target: Target) -> ScalingRecipe | None:
    """What to quantize to: NVFP4 in one level where the model's program would not apply the second."""
    recipe = target.recipe or target.default
    if (
        target.recipe is None
        and target.bridge.readers.one_level
        and isinstance(found.recipe, recipes.NVFP4BlockScaling)
    ):
        recipe = found.recipe
    if target.with_inputs is not None and found.name.removesuffix(".weight") in target.inputs:
        recipe = target.with_inputs
    if isinstance(recipe, recipes.NVFP4BlockScaling) and has_one_level(found, target):
        return dataclasses.replace(recipe, two_level=False, global_scale_form="multiplier")
    if target.group_size == AUTO:
        recipe = _of_largest_groups(recipe, found.shape[-1])
    if target.products.get(found.name) and found.dtype in _SCALES and isinstance(recipe, _INTEGERS):
        # Runtimes fuse a product whose scales have the type of its inputs.
        recipe = dataclasses.replace(recipe, scale_dtype=_SCALES[found.dtype])
    return recipe


def _of_largest_groups(recipe: ScalingRecipe | None, columns: int) -> ScalingRecipe | None:
    if not isinstance(recipe, _IN_GROUPS):
        return recipe
    best = largest_group(columns, recipe.group_size or _GROUP_SIZES[0])
    return dataclasses.replace(recipe, group_size=best) if best else recipe


def has_one_level(found: Found, target: Target) -> bool:
    """Whether a program applies no second scale to a tensor: in whole models, or to all experts in one."""
    if target.bridge.readers.one_level:
        return True
    return target.names is not None and (len(found.shape) > 2 or not target.names.second_scales)


def choose(found: Found, target: Target) -> Choice:
    """What to do with one tensor. Raises ValueError where its name cannot be written in the target's format."""
    if found.format == "plain" and not is_float(found):
        return _copy(found, target)
    if target.float_dtype:
        rest = found.format == "plain" and target.rest in DTYPES
        dtype = target.rest if rest else target.float_dtype
        if not _named(found, target):
            return _left_out(found, target)
        if found.dtype == dtype and not _turns(found, target):
            return _copy(found, target)
        if found.format == "plain" and (found.dtype == "F64" or _stays_float32(found, target, dtype)):
            return _copy(found, target)
        return _float(found, target, found.name, dtype)
    if target.kind == NO_KIND:
        return _copy(found, target) if found.format == "plain" else as_bfloat16(found, target, "")
    if why := _without_a_place(found, target):
        plain = found.format == "plain" and not wanted(found, target)
        return _copy(found, target) if plain else _in_floats(found, target, why)
    if found.format != "plain" and not _named(found, target):
        return _left_out(found, target)
    as_it_is = not target.kind and target.recipe is None and found.recipe is None
    if as_it_is and found.format == target.format and "blocks" in found.parts:
        return Choice(found, "keep", {target.spell(found.name): (found.kind, found.shape)})
    if target.kind:
        return _choose_kind(found, target, target.bridge.kinds[target.kind])
    if found.format == "plain":
        recipe = _recipe(found, target)
        if not wanted(found, target) or recipe is None or not target.bridge.takes(found.name, found.shape):
            return _copy(found, target)
        choice = _quantize(found, "cast", recipe, target)
        why = unread_embedding(found.name, target)  # which somebody asked for by name
        return choice.but(note=f"quantized as asked, but {why}") if why and not choice.note else choice
    if found.recipe is not None and _holds(found, target):
        return _outputs(found, "repack", found.ghost(), target)
    if not (target.include or target.named) and target.alone.later(found.name):
        return as_bfloat16(found, target, LATER)
    recipe = _recipe(found, target)
    assert recipe is not None
    return _quantize(found, "requantize" if found.recipe is not None else "cast", recipe, target)


def _stays_float32(found: Found, target: Target, dtype: str) -> bool:
    """Whether a tensor stays in float32 beside floats of another dtype, as programs or a release's makers have it."""
    return found.dtype == "F32" and (target.rest == KEEP or target.alone.float32(found.name, dtype))


def _choose_kind(found: Found, target: Target, kind: Kind) -> Choice:
    """What to do with one tensor where the target is a kind of the format's own."""
    if kind.encode is not None:
        return _encode(found, target, kind)
    if found.format == target.format and found.kind == kind.name:
        return Choice(found, "keep", {target.spell(found.name): (kind.name, found.shape)})
    wide = target.names is not None and target.names.wide(found.name)
    wide = wide or len(found.shape) < 2 or _stays_float32(found, target, kind.name)
    if wide or found.dtype == kind.name or not _named(found, target):
        return _copy(found, target) if found.format == "plain" else as_bfloat16(found, target, "it is left out")
    return Choice(found, "float", {target.spell(found.name): (kind.name, found.shape)})


def _encode(found: Found, target: Target, kind: Kind) -> Choice:
    """The same where it has blocks: what the kind, a mix or one that does not fit the rows, has for the tensor."""
    if found.format == "plain":
        whole = kind.whole and target.names is not None
        if not wanted(found, dataclasses.replace(target, named=True) if whole else target):
            return _copy(found, target)
    key = target.kind if kind.of is None else kind.of(target.names, found.name, found.shape[-1])
    own, columns = target.bridge.kinds.get(key), found.shape[-1]
    if own is None:
        made = choose(found, dataclasses.replace(target, kind="", recipe=target.bridge.recipes[key], named=True))
    elif columns % own.block:
        why = f"{own.name} has blocks of {own.block}, which do not divide its {columns:,} columns"
        return _in_floats(found, target, why)
    else:
        same = found.format == target.format and found.kind == own.name and found.origin.cut is None
        made = Choice(found, "keep" if same else "encode", {target.spell(found.name): (own.name, found.shape)})
    if columns % kind.block == 0 or made.note:
        return made
    (written, _), *_ = made.outputs.values()
    note = f"written as {written}: {kind.name} takes {kind.block} columns at a time, there are {columns}"
    return made.but(note=note)


def _named(found: Found, target: Target) -> bool:
    """Whether the patterns let a tensor be written in another type."""
    if not (target.include or target.exclude):
        return True
    names = names_of(found)
    if target.include and not any(fnmatchcase(name, pattern) for name in names for pattern in target.include):
        return False
    return not any(fnmatchcase(name, pattern) for name in names for pattern in target.exclude)


def _left_out(found: Found, target: Target) -> Choice:
    """What the patterns leave out keeps its numbers: its codes where the target's format holds them, else bfloat16."""
    if found.format == "plain":
        return _copy(found, target)
    if target.float_dtype:
        note = f"written as {target.spelled} though it is left out: its codes have no place beside floats"
        return _float(found, target, found.name, target.float_dtype).but(note=note)
    if found.format == target.format and "blocks" in found.parts:
        return Choice(found, "keep", {target.spell(found.name): (found.kind, found.shape)})
    if found.recipe is not None and _holds(found, dataclasses.replace(target, recipe=None)):
        return _outputs(found, "repack", found.ghost(), target)
    return as_bfloat16(found, target, "it is left out")


def _holds(found: Found, target: Target) -> bool:
    recipe = found.recipe
    assert recipe is not None
    asked = [one for one in (target.recipe, target.with_inputs) if one is not None]
    if target.group_size == AUTO and asked:
        asked = [one for one in (_recipe(found, target),) if one is not None]
    if target.recipe is not None and not any(same_grid(recipe, one) for one in asked):
        return False
    if not target.bridge.carries(recipe):
        return False
    if "global_scale" in found.parts and has_one_level(found, target):
        return False
    if not target.bridge.model_knows(recipe, target.model):
        return False
    try:
        target_parts(target, found.name, found.ghost())
    except ValueError:
        return False
    return True


def unread_embedding(name: str, target: Target) -> str:
    """Why a quantized tensor is of no use in the format, which has no form for embeddings; "" where it is."""
    if models.is_embedding(name) and not target.bridge.readers.embeddings:
        return f"embeddings have no form in {target.format} that a program loads"
    return ""


def _without_a_place(found: Found, target: Target) -> str:
    """Why no program loads a quantized tensor from the format though the bytes have a form in it; "" where one does."""
    bridge = target.bridge
    turned = models.is_turned(found.name, found.shape, target.model)
    if turned and len(found.shape) == 2 and not bridge.readers.turned_weights:
        return f"weights with inputs before outputs have no form in {target.format} that a program loads"
    odd = found.name.endswith(".weight") or (turned and not bridge.readers.turned_experts(target.model))
    if len(found.shape) == 3 and not bridge.readers.fused_experts and odd:
        return f"experts of a layer in one tensor have no form in {target.format} that a program loads"
    if found.format != "plain" and not bridge.takes(found.name, found.shape):
        return f"{target.format} has no place for it"
    if why := bridge.why_not(found.name):
        return why
    if found.format != "plain" and (why := unread_embedding(found.name, target)):
        return why
    if models.is_one_expert(found.name) and not bridge.readers.single_experts:
        return f"experts in tensors of their own have no form in {target.format} that a program loads"
    return ""


def as_bfloat16(found: Found, target: Target, why: str) -> Choice:
    """What cannot be written in the new format must not stay in the old one, which nothing would read; it is noted
    with the reason, "" for one that was asked for."""
    name, metadata = target.spell(found.name), target.bridge.plain_metadata(found.name)
    return _float(found, target, name, "BF16", metadata=metadata, note=why and f"written as bf16: {why}")


def _in_floats(found: Found, target: Target, why: str) -> Choice:
    """A tensor that the format cannot take quantized: floats stay as they are, others become some."""
    if found.format == "plain":
        return _copy(found, target).but(note=f"{LEFT}: {why}")
    return as_bfloat16(found, target, why)


def _turns(found: Found, target: Target) -> bool:
    """Whether the model's files have the tensor's rows as columns, and those that it was found in have not."""
    return not found.origin.turned and models.is_stored_turned(found.name, found.shape, target.model)


def _float(found: Found, target: Target, name: str, dtype: str, **more: Any) -> Choice:
    """Values as the model's float checkpoints keep them."""
    # A kind of file without config.json, which would say it, has outputs first.
    turned = models.is_written_turned(found.name, found.shape, target.model) and not target.bridge.container.whole
    turned = turned or (found.format != "plain" and found.origin.turned)
    shape = turned_shape(found.shape) if turned else found.shape
    return Choice(found, "float", {name: (dtype, shape)}, turned=turned, **more)


def _copy(found: Found, target: Target) -> Choice:
    wide = target.names is not None and (len(found.shape) < 2 or target.names.wide(found.name))
    if found.origin.numbers:  # bfloat16 holds all of FP8, and every program reads it
        return _float(found, target, target.spell(found.name), "F32" if wide else "BF16")
    if wide and found.dtype in ("BF16", "F16"):
        # Programs add and multiply by vectors in float32 only.
        return Choice(found, "float", {target.spell(found.name): ("F32", found.shape)})
    name = target.spell(found.name)
    metadata = target.bridge.plain_metadata(name)
    if found.origin.turned and target.bridge.container.whole and found.name not in target.products:
        return Choice(found, "float", {name: (found.dtype, found.shape)})
    shape = turned_shape(found.shape) if found.origin.turned else found.shape
    if target.rest in DTYPES and is_float(found) and not _stays_float32(found, target, target.rest):
        return Choice(found, "float", {name: (target.rest, shape)}, metadata=metadata)
    return Choice(found, "copy", {name: (found.dtype, shape)}, metadata=metadata)


def _quantize(found: Found, action: str, recipe: ScalingRecipe, target: Target) -> Choice:
    try:
        return _outputs(found, action, ghost(found.shape, recipe), target, recipe)
    except ValueError as error:
        return _in_floats(found, target, _why(found, recipe, error) if found.format == "plain" else str(error))


def _why(found: Found, recipe: ScalingRecipe, error: ValueError) -> str:
    """Why a tensor cannot have a recipe, as is said of a checkpoint, whose tensors nobody turns."""
    width, run = found.shape[-1] if found.shape else 0, recipe.layout.block.columns
    divides = not run or width % run == 0
    return str(error) if divides else f"{recipe.name} has blocks of {run}, which do not divide its {width:,} columns"


def requantized(found: Found, action: str, recipe: ScalingRecipe, target: Target) -> Choice:
    """A tensor that is quantized again to its own recipe."""
    return _outputs(found, action, ghost(found.shape, recipe), target, recipe)


def _outputs(
    found: Found, action: str, scaled: ScaledTensor, target: Target, recipe: ScalingRecipe | None = None
) -> Choice:
    parts, metadata = target_parts(target, found.name, scaled)
    outputs = {name: (p.dtype, p.shape) for name, p in parts.items()}
    return Choice(found, action, outputs, recipe or found.recipe, metadata)


def target_parts(
    target: Target, name: str, scaled: ScaledTensor | OutsideTensor
) -> tuple[dict[str, Part], dict[str, str]]:
    """Stored tensors by full name, and entries of the header's metadata. Raises ValueError where the format has no
    place for such a tensor."""
    bridge, module, product = target.bridge, name.removesuffix(".weight"), target.products.get(name, "")
    if not isinstance(scaled, ScaledTensor):
        return bridge.stored(name, scaled, Place(False, target.model, target.spell, product=product))
    inputs = bridge.input_scales and module in target.inputs
    inputs = inputs and bridge.input_scale(scaled.recipe, {}) is not None
    said = target.inputs_of(module, scaled.recipe)
    said = said if inputs or said is None or said.when == "dynamic" else None
    return bridge.stored(name, scaled, Place(inputs, target.model, target.spell, said, product))
