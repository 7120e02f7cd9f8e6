# SPDX-License-Identifier: Apache-2.0
"""`breccia.transformers`: transformers' own loader opens what `convert` writes and keeps the codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert
from loaded_models import MEASURE, close, layers, load, run, weights
from tiny_models import SIZES, logits, made_once, transformers

torch = pytest.importorskip("torch")
FAMILIES = ["llama", "llama-tied", "qwen2-tied", "qwen3", "mistral", "qwen3-moe"]
FORMATS = ["nvfp4", "int4", "int8", "mxfp8", "mxfp4", "mxfp6", "fp8-block", "modelopt:nvfp4", "modelopt:fp8"]
FORMATS += ["modelopt:mxfp8", "modelopt:fp8-block", "modelopt:int4"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models, made when asked for."""
    transformers()
    import breccia.transformers  # noqa: F401 (registers)

    return made_once(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("family", "to"), [("llama-tied", to) for to in FORMATS] + [(name, "nvfp4") for name in FAMILIES]
)
def test_codes_are_kept_and_logits_are_those_of_the_values(family: str, to: str, models: Any, tmp_path: Path) -> None:
    convert(models(family), tmp_path / "q", to)
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    model = load(tmp_path / "q")
    stored = weights(tmp_path / "q")
    assert {f"{name}.weight" for name in layers(model)} == set(stored)
    for name, layer in layers(model).items():
        assert layer.weight.to("numpy").recipe == stored[f"{name}.weight"].recipe
        assert torch.equal(layer.weight.dequantize(), torch.from_numpy(stored[f"{name}.weight"].dequantize()))
        layer.activations = None  # of which test_scheme_runs.py tells
    close(run(model), logits(tmp_path / "floats", dtype=torch.float32))


@pytest.mark.parametrize(("family", "to"), [("llama-tied", to) for to in FORMATS] + [("qwen3-moe", "nvfp4")])
def test_save_pretrained_writes_the_same_codes(family: str, to: str, models: Any, tmp_path: Path) -> None:
    convert(models(family), tmp_path / "q", to)
    model = load(tmp_path / "q")
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    first, second = weights(tmp_path / "q"), weights(tmp_path / "again")
    assert first.keys() == second.keys()
    for name, one in first.items():
        assert np.array_equal(one.dequantize(), second[name].dequantize())
        # One scale of one tile is also that of a tensor, which ModelOpt's files have for each row.
        assert one == second[name] or one.scale.size == 1
    said = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("q", "again")]
    assert said[0]["quantization_config"] == said[1]["quantization_config"]
    assert run(load(tmp_path / "again")).equal(run(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_on_load(family: str, models: Any, tmp_path: Path) -> None:
    """The same codes as `convert` writes, and what is saved loads again."""
    from breccia.transformers import BrecciaConfig

    model = load(models(family), quantization_config=BrecciaConfig("int4"))
    convert(models(family), tmp_path / "q", "int4")
    stored = weights(tmp_path / "q")
    assert {f"{name}.weight" for name in layers(model)} == set(stored)
    for name, layer in layers(model).items():
        assert torch.equal(layer.weight.dequantize(), torch.from_numpy(stored[f"{name}.weight"].dequantize()))
    model.save_pretrained(tmp_path / "saved")
    assert run(load(tmp_path / "saved")).equal(run(model))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # Linear layers with inputs before outputs, which the model initializes by their parts' names.
    "GPT2": ("GPT2LMHead", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "Mixtral": ("MixtralForCausal", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepseekV3": (
        "DeepseekV3ForCausal",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_name_and_keep_weights(name: str, models: Any, tmp_path: Path) -> None:
    from breccia.transformers import BrecciaConfig

    kind, more = OTHERS[name]
    sizes = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2}
    if name != "GPT2":
        sizes = {**SIZES, "pad_token_id": 0}
        sizes.pop("head_dim")
    torch.manual_seed(0)
    model = getattr(transformers(), f"{kind}Model" if name == "GPT2" else f"{kind}LM")(
        getattr(transformers(), f"{name}Config")(**{**sizes, **more})
    )
    model.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "q", "int8")
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    wanted = logits(tmp_path / "floats", dtype=torch.float32)
    read, made = load(tmp_path / "q"), load(tmp_path / "in", quantization_config=BrecciaConfig("int8"))
    stored = {name.replace("block_sparse_moe", "mlp") for name in weights(tmp_path / "q")}
    assert {f"{path}.weight" for path in layers(read)} == stored
    assert layers(read).keys() == layers(made).keys()
    for one in (read, made):
        close(run(one), wanted)
    read.save_pretrained(tmp_path / "again")
    assert run(load(tmp_path / "again")).equal(run(read))


def test_activations_and_modules_to_not_convert(models: Any, tmp_path: Path) -> None:
    from breccia.transformers import BrecciaConfig

    said = BrecciaConfig(
        recipe="mxfp8", activations=breccia.MXFP8BlockScaling(), modules_to_not_convert=["o_proj", "model.layers.1.*"]
    )
    model = load(models("llama"), quantization_config=said)
    kept = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert {tuple(name.split(".")[i] for i in (2, -1)) for name in layers(model)} == {("0", name) for name in kept}
    assert all(layer.activations == breccia.MXFP8BlockScaling() for layer in layers(model).values())
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert all(layer.activations == breccia.MXFP8BlockScaling() for layer in layers(again).values())
    assert run(again).equal(run(model))


def test_generation_and_dequantize(models: Any, tmp_path: Path) -> None:
    convert(models("qwen3"), tmp_path / "q", "nvfp4")
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    prompt = torch.arange(3, 11)[None]
    model, floats = load(tmp_path / "q"), load(tmp_path / "floats")
    options = {"max_new_tokens": 8, "do_sample": False}
    assert model.generate(prompt, **options).equal(floats.generate(prompt, **options))
    dense = model.dequantize()
    assert not layers(dense)
    assert run(dense).equal(run(floats))


def test_what_cannot_be_loaded_is_refused(models: Any, tmp_path: Path) -> None:
    from breccia.transformers import BrecciaConfig

    convert(models("llama"), tmp_path / "embedded", "int8", include=["*embed_tokens*"])
    with pytest.raises(ValueError, match="must belong to a linear layer, it belongs to Embedding"):
        load(tmp_path / "embedded")
    with pytest.raises(ValueError, match="modules_to_not_convert must name modules"):
        load(models("llama"), quantization_config=BrecciaConfig("int8", modules_to_not_convert=["nothing"]))
    with pytest.raises(ValueError, match="did you mean nvfp4"):
        BrecciaConfig("nvpf4")


def test_fused_experts_may_stay(models: Any) -> None:
    from breccia.transformers import BrecciaConfig

    model = load(models("gpt-oss"), quantization_config=BrecciaConfig("int8", modules_to_not_convert=["*experts"]))
    assert {name.split(".")[-1] for name in layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_without_transformers_the_message_names_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; import breccia.transformers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: transformers is needed here: pip install 'breccia[transformers]'" in run.stderr


def test_memory_of_loading(models: Any, tmp_path: Path) -> None:
    """Peak memory above that of a process that has loaded another model, over the checkpoint's size."""
    config = transformers().LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=2048
    )
    torch.manual_seed(0)
    model = transformers().LlamaForCausalLM(config).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 100e6
    model.save_pretrained(tmp_path / "large")
    convert(models("llama"), tmp_path / "small-q", "nvfp4")
    if not Path("/proc/self/status").is_file():
        pytest.skip("there is no /proc to tell a program's memory")
    for to in ("nvfp4", "modelopt:fp8"):
        convert(tmp_path / "large", tmp_path / to, to)
        size = sum(path.stat().st_size for path in (tmp_path / to).glob("*.safetensors"))
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "small-q"), str(tmp_path / to)]
        grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert 0.7 * size <= grown <= 1.3 * size, f"{to}: {grown / size:.2f} times the checkpoint"
