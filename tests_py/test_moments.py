# SPDX-License-Identifier: Apache-2.0
"""Moments of a layer's input, and their file."""

import numpy as np
import pytest
from breccia.checkpoint.files.safetensors_file import save_arrays
from breccia.moments import Moments, load_moments, save_moments


def moments_of(x, group=16, level="full"):
    """Moments of the rows of x (…, tokens, K)."""
    x = np.asarray(x, np.float64)
    runs = x.reshape(*x.shape[:-1], -1, group)
    return Moments(
        diag=np.sum(x * x, axis=-2).astype(np.float32),
        count=np.full(x.shape[:-2], x.shape[-2], np.int64),
        block=np.einsum("...tbi,...tbj->...bij", runs, runs).astype(np.float32) if level != "diag" else None,
        full=(np.swapaxes(x, -1, -2) @ x).astype(np.float32) if level == "full" else None,
        amax=np.abs(x).max((-1, -2)).astype(np.float32),
    )


def alike(a, b):
    assert a.arrays().keys() == b.arrays().keys()
    for name, array in a.arrays().items():
        other = b.arrays()[name]
        assert array.dtype == other.dtype and np.array_equal(array, other), name


def test_a_file_gives_back_what_was_saved(tmp_path):
    rng = np.random.default_rng(0)
    one, experts = moments_of(rng.normal(size=(9, 32))), moments_of(rng.normal(size=(3, 9, 48)))
    path = tmp_path / "m.safetensors"
    save_moments({"a.q_proj": one, "a.k_proj": one, "b": experts}, path, {"tokens": "9"})
    with load_moments(path) as found:
        assert sorted(found) == ["a.k_proj", "a.q_proj", "b"] and len(found) == 3
        assert found.metadata == {"tokens": "9"}
        alike(found["a.q_proj"], one)
        assert found["a.k_proj"] is found["a.q_proj"]
        alike(found["b"], experts)
        assert found["b"].experts == 3 and found["b"].columns == 48 and found["b"].level == "full"
        alike(found["b"].expert(1), Moments(**{k: v[1] for k, v in experts.arrays().items()}))
        with pytest.raises(KeyError, match="has no moments of 'c'"):
            found["c"]
    # Once: no more bytes than one layer's and the experts'.
    assert path.stat().st_size < 4096 + sum(m.nbytes for o in (one, experts) for m in o.arrays().values())


def test_sums_of_two_runs_add_up():
    x = np.random.default_rng(1).integers(-4, 5, (20, 32)).astype(np.float32)  # sums are exact
    alike(moments_of(x[:7]) + moments_of(x[7:]), moments_of(x))
    assert (moments_of(x[:7], level="diag") + moments_of(x[7:])).level == "diag"
    with pytest.raises(ValueError, match=r"diag must have one shape to be added, got \(32,\) and \(16,\)"):
        moments_of(x) + moments_of(x[:, :16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diag": np.ones((1, 1, 4), np.float32)}, r"diag must be \(K,\) or \(E, K\), got shape \(1, 1, 4\)"),
        ({"full": np.ones((4, 3), np.float32)}, r"full must be \(4, 4\) for diag \(4,\), got shape \(4, 3\)"),
        ({"block": np.ones((1, 3, 3), np.float32)}, r"block must be of runs that divide K, 4"),
        ({"block": np.ones((2, 2, 3), np.float32)}, r"block must be"),
        ({"count": np.ones(2, np.int64)}, r"count must be \(\) for diag \(4,\), got shape \(2,\)"),
    ],
)
def test_shapes_must_fit(change, message):
    good = {"diag": np.ones(4, np.float32), "count": np.int64(3)}
    Moments(**good)
    with pytest.raises(ValueError, match=message):
        Moments(**{**good, **change})


def test_types_must_be_the_files():
    with pytest.raises(TypeError, match="diag must be float32, got float64"):
        Moments(np.ones(4), np.int64(1))
    with pytest.raises(TypeError, match="count must be int64, got float64"):
        Moments(np.ones(4, np.float32), np.float64(1))


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"a": np.ones(4, np.float32)}, {}, r"tensors must be called NAME\.moments\.PART"),
        ({"a.moments.other": np.ones(4, np.float32)}, {}, r"tensors must be called NAME\.moments\.PART"),
        ({"a.moments.diag": np.ones(4, np.float32)}, {}, "moments of a must have diag and count, it lacks count"),
        (
            {"a.moments.diag": np.ones(4, np.float32), "a.moments.count": np.int64(1)},
            {"breccia.moments.shared": '{"b": "c"}'},
            "must map names to names of moments in the file",
        ),
        (
            {"a.moments.diag": np.ones(4, np.float32), "a.moments.count": np.int64(1)},
            {"breccia.moments.shared": "["},
            "must map names to names of moments in the file",
        ),
    ],
)
def test_a_file_that_is_not_valid(tmp_path, tensors, metadata, message):
    path = tmp_path / "m.safetensors"
    save_arrays({name: np.asarray(value) for name, value in tensors.items()}, path, metadata)
    with pytest.raises(ValueError, match=message):
        load_moments(path)


def test_a_wrong_array_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "m.safetensors"
    save_arrays({"a.moments.diag": np.ones(4, np.float16), "a.moments.count": np.ones((), np.int64)}, path)
    message = "moments of a: diag must be float32, got float16"
    with load_moments(path) as found, pytest.raises(ValueError, match=message):
        found["a"]
