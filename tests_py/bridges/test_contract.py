# SPDX-License-Identifier: Apache-2.0
"""What every bridge must do, for every bridge there is: a new one is tested on the day it appears."""

import importlib
import subprocess
import sys
import warnings
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges import OutsideTensor, common, scales
from breccia.bridges import parts as _parts
from cases import RECIPES

pytest.importorskip("ml_dtypes")  # arrays say by it what their bytes are

MODULES = bridges.modules()
CHECKPOINT = {name: m for name, m in MODULES.items() if hasattr(m, "lay_out")}
CARRIED = [(name, key) for name, m in CHECKPOINT.items() for key, recipe in RECIPES.items() if m.BRIDGE.carries(recipe)]
CASES = [(name, key) for name, module in CHECKPOINT.items() for key in module.BRIDGE.recipes]


def weight(shape: tuple[int, ...] = (256, 384)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).normal(0, 0.02, shape).astype(np.float32)


def reader(module: Any) -> Any:
    return getattr(module, "from_" + module.__name__.rpartition(".")[2])


def read(module: Any, parts: dict[str, Any], recipe: Any = None) -> Any:
    if module.NAME == "gguf":
        kind = next(name for name in parts if name != "scale")
        return reader(module)(parts[kind], kind, parts.get("scale"))
    if module.NAME == "mlx" and isinstance(recipe, breccia.INT8Scaling):  # shapes do not tell it, config.json does
        return reader(module)(parts, bits=8)
    return reader(module)(parts)


def dequantized(x: Any) -> Any:
    return x.dequantize() if isinstance(x, OutsideTensor) else breccia.dequantize(x)


def same_values(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(dequantized(a).view(np.uint32), dequantized(b).view(np.uint32))


@pytest.mark.parametrize(("name", "key"), CASES)
def test_round_trip_is_byte_exact(name: str, key: str) -> None:
    module = CHECKPOINT[name]
    recipe = module.BRIDGE.recipes[key]
    assert module.BRIDGE.carries(recipe)
    scaled = breccia.cast(weight(), recipe)
    parts = _parts.materialize(module.lay_out(scaled))
    back = read(module, parts, recipe)
    same_values(back, scaled)
    again = _parts.materialize(module.lay_out(back))
    assert parts.keys() == again.keys()
    for role, array in parts.items():
        assert array.dtype == again[role].dtype, role
        assert array.tobytes() == again[role].tobytes(), role


@pytest.mark.parametrize(("name", "key"), CARRIED)
def test_every_recipe_carried_is_read_back(name: str, key: str) -> None:
    module = CHECKPOINT[name]
    scaled = breccia.cast(weight(), RECIPES[key])
    back = read(module, _parts.materialize(module.lay_out(scaled)), scaled.recipe)
    if _last_bit(name, scaled.recipe):
        np.testing.assert_allclose(dequantized(back), dequantized(scaled), rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(dequantized(back), dequantized(scaled))


def _last_bit(name: str, recipe: Any) -> bool:
    """What docs/formats.md says may change the last bit: the other form of a global scale, and MLX's sum where the
    scales of integers are float32."""
    if isinstance(recipe, breccia.NVFP4BlockScaling):
        divides = CHECKPOINT[name].BRIDGE.recipes["nvfp4"].global_scale_form == "divisor"
        return divides != (recipe.global_scale_form == "divisor")
    return name == "mlx" and getattr(recipe, "scale_dtype", "") == "fp32"


@pytest.mark.parametrize(("name", "key"), CASES)
def test_a_transposed_view_is_refused(name: str, key: str) -> None:
    module = CHECKPOINT[name]
    turned = breccia.cast(weight((256, 256)), module.BRIDGE.recipes[key]).T
    write = getattr(module, "to_" + module.__name__.rpartition(".")[2])
    for call in (module.lay_out, write):
        with pytest.raises(ValueError, match=r"^scaled must not be a transposed view: pass \.mT of it$"):
            call(turned)
    same_values(read(module, write(turned.mT), turned.recipe), turned.mT)


@pytest.mark.parametrize(("name", "key"), CASES)
def test_the_plan_of_a_ghost_is_what_is_made(name: str, key: str) -> None:
    module = CHECKPOINT[name]
    recipe = module.BRIDGE.recipes[key]
    planned = module.lay_out(_parts.ghost((256, 384), recipe))
    made = module.lay_out(breccia.cast(weight(), recipe))
    assert {k: (p.dtype, p.shape) for k, p in planned.items()} == {k: (p.dtype, p.shape) for k, p in made.items()}


@pytest.mark.parametrize("name", CHECKPOINT)
def test_plans_warn_of_nothing(name: str) -> None:
    """Whatever the memory of a ghost holds, which was never written: operations with a signalling NaN are invalid."""
    module = CHECKPOINT[name]
    divisor = breccia.NVFP4BlockScaling(global_scale_form="divisor")
    for recipe in (*module.BRIDGE.recipes.values(), *((divisor,) if module.BRIDGE.carries(divisor) else ())):
        ghost = _parts.ghost((256, 384), recipe)
        for part in (ghost.scale, ghost.global_scale):
            if part is not None and part.dtype == np.float32:
                part.view(np.uint32)[...] = 0x7FA00001
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.lay_out(ghost)


@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_missing_tensor_is_named(name: str) -> None:
    module = CHECKPOINT[name]
    if name == "gguf":
        with pytest.raises(ValueError, match="kind"):
            reader(module)(np.zeros(34, np.uint8), "Q9_9")
        return
    with pytest.raises(ValueError, match=rf"{name}: '\w+' must be among the tensors"):
        reader(module)({})


@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_recipe_without_a_place_is_refused(name: str) -> None:
    module = CHECKPOINT[name]
    for recipe_type in breccia.recipes.all_recipes():
        recipe = recipe_type()
        if any(isinstance(known, recipe_type) for known in module.BRIDGE.recipes.values()):
            continue
        if module.BRIDGE.carries(recipe):
            continue
        with pytest.raises(ValueError, match="scaled must"):
            _parts.materialize(module.lay_out(breccia.cast(weight(), recipe)))


@pytest.mark.parametrize("name", [name for name, m in CHECKPOINT.items() if name != "gguf"])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    module = CHECKPOINT[name]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), next(iter(module.BRIDGE.recipes.values())))))
    for role in parts:
        if parts[role].ndim < 2:
            continue
        n, k = parts[role].shape[:2]
        with pytest.raises(ValueError, match=r"must (fit|have|be)\b.*got "):
            read(module, {**parts, role: parts[role][: max(n // 2, 1), : max(k // 3, 1)]})


HOSTILE = {
    "a scalar": lambda array: array.reshape(-1)[:1].reshape(()),
    "one axis": lambda array: array.reshape(-1),
    "three axes": lambda array: array[None],
    "nothing": lambda array: array[:0] if array.ndim else array.reshape(1)[:0],
    **{
        dtype: lambda array, dtype=dtype: np.zeros(array.shape, dtype)
        for dtype in ("bool", "uint8", "int64", "float64", "complex64")
    },
}


@pytest.mark.parametrize(("name", "key"), CASES)
def test_any_shape_and_dtype_is_read_or_refused(name: str, key: str) -> None:
    module = CHECKPOINT[name]
    recipe = module.BRIDGE.recipes[key]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), recipe)))
    for what, hostile in HOSTILE.items():
        for role, array in parts.items():
            try:
                result = read(module, {**parts, role: hostile(array)}, recipe)
            except (ValueError, TypeError) as error:
                assert str(error), f"{role}: {what}"
            else:
                assert isinstance(result, breccia.ScaledTensor | OutsideTensor), f"{role}: {what}"


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("name", "key"), CASES)
def test_complex_numbers_are_refused(name: str, key: str, library: str) -> None:
    module = CHECKPOINT[name]
    recipe = module.BRIDGE.recipes[key]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), recipe)))
    for role, array in parts.items():
        bad: Any = np.full(array.shape, 1 + 1j, np.complex64)
        if library == "torch":
            bad = pytest.importorskip("torch").from_numpy(bad)
        with pytest.raises(TypeError, match=r"^\w+ must have real numbers, got dtype complex64$"):
            read(module, {**parts, role: bad}, recipe)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_modelopt_int4_scales_of_another_dtype_are_refused(dtype: Any) -> None:
    module = CHECKPOINT["modelopt"]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), module.BRIDGE.recipes["int4"])))
    bad = {**parts, "weight_scale": parts["weight_scale"].astype(dtype)}
    with pytest.raises(ValueError, match=r"^scales must be float16, bfloat16 or float32, got dtype "):
        module.from_modelopt(bad, "int4")


@pytest.mark.parametrize("name", ["awq", "gptq"])
@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales"])
def test_words_that_are_no_matrix_are_named(name: str, role: str) -> None:
    module = CHECKPOINT[name]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), next(iter(module.BRIDGE.recipes.values())))))
    flat = parts[role].reshape(-1)
    sentence = rf"^{name}: '{role}' must be a matrix, got shape \({flat.size},\)$"
    with pytest.raises(ValueError, match=sentence):
        read(module, {**parts, role: flat})


@pytest.mark.parametrize(("name", "call"), [("torchao", "to_torchao"), ("transformer_engine", "to_transformer_engine")])
def test_a_missing_peer_names_the_extra(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name]
    monkeypatch.setitem(sys.modules, module.BRIDGE.peer, None)
    monkeypatch.setitem(sys.modules, f"{module.BRIDGE.peer}.pytorch", None)
    with pytest.raises(ImportError, match=rf"pip install 'breccia\[{module.BRIDGE.extra}\]'"):
        getattr(module, call)(breccia.cast(weight(), breccia.Float8CurrentScaling()))


def test_bridges_import_no_peer() -> None:
    code = (
        "import sys, breccia.bridges as b; b.modules();"
        "bad = {'torch', 'jax', 'mlx', 'torchao', 'gguf', 'transformer_engine', 'compressed_tensors'};"
        "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_of_the_modules_are_names_of_the_package() -> None:
    for module in MODULES.values():
        for name in module.__all__:
            assert getattr(bridges, name) is getattr(importlib.import_module(module.__name__), name)
    with pytest.raises(AttributeError):
        _ = bridges.no_such_name


def test_swizzle_round_trip() -> None:
    for rows, columns in [(1, 1), (128, 4), (129, 5), (300, 33)]:
        scale = np.random.default_rng(0).integers(0, 255, (rows, columns), dtype=np.uint8)
        np.testing.assert_array_equal(common.unswizzle(common.swizzle(scale), rows, columns), scale)
    flat = common.swizzle(np.arange(200 * 7, dtype=np.int64).astype(np.uint8).reshape(200, 7))
    r, c, tiles = 170, 6, 2
    at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    assert flat[at] == (r * 7 + c) % 256


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_formats_of_matrices_say_so(name: str) -> None:
    module = CHECKPOINT[name]
    scaled = breccia.cast(weight((2, 64, 128)), next(iter(module.BRIDGE.recipes.values())))
    with pytest.raises(ValueError, match=rf"scaled must be a matrix for {name}, got shape \(2, 64, 128\)"):
        module.lay_out(scaled)
    with pytest.raises(ValueError, match="scaled must not be a transposed view"):
        module.lay_out(breccia.cast(weight((128, 128)), next(iter(module.BRIDGE.recipes.values()))).T)


@pytest.mark.parametrize(
    ("name", "role"),
    [("modelopt", "weight_scale_2"), ("comfyui", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")],
)
@pytest.mark.parametrize("count", [0, 3])
def test_a_global_scale_of_no_number_or_many_is_named(name: str, role: str, count: int) -> None:
    module = CHECKPOINT[name]
    parts = _parts.materialize(module.lay_out(breccia.cast(weight(), module.BRIDGE.recipes["nvfp4"])))
    with pytest.raises(ValueError, match=rf"{role} must be one number.*got shape \({count},\)"):
        reader(module)({**parts, role: np.ones(count, np.float32)})


def test_reciprocals_of_extremes_warn_of_nothing() -> None:
    extremes = np.array([0, 1e-45, 1e-38, 1, 3e38], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = scales.reciprocal(extremes)
    np.testing.assert_array_equal(result[:2], np.inf)
    assert result[3] == 1
