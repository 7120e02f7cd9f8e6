# SPDX-License-Identifier: Apache-2.0
"""Recipes and layouts are data that checks itself."""

import dataclasses
import json
import pickle
import re

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import PerBlockK, PerBlockMN, PerChannel, PerTensor, recipes
from breccia.recipes import choices, crosses


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.ones(shape, np.float32)


# --- layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "block"),
    [(PerTensor(), (0, 0)), (PerChannel(), (1, 0)), (PerBlockK(32), (1, 32)), (PerBlockMN(4, 16), (4, 16))],
)
def test_a_block_of_a_layout_and_of_its_view(layout, block):
    assert (layout.block, layout.T.block) == (block, block[::-1])
    assert layout.T.T.block == pickle.loads(pickle.dumps(layout)).block == block
    assert layout.one_scale == layout.T.one_scale == isinstance(layout, PerTensor)
    rows, columns = (extent or whole for extent, whole in zip(layout.block, (8, 64), strict=True))
    assert np.prod(layout.scale_shape((8, 64))) == (8 // rows) * (64 // columns)
    turned = type(layout)(*(getattr(layout.T, field.name) for field in dataclasses.fields(layout)))
    assert turned == layout.T
    assert turned.block == layout.T.block


@pytest.mark.parametrize(
    "recipe",
    [
        *(kind() for kind in recipes.all_recipes()),
        recipes.NVFP4BlockScaling(two_level=False),
        recipes.Float8CurrentScaling(granularity="row"),
    ],
    ids=str,
)
def test_a_scale_that_follows_from_the_whole_tensor(recipe):
    """A value elsewhere in the tensor changes the scales, or the second one, exactly where the recipe says so."""
    x = np.random.default_rng(1).standard_normal((256, 256), dtype=np.float32)
    other = x.copy()
    other[-1, -1] = 1000
    one, two = (breccia.cast(of, recipe)[:128] for of in (x, other))
    same = np.array_equal(one.scale, two.scale) and np.array_equal(one.global_scale, two.global_scale)
    assert same != choices(recipe).one_for_all
    assert crosses(recipe, -2) == choices(recipe).one_for_all
    by_row = recipe.layout.scale_shape((256, 256)) == (256, 1)
    assert crosses(recipe, -1) == (by_row or crosses(recipe, -2))


MISFITS = {
    "PerTensor with many scales": (PerTensor(), u8(4, 8), f32(4), "PerTensor requires a scalar scale"),
    "PerBlockK, K not a multiple": (
        PerBlockK(128),
        u8(4, 100),
        f32(4, 1),
        "data.shape.-1.=100 must be divisible by block_size=128",
    ),
    "PerBlockK, scale of another shape": (
        PerBlockK(128),
        u8(4, 256),
        f32(4, 1),
        r"scale\.shape must be \(4, 2\), got \(4, 1\)",
    ),
    "PerBlockK, scale transposed": (PerBlockK(128), u8(4, 256), f32(2, 4), r"scale\.shape must be \(4, 2\)"),
    "PerChannel of 1-D": (PerChannel(), u8(4), f32(4), "at least 2-D|ndim >= 2"),
    "PerChannel, one scale too few": (PerChannel(), u8(4, 8), f32(3), r"scale\.shape must be one of"),
    "PerBlockMN of 1-D": (PerBlockMN(1, 32), u8(32), u8(1), "at least 2-D|ndim >= 2"),
    "PerBlockMN, scale of another shape": (
        PerBlockMN(128, 128),
        u8(200, 256),
        f32(1, 2),
        r"scale\.shape must be \(2, 2\)",
    ),
}


@pytest.mark.parametrize(("layout", "data", "scale", "sentence"), MISFITS.values(), ids=MISFITS.keys())
def test_layout_validate(layout, data, scale, sentence):
    with pytest.raises(ValueError, match=sentence):
        layout.validate(data, scale)


@pytest.mark.parametrize("size", [0, -1, -(1 << 40)])
def test_layout_sizes_must_be_positive(size):
    with pytest.raises(ValueError, match="block_size must be > 0"):
        PerBlockK(size)
    with pytest.raises(ValueError, match="must be > 0"):
        PerBlockMN(size, 32)
    with pytest.raises(ValueError, match="must be > 0"):
        PerBlockMN(1, size)


@pytest.mark.parametrize("size", ["128", 1.5, None, [128]])
def test_layout_sizes_must_be_integers(size):
    with pytest.raises(TypeError, match=rf"^block_size must be an integer, got {re.escape(repr(size))}$"):
        PerBlockK(size)


# --- recipes ------------------------------------------------------------------------------------------------

BAD_FIELDS = {
    "fp8_format": (
        ["E3M4", "e4 m3", "", None],
        [breccia.DelayedScaling, breccia.Float8CurrentScaling, breccia.Float8BlockScaling],
    ),
    "amax_history_len": ([0, -1], [breccia.DelayedScaling]),
    "granularity": (["channel", ""], [breccia.Float8CurrentScaling]),
    "block_k": ([0, -128], [breccia.Float8BlockScaling]),
    "block_m": ([0, -1], [breccia.Float8BlockScaling]),
    "scale_format": (["fp8", "E5M2"], [breccia.Float8BlockScaling, breccia.NVFP4BlockScaling]),
    "block_size": (
        [16, 64, 0],
        [breccia.MXFP8BlockScaling, breccia.MXFP6BlockScaling, breccia.MXFP4BlockScaling],
    ),
    "scale_rounding": (["nearest", "R CEIL"], [breccia.MXFP8BlockScaling]),
    "fp6_format": (["E2M1"], [breccia.MXFP6BlockScaling]),
    "fp4_format": (["E3M0"], [breccia.MXFP4BlockScaling, breccia.NVFP4BlockScaling]),
    "scale_rule": (["ao"], [breccia.NVFP4BlockScaling]),
    "scale_search": (["mae"], [breccia.NVFP4BlockScaling, breccia.INT4Scaling]),
    "group_size": ([0, -1], [breccia.INT4Scaling, breccia.INT8Scaling]),
    "scale_dtype": (["fp8", "float64"], [breccia.INT4Scaling, breccia.INT8Scaling]),
}


@pytest.mark.parametrize(
    ("field", "values", "classes"), [(f, v, c) for f, (v, c) in BAD_FIELDS.items()], ids=BAD_FIELDS
)
def test_recipe_fields_are_checked(field, values, classes):
    for cls in classes:
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"{field}.*got"):
                cls(**{field: value})


def test_nvfp4_block_size_is_fixed():
    with pytest.raises(ValueError, match="NVFP4 block_size is fixed at 16, got 32"):
        breccia.NVFP4BlockScaling(block_size=32)


def test_signed_int4_has_no_zero_point():
    with pytest.raises(ValueError, match="signed=False"):
        breccia.INT4Scaling(symmetric=False)


@pytest.mark.parametrize("size", ["128", 128.0, True, [1], 1 << 64, -(1 << 64)])
def test_block_sizes_must_be_integers_of_a_sane_size(size):
    with pytest.raises((TypeError, ValueError), match="block_k"):
        breccia.Float8BlockScaling(block_k=size)


def test_unknown_field():
    with pytest.raises(TypeError, match="block_n"):
        breccia.Float8BlockScaling(block_n=128)


def test_every_recipe_class_is_tested():
    assert set(recipes.all_recipes()) == {type(recipe) for recipe in cases.RECIPES.values()}


def test_positional_defaults_of_the_recipes():
    """The published positional order; new fields come after."""
    assert breccia.DelayedScaling("E5M2", 32, 1) == breccia.DelayedScaling(
        fp8_format="E5M2", amax_history_len=32, margin=1
    )
    assert breccia.Float8CurrentScaling("E5M2") == breccia.Float8CurrentScaling(fp8_format="E5M2")
    assert breccia.Float8BlockScaling("E5M2", 64) == breccia.Float8BlockScaling(fp8_format="E5M2", block_k=64)
    assert breccia.MXFP8BlockScaling("E5M2", 32) == breccia.MXFP8BlockScaling(fp8_format="E5M2")
    assert breccia.NVFP4BlockScaling("E2M1", 16, "E4M3") == breccia.NVFP4BlockScaling()
    int4 = breccia.INT4Scaling(32, False, "bf16")
    assert int4 == breccia.INT4Scaling(group_size=32, signed=False, scale_dtype="bf16")


@cases.ALL
def test_dict_round_trip(recipe):
    """Through JSON, as a checkpoint's metadata holds it; the class name is as good as the short one."""
    fields = json.loads(json.dumps(recipe.to_dict()))
    assert recipes.from_dict(fields) == recipe
    assert recipes.from_dict(fields | {"name": type(recipe).__name__}) == recipe


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"name": "fp9"}, ValueError, r"^name must be one of 'delayed', .*, 'int8_expanded', got 'fp9'$"),
        ({}, ValueError, r"^name must be one of 'delayed', .*, 'int8_expanded', got None$"),
        ({"name": "block", "block_k": 0}, ValueError, "^block_k must be > 0, got 0$"),
        (
            {"name": "block", "block_q": 1},
            TypeError,
            "fields must be those of Float8BlockScaling, which has no block_q",
        ),
    ],
)
def test_from_dict_checks(fields, error, sentence):
    with pytest.raises(error, match=sentence):
        recipes.from_dict(fields)


@cases.ALL
def test_element_and_layout(recipe):
    assert recipe.element == oracles.element_format(recipe)
    scaled = breccia.cast(cases.normal(cases.shape_for(recipe)), recipe)
    assert recipe.layout == scaled.layout
    assert recipe.layout.scale_shape(scaled.shape) == scaled.scale.shape


def test_the_base_classes_are_abstract():
    with pytest.raises(TypeError, match="abstract"):
        recipes.ScalingRecipe()
    with pytest.raises(TypeError, match="abstract"):
        breccia.Layout().validate(u8(4, 8), f32())


@cases.ALL
def test_what_a_scale_is_stored_as(recipe):
    scaled = breccia.cast(cases.normal(cases.shape_for(recipe)), recipe)
    stored = recipes.choices(recipe).scale
    coded = recipes.scale_format(recipe)
    if coded is None:
        assert str(scaled.scale.dtype) in (stored, {"bfloat16": "uint16"}.get(stored))
    else:
        assert coded == stored
        assert scaled.scale.dtype == np.uint8
        assert coded == ("float8_e4m3fn" if recipe.name == "nvfp4" else "float8_e8m0fnu")
        assert scaled.view().scale.dtype.name == coded
    chosen = recipes.choices(recipe)
    assert (chosen.has_zero_point or chosen.expanded) == (scaled.zero_point is not None)
    assert chosen.expanded == (scaled.exponents is not None)
    assert recipes.choices(recipe).two_level == (scaled.global_scale is not None)


SIZED = {breccia.INT4Scaling: "group_size", breccia.INT8Scaling: "group_size", breccia.Float8BlockScaling: "block_k"}


@pytest.mark.parametrize("cls", SIZED)
def test_block_size_is_a_name_of_every_block(cls):
    made = cls(block_size=64)
    assert made == cls(**{SIZED[cls]: 64})
    assert made.block_size == getattr(made, SIZED[cls]) == 64
    assert hash(made) == hash(cls(**{SIZED[cls]: 64}))
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, scale_search="mse").block_size == 64
    assert breccia.recipes.from_dict({"name": cls.name, "block_size": 64}) == made
    assert breccia.recipes.from_dict(made.to_dict()) == made
    assert "block_size" not in made.to_dict()
    with pytest.raises(TypeError, match=f"block_size must be left out beside {SIZED[cls]}"):
        cls(block_size=64, **{SIZED[cls]: 64})
    with pytest.raises((ValueError, TypeError), match=r"got (0|-1)"):
        cls(block_size=0)


@pytest.mark.parametrize(
    ("cls", "written", "meant"),
    [
        (breccia.NVFP4BlockScaling, {"scale_search": "MSE"}, {"scale_search": "mse"}),
        (breccia.MXFP8BlockScaling, {"fp8_format": "e5m2"}, {"fp8_format": "E5M2"}),
        (breccia.MXFP8BlockScaling, {"fp8_format": "float8_e4m3fn"}, {"fp8_format": "E4M3"}),
        (breccia.MXFP6BlockScaling, {"fp6_format": "e3m2"}, {"fp6_format": "E3M2"}),
        (breccia.MXFP8BlockScaling, {"scale_rounding": "RCEIL"}, {"scale_rounding": "rceil"}),
        (breccia.INT4Scaling, {"scale_dtype": "float16"}, {"scale_dtype": "fp16"}),
        (breccia.INT8Scaling, {"scale_dtype": "BFloat16"}, {"scale_dtype": "bf16"}),
        (breccia.Float8CurrentScaling, {"granularity": "Row"}, {"granularity": "row"}),
        (breccia.Float8BlockScaling, {"scale_format": "UE8M0"[1:]}, {"scale_format": "e8m0"}),
    ],
)
def test_options_are_taken_in_any_case(cls, written, meant):
    assert cls(**written) == cls(**meant)
    assert cls(**written).to_dict() == cls(**meant).to_dict()


@pytest.mark.parametrize("options", [{"rounding": "Stochastic", "seed": 1}, {"rounding": "NEAREST"}])
def test_options_of_verbs_are_taken_in_any_case(options):
    w = np.ones((2, 32), np.float32)
    assert breccia.cast(w, "MXFP8", **options) == breccia.cast(
        w, "mxfp8", **{**options, "rounding": options["rounding"].lower()}
    )
    q = breccia.cast(w, "mxfp8")
    np.testing.assert_array_equal(breccia.linear(w, q, precision="FAST"), breccia.linear(w, q, precision="fast"))


def test_swapped_arguments_are_told():
    w = np.ones((2, 32), np.float32)
    for recipe in (breccia.MXFP8BlockScaling(), "mxfp8"):
        with pytest.raises(TypeError, match="swapped arguments"):
            breccia.cast(recipe, w)
    with pytest.raises(TypeError, match=r"recipe must be a recipe such as .* got None"):
        breccia.cast(w, None)
