# SPDX-License-Identifier: Apache-2.0
"""The table of who loads what, in docs/who-loads-what.md, says what is so: every row is run again."""

import importlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny, transformers

clients = pytest.importorskip("clients")  # a source archive has no benchmarks

ROWS = {row["target"]: row for row in json.loads(clients.RESULTS.read_text())["rows"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models, made when asked for."""
    transformers()
    folder = tmp_path_factory.mktemp("models")
    return lambda name: folder / name if (folder / name).exists() else tiny(name, folder / name)


def test_every_target_has_a_row() -> None:
    assert list(ROWS) == clients.rows_of()


def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQModel has a kernel for AVX-512 with bfloat16 that it compiles, for a minute, where the CPU has these: without
    it the products are those of its kernels for any CPU."""
    if importlib.util.find_spec("gptqmodel") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch_cpu_avx512", "torch_cpu_avx512_awq"):
            module = importlib.import_module(f"gptqmodel.nn_modules.qlinear.{name}")
            monkeypatch.setattr(module, "has_avx512_bf16", lambda: False)


@pytest.mark.in_turn
@pytest.mark.parametrize("target", ROWS)
def test_row(target: str, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gptqmodel" in clients.client_of(target)[1]:
        compile_nothing(monkeypatch)
    try:
        found = clients.check(target, models(clients.model_for(target)), tmp_path)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    said = ROWS[target]
    assert found.keys() == said.keys(), found
    if "error" in said:
        bound = 1e-4 if said["error"] < 1e-4 else clients.EQUAL
        assert found["error"] is not None
        assert found["error"] <= bound
    else:
        assert found == said
