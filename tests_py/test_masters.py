# SPDX-License-Identifier: Apache-2.0
"""From quantized releases to bfloat16 and back, and what becomes of their heads for later tokens."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, target_names
from breccia.checkpoint.judging.verify import values
from checkpoints import weight, write_shards
from releases import RELEASES, ml_dtypes, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every release, and its master in bfloat16."""
    folder = tmp_path_factory.mktemp("releases")
    for name, made in RELEASES.items():
        write(made(), folder / name)
        convert(folder / name, folder / f"{name}-bf16", "bf16")
    return folder


def read(path: Path) -> dict[str, Any]:
    opened = Checkpoint(path)
    return {one.name: values(opened.load(opened.refined(one))) for one in opened.found}


def quantized(path: Path) -> set[str]:
    return {one.name for one in Checkpoint(path).found if one.format != "plain"}


@pytest.mark.always
@pytest.mark.parametrize("name", RELEASES)
def test_a_master_has_every_value_and_what_was_not_quantized_keeps_its_bytes(name: str, folder: Path) -> None:
    source, master = Checkpoint(folder / name), Checkpoint(folder / f"{name}-bf16")
    release, was, now = RELEASES[name](), read(folder / name), read(folder / f"{name}-bf16")
    assert now.keys() == {one for one in was if not one.endswith("input_scale")}
    assert not quantized(folder / f"{name}-bf16")
    for one in release.rest:
        assert master.entries[one].dtype == source.entries[one].dtype, one
        assert master.array(one).tobytes() == source.array(one).tobytes(), one
    for module in release.quantized:
        one = module if module in now else f"{module}.weight"
        assert master.entries[one].dtype == "BF16"
        np.testing.assert_array_equal(now[one], was[one].astype(ml_dtypes.bfloat16).astype(np.float32))
        assert not release.exact or np.array_equal(now[one], was[one])
    files = {path.name for path in (folder / name).iterdir() if path.suffix != ".safetensors"}
    said = json.loads((folder / f"{name}-bf16" / "config.json").read_text())
    assert "quantization_config" not in said
    assert files - {"hf_quant_config.json"} <= {path.name for path in (folder / f"{name}-bf16").iterdir()}


@pytest.mark.always
@pytest.mark.parametrize("name", RELEASES)
def test_a_master_becomes_the_release_again(name: str, folder: Path, tmp_path: Path) -> None:
    """Every stored byte; but of MXFP4, where blocks with a largest code of 3 or less get other codes of the values."""
    release = RELEASES[name]()
    convert(folder / f"{name}-bf16", tmp_path / "out", release.format, scheme=folder / name)
    before, after = Checkpoint(folder / name), Checkpoint(tmp_path / "out")
    assert {n: (e.dtype, e.shape) for n, e in after.entries.items()} == {
        n: (e.dtype, e.shape) for n, e in before.entries.items()
    }
    was, now = read(folder / name), read(tmp_path / "out")
    assert all(np.array_equal(was[one], now[one]) for one in was)
    differ = [one for one in before.entries if before.array(one).tobytes() != after.array(one).tobytes()]
    assert all(recipe_of(before, one) == "mxfp4" for one in differ), differ
    schemes = [breccia.load_scheme(path) for path in (folder / name, tmp_path / "out")]
    modules = [module for module in release.quantized if module.endswith("_proj")]
    assert schemes[0].resolved(modules).keys() == schemes[1].resolved(modules).keys()
    for first, second in zip(*(one.resolved(modules).values() for one in schemes), strict=True):
        assert first is not None and second is not None and first.inputs == second.inputs


def recipe_of(checkpoint: Checkpoint, stored: str) -> str:
    found = next(one for one in checkpoint.found if stored in one.parts.values())
    return found.recipe.name if found.recipe is not None else "none"


def test_int4_with_codes_of_minus_8_comes_back_by_a_search(tmp_path: Path) -> None:
    """Where scales are a share of 7.5 of the largest magnitude, half of the groups have a code beyond 7."""
    x = weight(128, 256).reshape(128, 8, 32)
    scale = (np.abs(x).max(-1, keepdims=True) / 7.5).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(np.rint(x / scale), -8, 7)
    made = (codes * scale).astype(ml_dtypes.bfloat16).reshape(128, 256)
    write_shards(tmp_path / "in", [{"model.layers.0.mlp.experts.0.up_proj.weight": made}], {})
    errors = {}
    for search in ("amax", "mse"):
        options: dict[str, Any] = {"group_size": 32, "scale_search": search}
        convert(tmp_path / "in", tmp_path / search, "compressed-tensors:int4", **options)
        (got,) = read(tmp_path / search).values()
        errors[search] = np.linalg.norm(got - made.astype(np.float32)) / np.linalg.norm(made.astype(np.float32))
    assert errors["mse"] < 0.005 < 0.04 < errors["amax"]


@pytest.mark.parametrize("rest", ["keep", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("to", ["bf16", "fp16", "fp32", "compressed-tensors:mxfp8"])
def test_dtypes_of_what_is_not_quantized(rest: str, to: str, folder: Path, tmp_path: Path) -> None:
    convert(folder / "mimo", tmp_path / "out", to, dtype_of_rest=rest)
    entries = Checkpoint(tmp_path / "out").entries
    asked = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
    gate, bias = (entries[f"model.layers.0.mlp.gate.{end}"].dtype for end in ("weight", "e_score_correction_bias"))
    assert gate == asked.get(rest, "F32")
    assert bias == "F32"  # which programs have in float32
    norm = entries["model.layers.0.input_layernorm.weight"].dtype
    assert norm == asked.get(rest, asked.get(to, "BF16"))
    if to in asked:
        assert entries["model.layers.0.self_attn.q_proj.weight"].dtype == asked[to]


def test_dtypes_of_a_model_in_float32(tmp_path: Path) -> None:
    """Whose master has one dtype; of a quantized one the rest is what was asked for."""
    arrays = {"model.layers.0.up_proj.weight": weight(64, 128), "model.norm.weight": weight(128)}
    write_shards(tmp_path / "in", [arrays], {})
    for options, to, dtype in (
        ({}, "bf16", "BF16"),
        ({}, "mxfp8", "F32"),
        ({"dtype_of_rest": "bf16"}, "mxfp8", "BF16"),
    ):
        convert(tmp_path / "in", tmp_path / "out", to, force=True, **options)
        assert Checkpoint(tmp_path / "out").entries["model.norm.weight"].dtype == dtype
    convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")
    convert(tmp_path / "a.gguf", tmp_path / "a.safetensors", "bf16")  # GGUF has vectors in float32, whatever the model
    assert Checkpoint(tmp_path / "a.safetensors").entries["model.norm.weight"].dtype == "BF16"
    with pytest.raises(ValueError, match="dtype_of_rest must be one of keep, bf16, fp16, fp32, got 'half'"):
        convert(tmp_path / "in", tmp_path / "no", "bf16", dtype_of_rest="half")


def test_a_scheme_of_a_checkpoint_in_floats_is_refused(tmp_path: Path) -> None:
    save_arrays({"up_proj.weight": weight(64, 128)}, tmp_path / "in.safetensors")
    with pytest.raises(ValueError, match=r"scheme must be a quantized checkpoint, or a file of rules, .* has no q"):
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "mxfp8", scheme=tmp_path / "in.safetensors")


WITH_HEADS = [name for name, made in RELEASES.items() if made().heads]
TARGETS = [to for to in target_names() if to.partition(":")[0] not in ("onnx", "gguf")]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", WITH_HEADS)
@pytest.mark.parametrize("kind", ["", "-bf16"])
@pytest.mark.parametrize("to", TARGETS)
def test_a_head_for_later_tokens_is_quantized_whole_or_not_at_all(
    to: str, kind: str, name: str, folder: Path, tmp_path: Path
) -> None:
    """Of its layers those are meant that the release has in codes; programs load a head in one form."""
    try:
        report = convert(folder / f"{name}{kind}", tmp_path / "out", to)
    except ValueError as error:
        assert "DeepSeek V4" in str(error) or "must have one recipe" in str(error), error
        return
    release = RELEASES[name]()
    layers = {f"{module}.weight" for module in release.quantized if module.startswith(release.heads)}
    codes = quantized(tmp_path / "out")
    assert {one for one in codes if one.startswith(release.heads)} in (set(), layers), report["notes"]


NAMED = [to for to in target_names() if ":" in to and not to.startswith(("onnx", "gpt-oss", "gguf:f16", "gguf:bf16"))]


@pytest.mark.parametrize("to", NAMED)
def test_a_checkpoint_of_every_format_is_a_scheme(to: str, tmp_path: Path) -> None:
    """Which gives its own bytes again, of mixtures of types, too."""
    names = [f"model.layers.{i}.{one}_proj.weight" for i in range(2) for one in ("self_attn.q", "mlp.down")]
    arrays = {name: weight(256, 256).astype(ml_dtypes.bfloat16) for name in names}
    write_shards(tmp_path / "in", [arrays], {"model_type": "deepseek_v4"})
    form, end = to.partition(":")[0], ".gguf" if to.startswith("gguf") else ""
    first, second = tmp_path / f"first{end}", tmp_path / f"second{end}"
    convert(tmp_path / "in", first, to, include=[names[0], names[3]])
    if to in ("mlx:int4", "mlx:int8"):  # which have biases of any value
        with pytest.raises(ValueError, match=r"q_proj is affine \d bits, which no recipe makes"):
            convert(tmp_path / "in", second, form, scheme=first)
        return
    convert(tmp_path / "in", second, form, scheme=first)
    before, after = Checkpoint(first), Checkpoint(second)
    assert before.entries.keys() == after.entries.keys()
    assert quantized(second) == quantized(first) == {names[0], names[3]}
    if to == "modelopt:fp8-tensor":  # whose one scale is stored, and read, as those of rows
        return
    for name in before.entries:
        assert before.array(name).tobytes() == after.array(name).tobytes(), name
