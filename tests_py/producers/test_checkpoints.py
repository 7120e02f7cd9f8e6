# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that llm-compressor, ModelOpt, torchao and mlx-lm make themselves, of a tiny Llama in those recipes of
theirs that need no GPU: their values are those that the producer decodes (compressed-tensors those of llm-compressor,
ModelOpt's own tensors those of its export), and every target keeps the scheme or says what is lost."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, verify
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.planning.targets import targets
from test_scheme_matrix import one as outcome
from test_scheme_producers import produced

torch = pytest.importorskip("torch")

PRESETS = (
    "W4A16_ASYM W8A8 INT8 W4AFP8 FP8 FP8_DYNAMIC FP8_BLOCK NVFP4A16 NVFP4 MXFP4A16 MXFP4 MXFP4XFP8 MXFP6A16 MXFP6A8 "
    "MXFP8A16 MXFP8 W2A4 W2A8 W2A16 W3A4 W3A8 W3A16 W4A4 W4A8 W4A16 W5A8 W6A8 W7A8 W8A16"
)
METHODS = (
    "gptq W4A16",
    "gptq ordered W4A16",
    "gptq W4A16_ASYM",
    "gptq W8A8",
    "gptq W8A16",
    "gptq NVFP4",
    "smooth gptq W8A8",
    "spin W4A16",
    "FP8 KV",
    "FP8_DYNAMIC KV",
    "mixed",
)
# What llm-compressor makes, and nothing here reads, with what every conversion says.
REFUSED = {
    **{f"W{bits}A16": f"must have 2, 3, 4 or 8 bits, config.json says {bits}" for bits in (5, 6, 7)},
    "quip W4A16": "stands beside a quantized weight, and nothing that is read here says what it means",
}
KINDS = {
    "llmcompressor": (*PRESETS.split(), *METHODS),
    "modelopt": (
        "FP8_DEFAULT_CFG",
        "FP8_DEFAULT_CFG+",
        "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
        "INT4_AWQ_CFG",
        "NVFP4_DEFAULT_CFG",
        "NVFP4_DEFAULT_CFG+",
        "NVFP4_MLP_ONLY_CFG",
        "W4A16_NVFP4_CFG",
    ),
    "torchao": (
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "MXDynamicActivationMXWeightConfig",
        "NVFP4WeightOnlyConfig",
    ),
    "mlx": (
        "affine-4-32",
        "affine-4-64",
        "affine-8-32",
        "affine-3-64",
        "affine-2-64",
        "mxfp4-4-32",
        "mxfp8-8-32",
        "nvfp4-4-16",
        "mixed_3_6",
        "mixed_4_6",
    ),
}
# ONNX is written of ONNX alone, and floats have no scheme.
TARGETS = [target["name"] for target in targets() if target["format"] not in ("onnx", "") and target["bits"] < 16]
ALL = [(producer, kind) for producer, kinds in KINDS.items() for kind in kinds]
of_all = pytest.mark.parametrize(("producer", "kind"), ALL, ids=[f"{one}: {kind}" for one, kind in ALL])


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a producer's kind. One process makes those that tests ask for when it is first asked for one."""
    folders: dict[str, Path] = {}
    asked = [one.callspec.params for one in request.session.items if hasattr(one, "callspec")]

    def make(producer: str, kind: str) -> Path:
        if producer not in folders:
            if find_spec(producer) is None:
                pytest.skip(f"{producer} is not installed")
            kinds = dict.fromkeys(one["kind"] for one in asked if one["producer"] == producer)
            folders[producer] = produced(producer, kinds, tmp_path_factory.mktemp(producer))
        folder = folders[producer] / kind
        error = folder.with_name(f"{kind}.error")
        if error.exists():
            pytest.fail(f"{producer} does not make {kind}: {error.read_text()[:300]}")
        return folder

    return make


def own_values(folder: Path) -> dict[str, Any]:
    """What the producer decodes: what it left, or what compressed-tensors makes of the folder."""
    left = folder.with_name(f"{folder.name}.values.safetensors")
    if left.exists():
        return {name: torch.from_numpy(np.array(array)) for name, array in SafetensorsFile(left).items()}
    entry = pytest.importorskip("compressed_tensors.entrypoints.convert")
    from safetensors.torch import load_file

    stored = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    tensors = {name: one for name, one in stored.items() if "_proj." in name and ".input_" not in name}
    return {name: one.float() for name, one in entry.CompressedTensorsDequantizer(folder).validate(tensors).items()}


@pytest.mark.in_turn
@of_all
def test_values_are_those_of_the_producer(producer: str, kind: str, made: Any) -> None:
    source = made(producer, kind)
    theirs, checkpoint = own_values(source), Checkpoint(source)
    quantized = [found for found in checkpoint.found if found.format != "plain"]
    assert len(quantized) >= 6
    for found in quantized:
        ours = torch.from_numpy(np.asarray(values(checkpoint.load(found)))).to(torch.bfloat16).float()
        wanted = theirs[found.name].to(torch.bfloat16).float()
        assert ours.equal(wanted), found.name


@pytest.mark.in_turn
@of_all
def test_every_target_keeps_the_scheme_or_says_what_is_lost(
    producer: str, kind: str, made: Any, tmp_path: Path, record_property: Any
) -> None:
    source, counts = made(producer, kind), Counter[str]()
    convert(source, tmp_path / "fp32", "fp32")
    for number, target in enumerate(TARGETS):
        out = tmp_path / f"{number}{'.gguf' if target.startswith('gguf') else ''}"
        counts[outcome(source, target, out)] += 1
        if out.exists():
            report = verify(tmp_path / "fp32", out)
            assert report["ok"], (target, report["failed"], report["missing"])
            counts["equal"] += all(one["equal"] for one in report["tensors"])
    record_property("outcomes", dict(counts))
    print("counts:", producer, kind, dict(counts))
    assert counts["refused"] + counts["no layer"] <= 2, counts  # the formats of models of DeepSeek and gpt-oss
    assert counts["equal"] > 0, counts


@pytest.mark.in_turn
@pytest.mark.parametrize(("producer", "kind"), [("llmcompressor", kind) for kind in REFUSED])
def test_what_is_not_read_is_refused_by_every_target(producer: str, kind: str, made: Any, tmp_path: Path) -> None:
    """None copies packed words as if they were weights, nor weights without the rotation that they ask for."""
    source = made(producer, kind)
    for number, target in enumerate(("fp32", *TARGETS)):
        out = tmp_path / f"{number}{'.gguf' if target.startswith('gguf') else ''}"
        with pytest.raises(ValueError, match=REFUSED[kind]):
            convert(source, out, target)
        assert not out.exists(), target
