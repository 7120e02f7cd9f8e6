# SPDX-License-Identifier: Apache-2.0
"""Every backend this machine can run, and any number of threads, gives the same bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import breccia
import pytest
from archive import needs_documents

pytest.importorskip("ml_dtypes")  # of backend_digest.py, too

HERE = Path(__file__).parent
ROOT = HERE.parent


SUPPORTED = breccia.cpu_info()["supported"]


def run(**environment):
    return subprocess.run(
        [sys.executable, HERE / "backend_digest.py"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def result(**environment):
    done = run(**environment)
    assert done.returncode == 0, done.stderr
    backend, digest, error = done.stdout.split()
    return backend, digest, float(error)


@pytest.fixture(scope="module")
def portable():
    return result(BRECCIA_CPU="portable")


def test_every_product_has_a_kernel():
    """Whatever the recipe and however many activations, and of the backend in use."""
    kernels = breccia.cpu_info()["kernels"]
    named = {name.split(",")[0].split(" x ")[0] for name in kernels}
    assert named == {cls.__name__ for cls in breccia.recipes.ScalingRecipe.__subclasses__()}
    assert all(set(by_rows) == {"M = 1", "M = 4", "M = 16", "M = 512"} for by_rows in kernels.values())
    before = breccia.cpu_info()["backend"]
    try:
        breccia.set_backend("portable")
        portable = {kernel for by_rows in breccia.cpu_info()["kernels"].values() for kernel in by_rows.values()}
    finally:
        breccia.set_backend(before)
    assert portable == {"rows_f32", "panels_f32"}


@needs_documents
def test_a_kernel_has_the_name_of_its_file():
    """So that a name in cpu_info leads to the code, and to the row of docs/kernels.md that says when it runs."""
    files = {path.stem for path in (ROOT / "cpp/src/matmul/paths").glob("*.cpp")}
    page = (ROOT / "docs/kernels.md").read_text()
    table = re.search(r"^\| kernel \|.*\n(?:\|.*\n)+", page, re.MULTILINE)[0]
    in_docs = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert in_docs == files
    before = breccia.cpu_info()["backend"]
    try:
        for backend in SUPPORTED:
            breccia.set_backend(backend)
            named = {kernel for by_rows in breccia.cpu_info()["kernels"].values() for kernel in by_rows.values()}
            assert named <= files
    finally:
        breccia.set_backend(before)


def test_portable_is_always_there():
    assert SUPPORTED[0] == "portable"
    assert breccia.cpu_info()["backend"] in SUPPORTED


@pytest.mark.parametrize("name", SUPPORTED)
def test_backend_equals_portable(name, portable):
    backend, digest, error = portable if name == "portable" else result(BRECCIA_CPU=name)
    assert backend == name
    assert digest == portable[1]
    assert error <= 1


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_change_nothing(threads, portable):
    assert result(BRECCIA_NUM_THREADS=threads)[1] == portable[1]


@pytest.mark.parametrize("name", ["nonsense", "AVX2"])
def test_unknown_backend_raises(name):
    done = run(BRECCIA_CPU=name)
    assert done.returncode != 0
    assert "BRECCIA_CPU" in done.stderr
    assert "portable" in done.stderr  # the names there are
    assert done.returncode > 0, "raised, not crashed"


def test_backends_can_be_changed_while_running():
    before = breccia.cpu_info()["backend"]
    try:
        for name in SUPPORTED:
            breccia.set_backend(name)
            assert breccia.cpu_info()["backend"] == name
        with pytest.raises(ValueError, match="portable"):
            breccia.set_backend("nonsense")
        assert breccia.cpu_info()["backend"] == SUPPORTED[-1], "a refused name changes nothing"
    finally:
        breccia.set_backend(before)


def test_number_of_threads():
    before = breccia.num_threads()
    try:
        breccia.set_num_threads(3)
        assert breccia.num_threads() == breccia.cpu_info()["threads"] == 3
        for bad in (0, -1):
            with pytest.raises(ValueError, match="must be >= 1"):
                breccia.set_num_threads(bad)
    finally:
        breccia.set_num_threads(before)
