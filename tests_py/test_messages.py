# SPDX-License-Identifier: Apache-2.0
"""Whatever a public function is given, it answers with a TypeError or a ValueError of one line in the words of its
arguments: never with the signatures of the binding."""

import ast
import dataclasses
import inspect
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia import formats
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe

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
X = np.ones((4, 128), np.float32)
RECIPE = breccia.MXFP8BlockScaling()
SCALED = breccia.cast(X, RECIPE)
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
    made |= keyword(formats.encode, x=X, fmt="float8_e4m3fn") | keyword(formats.decode, codes=CODES, fmt="int8")
    made |= keyword(formats.pack, codes=CODES) | keyword(formats.unpack, packed=CODES, n=8)
    made |= keyword(formats.finfo, fmt="int4")
    made |= keyword(breccia.cast, x=X, recipe=RECIPE) | keyword(breccia.dequantize, scaled=SCALED)
    made |= keyword(breccia.requantize, scaled=SCALED, recipe=RECIPE) | keyword(breccia.matmul, a=X, b=SCALED.T)
    good = {"data": SCALED.data, "scale": SCALED.scale, "recipe": RECIPE, "layout": SCALED.layout}
    made |= keyword(breccia.ScaledTensor, **good)
    made["cast(seed)"] = lambda value: breccia.cast(X, RECIPE, rounding="stochastic", seed=value)
    made |= keyword(breccia.set_num_threads) | keyword(breccia.set_backend)
    return made


CALLS = calls()


@pytest.fixture(autouse=True)
def settings():
    info = breccia.cpu_info()
    yield
    breccia.set_num_threads(info["threads"])
    breccia.set_backend(info["backend"])


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
