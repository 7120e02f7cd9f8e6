# SPDX-License-Identifier: Apache-2.0
"""Whatever a public function is given, it answers with a TypeError or a ValueError of one line in the words of its
arguments: never with the signatures of the binding. Whole sentences are in messages.py and messages_of_verbs.py."""

import ast
import dataclasses
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import breccia
import cases
import numpy as np
import pytest
from breccia import bridges, formats
from breccia.bridges import load_safetensors, save_safetensors
from breccia.checkpoint import save_arrays
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from messages import MESSAGES, Q, X
from messages_of_verbs import BLOCK, CURRENT, f32, u8
from messages_of_verbs import MESSAGES as OF_VERBS

TESTS = Path(__file__).parent

JUNK = {
    "None": None,
    "a float": 1.5,
    "text": "x",
    "negative": -1,
    "huge": 2**70,
    "huge extent": (2**70,),
    "list of None": [None],
    "dict": {},
    "object": object(),
    "bytes": b"x",
    "float extent": (1, 2.5),
    "NumPy number": np.float32(3),
    "bool": True,
    "surrogate": "\ud800",
    "two lines": "a\nb",
    "negative extent": (-1,),
    "text extent": ("a",),
    "array": np.zeros(3),
    "large extents": [2**62, 0],
}
ONES = f32(4, 128)
RECIPE = breccia.MXFP8BlockScaling()
SCALED = breccia.cast(ONES, RECIPE)
CODES = np.zeros(4, np.uint8)


def keyword(function, **good):
    """One call for each argument, the others being good."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind != p.VAR_KEYWORD]
    return {
        f"{function.__name__}({name})": lambda value, name=name: function(**{**good, name: value}) for name in names
    }


def calls():
    made = {}
    for cls in (*Layout.__subclasses__(), *ScalingRecipe.__subclasses__()):
        for f in dataclasses.fields(cls):
            made[f"{cls.__name__}({f.name})"] = lambda value, cls=cls, f=f: cls(**{f.name: value})
    for layout in (breccia.PerTensor(), breccia.PerBlockK(32), breccia.PerChannel(), breccia.PerBlockMN(1, 32)):
        made[f"{layout.name}.scale_shape"] = layout.scale_shape
        made[f"{layout.name}.T.scale_shape"] = layout.T.scale_shape

        def validate(value, layout=layout):
            layout.validate(type("Data", (), {"shape": value}), SCALED.scale)

        made[f"{layout.name}.validate"] = validate
    made |= keyword(formats.encode, x=ONES, fmt="float8_e4m3fn") | keyword(formats.decode, codes=CODES, fmt="int8")
    made |= keyword(formats.pack, codes=CODES) | keyword(formats.unpack, packed=CODES, n=8)
    made |= keyword(formats.finfo, fmt="int4")
    made |= keyword(breccia.cast, x=ONES, recipe=RECIPE) | keyword(breccia.dequantize, scaled=SCALED)
    made |= keyword(breccia.requantize, scaled=SCALED, recipe=RECIPE) | keyword(breccia.matmul, a=ONES, b=SCALED.T)
    good = {"data": SCALED.data, "scale": SCALED.scale, "recipe": RECIPE, "layout": SCALED.layout}
    made |= keyword(breccia.ScaledTensor, **good)
    made["cast(seed)"] = lambda value: breccia.cast(ONES, RECIPE, rounding="stochastic", seed=value)
    made |= keyword(breccia.set_num_threads) | keyword(breccia.set_backend)
    return made


CALLS = calls()


@pytest.fixture(autouse=True)
def settings():
    info = breccia.cpu_info()
    yield
    breccia.set_num_threads(info["threads"])
    breccia.set_backend(info["backend"])


@pytest.mark.always
@pytest.mark.filterwarnings("ignore:dtype= of dequantize")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_get_one_line(name):
    for what, value in JUNK.items():
        try:
            CALLS[name](value)
        except (TypeError, ValueError) as error:
            message = str(error)
            assert not isinstance(error, UnicodeError), (what, message)
            assert "\n" not in message and message, (what, message)
            for word in ("incompatible", "supported:", "C++", "pybind"):
                assert word not in message, (what, message)


def test_ranks_and_extents_that_no_layout_has():
    for layout in (breccia.PerBlockK(32), breccia.PerChannel(), breccia.PerBlockMN(1, 32)):
        for either in (layout, layout.T):
            with pytest.raises(ValueError, match=r"at least .-D, got 0-D"):
                either.scale_shape(())
            with pytest.raises(ValueError, match="negative extent"):
                either.scale_shape((-32, 64))


def _raises(path):
    """The calls of pytest.raises in a file that look at the kind of an error alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {id(item.context_expr) for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items
             if item.optional_vars is not None}  # fmt: skip
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or id(call) in named or getattr(call.func, "attr", "") != "raises":
            continue
        if not any(word.arg == "match" for word in call.keywords):
            yield call.lineno, ast.unparse(call.args[0])


def test_tests_of_errors_look_at_the_sentence():
    """A TypeError or ValueError of another cause, such as a mistake of the test, must not pass for the right one."""
    loose = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, kind in _raises(path)
        # Python's own, which have no sentence of this library.
        if kind not in ("AttributeError", "KeyError", "KeyboardInterrupt", "dataclasses.FrozenInstanceError", "Reached")
    ]
    assert not loose


EVERY = [*MESSAGES.items(), *OF_VERBS.items()]


@pytest.mark.always
@pytest.mark.parametrize(("error", "call", "sentence"), [row for _, row in EVERY], ids=[name for name, _ in EVERY])
def test_messages(error, call, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call()


BRIDGES = [name for name in dir(bridges) if name.startswith(("to_", "from_"))]


@pytest.mark.parametrize("name", [name for name in BRIDGES if name.startswith("to_")])
def test_bridges_refuse_what_is_no_scaled_tensor(name):
    with pytest.raises((TypeError, ImportError), match=r"scaled must be a ScaledTensor, got ndarray$|is needed here"):
        getattr(bridges, name)(X)


@pytest.mark.parametrize("name", [name for name in BRIDGES if name.startswith("from_")])
def test_bridges_refuse_what_is_no_mapping_of_tensors(name):
    function = getattr(bridges, name)
    if "parts" not in function.__code__.co_varnames[:1]:
        pytest.skip("takes arrays")
    with pytest.raises(TypeError, match=r"^[\w-]+: parts must map names to tensors, got int$"):
        function(5)


def test_a_checkpoint_asked_by_number(tmp_path):
    breccia.save({"w": Q}, tmp_path / "w.safetensors")
    with pytest.raises(TypeError, match=r"^name must be that of a tensor, a string, got 0$"):
        breccia.open(tmp_path / "w.safetensors")[0]


def test_a_filter_that_is_no_function():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with pytest.raises(TypeError, match=r"^filter must be a function of a module and its name, or None, got 'x'$"):
        breccia.quantize_(model, "nvfp4", "x")
    with pytest.raises(
        ValueError, match=r"^activations must be the name of a recipe, got 'nvfp5': did you mean nvfp4\?$"
    ):
        breccia.quantize_(model, "nvfp4", activations="nvfp5")
    assert type(model[0]) is torch.nn.Linear


def test_layers_of_torch_say_what_they_take():
    torch = pytest.importorskip("torch")
    from breccia import nn

    weight = Q.to("torch")
    told = {
        "weight must be a 2-D ScaledTensor of torch tensors, got ndarray": lambda: nn.QuantizedLinear(X),
        "bias must be a torch tensor of shape (8,) or None, got shape (3,)": lambda: nn.QuantizedLinear(
            weight, torch.ones(3)
        ),
        "recipes must be a LinearRecipes, such as LinearRecipes.fp8(), got 'fp8'": lambda: nn.ScaledLinear(
            64, 32, recipes="fp8"
        ),
        "shape must be a tuple of integers, got 5": lambda: breccia.distributed.plan(5, "nvfp4", 2),
        "world must be an integer, got '2'": lambda: breccia.distributed.plan((64, 64), "nvfp4", "2"),
    }
    for sentence, call in told.items():
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
            call()


def test_python_suggests_public_names():
    command = [sys.executable, "-c", "import breccia; breccia.quantise_"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Did you mean: 'quantize_'?" in run.stderr


def test_a_plain_file_is_not_an_empty_one(tmp_path):
    save_arrays({"w": X}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"its 1 are others: breccia\.open\(path\) reads those"):
        load_safetensors(tmp_path / "plain.safetensors")
    save_safetensors({}, tmp_path / "empty.safetensors")
    assert load_safetensors(tmp_path / "empty.safetensors") == {}


def test_dtypes_of_other_frameworks_are_understood():
    torch = pytest.importorskip("torch")
    assert breccia.dequantize(Q, torch.float16).dtype == np.float16
    assert breccia.dequantize(Q.to("torch"), np.float16).dtype == torch.float16


def test_numpys_integers_are_integers():
    recipe = breccia.Float8BlockScaling(block_k=np.int64(64))
    assert (recipe, type(recipe.block_k)) == (breccia.Float8BlockScaling(block_k=64), int)
    assert breccia.PerBlockK(np.int32(64)) == breccia.PerBlockK(64)
    assert breccia.lora_init(X, "nvfp4", np.int64(2))[0].shape == (2, X.shape[1])
    torch = pytest.importorskip("torch")
    layer = breccia.quantize_layer(torch.nn.Linear(64, 32), "fp8", exact_rows=np.int64(2))
    assert type(layer.exact_rows) is int


def test_a_quantized_tensor_is_not_cast_again():
    with pytest.raises(
        TypeError, match=r"^x must be an array of floats, got a ScaledTensor: use requantize\(x, recipe\)$"
    ):
        breccia.cast(Q, "fp8")


@pytest.mark.parametrize(("x", "w", "name"), [(X.astype(complex), Q, "x"), (X, X.astype(complex), "w")])
def test_linear_names_its_own_arguments(x, w, name):
    with pytest.raises(TypeError, match=rf"^{name} must be a float32, .* got dtype complex128$"):
        breccia.linear(x, w)


def test_files_cut_short_and_pickles_are_told(tmp_path):
    path = tmp_path / "w.safetensors"
    breccia.save({"w": Q}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    message = rf"the file is truncated, it needs {len(whole)} bytes and has {len(whole) - 5}$"
    with pytest.raises(ValueError, match=message):
        breccia.load(path)
    for name, start in (("pickle", pickle.dumps({"w": list(range(99))})), ("zip", b"PK\x03\x04" + bytes(99))):
        (tmp_path / name).write_bytes(start)
        with pytest.raises(
            ValueError,
            match=r"^\S+: file must be in the format of safetensors or GGUF: it is a pickle, as torch\.save writes",
        ):
            breccia.load(tmp_path / name)


def test_quantize_model_says_how_to_get_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^torch is needed here: pip install 'breccia\[torch\]' \("):
        breccia.quantize_(object(), "nvfp4")


@cases.ALL
def test_wrong_k_names_the_block_size(recipe):
    if not cases.is_block(recipe) or cases.may_be_ragged(recipe):
        pytest.skip("any K will do")
    width = cases.block_width(recipe)
    scaled = breccia.cast(f32(4, width + 1), CURRENT)
    for call in (
        lambda: breccia.cast(f32(4, width + 1), recipe),
        lambda: breccia.requantize(scaled, recipe),
    ):
        with pytest.raises(ValueError, match=rf"divisible by {width}, got .*{width + 1}"):
            call()
    with pytest.raises(ValueError, match="2"):
        breccia.cast(f32(width), recipe)


def test_out_may_not_overlap_the_operand():
    memory = np.zeros(4 * 128 * 4 + 64, np.uint8)
    data = memory[7 : 7 + 512].reshape(4, 128)
    aliased = breccia.from_buffer(data, f32(4, 1), BLOCK, breccia.PerBlockK(128))
    with pytest.raises(ValueError, match="overlap"):
        breccia.dequantize(aliased, out=memory[:2048].view(np.float32).reshape(4, 128))
    scale = f32(4, 128)
    aliased = breccia.from_buffer(u8(4, 128), scale[:, :1], BLOCK, breccia.PerBlockK(128))
    with pytest.raises(ValueError, match="overlap"):
        breccia.dequantize(aliased, out=scale)


def test_arguments_that_are_not_there_are_answered_with_those_that_are():
    told = {
        "cast() has no argument 'block_size', which is a field of the recipe: "
        "cast(x, breccia.NVFP4BlockScaling(block_size=...))": lambda: breccia.cast(X, "nvfp4", block_size=32),
        "cast() has no argument 'roundng': did you mean rounding?": lambda: breccia.cast(X, "nvfp4", roundng="nearest"),
        "INT4Scaling has no field 'group': did you mean group_size?": lambda: breccia.INT4Scaling(group=32),
        "MXFP8BlockScaling has no field 'scale_serch': did you mean scale_search?": lambda: breccia.MXFP8BlockScaling(
            scale_serch="mse"
        ),
    }
    for sentence, call in told.items():
        with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
            call()
    assert breccia.cast(X, "int4-32").recipe == breccia.INT4Scaling(group_size=32)
    assert breccia.INT8Scaling(block_size=None) == breccia.INT8Scaling()
