# SPDX-License-Identifier: Apache-2.0
"""Paths of modules before 0.4, and names of functions before 0.5, lead to those of today."""

import importlib
import subprocess
import sys

import breccia
import numpy as np
import pytest
from breccia._moved import MOVED, RENAMED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_warns_and_is_the_module(old):
    if old.startswith("distributed"):
        pytest.importorskip("torch")
    sys.modules.pop(f"breccia.{old}", None)
    with pytest.warns(
        DeprecationWarning, match=rf"^breccia\.{old} is breccia\.{MOVED[old]}; the old path goes in 0\.6$"
    ):
        module = importlib.import_module(f"breccia.{old}")
    assert module is importlib.import_module(f"breccia.{MOVED[old]}")
    assert module.__name__ == f"breccia.{MOVED[old]}"


@pytest.mark.parametrize("name", ["complete", "convert", "doctor", "inspect", "merge_lora", "verify"])
def test_functions_hide_the_modules_that_had_their_names(name):
    module = importlib.import_module(f"breccia.checkpoint.{name}")
    assert getattr(breccia.checkpoint, name) is getattr(module, name)


def test_the_command_is_a_function():
    code = "import breccia.checkpoint.convert as b; from breccia.cli import main; assert callable(b); main(['-h'])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: breccia")


def test_a_moved_module_is_still_an_attribute():
    code = (
        "import warnings, breccia; warnings.simplefilter('ignore'); "
        "assert breccia.cpu is breccia.gpu is breccia.device; breccia.quantize_model.quantize_"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"breccia\.nothing"):
        importlib.import_module("breccia.nothing")


@pytest.mark.parametrize(
    ("module", "old"),
    [("breccia", "quantize"), ("breccia", "scheme"), ("breccia.nn", "quantize"), ("breccia.checkpoint", "plot")],
)
def test_an_old_name_of_a_function_warns_and_gives_the_new_one(module, old):
    if module == "breccia.nn":
        pytest.importorskip("torch")
    holder, new = importlib.import_module(module), RENAMED[old]
    sentence = rf"^{module}\.{old} is {module}\.{new}; the old name goes in 0\.6$"
    with pytest.warns(DeprecationWarning, match=sentence) as warned:
        assert getattr(holder, old) is getattr(holder, new)
    assert warned[0].filename == __file__
    assert old not in dir(holder)


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="module 'breccia' has no attribute 'quantise'"):
        breccia.quantise  # noqa: B018


def test_an_old_argument_warns_and_works():
    scaled = breccia.cast(np.ones((4, 64), np.float32), "nvfp4")
    with pytest.warns(DeprecationWarning, match=r"^dtype= of dequantize is out_dtype=; the old name goes in 0\.6$"):
        assert breccia.dequantize(scaled, dtype="float16").dtype == np.float16
    assert scaled.dequantize("fp16").dtype == np.float16
    pytest.importorskip("ml_dtypes")  # which has NumPy's bfloat16
    assert breccia.dequantize(scaled, out_dtype="bf16").dtype.name == "bfloat16"
    bias = np.ones(4, np.float32)
    assert breccia.linear(scaled, scaled, bias, "bf16").dtype.name == "bfloat16"
