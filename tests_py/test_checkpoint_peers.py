# SPDX-License-Identifier: Apache-2.0
"""A real model in every format, read whole by the format's own library: the same values, bit for bit."""

import json
import warnings
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import modules
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert
from breccia.checkpoint.judging.verify import values
from checkpoints import deepseek_v3, first_layer_of_minilm, gpt_oss_20b

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layer_of_minilm(tmp_path_factory.mktemp("minilm") / "in")


def recipes_of(name: str) -> Any:
    return pytest.mark.parametrize("key", modules()[name].RECIPES)


def ours(path: Path) -> dict[str, Any]:
    """The quantized tensors of a checkpoint."""
    checkpoint = Checkpoint(path)
    made = {f.name: values(checkpoint.load(f)) for f in checkpoint.found if f.format != "plain"}
    assert len(made) == 6
    return made


@recipes_of("compressed-tensors")
def test_compressed_tensors(key: str, minilm: Path, tmp_path: Path) -> None:
    """Its converter to bfloat16, which finds schemes, modules and tensors by our config.json."""
    entry = pytest.importorskip("compressed_tensors.entrypoints.convert")
    convert(minilm, tmp_path / "q", f"compressed-tensors:{key}")
    converter = entry.CompressedTensorsDequantizer(tmp_path / "q")
    tensors = {n: torch.from_numpy(np.array(a)) if a.dtype.isbuiltin == 1 else as_torch(a) for n, a in file(tmp_path)}
    theirs = converter.validate(tensors)
    for name, value in ours(tmp_path / "q").items():
        assert theirs[name].dtype == torch.bfloat16
        assert torch.from_numpy(value).to(torch.bfloat16).equal(theirs[name]), name


@recipes_of("compressed-tensors")
def test_scales_lose_nothing_when_transformers_rounds_them(key: str, minilm: Path, tmp_path: Path) -> None:
    """It loads scales of blocks and rows in the model's dtype, bfloat16."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    convert(minilm, tmp_path / "q", f"compressed-tensors:{key}")
    scales = [np.asarray(array) for name, array in file(tmp_path) if name.endswith("weight_scale")]
    assert scales
    for scale in scales:
        if scale.dtype == np.float32:
            np.testing.assert_array_equal(scale, scale.astype(ml_dtypes.bfloat16).astype(np.float32))


def file(directory: Path) -> Any:
    return SafetensorsFile(directory / "q" / "model.safetensors").items()


def as_torch(array: Any) -> Any:
    from breccia.bridges.common import to_torch

    return to_torch(np.array(array))


@recipes_of("torchao")
def test_torchao(key: str, minilm: Path, tmp_path: Path) -> None:
    """safetensors and torchao's own flattened layout, tensors of its classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    loader = pytest.importorskip("safetensors.torch")
    convert(minilm, tmp_path / "q", f"torchao:{key}")
    path = tmp_path / "q" / "model.safetensors"
    state, rest = support.unflatten_tensor_state_dict(loader.load_file(path), SafetensorsFile(path).metadata)
    assert not rest
    for name, value in ours(tmp_path / "q").items():
        tensor = state[name]
        assert type(tensor).__module__.startswith("torchao.")
        theirs = tensor.dequantize()
        assert torch.from_numpy(value).to(theirs.dtype).equal(theirs), name


@recipes_of("mlx")
def test_mlx(key: str, minilm: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    convert(minilm, tmp_path / "q", f"mlx:{key}")
    tensors = mx.load(str(tmp_path / "q" / "model.safetensors"))
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization"]
    for name, value in ours(tmp_path / "q").items():
        base = name.removesuffix("weight")
        theirs = mx.dequantize(
            tensors[name], tensors[base + "scales"], tensors.get(base + "biases"), dtype=mx.float32, **said
        )
        np.testing.assert_array_equal(np.array(theirs), value, name)


@pytest.mark.in_turn
@recipes_of("gguf")
def test_gguf(key: str, minilm: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf.gguf_reader")
    quants = pytest.importorskip("gguf.quants")
    convert(minilm, tmp_path / "q.gguf", f"gguf:{key}")
    stored = {t.name: t for t in reader.GGUFReader(tmp_path / "q.gguf").tensors}
    checkpoint = Checkpoint(tmp_path / "q.gguf")
    for found in checkpoint.found:
        tensor = stored[found.parts.get("blocks") or found.parts["weight"]]
        theirs = quants.dequantize(tensor.data, tensor.tensor_type)
        scaled = checkpoint.load(found)
        if "global_scale" in found.parts and isinstance(
            scaled, breccia.ScaledTensor
        ):  # its second scale is a tensor of its own
            np.testing.assert_array_equal(stored[found.parts["global_scale"]].data, scaled.global_scale.reshape(1))
            recipe = breccia.NVFP4BlockScaling(two_level=False)
            scaled = breccia.ScaledTensor(scaled.data, scaled.scale, recipe, scaled.layout, shape=scaled.shape)
        np.testing.assert_array_equal(theirs.reshape(found.shape), values(scaled), found.name)


def test_modelopt_becomes_compressed_tensors(minilm: Path, tmp_path: Path) -> None:
    """compressed-tensors converts our ModelOpt files; codes and block scales are those that we convert to."""
    entry = pytest.importorskip("compressed_tensors.entrypoints.convert")
    convert(minilm, tmp_path / "q", "modelopt:nvfp4")
    convert(tmp_path / "q", tmp_path / "ct", "compressed-tensors")
    names = [n for n, _ in file(tmp_path) if n.endswith("weight_scale_2")]
    targets = [n.removesuffix(".weight_scale_2") for n in names]
    arrays = {n: as_torch(a) for n, a in file(tmp_path) if n.rpartition(".")[0] in targets and "weight" in n}
    theirs = entry.ModelOptNvfp4Converter(targets=targets).process(dict(arrays))
    written = dict(SafetensorsFile(tmp_path / "ct" / "model.safetensors").items())
    for base in targets:
        for role in ("weight_packed", "weight_scale"):
            mine = written[f"{base}.{role}"].view(np.uint8)
            np.testing.assert_array_equal(theirs[f"{base}.{role}"].view(torch.uint8).numpy(), mine)
        divisor = theirs[f"{base}.weight_global_scale"].numpy()
        assert np.abs(divisor - written[f"{base}.weight_global_scale"]) <= np.spacing(divisor)


def test_deepseek_by_compressed_tensors(tmp_path: Path) -> None:
    entry = pytest.importorskip("compressed_tensors.entrypoints.convert")
    source = deepseek_v3(tmp_path / "in")
    convert(source, tmp_path / "bf16", "bf16")
    converter = entry.FP8BlockDequantizer.from_pretrained(source)
    tensors = {n: as_torch(a) for path in source.glob("*.safetensors") for n, a in SafetensorsFile(path).items()}
    theirs = converter.process(tensors)
    checkpoint = Checkpoint(tmp_path / "bf16")
    assert {found.name for found in checkpoint.found} == theirs.keys()
    for found in checkpoint.found:
        assert as_torch(checkpoint.array(found.name)).equal(theirs[found.name]), found.name


def test_gpt_oss_by_transformers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    checkpoint = Checkpoint(gpt_oss_20b(tmp_path / "in"))
    experts = [found for found in checkpoint.found if found.format == "gpt-oss"]
    assert len(experts) == 2
    for found in experts:
        blocks, scales = (as_torch(checkpoint.array(found.parts[role])) for role in ("blocks", "scales"))
        theirs = mxfp4.convert_moe_packed_tensors(blocks, scales.view(torch.uint8), dtype=torch.float32)
        np.testing.assert_array_equal(theirs.numpy(), values(checkpoint.load(found)).swapaxes(-1, -2))
