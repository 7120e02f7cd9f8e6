# SPDX-License-Identifier: Apache-2.0
"""Recipes by name, in every place that takes a recipe and on the command line, from one table."""

import breccia
import numpy as np
import pytest
from breccia import recipe_names
from breccia.checkpoint.planning.targets import parse_target, target_names

X = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
NAMES = {
    "nvfp4": breccia.NVFP4BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "fp8": breccia.Float8CurrentScaling(),
    "fp8-row": breccia.Float8CurrentScaling(granularity="row"),
    "FP8-Block": breccia.Float8BlockScaling(block_m=128),
    "fp8-row-block": breccia.Float8BlockScaling(),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp8:e5m2": breccia.MXFP8BlockScaling("E5M2"),
    "int4": breccia.INT4Scaling(),
    "int4:32": breccia.INT4Scaling(group_size=32),
    "int4:asym:mse": breccia.INT4Scaling(signed=False, symmetric=False, scale_search="mse"),
    "int8:asym": breccia.INT8Scaling(symmetric=False),
    "nvfp4:mse": breccia.NVFP4BlockScaling(scale_search="mse"),
    "Float8BlockScaling": breccia.Float8BlockScaling(),
    "float8blockscaling:64": breccia.Float8BlockScaling(block_k=64),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert breccia.cast(X, name).recipe == NAMES[name]
    if not name.lower().startswith("float8"):
        assert parse_target(name).recipe == NAMES[name]


@pytest.mark.parametrize("kind", breccia.recipes.all_recipes(), ids=lambda kind: kind.name)
def test_every_recipe_has_a_name(kind):
    """Its own short name and its class's name are the same recipe, on the command line too."""
    assert breccia.cast(X, kind.name).recipe == kind()
    assert parse_target(kind.name).recipe == kind()
    assert breccia.cast(X, kind.__name__).recipe == kind()


def test_the_command_line_has_every_name():
    assert set(recipe_names.names()) < set(target_names())


PLACES = {
    "cast": lambda r: breccia.cast(X, r).recipe,
    "requantize": lambda r: breccia.requantize(breccia.cast(X, "fp8"), r).recipe,
    "cast_ste": lambda r: breccia.cast_ste(X, r) is not None,
    "cast_ste_clipped": lambda r: breccia.cast_ste_clipped(X, r) is not None,
    "LinearRecipes": lambda r: breccia.autograd.LinearRecipes(r, r, r).w,
    "reference": lambda r: breccia.kernels.reference.cast(X, r).recipe,
    "from_buffer": lambda r: breccia.from_buffer(*_parts(), r, breccia.MXFP8BlockScaling().layout).recipe,
}


def _parts():
    q = breccia.cast(X, breccia.MXFP8BlockScaling())
    return q.data, q.scale


@pytest.mark.parametrize("place", PLACES)
def test_every_place_takes_names(place):
    assert PLACES[place]("mxfp8") in (breccia.MXFP8BlockScaling(), True)
    with pytest.raises(ValueError, match=r"got 'mxfp9': did you mean mxfp8 or mxfp6 or mxfp4\?"):
        PLACES[place]("mxfp9")
    with pytest.raises(TypeError, match=r"add \(\), MXFP8BlockScaling\(\)"):
        PLACES[place](breccia.MXFP8BlockScaling)


def test_quantize_model_takes_names():
    torch = pytest.importorskip("torch")
    model = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), "NVFP4")
    assert model[0].weight.recipe == breccia.NVFP4BlockScaling()
    with pytest.raises(TypeError, match=r"got one itself.*breccia\.quantize_layer\(layer, recipe\)"):
        breccia.quantize_(torch.nn.Linear(64, 32), "nvfp4")


WRONG = {
    "nvfp5": r"did you mean nvfp4\?$",
    "nvpf4": r"did you mean nvfp4\?$",
    "quantum": r"known are delayed, current",
    "nvfp4:fast": r"^the option after 'nvfp4:' must be mse, got 'fast'$",
    "current:128": r"^the option after 'current:' must be mse or e5m2, got '128'$",
    "": r"known are",
}


@pytest.mark.parametrize("name", WRONG)
def test_unknown_names(name):
    with pytest.raises(ValueError, match=WRONG[name]):
        breccia.cast(X, name)


@pytest.mark.parametrize(
    ("spelled", "sentence"),
    [
        ("nvfp5", r"did you mean nvfp4\?$"),
        ("compressed-tensor:nvfp4", r"did you mean compressed-tensors:nvfp4\?$"),
        (
            "modelopt:nvfp5",
            r"^to must have one of .*nvfp4.* behind 'modelopt:', got 'nvfp5': did you mean nvfp4\?$",
        ),
    ],
)
def test_unknown_targets(spelled, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_target(spelled)


def test_options_of_a_formats_recipe():
    assert parse_target("compressed-tensors:NVFP4:mse").recipe.scale_search == "mse"


def test_names_in_compiled_functions():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X)
    compiled = torch.compile(lambda x: breccia.dequantize(breccia.cast(x, "mxfp8")), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), breccia.dequantize(breccia.cast(x, "mxfp8")))


@pytest.mark.parametrize("name", ["nvfp4", "NvFp4", "NVFP4BlockScaling", "nvfp4blockscaling"])
def test_the_core_takes_short_names(name):
    assert breccia._core.Recipe(name, {}).name == "NVFP4BlockScaling"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nvfp5", r"did you mean 'nvfp4'\?"),
        ("int5", r"did you mean 'int4' or 'int8'\?"),
        ("?" * 1000, "known are 'delayed'"),
    ],
)
def test_the_core_suggests_names(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        breccia._core.Recipe(name, {})
