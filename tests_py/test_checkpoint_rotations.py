# SPDX-License-Identifier: Apache-2.0
"""Rotations of the inputs and outputs of layers are turned back, kept where programs apply them, or refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, target_names, verify
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.reading.rotation import hadamard, is_known
from checkpoints import weight

ml_dtypes = pytest.importorskip("ml_dtypes")
DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("size", [1, 2, 64, 12, 40, 44, 96, 344, 896])
def test_hadamard_matrices_are_compressed_tensors(size: int) -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    mine = hadamard(np.eye(size, dtype=np.float32)) * np.float32(np.sqrt(size))
    if size & (size - 1) == 0:
        wanted = theirs.deterministic_hadamard_matrix(size, torch.float32)
    else:
        known = max(one for one in (12, 20, 40, 44, 172, 28) if size % one == 0)
        assert size // known & size // known - 1 == 0
        stored = theirs._fetch_hadamard_divisor(known, torch.float32).numpy()
        wanted = np.kron(stored.T, theirs.deterministic_hadamard_matrix(size // known, torch.float32).numpy())
    np.testing.assert_allclose(mine, np.asarray(wanted), atol=1e-4)
    np.testing.assert_allclose(mine @ mine.T, size * np.eye(size), atol=1e-2)
    back = hadamard(hadamard(np.eye(size, dtype=np.float32)), transposed=True)
    np.testing.assert_allclose(back, np.eye(size), atol=1e-5)


def test_a_size_that_is_not_known_is_refused() -> None:
    assert not is_known(0)
    assert is_known(192)  # 12 times 16
    assert not is_known(192, alone=True)
    with pytest.raises(ValueError, match="size 6 is not known"):
        hadamard(np.eye(6, dtype=np.float32))


def _theirs(kind: str, location: str, inverse: bool, head_dim: int | None, randomize: bool) -> Any:
    """compressed-tensors' transform of a layer of (256, 512), its weight in the file's form and its stored tensors."""
    torch = pytest.importorskip("torch")
    transform = pytest.importorskip("compressed_tensors.transform")
    torch.manual_seed(3)
    layer = torch.nn.Linear(512, 256)
    opposite = {"input": "weight_input", "output": "weight_output"}[location]
    apply = [{"targets": ["Linear"], "location": location, "inverse": inverse}]
    apply += [{"targets": ["Linear"], "location": opposite, "inverse": not inverse}]
    scheme = {"type": kind, "apply": apply, "head_dim": head_dim, "randomize": randomize}
    scheme["precision"] = "torch.float32"
    model = torch.nn.ModuleDict({"down_proj": layer})
    plain = {"weight": layer.weight.detach().clone().numpy(), "bias": layer.bias.detach().clone().numpy()}
    transform.apply_transform_config(model, transform.TransformConfig(config_groups={"u": scheme}))
    state = {name.removeprefix("down_proj."): value.detach().numpy() for name, value in model.state_dict().items()}
    return plain, state, {"config_groups": {"u": scheme}}


KINDS = ["hadamard", "random-hadamard", "random-matrix"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("location", ["input", "output"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("head_dim", [None, 64])
def test_transforms_of_compressed_tensors_are_turned_back(
    kind: str, location: str, inverse: bool, head_dim: int | None, tmp_path: Path
) -> None:
    """compressed-tensors makes the weights, from plain ones that come back."""
    plain, state, said = _theirs(kind, location, inverse, head_dim, kind == "hadamard" and inverse)
    at = "model.layers.0.mlp.down_proj."
    source = tmp_path / "in"
    source.mkdir()
    save_arrays({at + name: np.ascontiguousarray(value) for name, value in state.items()}, source / "model.safetensors")
    quantization = {"quant_method": "compressed-tensors", "transform_config": json.loads(json.dumps(said))}
    config = {"model_type": "llama", "quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "out", "fp32", strict=True)
    (note,) = report["notes"]
    assert note.startswith("rotations (transform_config) are turned back in weights")
    out = Checkpoint(tmp_path / "out")
    assert set(out.entries) == {at + "weight", at + "bias"}
    loose = 0.02 if kind == "random-matrix" else 1e-4
    np.testing.assert_allclose(out.array(at + "weight"), plain["weight"], atol=loose)
    np.testing.assert_allclose(out.array(at + "bias"), plain["bias"], atol=loose)


def _rotated(path: Path, to: str, key: dict[str, Any]) -> dict[str, Any]:
    """A small Llama whose down_proj is rotated, in a format; its plain numbers."""
    plain = {DOWN: weight(256, 512), UP: weight(512, 256), "model.norm.weight": np.ones(256, np.float32)}
    turned = {**plain, DOWN: hadamard(plain[DOWN])}
    path.mkdir()
    save_arrays(turned, path / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    made = path.with_name("quantized")
    convert(path, made, to)
    said = json.loads((made / "config.json").read_text())
    said["quantization_config"] |= key
    (made / "config.json").write_text(json.dumps(said))
    return plain


ONLINE = {"targets": ["re:.*down_proj$"], "location": "input", "inverse": False, "ignore": []}
TRANSFORM = {"transform_config": {"config_groups": {"r4": {"type": "hadamard", "apply": [ONLINE]}}}}
SOURCES = {"compressed-tensors:int8": TRANSFORM, "gptq:int4": {"rotation": "hadamard"}}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("to", target_names())
def test_every_target_has_the_plain_model_or_the_words(to: str, source: str, tmp_path: Path) -> None:
    plain = _rotated(tmp_path / "in", source, SOURCES[source])
    try:
        report = convert(tmp_path / "quantized", tmp_path / "out", to)
    except ValueError as error:
        assert re.search("DeepSeek V4|must have one recipe", str(error)), error
        return
    same = to.partition(":")[0] == source.partition(":")[0]
    turned = any(note.startswith("rotations") for note in report["notes"])
    assert turned != same
    out = Checkpoint(tmp_path / "out")
    made = values(out.load({one.name: one for one in out.found}[DOWN]))
    wanted = hadamard(plain[DOWN]) if same else plain[DOWN]
    error = np.linalg.norm(np.asarray(made, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 0.6
    if same:
        (key,) = SOURCES[source]
        assert out.quantization[key] == SOURCES[source][key]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rotation": "spin"}, "rotation must be 'hadamard' or 'random'"),
        ({"transform_config": {"config_groups": {"u": []}}}, "must have groups with places"),
        ({"transform_config": {"config_groups": {"u": {"apply": [{"location": "moon"}]}}}}, "'moon'"),
        (
            {"transform_config": {"config_groups": {"u": {"type": "random-hadamard", "apply": [ONLINE]}}}},
            "must have its matrix of size 512 in the files",
        ),
        (
            {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": [{"location": "q_attn"}]}}}},
            "must rotate queries and keys by one",
        ),
    ],
)
def test_what_cannot_be_turned_back_is_refused(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    _rotated(tmp_path / "in", "compressed-tensors:int8", said)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "quantized", tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


def test_queries_and_keys_need_no_turn(tmp_path: Path) -> None:
    places = [{"targets": ["re:.*self_attn$"], "location": place} for place in ("q_attn", "k_cache")]
    said = {"transform_config": {"config_groups": {"r3": {"type": "hadamard", "head_dim": 64, "apply": places}}}}
    _rotated(tmp_path / "in", "compressed-tensors:int8", said)
    report = convert(tmp_path / "quantized", tmp_path / "out", "bf16")
    assert report["notes"] == [
        "rotations (transform_config) are turned back in weights: of inputs and outputs of no layer"
    ]
    assert verify(tmp_path / "quantized", tmp_path / "out")["ok"]
