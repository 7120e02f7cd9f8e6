# SPDX-License-Identifier: Apache-2.0
"""benchmarks/compare_cpu.py runs, and those it compares with compute the same bytes and numbers. It times tiny tensors
here; nothing is asked of the times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import breccia
import numpy as np
import pytest

pytest.importorskip("ml_dtypes")
pytest.importorskip("comparison")  # a source archive has no benchmarks
from comparison import converting, products, torch_convert

SCRIPT = Path(__file__).parent.parent / "benchmarks/compare_cpu.py"
PACKAGE = Path(breccia.__file__).parent.parent
NAMES = list(converting.RECIPES)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(0, 0.02, (256, 256)).astype(np.float32)


def raw(array):
    """Bytes, 4-bit codes two to one."""
    if not isinstance(array, np.ndarray):
        array = array.view(__import__("torch").uint8).numpy()
    return np.ascontiguousarray(array).view(np.uint8).ravel()


@pytest.mark.parametrize("name", NAMES)
def test_peers_cast_to_the_same_bytes(name, x):
    peers = converting.numpy_casts(name, x) | torch_convert.casts(name, x, compiled=False)
    expected = raw(breccia.cast(x, converting.RECIPES[name]).data)
    for peer, run in peers.items():
        if peer.endswith("no scale"):
            continue
        codes = raw(run()[0])
        if codes.size == 2 * expected.size:
            codes = codes[::2] | codes[1::2] << 4
        assert np.array_equal(codes, expected), peer


@pytest.mark.parametrize("name", NAMES)
def test_peers_dequantize_to_the_same_numbers(name, x):
    scaled = breccia.cast(x, converting.RECIPES[name])
    expected = breccia.dequantize(scaled)
    peers = converting.numpy_dequantizations(name, scaled) | torch_convert.dequantizations(name, scaled, compiled=False)
    for peer, run in peers.items():
        if not peer.endswith("no scale"):
            assert np.array_equal(np.asarray(run()).reshape(expected.shape), expected), peer


def test_peers_search_for_the_same_scales(x):
    nvfp4 = breccia.cast(x, converting.SEARCHES["NVFP4"])
    assert np.array_equal(converting.search_nvfp4(x)[..., 0], nvfp4.scale.view(np.uint8))
    int4 = breccia.cast(x, converting.SEARCHES["INT4 g128"])
    assert np.array_equal(converting.search_int4(x)[..., 0], int4.scale.astype(np.float32))
    for run in torch_convert.searches("INT4 g128", x).values():
        assert np.array_equal(run().numpy()[..., 0], int4.scale.astype(np.float32))


@pytest.mark.slow
def test_quick_run_gives_every_row(tmp_path):
    files = {name: tmp_path / f"cpu.{name}" for name in ("json", "markdown", "picture")}
    options = [str(part) for name, path in files.items() for part in (f"--{name}", path)]
    command = [sys.executable, str(SCRIPT), "--quick", "--threads", "1", "--rows", "1,16", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(files["json"].read_text())
    groups = {row["group"] for row in results["rows"]}
    assert groups == {
        "cast", "dequantize", "search", "requantize", "matmul M=1", "matmul M=16", "matmul 256³"
    }  # fmt: skip
    casts = {row["name"] for row in results["rows"] if row["group"] == "cast"}
    assert casts >= {f"fp32 → {name}" for name in NAMES}
    multiplied = {row["name"] for row in results["rows"] if row["group"] == "matmul M=16"}
    named = {f"{source} × {name}" for source in ("bf16", "fp32", "FP8") for name in products.RECIPES}
    assert multiplied == named | {f"INT8 × {name}" for name in products.BY_ROUNDED}
    for row in results["rows"]:
        assert row["rate"] > 0
        assert all(ms > 0 for ms in row["ms"].values())
        if row["limit"] == "memcpy":
            assert row["of_limit"]["breccia"] > 0
    for name in casts:
        assert f"| {name} |" in files["markdown"].read_text()
    assert ElementTree.parse(files["picture"]).getroot().tag.endswith("svg")
