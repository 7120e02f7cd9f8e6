# SPDX-License-Identifier: Apache-2.0
"""What every bridge must do, as checks that a test of any package can run over its own.

```python
from breccia import testing

@pytest.mark.parametrize(("name", "check", "key"), testing.cases(BRIDGE))
def test_contract(name, check, key, tmp_path):
    testing.run(BRIDGE, check, key, tmp_path)
```
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges, verbs
from breccia.bridges.contract import NAMED, FileFormat, Place
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, ghost
from breccia.checkpoint import Checkpoint, convert, save_arrays
from breccia.checkpoint.files import disk
from breccia.checkpoint.planning.choices import stored_bytes
from breccia.checkpoint.planning.targets import parse_target
from breccia.checkpoint.reading.finding import Finder
from breccia.checkpoint.writing.execute import cast_for
from breccia.recipes import ScalingRecipe, all_recipes
from breccia.scaled_tensor import ScaledTensor

__all__ = ["CHECKS", "cases", "run"]


def values_of(bridge: FileFormat) -> np.ndarray[Any, Any]:
    """The numbers of a bridge's sample, float32, the same each time."""
    return np.random.default_rng(7).normal(0, 0.02, bridge.sample.shape).astype(np.float32)


def _model(bridge: FileFormat, folder: Path) -> Path:
    folder.mkdir()
    sample = bridge.sample
    arrays = {sample.name: values_of(bridge), "norm.weight": np.ones(sample.shape[-1], np.float32)}
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    disk.write_file(folder / "config.json", json.dumps(dict(sample.model)).encode())
    return folder


def _written(bridge: FileFormat, key: str, folder: Path) -> Path:
    """A checkpoint of the format."""
    name = "written" if not bridge.container.whole else f"written.{bridge.name}"
    convert(_model(bridge, folder / "source"), folder / name, f"{bridge.name}:{key}", include=[bridge.sample.name])
    return folder / name


def _found(opened: Checkpoint, bridge: FileFormat) -> Found:
    found = [one for one in opened.found if one.name == bridge.sample.name]
    assert [one.format for one in found] == [bridge.name], f"{bridge.sample.name!r} is read as {found}"
    return opened.refined(found[0])


def _is_record(details: object) -> bool:
    parameters = vars(type(details)).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


def _numbers(tensor: Any) -> np.ndarray[Any, Any]:
    if isinstance(tensor, ScaledTensor):
        return np.asarray(verbs.dequantize(tensor))
    return np.asarray(tensor.dequantize() if isinstance(tensor, OutsideTensor) else tensor, np.float32)


def what_is_written_is_read(bridge: FileFormat, key: str, folder: Path) -> None:
    """A checkpoint is found, has the numbers of the cast, and is written again with the same bytes."""
    place, recipe = _written(bridge, key, folder), bridge.recipes[key]
    opened = Checkpoint(place)
    with contextlib.closing(opened):
        found = _found(opened, bridge)
        assert found.details is None or _is_record(found.details), (
            f"details must be of a frozen dataclass, got {found.details!r}"
        )
        cast = cast_for(parse_target(f"{bridge.name}:{key}"), values_of(bridge), recipe)
        np.testing.assert_array_equal(_numbers(opened.load(found)), _numbers(cast))
        again = folder / f"again{place.suffix}"
        report = convert(place, again, bridge.name)
        assert set(report["tensors"]) <= {"repack", "copy", "float", "same", "keep"}, report["tensors"]
        with Checkpoint(again) as second:
            names = set(opened.entries) ^ set(second.entries)
            assert not names, f"tensors must be the same when they are written again, these are not: {sorted(names)}"
            for name in found.parts.values():
                assert opened.array(name).tobytes() == second.array(name).tobytes(), name


def the_plan_is_what_is_made(bridge: FileFormat, key: str, folder: Path) -> None:
    """Dtypes and shapes are known before there are bytes, which are as many as these say."""
    sample, recipe = bridge.sample, bridge.recipes[key]
    place = Place(model=sample.model)
    planned, _ = bridge.stored(sample.name, ghost(sample.shape, recipe), place)
    made, _ = bridge.stored(sample.name, verbs.cast(values_of(bridge), recipe), place)
    before, after = ({k: (p.dtype, p.shape) for k, p in parts.items()} for parts in (planned, made))
    assert before == after, f"what is planned must be what is made, it is {before} and {after}"
    for name, part in made.items():
        assert np.asarray(part.make()).nbytes == stored_bytes(part.dtype, part.shape), name


def a_transposed_view_is_refused(bridge: FileFormat, key: str, folder: Path) -> None:
    """Files store rows."""
    turned = verbs.cast(np.ones((*bridge.sample.shape[:-2], 256, 256), np.float32), bridge.recipes[key]).mT
    with _refused("transposed view"):
        bridge.stored(bridge.sample.name, turned, Place(model=bridge.sample.model))


def a_recipe_without_a_place_is_refused(bridge: FileFormat, key: str, folder: Path) -> None:
    """What the format does not carry is an error, not another number."""
    for kind in all_recipes():
        recipe: ScalingRecipe = kind()
        if not bridge.carries(recipe):
            with _refused(""):
                parts, _ = bridge.stored(
                    bridge.sample.name, verbs.cast(values_of(bridge), recipe), Place(model=bridge.sample.model)
                )
                for part in parts.values():
                    part.make()


def config_json_names_it(bridge: FileFormat, key: str, folder: Path) -> None:
    """What is written says whose it is, so that nobody else is asked first."""
    if bridge.container.whole:
        return
    with Checkpoint(_written(bridge, key, folder)) as opened:
        context = opened.context
        claims = Finder(opened.entries, context).claims
    named = [name for name, claim in claims.items() if claim >= NAMED]
    assert named == [bridge.name], f"config.json must name {bridge.name} alone, it names {named}: {context}"


_HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a scalar": lambda array: array.reshape(-1)[:1].reshape(()),
    "one axis": lambda array: array.reshape(-1),
    "three axes": lambda array: array[None],
    "half": lambda array: array[: array.shape[0] // 2] if array.ndim else array,
    "nothing": lambda array: array.reshape(-1)[:0],
    "bool": lambda array: np.zeros(array.shape, bool),
    "int64": lambda array: np.zeros(array.shape, np.int64),
    "float64": lambda array: np.zeros(array.shape, np.float64),
    "complex64": lambda array: np.zeros(array.shape, np.complex64),
}


def any_arrays_are_read_or_refused(bridge: FileFormat, key: str, folder: Path) -> None:
    """Parts of any shape and dtype, and parts that are missing, are read or named in an error of one sentence."""
    with Checkpoint(_written(bridge, key, folder)) as opened:
        found = _found(opened, bridge)
        parts = {role: np.array(opened.array(name)) for role, name in found.parts.items()}
        for role, array in parts.items():
            for what, hostile in _HOSTILE.items():
                _read_or_refused(bridge, {**parts, role: hostile(array)}, found, f"{role}: {what}")
            _read_or_refused(bridge, {k: v for k, v in parts.items() if k != role}, found, f"{role}: missing")


def _read_or_refused(bridge: FileFormat, parts: dict[str, Any], found: Found, what: str) -> None:
    try:
        made = bridge.open(parts, found)
    except (ValueError, TypeError) as error:
        if not str(error):
            raise AssertionError(f"{what}: the error must say what is wrong") from error
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} must be a ValueError or TypeError: {error}") from error
    assert isinstance(made, ScaledTensor | OutsideTensor | np.ndarray), what


@contextlib.contextmanager
def _refused(word: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if word not in str(error):
            raise AssertionError(f"the message must name a {word}: {error}") from error
        return
    raise AssertionError("it must be refused by a ValueError, it is not")


CHECKS: dict[str, Callable[[FileFormat, str, Path], None]] = {
    check.__name__: check
    for check in (
        what_is_written_is_read,
        the_plan_is_what_is_made,
        a_transposed_view_is_refused,
        a_recipe_without_a_place_is_refused,
        config_json_names_it,
        any_arrays_are_read_or_refused,
    )
}


def cases(*every: FileFormat) -> list[tuple[str, str, str]]:
    """What there is to check of bridges that write: of each recipe what is written in it, the rest once.

    Args:
        every: bridges; those of the registry where there are none.

    Returns:
        Name of the bridge, of the check, and key of the recipe.
    """
    some = every or tuple(bridges.registry().values())
    once = ("a_recipe_without_a_place_is_refused", "config_json_names_it")
    return [
        (bridge.name, check, key)
        for bridge in some
        if bridge.writes
        for check in CHECKS
        for i, key in enumerate(bridge.recipes)
        if check not in once or i == 0
    ]


def run(bridge: FileFormat, check: str, key: str, folder: Path) -> None:
    """Run a check; a bridge that is not registered is, as long as it takes.

    Args:
        bridge: what the format is.
        check: a name of `CHECKS`.
        key: of the recipe.
        folder: an empty one, to write to.

    Raises:
        AssertionError: the bridge does not do what it must; the message says what.
    """
    there = bridges.registry().get(bridge.name) is bridge
    if not there:
        bridges.register(bridge)
    try:
        CHECKS[check](bridge, key, folder)
    finally:
        if not there:
            bridges.unregister(bridge.name)
