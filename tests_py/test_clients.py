# SPDX-License-Identifier: Apache-2.0
"""Whole models, written by `convert` and opened by the loader that people use: the logits are those of the same model
with the quantized weights' values in bfloat16."""

import ast
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from breccia.bridges import modules
from breccia.checkpoint import Checkpoint, convert, verify
from breccia.checkpoint.reading.models import tied
from tiny_models import HEADS, MODELS, logits, made_once, transformers

torch = pytest.importorskip("torch")
BOUND = 1e-2  # of the logits' norm: bfloat16 activations through two layers, rounded in another order


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models, made when asked for."""
    transformers()
    return made_once(tmp_path_factory.mktemp("models"))


def check(source: Path, out: Path, to: str, bound: float = BOUND, **options: Any) -> dict[str, Any]:
    """Convert, load both forms, compare."""
    report = convert(source, out, to)
    assert report["tensors"].get("cast") or report["tensors"].get("repack"), report["tensors"]
    floats = out.with_name(out.name + "-bf16")
    convert(out, floats, "bf16")
    wanted = logits(floats, dtype=torch.bfloat16)
    got = logits(out, dtype=torch.bfloat16, **options)
    assert not got.isnan().any()
    assert float((got - wanted).norm() / wanted.norm()) <= bound
    assert not logits(source, dtype=torch.bfloat16).equal(wanted)  # it is quantized
    return report


# torchao has no products of MX weights by activations that are not quantized.
LOADED = [("compressed-tensors", key) for key in modules()["compressed-tensors"].RECIPES] + [
    ("torchao", key) for key in modules()["torchao"].RECIPES if not key.startswith("mx")
]


@pytest.mark.parametrize(("name", "key"), LOADED)
def test_every_target_of_transformers(name: str, key: str, models: Any, tmp_path: Path) -> None:
    """Embeddings shared with the output layer, which has no tensor: a loader finds it by name alone."""
    pytest.importorskip(name.replace("-", "_"))
    options = {}
    if name == "compressed-tensors" and key in ("int4-asym", "fp8-block"):
        # Kept packed, it expects zero points that are not, whoever wrote the file; with tiles it quantizes activations.
        options["quantization_config"] = transformers().CompressedTensorsConfig(dequantize=True)
    bound = 0.02 if key.startswith("int8") else BOUND
    check(models("llama-tied"), tmp_path / "q", f"{name}:{key}", bound, **options)


# The scheme of compressed-tensors' own that each recipe is; of these two, what it says of weights.
PRESETS = {
    "nvfp4": "NVFP4A16",
    "fp8": "FP8_DYNAMIC",
    "fp8-tensor": "FP8",
    "fp8-block": "FP8_BLOCK",
    "mxfp4": "MXFP4A16",
    "mxfp6": "MXFP6A16",
    "mxfp8": "MXFP8A16",
    "int4": "W4A16",
    "int4-asym": "W4A16_ASYM",
    "int8": "W8A16",
}
WEIGHTS_ALONE = ("fp8", "fp8-tensor")


@pytest.mark.parametrize("key", modules()["compressed-tensors"].RECIPES)
def test_schemes_are_those_of_compressed_tensors(key: str, models: Any, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    convert(models("llama-tied"), tmp_path / "q", f"compressed-tensors:{key}")
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(said)
    (scheme,) = config.config_groups.values()
    preset = quantization.preset_name_to_scheme(PRESETS[key], ["Linear"])
    assert scheme.targets == preset.targets

    def numbers(args: Any) -> Any:
        return None if args is None else args.model_dump(exclude={"observer", "observer_kwargs"})

    if key == "int8":  # a scale for each row, where the preset has one for each group
        preset.weights.strategy, preset.weights.group_size = quantization.QuantizationStrategy.CHANNEL, None
    assert numbers(scheme.weights) == numbers(preset.weights)
    if key in WEIGHTS_ALONE:
        assert scheme.input_activations is None
    else:
        assert numbers(scheme.input_activations) == numbers(preset.input_activations)


def test_transformers_quantizes_the_activations_of_tiles(models: Any, tmp_path: Path) -> None:
    """By the scheme that vLLM wants, unless it is told to dequantize, as `test_every_target_of_transformers` does."""
    pytest.importorskip("compressed_tensors")
    convert(models("llama-tied"), tmp_path / "q", "compressed-tensors:fp8-block")
    convert(tmp_path / "q", tmp_path / "floats", "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = transformers().AutoModelForCausalLM
        model = loader.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
        floats = loader.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16)
    x = torch.randn(64, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(torch.arange(3, 43)[None])  # which makes the layers' values
        found, wanted = model.model.layers[0].mlp.up_proj, floats.model.layers[0].mlp.up_proj
        error = float((found(x) - wanted(x)).norm() / wanted(x).norm())
    assert found.weight.equal(wanted.weight)
    assert 0.005 < error < 0.05  # that of FP8 is 0.026


@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("llama-tied", "gpt-oss")])
@pytest.mark.parametrize("to", ["compressed-tensors:fp8", "torchao:int4"])
def test_every_model(model: str, to: str, models: Any, tmp_path: Path) -> None:
    pytest.importorskip(to.partition(":")[0].replace("-", "_"))
    check(models(model), tmp_path / "q", to)


@pytest.mark.parametrize("model", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("key", ["block", "block-ue8m0"])
def test_deepseek_tiles(key: str, model: str, models: Any, tmp_path: Path) -> None:
    """Powers of two are float32 numbers, as in V3.1: E8M0 under V4's name is for V4 alone."""
    pytest.importorskip("accelerate")
    check(models(model), tmp_path / "q", f"deepseek:{key}")


TIED = ["compressed-tensors:fp8", "modelopt:nvfp4", "deepseek:block", "awq:int4", "gptq:int4", "torchao:fp8", "gpt-oss"]


@pytest.mark.parametrize("to", [name for name in TIED if name != "gpt-oss"])
def test_shared_output_layers_are_in_the_lists_of_what_is_left_alone(to: str, models: Any, tmp_path: Path) -> None:
    convert(models("llama-tied"), tmp_path / "q", to)
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    lists = [said.get(key, []) for key in ("ignore", "modules_to_not_convert")]
    lists.append([name.strip("-:^$") for name in said.get("dynamic", {})])
    assert any("lm_head" in names for names in lists)
    if to.startswith("modelopt"):
        own = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
        assert "lm_head" in own["exclude_modules"]


@pytest.mark.parametrize("model", HEADS)
def test_output_layers_by_other_names_stay(model: str, models: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    check(models(model), tmp_path / "q", "compressed-tensors:fp8")


@pytest.mark.slow
def test_output_layers_of_every_language_model_are_known() -> None:
    """What transformers' classes for text say of weights that two modules share."""
    shared = set()
    for file in (Path(transformers().__file__).parent / "models").glob("*/modeling_*.py"):
        for kind in (each for each in ast.parse(file.read_text()).body if isinstance(each, ast.ClassDef)):
            said = [s.value for s in kind.body if isinstance(s, ast.Assign) and ast.unparse(s).startswith("_tied_w")]
            if kind.name.endswith("ForCausalLM") and isinstance((said or [None])[0], ast.Dict):
                shared |= set(ast.literal_eval(said[0]).items())
    assert len(shared) > 20
    odd = {("model.local_encoder.embed_tokens.weight", "lm_head.weight")}  # which has a tensor in the files
    odd |= {(one, other) for one, other in shared if one.startswith(("prophetnet", "output.")) or "prophet" in other}
    found = {pair for pair in shared if pair[0].removesuffix("weight").removesuffix(".") in tied([pair[1]])}
    assert {pair for pair in shared - found - odd if pair[0].endswith(".weight")} == set()


def test_gptqs_exclusions_name_what_servers_fuse(models: Any, tmp_path: Path) -> None:
    """GPTQModel looks for a module's own name, servers for that of the layer they make of several."""
    alone = ["*.layers.0.self_attn.*", "*.layers.1.mlp.up_proj.weight"]
    convert(models("llama-tied"), tmp_path / "q", "gptq:int4", exclude=alone)
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert all(name.startswith("-:^") and value == {} for name, value in said.items())

    def is_alone(module: str) -> bool:
        return any(re.match(pattern.removeprefix("-:"), module) for pattern in said)

    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"):
        assert is_alone(f"model.layers.0.self_attn.{name}")
        assert not is_alone(f"model.layers.1.self_attn.{name}")
    assert is_alone("model.layers.1.mlp.up_proj")
    assert not is_alone("model.layers.1.mlp.gate_up_proj")
    assert not is_alone("model.layers.0.mlp.up_proj")


def test_torchao_in_shards(models: Any, tmp_path: Path) -> None:
    """transformers writes the whole model's metadata into every shard's header, and reads only the last one's."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig

        said = transformers().TorchAoConfig(Int8WeightOnlyConfig())
        loader = transformers().AutoModelForCausalLM
        model = loader.from_pretrained(models("llama"), dtype=torch.bfloat16, quantization_config=said)
        model.save_pretrained(tmp_path / "theirs", max_shard_size="150KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    result = verify(models("llama"), tmp_path / "theirs", min_sqnr_db=30)
    assert result["ok"], result
    convert(tmp_path / "theirs", tmp_path / "again", "torchao")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    wanted, got = (logits(tmp_path / name, dtype=torch.bfloat16) for name in ("theirs", "again"))
    assert got.equal(wanted)


def test_gpt_oss_keeps_its_experts_in_its_own_form(models: Any, tmp_path: Path) -> None:
    """Float checkpoints have inputs before outputs, MXFP4 blocks run along the inputs; attention stays bfloat16."""
    source = models("gpt-oss")
    convert(source, tmp_path / "same", "bf16")
    assert logits(tmp_path / "same", dtype=torch.bfloat16).equal(logits(source, dtype=torch.bfloat16))
    if pytest.importorskip("transformers").utils.is_accelerate_available():
        check(source, tmp_path / "checked", "gpt-oss:mxfp4")
    convert(source, tmp_path / "q", "gpt-oss:mxfp4")
    found = [f for f in Checkpoint(tmp_path / "q").found if f.format != "plain"]
    assert {f.name.rpartition(".")[2] for f in found} == {"gate_up_proj", "down_proj"}
    convert(tmp_path / "q", tmp_path / "floats", "bf16")
    assert verify(source, tmp_path / "floats")["ok"]
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, floats = Checkpoint(tmp_path / "q"), Checkpoint(tmp_path / "floats")
    for one in found:
        parts = {role: torch.from_numpy(stored.array(name).copy()) for role, name in one.parts.items()}
        theirs = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.bfloat16)
        mine = torch.from_numpy(floats.array(one.name).view("int16").copy()).view(torch.bfloat16)
        assert theirs.equal(mine), one.name


@pytest.mark.parametrize("to", ["compressed-tensors:fp8", "torchao:int8"])
def test_fused_experts_without_a_form_stay_and_are_said(to: str, models: Any, tmp_path: Path) -> None:
    report = check(models("gpt-oss"), tmp_path / "q", to, bound=0.05)  # a router may choose another expert
    assert len([note for note in report["notes"] if "experts of a layer in one tensor have no form" in note]) == 4


def test_what_transformers_does_wrong_with_experts_is_said(models: Any, tmp_path: Path) -> None:
    """docs/who-loads-what.md has the row; a dense model, and experts in other recipes, are read right."""

    def notes(model: str, to: str) -> list[str]:
        return convert(models(model), tmp_path / f"{model}-{to.replace(':', '-')}", to)["notes"]

    said = "experts in nvfp4: transformers leaves out their second scales: read them by vLLM or SGLang"
    assert notes("qwen3-moe", "compressed-tensors:nvfp4") == [said]
    assert notes("llama", "compressed-tensors:nvfp4") == notes("qwen3-moe", "compressed-tensors:mxfp4") == []
    assert notes("qwen3-moe", "modelopt:nvfp4") == []


def test_a_repack_leaves_alone_what_the_source_left_alone(models: Any, tmp_path: Path) -> None:
    convert(models("llama"), tmp_path / "a", "modelopt:nvfp4", exclude=["*.o_proj.weight", "*.layers.1.*"])
    report = convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    assert set(report["tensors"]) == {"copy", "repack"}
    again = convert(tmp_path / "a", tmp_path / "c", "compressed-tensors:mxfp4")
    assert set(again["tensors"]) == {"copy", "requantize"}
    wider = convert(tmp_path / "a", tmp_path / "d", "compressed-tensors", include=["*.o_proj.weight"])
    assert wider["tensors"]["cast"] == 2
