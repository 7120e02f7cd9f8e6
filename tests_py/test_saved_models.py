# SPDX-License-Identifier: Apache-2.0
"""Models that quantize_ changed, saved by the libraries that they are of, and opened again: the same results."""

import copy
import json
import os
import subprocess
import sys
import warnings

import breccia
import cases
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
import breccia.checkpoint  # noqa: E402
import breccia.transformers  # noqa: E402
import lora_peer  # noqa: E402
from breccia.nn import QuantizedLinear  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

X = torch.arange(16)[None]


def llama(layers=1):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def opened(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model):
    with torch.no_grad():
        return model(X).logits


@cases.ALL
@pytest.mark.parametrize("activations", [None, "fp8-row"])
def test_save_pretrained_writes_what_from_pretrained_opens(recipe, activations, tmp_path):
    model = breccia.quantize_(llama(), recipe, exclude=["lm_head"], activations=activations, exact_rows=4)
    y = logits(model)
    model.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert isinstance(again.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert again.model.layers[0].mlp.up_proj.exact_rows == 4
    assert type(again.lm_head) is torch.nn.Linear
    assert torch.equal(logits(again), y)
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(opened(tmp_path / "twice")), y)


def test_layers_of_several_recipes_and_inputs(tmp_path):
    model = breccia.quantize_(llama(), "nvfp4", include=["*.self_attn.*"], activations="nvfp4", gradients="bf16")
    breccia.quantize_(model, "fp8-block", include=["*.up_proj"], activations="fp8-row-block")
    breccia.quantize_(model, "int8", include=["*.down_proj"])
    y = logits(model)
    model.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert torch.equal(logits(again), y)
    mine, its = ({n: (m.recipe, m.activations) for n, m in one.named_modules() if isinstance(m, QuantizedLinear)}
                 for one in (model, again))  # fmt: skip
    assert its == mine


def test_copies_of_the_model_keep_saving(tmp_path):
    model = breccia.quantize_(llama(), "mxfp8", exclude=["lm_head"])
    y = logits(model)
    torch.save(model, tmp_path / "whole.pt")
    for number, one in enumerate((copy.deepcopy(model), torch.load(tmp_path / "whole.pt", weights_only=False))):
        assert torch.equal(logits(one), y)
        one.save_pretrained(tmp_path / str(number))
        assert torch.equal(logits(opened(tmp_path / str(number))), y)


def test_dequantize_takes_the_mark_away(tmp_path):
    model = breccia.quantize_(llama(), "int8", exclude=["lm_head"])
    y = logits(model)
    model.dequantize().save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    torch.testing.assert_close(logits(opened(tmp_path)), y)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")  # which PEFT calls
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "int4", "mxfp6"])
def test_adapters_are_merged_and_the_model_is_saved(recipe, tmp_path, monkeypatch):
    peft = lora_peer.peft()
    lora_peer.hide(monkeypatch)
    import breccia.peft

    model = breccia.quantize_(llama(), recipe, exclude=["lm_head"])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    merged = wrapped.merge_and_unload()
    y = logits(merged)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(opened(tmp_path)), y)


def unmarked(model, folder):
    """As a library saves it that knows nothing of quantize_: a state_dict and the config of the model."""
    folder.mkdir()
    model.config.to_json_file(folder / "config.json")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if k != "quantization_config"}))
    state = {name: part.clone().contiguous() for name, part in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@cases.ALL
def test_a_folder_without_the_mark_is_read_by_its_tensors(recipe, tmp_path):
    model = breccia.quantize_(llama(), recipe, exclude=["lm_head"])
    folder = unmarked(model, tmp_path / "state")
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = breccia.dequantize(model.model.layers[0].mlp.up_proj.weight)
    breccia.checkpoint.convert(folder, tmp_path / "out", "fp32")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], wanted)
    config = breccia.transformers.BrecciaConfig()
    if any(str(part.dtype).endswith(("e8m0fnu", "fnuz", "_x2")) for part in model.state_dict().values()):
        with pytest.raises(ValueError, match=r"unknown dtype F"):
            opened(folder, quantization_config=config)
        breccia.checkpoint.convert(folder, tmp_path / "own", "breccia")
        folder = tmp_path / "own"
    if recipe.element.endswith("fnuz"):  # which transformers does not read in breccia's own format either
        return
    again = opened(folder, quantization_config=config)
    assert torch.equal(logits(again), logits(model))


@cases.ALL
def test_a_state_of_older_versions_is_read_or_refused(recipe, tmp_path):
    """Which has no texts: dtypes and shapes of its parts say what the codes are, or nothing does."""
    model = breccia.quantize_(llama(), recipe, exclude=["lm_head"])
    folder = unmarked(model, tmp_path / "state")
    state, own = load_file(folder / "model.safetensors"), dict(model.named_buffers())
    for name in state.keys() & own.keys():  # of two codes to a byte, which these versions left as they are
        state[name] = state[name].view(own[name].dtype)
    save_file({n: part for n, part in state.items() if not n.endswith("_form")}, folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    try:
        breccia.checkpoint.convert(folder, tmp_path / "out", "fp32")
    except ValueError as error:
        assert "a layer of breccia" in str(error) or "must be a multiplier" in str(error)
        assert not (tmp_path / "out").exists()
        return
    wanted = breccia.dequantize(model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], wanted)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in version")  # which diffusers calls
def test_diffusers(tmp_path, monkeypatch):
    lora_peer.hide(monkeypatch)
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 1}
    sizes |= {"sample_size": 8, "patch_size": 2, "norm_num_groups": 4, "norm_type": "ada_norm_zero"}
    model = diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10).eval()
    breccia.quantize_(model, "mxfp8", exclude=["proj_out*"])
    x = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        y = model(x, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample
        model.save_pretrained(tmp_path)
        again = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path).eval()
        assert any(isinstance(layer, QuantizedLinear) for layer in again.modules())
        for p in again.parameters():  # torch's own products of floats depend on where in a file's map these lie
            p.data = p.data.clone()
        assert torch.equal(again(x, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample, y)


@cases.ALL
def test_timm(recipe, tmp_path):
    """What timm saves opens in a model that quantize_ changed, never in a plain one, and convert makes floats of it."""
    try:
        import timm.models
    except (ImportError, RuntimeError) as error:  # the latter of a torchvision that is for another build of torch
        pytest.skip(f"timm is not installed, or its torchvision does not load: {error}")

    def vit():
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "num_heads": 2, "depth": 1, "num_classes": 128}
        return timm.create_model("vit_tiny_patch16_224", **sizes, pretrained=False).eval()

    def result(model):
        with torch.no_grad():
            return model(x)

    torch.manual_seed(0)
    model, x = breccia.quantize_(vit(), recipe), torch.randn(2, 3, 32, 32)
    assert sum(isinstance(layer, QuantizedLinear) for layer in model.modules()) == 5
    saved, floats = tmp_path / "saved", tmp_path / "floats"
    timm.models.save_for_hf(model, saved, safe_serialization=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        timm.create_model(f"local-dir:{saved}", pretrained=True)
    again = breccia.quantize_(vit(), recipe)
    timm.models.load_checkpoint(again, str(saved / "model.safetensors"))
    assert torch.equal(result(again), result(model))
    breccia.checkpoint.convert(saved, floats, "fp32")
    plain = vit()
    timm.models.load_checkpoint(plain, str(floats / "model.safetensors"))
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(plain.get_submodule(name).weight, breccia.dequantize(layer.weight)), name


def test_a_model_inside_of_another_module_is_marked(tmp_path):
    """As sentence-transformers and others hold one, and save it with its own method."""
    outer = torch.nn.Sequential(torch.nn.Linear(128, 128), llama())
    breccia.quantize_(outer, "mxfp8")
    y = logits(outer[1])
    outer[1].save_pretrained(tmp_path)
    assert torch.equal(logits(opened(tmp_path)), y)


@pytest.mark.parametrize("recipe", ["int8", "int4", "nvfp4", "mxfp4"])
def test_an_inner_model_quantized_alone_saves_with_the_outer(recipe, tmp_path):
    model = llama()
    breccia.quantize_(model.model, recipe)
    y = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(opened(tmp_path)), y)


def test_a_plain_model_refuses_the_state():
    """As timm and others load one: a plain model's load_state_dict."""
    state = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128)), "mxfp8").state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        torch.nn.Sequential(torch.nn.Linear(128, 128)).load_state_dict(state)


def test_inspect_names_the_format(tmp_path):
    folder = unmarked(breccia.quantize_(llama(), "nvfp4", exclude=["lm_head"]), tmp_path / "state")
    command = [sys.executable, "-m", "breccia", "inspect", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "breccia nvfp4" in shown
    assert "weight_data" not in shown


@pytest.mark.parametrize("first", ["peft", "layers"])
def test_peft_takes_layers_without_an_import_of_ours(first):
    """Whichever is first; in a process of its own, for an import lasts."""
    peer = "import pytest, lora_peer; lora_peer.hide(pytest.MonkeyPatch()); peft = lora_peer.peft()\n"
    layers = (
        "import importlib.util, torch, breccia\n"
        "m = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), 'mxfp8')\n"
        "assert importlib.util.find_spec('peft').name == 'peft'\n"  # as libraries ask whether it is there
    )
    code = (
        (peer + layers if first == "peft" else layers + peer)
        + "w = peft.get_peft_model(m, peft.LoraConfig(target_modules=['0']))\n"
        "assert type(w.base_model.model[0]).__name__ == 'QuantizedLora'\n"
    )
    here = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=here)
