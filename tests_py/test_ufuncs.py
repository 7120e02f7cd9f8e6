# SPDX-License-Identifier: Apache-2.0
"""NumPy's universal functions, indices and torch.func's transforms: the right values, or a sentence."""

import itertools

import breccia
import cases
import numpy as np
import pytest

X = cases.normal((4, 256))


@cases.ALL
def test_ufuncs_read_values_and_write_to_arrays_alone(recipe):
    q = breccia.cast(X, recipe)
    values = breccia.dequantize(q)
    assert np.array_equal(np.add(q, 1), values + 1)
    assert np.array_equal(np.add.reduce(q), values.sum(0)) or np.isnan(values).any()
    assert np.array_equal(np.add(X, 1, out=np.zeros_like(X), where=np.greater(q, 0)), np.where(values > 0, X + 1, 0))
    out = np.zeros_like(X)
    np.add.at(out, np.arange(4), q)
    assert np.array_equal(out, values)
    with pytest.raises(TypeError, match="out of add must be an array, got a ScaledTensor"):
        np.add(X, 1, out=q)
    with pytest.raises(TypeError, match="out of divmod must be an array, got a ScaledTensor"):
        np.divmod(X, 2, out=(X.copy(), q))
    with pytest.raises(TypeError, match=r"add\.at must write to an array"):
        np.add.at(q, [0], 1)
    with pytest.raises(TypeError, match="bool"):
        np.add(X, 1, where=q, out=X.copy())


@pytest.mark.parametrize("rows", [1, 4])
@cases.ALL
def test_every_index_gives_values_or_is_refused(recipe, rows):
    q = breccia.cast(X[:rows], recipe)
    values = breccia.dequantize(q)
    picks = [0, -1, [0], np.array([rows - 1, 0]), np.arange(rows) % 2 == 0, slice(None), slice(0, 0), slice(0, 1), ...]
    read = 0
    for key in [*picks, *itertools.product(picks, [0, [0], slice(0, 128), slice(None)])]:
        if isinstance(key, tuple) and key[0] is ... and len(key) > 1:
            key = (..., key[1])
        try:
            part = q[key]
        except (ValueError, TypeError, IndexError) as error:
            assert "must" in str(error) or "may" in str(error)
            continue
        read += 1
        got, wanted = breccia.dequantize(part), values[key]
        assert got.shape == wanted.shape == part.shape
        assert np.array_equal(got, wanted)
        assert np.array_equal(np.asarray(part), wanted)
    assert read > 3


def test_transforms_of_torch_are_refused_in_a_sentence():
    torch = pytest.importorskip("torch")
    func = torch.func
    x, w = torch.from_numpy(X), torch.from_numpy(cases.normal((32, 256), seed=1))
    calls = {}
    for name, recipe in cases.RECIPES.items():
        q = breccia.cast(w, recipe)
        calls |= {
            f"{name}, linear": lambda x, q=q: breccia.linear(x, q),
            f"{name}, layer": breccia.nn.QuantizedLinear(q),
        }
    calls["activations"] = breccia.nn.QuantizedLinear(breccia.cast(w, "mxfp8"), activations="mxfp8")
    calls["F.linear"] = lambda x: torch.nn.functional.linear(x, breccia.cast(w, "mxfp8"))
    calls["scaled"] = breccia.nn.ScaledLinear(256, 32)
    for name, call in calls.items():
        for way, run in {
            "vmap": lambda call: torch.vmap(call)(x[:, None]),
            "grad": lambda call: func.grad(lambda x: call(x).sum())(x),
            "vjp": lambda call: func.vjp(call, x),
            "jacrev": lambda call: func.jacrev(call)(x),
            "jvp": lambda call: func.jvp(call, (x,), (x,)),
            "hessian": lambda call: func.hessian(lambda x: call(x).sum())(x),
        }.items():
            with pytest.raises(NotImplementedError, match=r"^\w+ must (not be what torch|have no derivative)"):
                run(call)
                pytest.fail(f"{name} under {way}")


def test_linear_of_torch_obeys_autocast():
    torch = pytest.importorskip("torch")
    x, q = torch.from_numpy(X), breccia.cast(torch.from_numpy(cases.normal((32, 256), seed=1)), "mxfp8")
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, q)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, breccia.nn.QuantizedLinear(q)(x))
