# SPDX-License-Identifier: Apache-2.0
"""`breccia.save`, `load` and `open`: every format through one door, one tensor at a time."""

import builtins

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia.checkpoint import convert, save_arrays


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
