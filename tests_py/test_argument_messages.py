# SPDX-License-Identifier: Apache-2.0
"""Messages that were once misleading: each names the argument, what it was and what it must be."""

import pickle
import sys

import breccia
import cases
import numpy as np
import pytest
from breccia.bridges import load_safetensors, save_safetensors
from breccia.checkpoint import save_arrays

Q = breccia.cast(cases.normal((8, 256)), "nvfp4")
X = cases.normal((2, 256))

MESSAGES = {
    "bias": (
        ValueError,
        r"bias must be \(8,\) for w of shape \(8, 256\), got shape \(3,\)",
        lambda: breccia.linear(X, Q, X[0, :3]),
    ),
    "matrix bias": (ValueError, r"bias must be \(8,\)", lambda: breccia.linear(X, Q, np.ones((2, 8), np.float32))),
    "bias of text": (ValueError, r"bias must be \(8,\) .* got str", lambda: breccia.linear(X, Q, "b")),
    "linear": (
        ValueError,
        r"x must be \(\.\.\., 256\) for w of shape \(8, 256\), got shape \(2, 100\)",
        lambda: breccia.linear(X[:, :100], Q),
    ),
    "block_k": (TypeError, "block_k must be an integer, got 128.0$", lambda: breccia.Float8BlockScaling(block_k=128.0)),
    "block_k of text": (TypeError, "must be an integer, got '8'", lambda: breccia.Float8BlockScaling(block_k="8")),
    "layout": (TypeError, "block_size must be an integer, got 128.0$", lambda: breccia.PerBlockK(128.0)),
    "threads": (TypeError, "count must be an integer, got 1.5", lambda: breccia.set_num_threads(1.5)),
    "packed scale": (
        ValueError,
        r"scale\.shape must be \(8, 16\) for data of shape \(8, 128\) with two codes per byte, or \(8, 8\) with one, "
        r"got \(8, 3\)",
        lambda: breccia.from_buffer(Q.data, Q.scale[:, :3], Q.recipe, Q.layout, global_scale=Q.global_scale),
    ),
    "to": (ValueError, "target must be 'numpy', 'torch', 'jax', 'mlx' or 'cpu'", lambda: Q.to("pytorch")),
    "load": (ValueError, "framework must be one of", lambda: load_safetensors("none", "pytorch")),
    "save": (
        TypeError,
        r"tensors must map names to ScaledTensors, as \{'weight': q\}, got ScaledTensor",
        lambda: save_safetensors(Q, "none"),
    ),
}


@pytest.mark.parametrize(("error", "sentence", "call"), MESSAGES.values(), ids=MESSAGES.keys())
def test_messages(error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()


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
