# SPDX-License-Identifier: Apache-2.0
"""`breccia.transformers` keeps the codes of experts that a model has in one tensor, and multiplies by them."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert
from loaded_models import BOUND, MEASURE, close, layers, load, run, weights
from tiny_models import FUSED, SIZES, logits, made_once, transformers

torch = pytest.importorskip("torch")
PAIRS = [("gpt-oss", to) for to in ("int8", "nvfp4", "mxfp4", "mxfp8")]
PAIRS += [(name, "nvfp4") for name in FUSED if name != "gpt-oss"]
PROJECTIONS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models, made when asked for."""
    transformers()
    import breccia.transformers  # noqa: F401 (registers)

    return made_once(tmp_path_factory.mktemp("models"))


def stacks(model: Any) -> dict[str, Any]:
    return {name: layer for name, layer in layers(model).items() if layer.weight.ndim == 3}


def own_name(name: str) -> str:
    """The model's name of a stored weight."""
    for stored, own in (("input_linear", "experts.gate_up_proj"), ("output_linear", "experts.down_proj")):
        name = name.replace(f"{stored}.weight", own)
    return name.removesuffix(".weight")


@pytest.mark.parametrize(("family", "to"), PAIRS)
def test_codes_are_kept_and_logits_are_those_of_the_values(family: str, to: str, models: Any, tmp_path: Path) -> None:
    convert(models(family), tmp_path / "q", to)
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    model = load(tmp_path / "q")
    stored = {own_name(name): weight for name, weight in weights(tmp_path / "q").items()}
    assert layers(model).keys() == stored.keys()
    assert len(stacks(model)) == 2 * SIZES["num_hidden_layers"]
    for name, layer in layers(model).items():
        assert torch.equal(layer.weight.dequantize(), torch.from_numpy(stored[name].dequantize()))
    # No parameter of the experts is left in high precision but biases.
    left = [name for name, p in model.named_parameters() if "experts" in name and p.dim() == 3]
    assert not left
    close(run(model), logits(tmp_path / "floats", dtype=torch.float32))


@pytest.mark.parametrize(("family", "to"), PAIRS)
def test_quantize_on_load_and_save(family: str, to: str, models: Any, tmp_path: Path) -> None:
    """The same codes as `convert` writes, under the same names, and what is saved loads again."""
    from breccia.transformers import BrecciaConfig

    convert(models(family), tmp_path / "q", to)
    made, read = load(models(family), quantization_config=BrecciaConfig(to)), load(tmp_path / "q")
    assert run(made).equal(run(read))
    first = weights(tmp_path / "q")
    for name, model in (("made", made), ("read", read)):
        model.save_pretrained(tmp_path / name, max_shard_size="100KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        second = weights(tmp_path / name)
        assert first.keys() == second.keys()
        assert all(np.array_equal(one.dequantize(), second[key].dequantize()) for key, one in first.items())
        assert run(load(tmp_path / name)).equal(run(read))


def test_generation_and_dequantize(models: Any, tmp_path: Path) -> None:
    convert(models("gpt-oss"), tmp_path / "q", "nvfp4")
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    model, floats = load(tmp_path / "q"), load(tmp_path / "floats")
    prompt, options = torch.arange(3, 11)[None], {"max_new_tokens": 8, "do_sample": False}
    assert model.generate(prompt, **options).equal(floats.generate(prompt, **options))
    dense = model.dequantize()
    assert not layers(dense)
    assert run(dense).equal(run(floats))


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("kept", PROJECTIONS)
def test_one_projection_may_stay(family: str, kept: str, models: Any, tmp_path: Path) -> None:
    """The other one is multiplied in high precision, in the order of axes that the model has it."""
    name = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}[kept] if family == "granite-moe" else kept
    convert(models(family), tmp_path / "q", "int8", exclude=[f"*{name}*"])
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    model = load(tmp_path / "q")
    assert {path.rpartition(".")[2] for path in stacks(model)} == {*PROJECTIONS} - {kept}
    close(run(model), logits(tmp_path / "floats", dtype=torch.float32))
    model.save_pretrained(tmp_path / "again")
    assert run(load(tmp_path / "again")).equal(run(model))


@pytest.mark.parametrize("family", FUSED)
def test_activations_are_quantized_too(family: str, models: Any, tmp_path: Path) -> None:
    from breccia.transformers import BrecciaConfig

    exact = load(models(family), quantization_config=BrecciaConfig("mxfp8"))
    model = load(models(family), quantization_config=BrecciaConfig("mxfp8", activations="mxfp8"))
    path, layer = next(iter(stacks(model).items()))
    assert layer.activations == breccia.MXFP8BlockScaling()
    torch.manual_seed(0)
    x = torch.randn(24, layer.in_features)
    ends = torch.tensor([0, 5, 5, 20, 24])
    rounded = breccia.cast(x, "mxfp8").dequantize()
    wanted = torch.cat(
        [rounded[a:b] @ layer.weight.dequantize()[e].T for e, (a, b) in enumerate(pairwise(ends.tolist()))]
    )
    close(layer(x, ends), wanted)
    assert not layer(x, ends).equal(stacks(exact)[path](x, ends))
    assert not run(model).isnan().any()
    assert not run(model).equal(run(exact))


@pytest.mark.parametrize("family", FUSED)
def test_gradients_reach_the_inputs(family: str, models: Any) -> None:
    from breccia.transformers import BrecciaConfig

    model = load(models(family), quantization_config=BrecciaConfig("int8"))
    tokens = torch.arange(3, 19)[None]
    embeddings = model.get_input_embeddings()(tokens).detach()

    def gradient(one: Any) -> Any:
        x = embeddings.clone().requires_grad_()
        one(inputs_embeds=x).logits.square().mean().backward()
        return x.grad

    found = gradient(model)
    wanted = gradient(model.dequantize())
    assert float((found - wanted).norm() / wanted.norm()) <= 10 * BOUND


def test_rows_of_other_processes_add_nothing(models: Any) -> None:
    """Expert parallelism gives rows of experts that are elsewhere the index after the last one."""
    from breccia.transformers import BrecciaConfig

    model = load(models("gpt-oss"), quantization_config=BrecciaConfig("int8"))
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    x, weight = torch.randn(6, experts.gate_up_proj.in_features), torch.rand(6, 2)
    chosen = torch.tensor([[0, 1], [4, 2], [3, 4], [4, 4], [1, 0], [2, 4]])
    with torch.no_grad():
        found = experts(x, chosen, weight)
        whole = experts(x, chosen.clamp(max=3), torch.where(chosen == 4, 0, weight))
    close(found, whole)
    assert not found[3].any()


def test_a_model_that_reads_stacks_in_either_order(tmp_path: Path) -> None:
    """Qwen3-VL's experts have inputs before outputs in files of its makers, outputs first in those of transformers."""
    from breccia.transformers import BrecciaConfig

    text = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 1e4}
    seen = {"hidden_size": 64, "depth": 1, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    torch.manual_seed(0)
    kind = transformers().Qwen3VLMoeForConditionalGeneration
    config = transformers().Qwen3VLMoeConfig(text_config=text, vision_config={**seen, "deepstack_visual_indexes": [0]})
    model = kind(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "makers", "bf16")
    for name in ("in", "makers"):
        convert(tmp_path / name, tmp_path / f"{name}-q", "nvfp4")
    first, second = weights(tmp_path / "in-q"), weights(tmp_path / "makers-q")
    assert first == second
    stack = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert first[stack].shape == (4, 192, 128)
    shapes = [breccia.open(tmp_path / name)[stack].shape for name in ("in", "makers")]
    assert [tuple(shape) for shape in shapes] == [(4, 192, 128)] * 2
    convert(tmp_path / "in-q", tmp_path / "floats", "fp32")
    wanted = run(kind.from_pretrained(tmp_path / "floats", dtype=torch.float32))
    for path, said in (("in-q", None), ("in", BrecciaConfig("nvfp4")), ("makers", BrecciaConfig("nvfp4"))):
        options = {} if said is None else {"quantization_config": said}
        read = kind.from_pretrained(tmp_path / path, dtype=torch.float32, **options)
        assert len(stacks(read)) == 4
        close(run(read), wanted)
        read.save_pretrained(tmp_path / "again")
        assert run(kind.from_pretrained(tmp_path / "again", dtype=torch.float32)).equal(run(read))


def test_what_cannot_be_computed_is_refused(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from breccia.transformers import BrecciaConfig
    from breccia.transformers.experts import why_not_grouped
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    convert(models("gpt-oss"), tmp_path / "q", "int8")
    monkeypatch.delattr(gpt_oss.GptOssExperts, "_apply_gate")
    message = r"experts of GptOssExperts \(model.layers.0.mlp.experts\) must be gate and up projections, .*is not known"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "q")
    with pytest.raises(ValueError, match=message):
        load(models("gpt-oss"), quantization_config=BrecciaConfig("int8"))

    def of(*names: str, **more: Any) -> Any:
        return SimpleNamespace(named_parameters=lambda: [(name, None) for name in names], **more)

    assert why_not_grouped(of("gate_up_proj", "up_proj")) == "its parameters are gate_up_proj, up_proj"
    assert "its parameters are" in why_not_grouped(of(*PROJECTIONS, "down_proj_bias"))
    assert "a norm follows" in why_not_grouped(of(*PROJECTIONS, has_post_expert_norm=True))


def test_experts_in_one_tensor_have_no_form_in_modelopt(models: Any, tmp_path: Path) -> None:
    """`convert` leaves them in bfloat16 and says so; what it writes loads."""
    report = convert(models("gpt-oss"), tmp_path / "q", "modelopt:fp8")
    assert "experts" in str(report["kept"]) + str(report["notes"])
    model = load(tmp_path / "q")
    assert layers(model)
    assert not stacks(model)


@pytest.mark.slow
def test_memory_of_loading(models: Any, tmp_path: Path) -> None:
    """Peak memory above that of a process that has loaded another model, over the checkpoint's size."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
    config = transformers().GptOssConfig(**sizes, num_local_experts=8, num_experts_per_tok=2, vocab_size=2048)
    torch.manual_seed(0)
    model = transformers().GptOssForCausalLM(config).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 100e6
    model.save_pretrained(tmp_path / "large")
    convert(models("gpt-oss"), tmp_path / "small", "nvfp4")
    convert(tmp_path / "large", tmp_path / "q", "nvfp4")
    if not Path("/proc/self/status").is_file():
        pytest.skip("there is no /proc to tell a program's memory")
    size = sum(path.stat().st_size for path in (tmp_path / "q").glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "q")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.5 * size <= grown <= 1.3 * size, f"{grown / size:.2f} times the checkpoint"
