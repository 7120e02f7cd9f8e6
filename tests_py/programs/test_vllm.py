# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, on the CPU, with breccia's plugin: every target whose description names vLLM is opened and run, and
every row of the table in docs/who-loads-what.md says what happened."""

import json
from pathlib import Path

import program_runs
import pytest

ROWS = {(row["target"], row["model"]): row for row in json.loads(program_runs.RESULTS.read_text())["rows"]}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_every_target_has_a_row() -> None:
    assert list(ROWS) == program_runs.rows_of("vLLM")


@pytest.mark.in_turn
@pytest.mark.parametrize(("target", "model"), ROWS, ids=lambda part: part)
def test_row(target: str, model: str, folder: Path) -> None:
    found, said = program_runs.check("vLLM", target, model, folder), ROWS[target, model]
    if "error" not in said:
        assert found == said
        return
    assert found.keys() == said.keys(), found
    assert found["error"] <= program_runs.bound(target)


def test_the_log_says_what_this_version_lacks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every kernel has a place in this version of vLLM."""
    import breccia.vllm

    breccia.vllm.register()
    assert not [record.getMessage() for record in caplog.records if record.name == "breccia"]
