# SPDX-License-Identifier: Apache-2.0
"""The contract that packages check their own bridges by, run over every format of the registry."""

import dataclasses
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges, testing
from breccia.bridges import FileFormat, Found, Part
from breccia.bridges.contract import Place
from breccia.checkpoint.planning.choices import stored_bytes

pytest.importorskip("ml_dtypes")
ROW = breccia.INT8Scaling()


def find(name: str, entries: Any, context: Any) -> Found | None:
    prefix = name.removesuffix("codes")
    if prefix + "size" not in entries:
        return None
    parts = {"codes": name, "size": prefix + "size"}
    return Found(prefix + "weight", "mine", "int8", parts, entries[name].shape, ROW, ROW.layout, "float32")


def read(parts: Any, found: Found) -> Any:
    if parts.keys() != {"codes", "size"} or parts["codes"].dtype != np.int8:
        raise ValueError("mine: codes and size must be there")
    return breccia.ScaledTensor(parts["codes"], parts["size"], ROW, ROW.layout)


def lay_out(scaled: Any, place: Any) -> dict[str, Part]:
    if scaled.recipe != ROW:
        raise ValueError(f"scaled must be {ROW}, got {scaled.recipe}")
    if scaled.layout != ROW.layout:
        raise ValueError("scaled must not be a transposed view")
    codes = Part("I8", scaled.shape, lambda: np.asarray(scaled.data).view(np.int8))
    return {"codes": codes, "size": Part("F32", tuple(scaled.scale.shape), lambda: np.asarray(scaled.scale))}


MINE = FileFormat(
    "mine",
    recipes={"int8": ROW},
    anchors=(".codes",),
    find=find,
    read=read,
    carries=lambda recipe: recipe == ROW,
    lay_out=lay_out,
    config=lambda written: {"quantization_config": {"quant_method": "mine"}},
)


@pytest.mark.always
@pytest.mark.parametrize(("name", "check", "key"), testing.cases())
def test_contract(name: str, check: str, key: str, tmp_path: Path) -> None:
    bridge = bridges.bridge(name)
    if bridge.container.peer is not None:
        pytest.importorskip(bridge.container.peer)
    testing.run(bridge, check, key, tmp_path)


@pytest.mark.parametrize(("name", "check", "key"), testing.cases(MINE))
def test_a_format_of_ones_own(name: str, check: str, key: str, tmp_path: Path) -> None:
    testing.run(MINE, check, key, tmp_path)
    assert name not in bridges.registry()


def others(parts: Any, found: Found) -> Any:
    return breccia.ScaledTensor(parts["codes"] ^ 1, parts["size"], ROW, ROW.layout)


def halves(scaled: Any, place: Any) -> dict[str, Part]:
    return {**lay_out(scaled, place), "size": Part("F16", tuple(scaled.scale.shape), lambda: scaled.scale)}


def anything(scaled: Any, place: Any) -> dict[str, Part]:
    return {"codes": Part("U8", scaled.data.shape, lambda: scaled.data)}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "what_is_written_is_read": ({"read": others}, "Arrays are not equal"),
    "the_plan_is_what_is_made": ({"lay_out": halves}, r"layers\.0\.mlp\.up_proj\.size"),
    "a_transposed_view_is_refused": ({"lay_out": anything}, "it must be refused by a ValueError"),
    "a_recipe_without_a_place_is_refused": ({"lay_out": anything}, "it must be refused by a ValueError"),
    "config_json_names_it": ({"config": lambda written: {}}, "must name mine alone, it names"),
    "any_arrays_are_read_or_refused": (
        {"read": lambda parts, found: parts["codes"] / parts["size"]["no"]},
        "IndexError must be a ValueError or TypeError",
    ),
}


@dataclasses.dataclass
class Loose:
    bits: int = 8


@pytest.mark.parametrize("details", [{"bits": 8}, Loose()], ids=["a dict", "not frozen"])
def test_details_are_a_frozen_record(details: Any, tmp_path: Path) -> None:
    def found(*asked: Any) -> Found | None:
        one = find(*asked)
        return one and dataclasses.replace(one, details=details)

    with pytest.raises(AssertionError, match="details must be of a frozen dataclass"):
        testing.run(dataclasses.replace(MINE, find=found), "what_is_written_is_read", "int8", tmp_path)


def test_a_record_of_another_class_is_refused() -> None:
    found = Found("w", "mine", "int8", {}, (4, 8), details=Loose())
    assert found.record(Loose).bits == 8
    with pytest.raises(TypeError, match="details must be of Part, got Loose"):
        found.record(Part)


@pytest.mark.parametrize("check", testing.CHECKS)
def test_a_broken_format_fails(check: str, tmp_path: Path) -> None:
    change, sentence = BROKEN[check]
    with pytest.raises(AssertionError, match=sentence):
        testing.run(dataclasses.replace(MINE, **change), check, "int8", tmp_path)


STORED = [(name, key) for name, one in bridges.registry().items() if one.writes for key in one.recipes]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "key"), STORED)
def test_what_is_stored_has_the_bytes_of_its_type(name: str, key: str, dtype: str) -> None:
    """Whatever type the scales of a source have."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bridge = bridges.bridge(name)
    rng = np.random.default_rng(3)
    scaled = breccia.cast(rng.normal(0, 0.02, bridge.sample.shape).astype(np.float32), bridge.recipes[key])
    if scaled.scale.dtype.itemsize > 1:
        scale = scaled.scale.astype(getattr(ml_dtypes, dtype, dtype))
        parts = {"zero_point": scaled.zero_point, "global_scale": scaled.global_scale, "shape": scaled.shape}
        scaled = breccia.ScaledTensor(scaled.data, scale, scaled.recipe, scaled.layout, **parts)
    for inputs in (False, True):
        try:
            stored, _ = bridge.stored(bridge.sample.name, scaled, Place(inputs, bridge.sample.model))
        except ValueError:
            continue  # the format has no such scales, and says so
        for role, part in stored.items():
            made = np.asarray(part.make())
            assert made.nbytes == stored_bytes(part.dtype, part.shape), (role, part.dtype, made.dtype)
