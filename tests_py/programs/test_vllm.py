# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, on the CPU, with breccia's plugin: every target whose description names vLLM is opened and run, and
every row of the table in docs/who-loads-what.md says what happened."""

import json
import re
from pathlib import Path

import program_runs
import pytest
from breccia.checkpoint import convert
from transformers import AutoModelForCausalLM

# vLLM computes quantized experts by instructions that some CPUs lack.
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
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
    elif "fails" in found and not AMX:
        assert model in ("gpt-oss", "qwen3-moe-wide")
        assert re.match(r"\w+: .*\bMoE backend\b", found["fails"])
    else:
        assert "error" in found, found
        assert found["error"] <= program_runs.bound(target)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("whose", ["the name", "the class"])
def test_embeddings_of_compressed_tensors_are_not_loaded(kind: str, whose: str, tmp_path: Path) -> None:
    """What docs/checkpoints.md says of embeddings that `include` asks for. vLLM's Llama does not find those of a group
    that names the layer, as `convert` writes it; those of a group that names the class it looks up by Triton alone."""
    out = tmp_path / "out"
    model = program_runs.source("llama-wide", tmp_path)
    report = convert(model, out, f"compressed-tensors:{kind}", include=["*_proj.weight", "*embed_tokens.weight"])
    assert any("embeddings have no form in compressed-tensors" in note for note in report["notes"])
    if whose == "the class":
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["targets"] += ["Embedding"]
        (out / "config.json").write_text(json.dumps(config))
    found, why = program_runs.in_a_process("vLLM", out)
    said = {
        "the name": "ValueError: There is no module or parameter named 'embed_tokens.weight_packed' in LlamaModel.",
        "the class": "AttributeError: module 'triton' has no attribute 'next_power_of_2'",
    }
    assert found is None
    assert why.startswith(said[whose])
    if whose == "the class":
        with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
            AutoModelForCausalLM.from_pretrained(out)
    else:
        _, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert list(loading["missing_keys"]) == ["model.embed_tokens.weight"]  # which is random


def test_the_log_says_what_this_version_lacks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every kernel has a place in this version of vLLM."""
    import breccia.vllm

    breccia.vllm.register()
    assert not [record.getMessage() for record in caplog.records if record.name == "breccia"]
