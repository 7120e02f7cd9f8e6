# SPDX-License-Identifier: Apache-2.0
"""breccia's own files: plain safetensors whose metadata says what belongs together.

A tensor ``w`` is stored as ``w.data``, ``w.scale`` and, where it has them, ``w.zero_point`` (of groups with exponents
these) and ``w.global_scale``; the header's metadata has ``w.config``, the recipe and layout as JSON. Files of
breccia up to 0.1.3 have the same names, 4-bit codes one per byte, and load.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from breccia import frameworks, layouts, recipes
from breccia.bridges.checks import FLOATS, StoredTypeError, shown
from breccia.bridges.common import Array, as_numpy, check_upright, codes
from breccia.bridges.contract import FileFormat, Place, Readers
from breccia.bridges.fp8 import FP8_STORED
from breccia.bridges.packing import packed_codes
from breccia.bridges.parts import Found, Part, part
from breccia.bridges.scales import STORED_SCALES, made
from breccia.bridges.written import FP8_INPUTS, INT8_INPUTS, NVFP4_INPUTS, Dialect, InputScale, Written, said_of_inputs
from breccia.checkpoint.files.bounded_json import loads
from breccia.checkpoint.files.dtypes import little_endian, numpy_dtype, stored_name
from breccia.checkpoint.files.safetensors_file import SafetensorsFile, SafetensorsWriter
from breccia.formats import finfo
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import others
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import Activations
from breccia.value import sixes
from breccia.value.form import Form
from breccia.value.inputs import FLOATS as FLOAT_NAMES
from breccia.value.inputs import refuse_mask

NAME = "breccia"
_GRID = {"fp8_format", "fp6_format", "block_k", "group_size", "signed", "symmetric"}  # in files of every version
ROLES = ("data", "scale", "zero_point", "global_scale")

__all__ = ["load_safetensors", "save_safetensors"]


def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file, which appears only when it is complete.

    Args:
        tensors: name → ScaledTensor; or an array of any framework, which is stored as it is under its own name.
        path: the file; replaced if it is there.
        extra_metadata: strings to add to the header.

    Raises:
        TypeError: a value is neither, or of a dtype that safetensors has not; or metadata is not strings.
        ValueError: a tensor is a transposed view, or a name is taken: by ``extra_metadata``, or by a part of another
            tensor.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to ScaledTensors, as {{'weight': q}}, got {type(tensors).__name__}")
    metadata = dict(extra_metadata or {})
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"extra_metadata must map strings to strings, got {key!r}: {text!r}")
    parts: dict[str, Part] = {}
    for name, scaled in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors must map names to ScaledTensors, got the key {name!r}")
        if f"{name}.config" in metadata:
            raise ValueError(f"extra_metadata must not have {name + '.config'!r}: it describes a tensor")
        if isinstance(scaled, ScaledTensor):
            stored, metadata[f"{name}.config"] = store(name, scaled)
        else:
            stored = {name: _plain(scaled, f"tensors[{name!r}]")}
        if taken := stored.keys() & parts.keys():
            raise ValueError(f"tensors must have one tensor for each stored name, got two for {min(taken)!r}")
        parts |= stored
    plan = {name: (p.dtype, p.shape) for name, p in parts.items()}
    with SafetensorsWriter(path, plan, metadata) as writer:
        for name, p in parts.items():
            writer.write(name, p.make())


def _plain(array: Any, argument: str) -> Part:
    """An array as it is stored. Raises TypeError where it is none, or of a dtype that safetensors has not."""
    if hasattr(array, "scaled") or not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise TypeError(f"{argument} must be a ScaledTensor or an array, got {type(array).__name__}")
    try:
        stored = stored_name(array)
    except TypeError as error:
        raise TypeError(f"{argument}: {error}") from None
    if isinstance(array, np.ndarray):
        refuse_mask(array, argument)
        return Part(stored, array.shape, lambda: little_endian(array))
    # NumPy has no such type of its own: the bytes alone.
    coded = stored == "BF16" or stored.startswith("F8")

    def make() -> Array:
        here = array.detach().cpu() if hasattr(array, "detach") else array
        return np.asarray(frameworks.on_host(here)[0] if coded else here)

    return Part(stored, tuple(array.shape), make)


def store(name: str, scaled: ScaledTensor) -> tuple[dict[str, Part], str]:
    """Stored tensors of a logical one, by full name, and its entry in the header's metadata."""
    check_upright(scaled, f"tensors[{name!r}]")
    element = scaled.recipe.element
    four = finfo(element).bits == 4
    data = packed_codes(scaled) if four else codes(scaled.data, f"tensors[{name!r}].data")
    stored = FP8_STORED.get(element, "U8")
    parts = {f"{name}.data": part(np.ascontiguousarray(data), stored)}
    for role in ROLES[1:]:
        value = getattr(scaled, role)
        if value is not None:
            array = as_numpy(value, f"tensors[{name!r}].{role}")
            parts[f"{name}.{role}"] = part(np.ascontiguousarray(array).reshape(array.shape), _stored(array.dtype))
    return parts, scaled._form.text(scaled.shape)


def store_in_checkpoint(name: str, scaled: ScaledTensor, place: Place) -> tuple[dict[str, Part], dict[str, str]]:
    """As `store`, with the entry's name."""
    parts, text = store(name, scaled)
    return parts, {f"{name}.config": text}


@functools.lru_cache(maxsize=64)
def _stored(dtype: Any) -> str:
    bytes_ = {"uint8": "U8", "int8": "I8", "float64": "F64", "uint4": "U8", "int4": "I8", "float8_e8m0fnu": "F8_E8M0"}
    return {**bytes_, **FP8_STORED, **STORED_SCALES}[dtype.name]


def parse_config(text: str, name: str) -> tuple[ScalingRecipe, Layout, tuple[int, ...] | None, str]:
    """Recipe, layout, shape (None in files of 0.1.3) and original dtype of a ``.config``."""
    try:
        return _parsed(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"metadata {name + '.config'!r} must describe a recipe and a layout: {error}") from None


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[ScalingRecipe, Layout, tuple[int, ...] | None, str]:
    config = loads(text)
    fields = {"name": config["recipe"]["name"], **config["recipe"]["fields"]}
    if fields["name"] == "nvfp4":  # breccia 0.1.3 had one level, and no field to say so
        fields.setdefault("two_level", False)
    known = {name: kind for kind in recipes.all_recipes() for name in (kind.name, kind.__name__)}
    kind = known[fields["name"]]
    _check_fields(kind, config["recipe"]["fields"])
    if lacking := sorted(_GRID & {f.name for f in dataclasses.fields(kind)} - fields.keys()):
        raise ValueError(f"recipe must have {', '.join(lacking)}, which say what the codes mean")
    recipe = recipes.from_dict(fields)
    layout_kind = {kind.name: kind for kind in layouts.Layout.__subclasses__()}[config["layout"]["name"]]
    _check_fields(layout_kind, config["layout"]["fields"])
    layout = layout_kind(**config["layout"]["fields"])
    shape = config.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"shape must be a list of numbers, got {shape!r}")
    original = config.get("original_dtype", "float32")
    if original not in FLOAT_NAMES:
        raise ValueError(f"original_dtype must be one of {', '.join(FLOAT_NAMES)}, got {shown(original)}")
    return recipe, layout, None if shape is None else tuple(shape), original


def _check_fields(kind: type[Any], said: Any) -> None:
    """Refuses fields that the dataclass has not, or has of another type."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in dict(said).items():
        if key not in known:
            raise ValueError(f"{kind.name} has no field {key!r}")
        usual = known[key].default
        wanted = int if usual is dataclasses.MISSING else type(usual)
        if type(value) is not wanted and value is not None and usual is not None:
            raise ValueError(f"{key} must be of type {wanted.__name__}, got {value!r}")
        if type(value) is int and not -(2**31) < value < 2**31:
            raise ValueError(f"{key} must be below 2^31, got {value}")


def load_safetensors(path: str | os.PathLike[str], framework: str = "numpy") -> dict[str, ScaledTensor]:
    """Every ScaledTensor of a file, viewing the mapped file. Other tensors of it are passed over.

    Args:
        path: a file of `save_safetensors`, of this version or breccia 0.1.3.
        framework: "numpy", "torch", "jax" or "mlx". NumPy's arrays are read-only views of the file; the others share
            its pages where they can until they are written to, which changes no file.

    Returns:
        Name → ScaledTensor, in the order of the header.

    Raises:
        ValueError: the file is not valid, has tensors of other formats only, or metadata and tensors do not fit.
    """
    frameworks.named(framework)
    file = SafetensorsFile(path)
    read = file.__getitem__ if framework == "numpy" else file.private
    result = {}
    for key, text in file.metadata.items():
        name = key.removesuffix(".config")
        if name == key or f"{name}.data" not in file.entries or f"{name}.scale" not in file.entries:
            continue
        parts = {role: read(f"{name}.{role}") for role in ROLES if f"{name}.{role}" in file.entries}
        try:
            scaled = load(parts, config=text, name=name)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{file.path}: tensor {name!r}: {error}") from None
        result[name] = scaled if framework == "numpy" else scaled.to(framework)
    if file.entries and not result:
        raise ValueError(
            f"{file.path}: file must have tensors that save_safetensors wrote, its {len(file.entries)} are others: "
            f"breccia.open(path) reads those of every format"
        )
    return result


@dataclass(frozen=True, slots=True)
class Details:
    """The text that the header has of a tensor: recipe, layout, shape and dtype; not ``sure`` where dtypes and shapes
    alone say it."""

    config: str
    sure: bool = True


def read(parts: Mapping[str, Array], found: Found) -> ScaledTensor:
    """See `FileFormat.read`. Raises ValueError as `load`, and for a global scale that may be a divisor."""
    details = found.record(Details)
    level = parts.get("global_scale")
    if not details.sure and level is not None and not np.all(level < 1):
        raise ValueError("weight_global_scale must be a multiplier below 1 where nothing says its form, it is not")
    return load(parts, config=details.config)


def load(parts: Mapping[str, Array], *, config: str, name: str = "") -> ScaledTensor:
    """The logical tensor of its stored ones, by role."""
    recipe, layout, shape, original = parse_config(config, name)
    data, scale = parts["data"], parts["scale"]
    if data.dtype.itemsize == 1 and data.dtype != np.uint8 and recipe.element not in data.dtype.name:
        data = data.view(np.uint8)
    if data.dtype.kind in "iuf" and data.dtype.itemsize > 1:
        raise StoredTypeError(f"data must have one-byte items, got {data.dtype}")
    if shape and recipe.element.startswith("float6") and 4 * data.shape[-1] == 3 * shape[-1]:  # of `breccia.pack`
        data = sixes.unpack(data)
    if layout.one_scale and scale.size == 1:
        scale = scale.reshape(())  # 0.2 also wrote arrays of one element
    return made(
        data,
        scale,
        recipe,
        layout,
        parts.get("zero_point"),
        global_scale=parts.get("global_scale"),
        shape=shape,
        original_dtype=original,
    )


def find_all(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> list[Found]:
    """The logical tensors that a header's metadata describes, and those of a layer's state, by their texts."""
    found = []
    for key, text in metadata.items():
        for end, joint in ((".config", "."), ("_form", "_")):
            name = key.removesuffix(end)
            parts = {role: f"{name}{joint}{role}" for role in ROLES if f"{name}{joint}{role}" in entries}
            if name != key and {"data", "scale"} <= parts.keys():
                parts |= {"text": key} if joint == "_" else {}
                found.append(_found(name, parts, entries, text))
    return found


def _found(name: str, parts: dict[str, str], entries: Mapping[str, Any], text: str, sure: bool = True) -> Found:
    recipe, layout, shape, _ = parse_config(text, name)
    data, scale = entries[parts["data"]], entries[parts["scale"]]
    dtype = FLOATS.get(scale.dtype, "uint8")
    zero = entries.get(parts.get("zero_point", ""))
    zero_dtype = "" if zero is None else str(numpy_dtype(zero.dtype))
    findings: tuple[str, ...] = ()
    if shape is None:
        shape = data.shape
        if finfo(recipe.element).bits == 4:
            findings = ("4-bit codes are one per byte, as breccia 0.1.3 wrote them",)
    details = Details(text, sure)
    return Found(
        name, NAME, recipe.name, parts, tuple(shape), recipe, layout, dtype, zero_dtype,
        details=details, findings=findings,
    )  # fmt: skip


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """A tensor of a layer's state of breccia before 0.5, which has no text: by the dtypes and shapes of its parts.
    Raises ValueError where these are of several formats."""
    base = name.removesuffix("_data")
    parts = {role: f"{base}_{role}" for role in ROLES if f"{base}_{role}" in entries}
    if "scale" not in parts or f"{base}_form" in entries:
        return None
    dtypes = [entries[parts[role]].dtype if role in parts else "" for role in ROLES]
    shape, scales = tuple(entries[name].shape), tuple(entries[parts["scale"]].shape)
    shape = (*shape[:-1], 2 * shape[-1]) if dtypes[0] == "U8" and dtypes[2] else shape
    recipe = _recipe_of(dtypes, *(_block(n, count) for n, count in zip(shape[-2:], scales[-2:], strict=False)))
    if scales[-2:] == (shape[-2], 1) and dtypes[1] == "F32" and not dtypes[2]:
        recipe = _recipe_of(dtypes, 1)  # of whole rows
    if recipe is None or recipe.layout.scale_shape(shape) != scales:
        raise ValueError(
            "a layer of breccia has this state, which several formats have: load it in Python into a model quantized "
            "alike, and save that"
        )
    form = Form(recipe, recipe.layout, "one", "float32")
    return _found(base, parts, entries, form.text(shape), sure=False)


def _block(values: int, scales: int) -> int:
    """The power of two of values that share one of so many scales."""
    return 1 << (max(1, -(-values // max(1, scales))) - 1).bit_length()


def _recipe_of(dtypes: list[str], rows: int = 0, columns: int = 0) -> ScalingRecipe | None:
    """The recipe of data, scales, zero points and a global scale of these dtypes, in blocks of that size; without
    blocks, of one scale for all. None where several recipes have such."""
    element, scale, zero, level = dtypes
    scales = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E8M0": "e8m0"}.get(scale, "")
    fp8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}.get(element)
    match element:
        case "F4" if scale == "F8_E4M3":
            return recipes.NVFP4BlockScaling(two_level=bool(level))
        case "F4":
            return recipes.MXFP4BlockScaling()
        case "I8" if zero == "F16":
            return recipes.INT8ExpandedScaling(columns)
        case "I8":
            return recipes.INT8Scaling(columns or None, scales, symmetric=not zero)
        case "U8" if zero == "U8":
            return recipes.INT4Scaling(columns, False, scales, False)
        case _ if fp8 and zero:
            return recipes.Float8ExpandedScaling(fp8, columns)
        case _ if fp8 and not columns:
            return recipes.Float8CurrentScaling(fp8, "row" if rows else "tensor")
        case _ if fp8 and scales == "e8m0" and (rows, columns) == (1, 32):
            return recipes.MXFP8BlockScaling(fp8)
        case _ if fp8:
            return recipes.Float8BlockScaling(fp8, columns, rows, scales)
    return None


def reshaped(found: Found, shape: tuple[int, ...]) -> Found:
    """The description of some of a tensor's rows: the header's, of another shape."""
    config = loads(found.record(Details).config)
    if config.get("shape") is not None:
        config["shape"] = list(shape)
    return replace(found, shape=shape, details=replace(found.record(Details), config=json.dumps(config)))


def carries(recipe: ScalingRecipe) -> bool:
    """Every recipe."""
    return True


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: the recipe of most modules, and others' by their names; and
    how their inputs are quantized, likewise."""
    inputs = {module: one for module in written.recipes if (one := written.dynamic(module)) is not None}
    inputs |= {module: inputs_for(written.recipes[module], "static") for module in written.inputs}
    said = said_of(written.recipes, inputs)
    return {
        "quantization_config": {"quant_method": NAME, **said, "ignore": [glob.escape(one) for one in written.ignored]}
    }


def said_of(recipes: Mapping[str, ScalingRecipe], inputs: Mapping[str, Activations]) -> dict[str, Any]:
    """Recipes and inputs of modules, as config.json says them: ``recipe`` and ``inputs`` of most, ``modules`` and
    ``module_inputs`` of others by their names."""
    (first, _), *others = Written(dict(recipes)).groups()
    said: dict[str, Any] = {"recipe": first.to_dict()}
    if others:
        said["modules"] = {module: recipe.to_dict() for recipe, modules in others for module in modules}
    return said | said_of_inputs(recipes, inputs)


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs, which multiplies: FP8's and INT8's of the tensor, NVFP4's second one."""
    match recipe:
        case recipes.NVFP4BlockScaling():
            return InputScale("input_scale", NVFP4_INPUTS)
        case recipes.Float8CurrentScaling() | recipes.DelayedScaling() if recipe.element == "float8_e4m3fn":
            return InputScale("input_scale", FP8_INPUTS)
        case recipes.INT8Scaling():
            return InputScale("input_scale", INT8_INPUTS)
    return None


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers"),
    needs="breccia installed",
    readers=Readers(
        turned_weights=True,  # read by name, whose weights are turned back
        embeddings=True,
        fused_experts=True,
    ),
    find_all=find_all,
    row_axis=0,
    reshaped=reshaped,
    read=read,
    anchors=("_data",),
    find=find,
    text="_form",
    carries=carries,
    vendors_elements=True,
    exponents=True,
    store=store_in_checkpoint,
    input_scales=True,
    input_scale=input_scale,
    dialect=Dialect(read=others.scheme, write=config),
)
