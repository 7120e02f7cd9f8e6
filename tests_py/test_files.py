# SPDX-License-Identifier: Apache-2.0
"""`breccia.save`, `load` and `open`: every format through one door, one tensor at a time."""

import builtins

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia.bridges.outside import OutsideTensor
from breccia.checkpoint import SafetensorsFile, convert, save_arrays


def test_round_trip(tmp_path):
    tensors = {name: breccia.cast(cases.normal((4, 256)), name) for name in ("nvfp4", "mxfp8", "int4:asym")}
    breccia.save(tensors, tmp_path / "q.safetensors", {"made": "here"})
    assert breccia.load(tmp_path / "q.safetensors") == tensors


@peers.ALL
def test_every_framework(peer, tmp_path):
    x = cases.normal((32, 64))
    save_arrays({"a.weight": x, "a.bias": x[0]}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "q.safetensors", "modelopt:nvfp4")
    tensors = breccia.load(tmp_path / "q.safetensors", peer.name)
    assert sorted(tensors) == ["a.bias", "a.weight"]
    assert type(tensors["a.bias"]) is type(peer.array(x))
    np.testing.assert_array_equal(peer.host(tensors["a.bias"]), x[0])
    expected = breccia.dequantize(breccia.cast(x, "nvfp4"))
    np.testing.assert_array_equal(peer.host(breccia.dequantize(tensors["a.weight"])), expected)


@peers.ALL
@cases.ALL
def test_what_load_gives_can_be_saved(peer, recipe, tmp_path):
    """ScaledTensors and plain arrays of one framework, through one file."""
    x = cases.normal((4, 256))
    breccia.save({"w": breccia.cast(peer.array(x), recipe), "norm": peer.array(x[0])}, tmp_path / "a.safetensors")
    first = breccia.load(tmp_path / "a.safetensors", peer.name)
    breccia.save(first, tmp_path / "b.safetensors")
    second = breccia.load(tmp_path / "b.safetensors", peer.name)
    assert set(first) == set(second) == {"norm", "w"}
    assert second["w"].to("numpy") == breccia.cast(x, recipe)
    np.testing.assert_array_equal(peer.host(second["norm"]), x[0])
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def torch_arrays():
    torch = pytest.importorskip("torch")
    names = "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu int8 int64 uint8 bool complex64"
    return {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names.split()}


def numpy_arrays():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plain = {name: np.arange(6).reshape(2, 3).astype(name) for name in ("f4", ">f4", "<i8", ">u2", "?", "c8")}
    coded = {n: np.arange(6).astype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")}
    return plain | coded | {"0-D": np.float32(3)[()].reshape(())}


def jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    return {name: jnp.arange(6).astype(name) for name in ("float32", "bfloat16", "float8_e5m2", "int32", "bool")}


def mlx_arrays():
    mx = pytest.importorskip("mlx.core")
    kinds = (mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int64, mx.uint8, mx.bool_)
    return {str(kind): mx.arange(6).astype(kind) for kind in kinds}


@pytest.mark.parametrize("arrays", [torch_arrays, numpy_arrays, jax_arrays, mlx_arrays], ids=lambda f: f.__name__)
def test_plain_arrays_of_every_dtype(arrays, tmp_path):
    given = arrays()
    breccia.save({**given, "q": breccia.cast(cases.normal((4, 64)), "nvfp4")}, tmp_path / "a.safetensors")
    found = SafetensorsFile(tmp_path / "a.safetensors")
    for name, array in given.items():
        kept = np.asarray(found[name])
        assert kept.dtype.name == str(array.dtype).rpartition(".")[2].replace("bool_", "bool") or name.startswith(">")
        wide = [np.asarray(a.tolist()) for a in (array, kept)]
        np.testing.assert_array_equal(*wide, err_msg=name)


REFUSED = {
    "text": ({"w": np.array(["a"])}, r"tensors\['w'\]: dtype must be one safetensors can store, got <U1"),
    "a list": ({"w": [1.0]}, r"tensors\['w'\] must be a ScaledTensor or an array, got list"),
    "an OutsideTensor": (
        {"w": OutsideTensor(breccia.cast(cases.normal((4, 64)), "int4:32"), np.zeros((4, 2), np.float16))},
        r"tensors\['w'\] must be a ScaledTensor or an array, got OutsideTensor",
    ),
    "one name twice": (
        {"w.data": np.zeros(3), "w": breccia.cast(cases.normal((4, 64)), "nvfp4")},
        "tensors must have one tensor for each stored name, got two for 'w.data'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_save_refuses(case, tmp_path):
    tensors, message = REFUSED[case]
    for given in (tensors, dict(reversed(tensors.items()))):
        with pytest.raises((TypeError, ValueError), match=message):
            breccia.save(given, tmp_path / "never.safetensors")
    assert not list(tmp_path.iterdir())


@peers.ALL
def test_save_arrays_names_save(peer, tmp_path):
    """It would write a ScaledTensor's values as float32."""
    q = breccia.cast(peer.array(cases.normal((4, 64))), "nvfp4")
    with pytest.raises(TypeError, match=r"'w': ScaledTensor; breccia.save writes ScaledTensors as they are"):
        save_arrays({"w": q}, tmp_path / "never.safetensors")
    assert not list(tmp_path.iterdir())
    if peer.name in ("torch", "mlx"):
        with pytest.raises(TypeError, match=r"'w': \w+; breccia.save writes .* arrays of every framework"):
            save_arrays({"w": peer.array(cases.normal((4, 64)))}, tmp_path / "never.safetensors")


def test_big_endian_arrays_keep_their_values(tmp_path):
    save_arrays({"w": np.arange(4, dtype=">f4")}, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(breccia.load(tmp_path / "w.safetensors")["w"], np.arange(4))


def test_open_is_lazy(tmp_path, monkeypatch):
    save_arrays({f"w{i}": cases.normal((2, 2), i) for i in range(3)}, tmp_path / "w.safetensors")
    checkpoint = breccia.open(tmp_path / "w.safetensors")
    read = []
    load = checkpoint._checkpoint.load
    monkeypatch.setattr(checkpoint._checkpoint, "load", lambda found: read.append(found.name) or load(found))
    pairs = iter(checkpoint)
    assert next(pairs)[0] == "w0"
    assert read == ["w0"]
    np.testing.assert_array_equal(checkpoint["w2"], cases.normal((2, 2), 2))
    assert read == ["w0", "w2"]
    assert [name for name, _ in pairs] == ["w1", "w2"]
    assert (len(checkpoint), checkpoint.keys(), "w1" in checkpoint) == (3, ["w0", "w1", "w2"], True)
    assert repr(checkpoint).endswith("w.safetensors'): 3 tensors")
    with checkpoint, pytest.raises(KeyError, match=r"has no tensor 'w9': known are w0, w1, w2"):
        checkpoint["w9"]


def test_open_refuses(tmp_path):
    with pytest.raises(ValueError, match="framework must be one of"):
        breccia.open(tmp_path, "pytorch")
    with pytest.raises(FileNotFoundError, match="there is no"):
        breccia.open(tmp_path / "none")


def test_builtins_are_left_alone():
    assert builtins.open is not breccia.open
