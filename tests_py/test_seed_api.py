# SPDX-License-Identifier: Apache-2.0
"""The API that this library grew from, as its published page (0.1) states it: each name, signature, default,
exception and message. Where that page is wrong or this library does better, the test's docstring says so."""

import dataclasses
import inspect
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from archive import needs_benchmarks
from breccia import ScaledTensor, bridges
from breccia.layouts import PerBlockK, PerBlockMN, PerChannel, PerTensor

REQUIRED = inspect.Parameter.empty


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.ones(shape, np.float32)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# --- names, signatures, defaults ----------------------------------------------------------------------------

FUNCTIONS = {
    "breccia.cast": ("x", "recipe"),
    "breccia.dequantize": ("scaled",),
    "breccia.matmul": ("a", "b", ("out_dtype", np.float32)),
    "breccia.requantize": ("scaled", "new_recipe"),
    "breccia.from_buffer": ("data", "scale", "recipe", "layout"),
    "breccia.ScaledTensor": ("data", "scale", "recipe", "layout"),
    "breccia.bridges.from_transformer_engine": ("te_t", ("recipe", None)),
    "breccia.bridges.to_transformer_engine": ("scaled",),
    "breccia.bridges.from_torchao": ("aqt", ("recipe", None)),
    "breccia.bridges.to_torchao": ("scaled",),
    "breccia.bridges.save_safetensors": ("tensors", "path", ("extra_metadata", None)),
    "breccia.bridges.load_safetensors": ("path",),
    "breccia.bridges.to_dlpack": ("scaled",),
    "breccia.bridges.from_dlpack": ("scaled", "framework"),
    "breccia.bridges.from_deepseek_v3": ("data", "scale", ("block_k", 128), ("fp8_format", "E4M3")),
    "breccia.bridges.to_deepseek_v3": ("scaled",),
    "breccia.kernels.reference.cast": ("x", "recipe"),
    "breccia.kernels.reference.dequantize": ("scaled",),
    "breccia.kernels.reference.requantize": ("scaled", "recipe"),
    "breccia.kernels.reference.matmul": ("a", "b", ("out_dtype", np.float32)),
    "breccia.DelayedScaling": (("fp8_format", "E4M3"), ("amax_history_len", 16), ("margin", 0)),
    "breccia.Float8CurrentScaling": (("fp8_format", "E4M3"),),
    "breccia.Float8BlockScaling": (("fp8_format", "E4M3"), ("block_k", 128)),
    "breccia.MXFP8BlockScaling": (("fp8_format", "E4M3"), ("block_size", 32)),
    "breccia.NVFP4BlockScaling": (("fp4_format", "E2M1"), ("block_size", 16), ("scale_format", "E4M3")),
    "breccia.INT4Scaling": (("group_size", 128), ("signed", True), ("scale_dtype", "fp16")),
    "breccia.PerTensor": (),
    "breccia.PerBlockK": (("block_size", 128),),
    "breccia.PerChannel": (),
    "breccia.PerBlockMN": (("block_m", 1), ("block_n", 32)),
    "breccia.layouts.PerTensor.validate": ("self", "data", "scale"),
}


def found(path):
    value = breccia
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


@pytest.mark.always
@pytest.mark.parametrize("path", FUNCTIONS)
def test_signatures(path):
    """The page's parameters come first, in its order, by its names and with its defaults; more may follow, but all
    of them have defaults."""
    parameters = list(inspect.signature(found(path)).parameters.values())
    wanted = [(p, REQUIRED) if isinstance(p, str) else p for p in FUNCTIONS[path]]
    assert [(p.name, p.default) for p in parameters[: len(wanted)]] == wanted
    assert all(p.default is not REQUIRED or p.kind is p.VAR_KEYWORD for p in parameters[len(wanted) :])


@pytest.mark.parametrize("module", ["breccia", "breccia.bridges", "breccia.kernels.reference"])
def test_names_by_star(module):
    names = {}
    exec(f"from {module} import *", names)
    for path in FUNCTIONS:
        place, _, name = path.rpartition(".")
        assert place != module or names[name] is found(path)


def test_version():
    assert isinstance(breccia.__version__, str)
    assert breccia.__version__.count(".") >= 2


def test_triton_module_is_there_without_a_gpu():
    """Importing it imports no Triton; where the kernels cannot run it has the flag alone."""
    code = "import breccia.kernels.triton as t, sys; print('triton' in sys.modules, t.TRITON_AVAILABLE, *dir(t))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "False"
    assert ("scaled_matmul_triton" in out) == (out[1] == "True")


# --- ScaledTensor -------------------------------------------------------------------------------------------


class MyRecipe:
    """A recipe that breccia knows nothing of."""


class MyLayout:
    """A layout without a check."""


class RefusingLayout:
    def validate(self, data, scale):
        raise ValueError(f"scale of {scale.shape} does not match data of {data.shape}")


def foreign(data=None, scale=None, recipe=None, layout=None):
    return ScaledTensor(
        u8(4, 8) if data is None else data,
        np.float32(1) if scale is None else scale,
        MyRecipe() if recipe is None else recipe,
        MyLayout() if layout is None else layout,
    )


def test_construction_as_on_the_page():
    st = ScaledTensor(data=u8(4, 8), scale=np.float32(1.0), recipe=breccia.Float8CurrentScaling(), layout=PerTensor())
    assert (st.shape, st.ndim, st.data_dtype, st.scale_dtype) == ((4, 8), 2, np.uint8, np.float32)
    assert dataclasses.is_dataclass(st)
    with pytest.raises(dataclasses.FrozenInstanceError):
        st.data = u8(4, 8)


INVARIANTS = {
    "data": (TypeError, r"^data must be array-like", lambda: foreign(data=[[1]])),
    "scale": (TypeError, r"^scale must be array-like", lambda: foreign(scale=1.0)),
    "ndim": (ValueError, r"^data must be at least 1-D", lambda: foreign(data=u8())),
    "recipe": (ValueError, r"^recipe is required", lambda: ScaledTensor(u8(4, 8), f32(), None, MyLayout())),
    "layout": (ValueError, r"^layout is required", lambda: ScaledTensor(u8(4, 8), f32(), MyRecipe(), None)),
    "validate": (ValueError, r"does not match data of \(4, 8\)", lambda: foreign(layout=RefusingLayout())),
}


@pytest.mark.parametrize(("error", "sentence", "build"), INVARIANTS.values(), ids=INVARIANTS.keys())
def test_invariants(error, sentence, build):
    with pytest.raises(error, match=sentence):
        build()


def test_a_layouts_check_is_called_with_the_arrays():
    calls = []

    class Noting:
        def validate(self, data, scale):
            calls.append((data, scale))

    data, scale = u8(4), np.float32(2)
    for recipe in (MyRecipe(), breccia.Float8CurrentScaling()):
        foreign(data, scale, recipe, Noting())
    assert all(call[0] is data and call[1] is scale for call in calls)
    assert len(calls) == 2


def test_from_buffer_keeps_the_very_arrays():
    data, scale = u8(4, 4), np.float32(2)
    st = breccia.from_buffer(data, scale, MyRecipe(), MyLayout())
    assert st.data is data
    assert st.scale is scale


def test_a_strangers_recipe_is_carried():
    st = foreign(u8(4, 8), f32(4, 1))
    assert (st.shape, st.nbytes, st.is_packed) == ((4, 8), 48, False)
    assert repr(st) == (
        "breccia.ScaledTensor(shape=(4, 8), data_dtype=uint8, scale_shape=(4, 1), recipe=MyRecipe, layout=MyLayout)"
    )
    again = pickle.loads(pickle.dumps(st))
    assert (again.shape, type(again.recipe), type(again.layout)) == ((4, 8), MyRecipe, MyLayout)
    assert {st: 1}[st] == 1
    pytest.importorskip("torch")
    assert st.to("torch").to("numpy") == st


VERBS = {
    "cast": lambda st: breccia.cast(normal(4, 128), st.recipe),
    "dequantize": breccia.dequantize,
    "requantize": lambda st: breccia.requantize(st, breccia.Float8CurrentScaling()),
    "requantize to it": lambda st: breccia.requantize(breccia.cast(normal(4, 8), "fp8"), st.recipe),
    "matmul": lambda st: breccia.matmul(normal(2, 4), st),
    "matmul by": lambda st: breccia.matmul(st, normal(8, 2)),
    "linear": lambda st: breccia.linear(normal(2, 8), st),
    "prepare": breccia.prepare,
    "save": lambda st: bridges.save_safetensors({"w": st}, "never.safetensors"),
    "array": np.asarray,
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_a_strangers_recipe(verb):
    with pytest.raises(TypeError, match="breccia has no kernels for recipe MyRecipe"):
        VERBS[verb](foreign())


def test_verbs_refuse_a_strangers_layout():
    with pytest.raises(TypeError, match="breccia has no kernels for layout MyLayout"):
        breccia.dequantize(foreign(recipe=breccia.Float8CurrentScaling()))
    with pytest.raises(TypeError, match="layout MyLayout must have an attribute T"):
        _ = foreign().T


def test_a_class_is_not_a_recipe():
    with pytest.raises(TypeError, match=r"got the class NVFP4BlockScaling: add \(\), NVFP4BlockScaling\(\)"):
        breccia.cast(normal(4, 16), breccia.NVFP4BlockScaling)


def test_equal_values_are_equal_and_hash_alike():
    """The page promises hashes of values, for memoization across calls."""
    x = normal(4, 128)
    for recipe in (breccia.Float8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.INT4Scaling()):
        a, b, other = breccia.cast(x, recipe), breccia.cast(x, recipe), breccia.cast(2 * x, recipe)
        assert a == b
        assert hash(a) == hash(b)
        assert {a: "seen"}[b] == "seen"
        assert a != other
        assert a != a.T
        assert a.T == b.T
        assert a != breccia.requantize(a, breccia.Float8CurrentScaling())
    assert a != "text"
    nan = breccia.cast(np.full((1, 128), np.nan, np.float32), breccia.Float8BlockScaling())
    assert nan == breccia.cast(np.full((1, 128), np.nan, np.float32), breccia.Float8BlockScaling())


# --- core operations ----------------------------------------------------------------------------------------

RECIPES = [
    breccia.DelayedScaling(),
    breccia.Float8CurrentScaling(),
    breccia.Float8BlockScaling(),
    breccia.MXFP8BlockScaling(),
    breccia.NVFP4BlockScaling(),
    breccia.INT4Scaling(),
]
EACH = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@EACH
def test_six_recipes(recipe):
    x = normal(8, 256)
    st = breccia.cast(x, recipe)
    y = breccia.dequantize(st)
    assert isinstance(y, np.ndarray)
    assert (y.shape, y.dtype) == (x.shape, np.float32)
    assert (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()) > 0.99
    product = breccia.matmul(normal(3, 8), st)
    assert (product.shape, product.dtype) == ((3, 256), np.float32)
    np.testing.assert_allclose(product, normal(3, 8) @ y, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES[2:], ids=lambda recipe: recipe.name)
def test_block_recipes_need_two_axes_and_whole_blocks(recipe):
    with pytest.raises(ValueError, match=r"x\.ndim >= 2"):
        breccia.cast(normal(256), recipe)
    with pytest.raises(ValueError, match="divisible"):
        breccia.cast(normal(4, 250), recipe)


def test_batches_broadcast():
    st = breccia.cast(normal(2, 8, 128), breccia.MXFP8BlockScaling())
    assert breccia.matmul(normal(2, 3, 8), st).shape == (2, 3, 128)
    assert breccia.matmul(normal(2, 3, 8), st, out_dtype=np.float16).dtype == np.float16


def test_requantize_by_keyword():
    st = breccia.cast(normal(8, 256), breccia.MXFP8BlockScaling())
    other = breccia.requantize(scaled=st, new_recipe=breccia.Float8CurrentScaling())
    assert other.recipe == breccia.Float8CurrentScaling()


def test_first_example_of_the_page():
    """It multiplies A (16, 256) by ``cast(W (256, 64), block_k=128)``, whose rows of 64 hold no block of 128: by its
    own rule the cast is refused. The message says what to do instead, and that works."""
    a, w = normal(16, 256), normal(256, 64)
    with pytest.raises(ValueError, match=r"divisible by 128, got .*64.*cast w\.T and multiply by q\.T"):
        breccia.cast(w, breccia.Float8BlockScaling(block_k=128))
    q = breccia.cast(w.T, breccia.Float8BlockScaling(block_k=128))
    y = breccia.matmul(breccia.cast(a, breccia.Float8CurrentScaling()), q.T)
    assert y.shape == (16, 64)
    assert np.abs(y - a @ w).max() < 0.1 * np.abs(a @ w).max()


# --- recipes ------------------------------------------------------------------------------------------------

FIELDS = {
    "format": (ValueError, r"fp8_format must be 'E4M3' or 'E5M2'", lambda: breccia.Float8CurrentScaling("E3M4")),
    "history": (ValueError, r"amax_history_len", lambda: breccia.DelayedScaling(amax_history_len=0)),
    "block_k": (ValueError, r"block_k must be > 0, got 0", lambda: breccia.Float8BlockScaling(block_k=0)),
    "MX": (ValueError, r"block_size is fixed at 32", lambda: breccia.MXFP8BlockScaling(block_size=16)),
    "NVFP4": (ValueError, r"block_size is fixed at 16", lambda: breccia.NVFP4BlockScaling(block_size=32)),
    "FP4": (ValueError, r"fp4_format must be 'E2M1'", lambda: breccia.NVFP4BlockScaling(fp4_format="E3M0")),
    "scale": (ValueError, r"scale_format must be 'E4M3'", lambda: breccia.NVFP4BlockScaling(scale_format="E8M0")),
    "group": (ValueError, r"group_size must be > 0", lambda: breccia.INT4Scaling(group_size=-1)),
    "dtype": (ValueError, r"scale_dtype must be 'fp16'", lambda: breccia.INT4Scaling(scale_dtype="fp64")),
}


@pytest.mark.parametrize(("error", "sentence", "build"), FIELDS.values(), ids=FIELDS.keys())
def test_fields_are_checked(error, sentence, build):
    with pytest.raises(error, match=sentence):
        build()


@EACH
def test_recipes_are_frozen_hashable_and_json(recipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.novel = 1
    assert hash(recipe) == hash(type(recipe)())
    fields = json.loads(json.dumps(recipe.to_dict()))
    assert fields.pop("name") == type(recipe).name
    assert type(recipe)(**fields) == recipe
    assert breccia.recipes.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(("name", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_int4_scales_are_numbers(name, dtype):
    """bfloat16 as ml_dtypes' type where that is installed, not as half-words."""
    pytest.importorskip("ml_dtypes")
    st = breccia.cast(normal(4, 128), breccia.INT4Scaling(scale_dtype=name))
    assert st.scale_dtype.name == dtype
    np.testing.assert_allclose(st.scale.astype(np.float32)[:, 0], np.abs(normal(4, 128)).max(1) / 7, rtol=2**-8)
    assert breccia.requantize(breccia.cast(normal(4, 128), "fp8"), st.recipe).scale_dtype.name == dtype


def test_a_product_of_shapes_that_do_not_match():
    with pytest.raises(ValueError, match=r"matmul shape mismatch: b must be \(\.\.\., 128, N\)"):
        breccia.matmul(breccia.cast(normal(4, 128), "fp8"), breccia.cast(normal(64, 16), "fp8"))


# --- layouts ------------------------------------------------------------------------------------------------

FITS = {
    "scalar": (PerTensor(), (4, 8), ()),
    "rows": (PerBlockK(128), (4, 256), (4, 2)),
    "batch": (PerBlockK(32), (2, 4, 64), (2, 4, 2)),
    "channels": (PerChannel(), (4, 128), (4,)),
    "column": (PerChannel(), (4, 128), (4, 1)),
    "MX": (PerBlockMN(1, 32), (4, 64), (4, 2)),
    "tiles": (PerBlockMN(2, 8), (8, 64), (4, 8)),
}
MISFITS = {
    "PerTensor, one element": (PerTensor(), (4, 8), (1,), r"PerTensor requires a scalar scale \(ndim=0\), got ndim=1"),
    "PerTensor, rows": (PerTensor(), (4, 8), (4, 1), r"PerTensor requires a scalar scale \(ndim=0\), got ndim=2"),
    "PerBlockK, K": (PerBlockK(128), (4, 200), (4, 2), r"divisible by block_size=128"),
    "PerBlockK, scale": (PerBlockK(128), (4, 256), (4, 1), r"scale\.shape must be \(4, 2\)"),
    "PerBlockK, 1-D": (PerBlockK(128), (128,), (1,), r"data must be at least 2-D \(M, K\), got ndim=1"),
    "PerChannel, M": (PerChannel(), (4, 128), (8,), r"scale\.shape must be one of"),
    "PerChannel, grid": (PerChannel(), (4, 128), (4, 2), r"scale\.shape must be one of"),
    "PerChannel, 1-D": (PerChannel(), (4,), (4,), r"data must be at least 2-D \(M, K\), got ndim=1"),
    "PerBlockMN, M": (PerBlockMN(4, 32), (5, 64), (1, 2), r"must be \(2, 2\), got .* block_m=4, block_n=32"),
    "PerBlockMN, N": (PerBlockMN(1, 32), (4, 50), (4, 1), r"must be \(4, 2\), got .* block_m=1, block_n=32"),
    "PerBlockMN, tiles": (PerBlockMN(2, 32), (4, 50), (4, 1), r"must be \(2, 2\), got .* block_m=2, block_n=32"),
    "PerBlockMN, 1-D": (PerBlockMN(1, 32), (64,), (2,), r"data must be at least 2-D \(M, K\), got ndim=1"),
}


@pytest.mark.parametrize(("layout", "data", "scale"), FITS.values(), ids=FITS.keys())
def test_scales_that_fit(layout, data, scale):
    layout.validate(u8(*data), f32(*scale))


@pytest.mark.parametrize(("layout", "data", "scale", "sentence"), MISFITS.values(), ids=MISFITS.keys())
def test_scales_that_do_not_fit(layout, data, scale, sentence):
    """The page's PerBlockMN refuses short tiles at the edges; checkpoints have them, so they fit a scale for each
    tile that is begun."""
    with pytest.raises(ValueError, match=sentence):
        layout.validate(u8(*data), f32(*scale))
    with pytest.raises(ValueError, match=sentence):
        ScaledTensor(u8(*data), f32(*scale), breccia.Float8CurrentScaling(), layout)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: PerBlockK(0), "block_size must be > 0, got 0"),
        (lambda: PerBlockK(-1), "block_size must be > 0, got -1"),
        (lambda: PerBlockMN(block_m=0), "block_m and block_n must be > 0"),
        (lambda: PerBlockMN(block_n=-1), "block_m and block_n must be > 0"),
    ],
)
def test_block_sizes_are_positive(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_names_of_layouts():
    assert [kind.name for kind in (PerTensor, PerBlockK, PerChannel, PerBlockMN)] == [
        "per_tensor",
        "per_block_k",
        "per_channel",
        "per_block_mn",
    ]


def test_packing_needs_pairs():
    assert breccia.formats.pack(u8(2, 6)).shape == (2, 3)
    with pytest.raises(ValueError, match="codes must have an even number of columns, got 5"):
        breccia.formats.pack(u8(2, 5))
    assert breccia.formats.unpack(u8(2, 3), n_values=5).shape == (2, 5)
    with pytest.raises(ValueError, match="n_values must be 2 or 1, the capacity of 1 bytes a row, got 10"):
        breccia.formats.unpack(u8(1), n_values=10)


# --- bridges ------------------------------------------------------------------------------------------------


def test_safetensors_round_trip(tmp_path):
    tensors = {recipe.name: breccia.cast(normal(4, 256), recipe) for recipe in RECIPES}
    path = tmp_path / "w.safetensors"
    bridges.save_safetensors(tensors=tensors, path=path, extra_metadata={"from": "a test"})
    assert bridges.load_safetensors(path=path) == tensors


def test_deepseek_round_trip():
    data, scale = u8(4, 256), f32(4, 2)
    st = bridges.from_deepseek_v3(data=data, scale=scale, block_k=128, fp8_format="E4M3")
    assert st.recipe == breccia.Float8BlockScaling()
    assert all(got is given for got, given in zip(bridges.to_deepseek_v3(st), (data, scale), strict=True))
    with pytest.raises(ValueError, match="scaled must be Float8BlockScaling"):
        bridges.to_deepseek_v3(breccia.cast(normal(4, 8), "fp8"))


def test_dlpack_pair():
    data, scale = bridges.to_dlpack(scaled=breccia.cast(normal(4, 256), "fp8-row"))
    assert "dltensor" in repr(data)
    assert "dltensor" in repr(scale)


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_the_scalar_scale_of_the_page_moves(framework):
    """`np.float32(1.0)`, as in the page's construction, is no array and exports nothing by itself."""
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    st = ScaledTensor(data=u8(4, 8), scale=np.float32(1.0), recipe=breccia.Float8CurrentScaling(), layout=PerTensor())
    moved = bridges.from_dlpack(st, framework)
    assert moved.to("numpy") == st
    np.testing.assert_array_equal(moved.numpy(), st.numpy())
    assert all("dltensor" in repr(capsule) for capsule in bridges.to_dlpack(st))


MISSING = {
    "TransformerEngine": ("transformer_engine", bridges.to_transformer_engine),
    "torchao": ("torchao", bridges.to_torchao),
}


@pytest.mark.parametrize("peer", MISSING)
def test_a_missing_peer_is_named(peer, monkeypatch):
    module, call = MISSING[peer]
    for name in [n for n in sys.modules if n.partition(".")[0].startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{peer}.* is needed here: pip install 'breccia\[") as raised:
        call(breccia.cast(normal(4, 128), "fp8"))
    assert raised.value.name.startswith(module)


# --- the package ----------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def test_extras_that_the_page_and_the_code_name_are_there():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {"torch", "mlx", "jax", "triton", "bridges", "dev", "all"}
    named |= {bridge.extra for bridge in bridges.registry().values() if bridge.extra}
    for source in (ROOT / "python").rglob("*.py"):
        named |= set(re.findall(r'require\("[\w.]+", "(\w+)"\)', source.read_text()))
    assert named <= set(extras)
    parts = {part for extra in extras.values() for text in extra for part in re.findall(r"breccia\[(.*)\]", text)}
    assert {name for part in parts for name in part.split(",")} <= set(extras)


@pytest.mark.parametrize("script", ["bench_memory.py", "bench_accuracy.py --side 128 --seeds 1"])
@needs_benchmarks
def test_benchmarks_of_the_page_run(script):
    name, *options = script.split()
    command = [sys.executable, str(ROOT / "benchmarks" / name), *options]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "NVFP4BlockScaling()" in out
