# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA over layers of codes: as over the layers of their values, merged, unmerged, saved and trained."""

import copy
import warnings

import breccia
import cases
import numpy as np
import pytest
from breccia import recipes

torch = pytest.importorskip("torch")
import lora_peer  # noqa: E402

peft = lora_peer.peft()
import breccia.peft  # noqa: E402
from breccia.nn import QuantizedLinear  # noqa: E402

K, N = 256, 384
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")  # which PEFT calls


@pytest.fixture(autouse=True)
def _only_whole_peers(monkeypatch):
    lora_peer.hide(monkeypatch)


WEIGHTS = {name: recipe for name, recipe in cases.RECIPES.items() if name != "int4-unsigned"}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True, "lora_dropout": 0.0},
    "dora, dropout": {"use_dora": True, "lora_dropout": 0.1},
}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(K, N), torch.nn.Linear(N, K), torch.nn.Linear(K, 8)

    def forward(self, x):
        return self.head(self.second(torch.nn.functional.gelu(self.first(x))))


def base(recipe="nvfp4", **options):
    torch.manual_seed(0)
    return breccia.quantize_(Block(), recipe, lambda layer, name: name != "head", **options)


def dense(model):
    """The same of ordinary layers with the values that the codes stand for."""
    made = copy.deepcopy(model)
    for name in ("first", "second"):
        layer = getattr(made, name)
        plain = torch.nn.Linear(layer.in_features, layer.out_features)
        plain.weight, plain.bias = torch.nn.Parameter(breccia.dequantize(layer.weight)), layer.bias
        setattr(made, name, plain)
    return made


def config(**options):
    return peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": ["first", "second"], **options})


def adapted(model, seed=1, scale=0.02, **options):
    """With an adapter that does something already."""
    made = peft.get_peft_model(model, config(**options))
    torch.manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=scale)
        elif "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    return made


def x(seed=0):
    return torch.from_numpy(cases.normal((5, K), seed))


def step(model, seed=0):
    torch.manual_seed(3)  # of the dropout
    model.zero_grad()
    loss = model(x(seed)).square().mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


# LoRA over every recipe, its other kinds over some: the layer below is the same.
PAIRS = [(name, kind) for name in WEIGHTS for kind in KINDS if kind == "lora" or name in ("nvfp4", "int4-asymmetric")]


@pytest.mark.parametrize(("recipe", "kind"), PAIRS)
def test_as_over_the_values(recipe, kind):
    """Outputs and gradients of every recipe are those of PEFT's own layer over the values."""
    recipe = WEIGHTS[recipe]
    codes = adapted(base(recipe), **KINDS[kind])
    values = adapted(dense(base(recipe)), **KINDS[kind])
    assert type(codes.base_model.model.first) is breccia.peft.QuantizedLora
    assert list(codes.state_dict()) != list(values.state_dict())
    (loss, grads), (wanted, expected) = step(codes), step(values)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected.keys()
    assert len(grads) >= 4
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_model_of_codes_alone(kind):
    """Layers without bias and nothing else: the model has no parameter that PEFT could take the device from."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False), torch.nn.Linear(N, K, bias=False))
    model = breccia.quantize_(model, "nvfp4")
    assert not list(model.parameters())
    y = model(x())
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "1"], **KINDS[kind]))
    torch.testing.assert_close(tuned(x()), y, rtol=1e-5, atol=1e-5)  # B begins at zero
    tuned(x()).sum().backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


def test_functions_of_peft_keep_their_arguments():
    """Those that are changed here are called by position and by name."""
    from peft.tuners.lora import model as lora_model

    layer = QuantizedLinear(breccia.cast(torch.ones(N, K), "nvfp4"))
    for device in (lora_model.get_device_map(layer), lora_model.get_device_map(model=layer)):
        assert set(map(str, device.values())) == {"cpu"}
    assert callable(breccia.peft._take_codes)


def test_peft_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted(base())


@pytest.mark.parametrize(("recipe", "kind"), PAIRS)
@pytest.mark.filterwarnings("ignore:merging rounds")
def test_merge_and_unmerge(recipe, kind):
    """Merged codes are those of the merged values, in the recipe there was; unmerging puts back every bit."""
    recipe = WEIGHTS[recipe]
    model = adapted(base(recipe), scale=0.1, **KINDS[kind]).eval()
    values = adapted(dense(base(recipe)), scale=0.1, **KINDS[kind]).eval()
    layer, plain = model.base_model.model.first, values.base_model.model.first
    before, y = layer.base_layer.weight, model(x())
    bias = layer.base_layer.bias.clone()
    with breccia.peft.merging() as report:
        model.merge_adapter()
    values.merge_adapter(safe_merge=True)
    after = layer.base_layer.weight
    assert after.recipe == before.recipe
    assert after.original_dtype == before.original_dtype
    wanted = plain.base_layer.weight.detach()
    error = (breccia.dequantize(after) - wanted).abs().mean()
    ordinary = (breccia.dequantize(breccia.cast(wanted, recipe)) - wanted).abs().mean()
    assert error <= 1.1 * ordinary + 1e-6
    torch.testing.assert_close(layer.base_layer.bias, plain.base_layer.bias)
    assert len(report.layers) == 2
    assert report.layers[0].elements == N * K
    assert report.layers[0].changed > 0
    assert 0.5 < report.kept < 1.5
    model.unmerge_adapter()
    assert layer.base_layer.weight == before
    assert torch.equal(layer.base_layer.bias, bias)
    assert torch.equal(model(x()), y)


@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
def test_several_adapters():
    """Trained, switched, mixed in a batch, merged together and one after the other, unmerged as one."""
    model, values = adapted(base("mxfp8")).eval(), adapted(dense(base("mxfp8"))).eval()
    for one in (model, values):
        one.add_adapter("other", config(r=4))
        torch.manual_seed(5)
        for name, parameter in one.named_parameters():
            if "lora_" in name and "other" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    close = {"rtol": 1e-4, "atol": 1e-5}
    outputs = {}
    for active in ("default", "other"):
        model.set_adapter(active)
        values.set_adapter(active)
        outputs[active] = model(x())
        torch.testing.assert_close(outputs[active], values(x()), **close)
    assert not torch.allclose(outputs["default"], outputs["other"])
    with model.disable_adapter(), values.disable_adapter():
        torch.testing.assert_close(model(x()), values(x()), **close)
    mixed = ["default", "other", "__base__", "other", "default"]
    torch.testing.assert_close(model(x(), adapter_names=mixed), values(x(), adapter_names=mixed), **close)
    before = model.base_model.model.first.base_layer.weight
    with breccia.peft.merging():
        together, apart = copy.deepcopy(model), copy.deepcopy(model)
        together.merge_adapter(["default", "other"])
        apart.merge_adapter(["default"])
        apart.merge_adapter(["other"])
    layers = [one.base_model.model.first for one in (together, apart)]
    assert layers[0].base_layer.weight == layers[1].base_layer.weight != before
    assert layers[1].merged_adapters == ["default", "other"]
    apart.unmerge_adapter()
    assert layers[1].base_layer.weight == before


def test_stochastic_rounding_keeps_small_changes():
    """A change of a tenth of a step: nearest rounding swallows nearly all of it, chance keeps it on average."""
    kept = {}
    for seed in (None, 0, 1):
        model = adapted(base("int4:32"), scale=0.0035)
        with breccia.peft.merging(seed) as report:
            merged = model.merge_and_unload()
        assert type(merged.first) is QuantizedLinear
        kept[seed] = report.kept, merged.first.weight
    assert kept[None][0] < 0.2
    assert abs(kept[0][0] - 1) < 0.2
    assert kept[0][1] != kept[1][1]
    model = adapted(base("int4:32"), scale=0.0035)
    with breccia.peft.merging(0):
        assert model.merge_and_unload().first.weight == kept[0][1]
    with pytest.warns(UserWarning, match=r"keeps less than 90 % of their change.*merging\(rounding=\"feedback\"\)"):
        adapted(base("int4:32"), scale=0.0035).merge_and_unload()
    with pytest.raises(TypeError, match="seed must be an integer or None, got 'a'"), breccia.peft.merging("a"):
        pass
    with pytest.raises(ValueError, match="seed must be left out with"), breccia.peft.merging(1, rounding="nearest"):
        pass


@pytest.mark.parametrize("recipe", [name for name in WEIGHTS if "expanded" not in name])
def test_feedback_keeps_what_the_adapter_does(recipe):
    """What the layer computes of inputs that A looks at is nearer to the change than with rounding to nearest."""
    lost = {}
    for rounding in ("nearest", "feedback"):
        model = adapted(base(WEIGHTS[recipe]))
        layer = model.base_model.model.first
        codes, change = layer.base_layer.weight, layer.get_delta_weight("default").detach()
        looked_at = layer.lora_A["default"].weight.detach()
        with breccia.peft.merging(rounding=rounding) as report:
            model.merge_adapter()
        assert report.rounding == rounding
        new = layer.base_layer.weight
        assert new.recipe == codes.recipe
        asked = breccia.dequantize(codes) + change
        lost[rounding] = ((breccia.dequantize(new) - asked) @ looked_at.T).norm() / (change @ looked_at.T).norm()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.unmerge_adapter()
        assert layer.base_layer.weight == codes
    assert lost["feedback"] < 0.6 * lost["nearest"]


def test_fused_layers_keep_their_global_scale():
    model = adapted(base("nvfp4"), scale=0.001)
    before = model.base_model.model.first.base_layer.weight
    with breccia.peft.merging():
        merged = model.merge_and_unload()
    assert torch.equal(merged.first.weight.global_scale, before.global_scale)
    model = adapted(base("nvfp4"), scale=0.5)
    with breccia.peft.merging():
        larger = model.merge_and_unload().first.weight
    assert larger.global_scale > before.global_scale


def test_safe_merge_changes_nothing_where_it_refuses():
    model = adapted(base())
    before = model.base_model.model.first.base_layer.weight
    model.base_model.model.first.lora_B["default"].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="merged values must be finite, those with adapters default are not"):
        model.merge_adapter(safe_merge=True)
    assert model.base_model.model.first.base_layer.weight == before
    assert model.base_model.model.first.merged_adapters == []


def test_what_cannot_be_is_refused():
    for init in ("pissa", "olora", "loftq"):
        options = {"loftq_config": peft.LoftQConfig()} if init == "loftq" else {}
        with pytest.raises(ValueError, match=rf"for a quantized layer, got '{init}': breccia\.lora_init"):
            adapted(base(), init_lora_weights=init, **options)
    from breccia.transformers.experts import StackedLinear

    model = torch.nn.Sequential(StackedLinear(breccia.cast(torch.ones(2, N, K), "nvfp4")), torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="target_modules must be linear layers, got StackedLinear"):
        peft.get_peft_model(model, config(target_modules=["0"]))


def test_configs_from_before_the_import():
    one = config()
    one._custom_modules = None
    with pytest.raises(ValueError, match="not supported"):
        peft.get_peft_model(base(), one)
    assert peft.get_peft_model(base(), breccia.peft.register(one)).base_model.model.first.merged is False


def test_modules_to_save_and_files(tmp_path):
    """The head learns too; what is saved comes back over another copy of the base."""
    model = adapted(base(), modules_to_save=["head"])
    with torch.no_grad():
        model.base_model.model.head.modules_to_save["default"].weight.add_(1)
    assert "head.modules_to_save.default.weight" in " ".join(n for n, p in model.named_parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    assert not any("weight_data" in name for name in breccia.load(tmp_path / "adapter_model.safetensors"))
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(again(x()), model(x()))


def test_packed_codes_stay_packed():
    """Merged, and merged and taken out again; values are those of codes of a byte each."""
    merged = []
    for hold in (lambda model: model, breccia.nn.pack_):
        model = adapted(hold(base("mxfp6")))
        layer = model.base_model.model.first.base_layer
        nbytes, before = layer.weight.nbytes, layer.weight
        model.merge_adapter()
        assert layer.weight.nbytes == nbytes
        merged.append(model(x()))
        model.unmerge_adapter()
        assert layer.weight == before and layer.weight.nbytes == nbytes
    assert torch.equal(*merged)


def test_modules_to_save_of_codes_are_refused():
    """Their copy would not learn: a head that was quantized with the rest, or a block around such."""
    model = torch.nn.ModuleDict({"block": base(), "1": breccia.quantize_layer(torch.nn.Linear(8, 64), "fp8")})
    model["head"] = breccia.quantize_layer(torch.nn.Linear(64, 8), "fp8")
    for name, target, kind in (("head", "first", "QuantizedLinear"), ("block", "1", "Block")):
        with pytest.raises(ValueError, match=f"modules_to_save must be modules without .* of codes.* got a {kind}"):
            peft.get_peft_model(copy.deepcopy(model), config(target_modules=[target], modules_to_save=[name]))


@pytest.mark.parametrize("way", ["compiled", "checkpointed", "autocast"])
def test_ways_to_run(way):
    torch._dynamo.reset()
    model = adapted(base("nvfp4", activations="fp8-row"))
    expected = step(model)
    if way == "compiled":
        run = torch.compile(model, backend="aot_eager")
    elif way == "checkpointed":

        def run(x):
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x())
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), model(x()), rtol=0.1, atol=0.05)
        return
    model.zero_grad()
    loss = run(x()).square().mean()
    loss.backward()
    torch.testing.assert_close(loss, expected[0])
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, expected[1][name], rtol=1e-5, atol=1e-7)


# --- models of transformers -----------------------------------------------------------------------------------------


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **settings))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder / "in")
    breccia.checkpoint.convert(folder / "in", folder / "out", "nvfp4")
    return folder / "out"


def tokens(many=4):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 97, (many, 16)))


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def test_models_opened_by_transformers(checkpoint, tmp_path):
    """Opened as codes, prepared, trained by Trainer, the adapter saved, and merged into the checkpoint's file."""
    transformers = pytest.importorskip("transformers")
    import breccia.transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    model = breccia.peft.prepare_model_for_kbit_training(model)
    assert model.model.gradient_checkpointing
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj) is breccia.peft.QuantizedLora
    losses = trained(model, tokens(), tmp_path / "run", lr=2e-2)
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained(tmp_path / "adapter")
    breccia.checkpoint.merge_lora(checkpoint, tmp_path / "adapter", tmp_path / "merged")
    with breccia.peft.merging():
        here = model.merge_and_unload()
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, layer in there.named_modules():
        if isinstance(layer, QuantizedLinear):
            mine = here.get_submodule(name).weight
            torch.testing.assert_close(breccia.dequantize(mine), breccia.dequantize(layer.weight))
    here.save_pretrained(tmp_path / "again")
    assert breccia.load(tmp_path / "again" / "model.safetensors")


def trained(model, ids, folder, lr, steps=12, **options):
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": row, "labels": row} for row in ids]
    losses = []

    class Keep(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=len(ids), max_steps=steps, learning_rate=lr, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Keep()]).train()
    return losses


def test_peft_prepares_them_too(checkpoint):
    """Its own function freezes and casts, and knows no codes: it leaves checkpointing to who calls it."""
    transformers = pytest.importorskip("transformers")
    import breccia.transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    before = breccia.dequantize(model.model.layers[0].mlp.up_proj.weight)
    model = peft.prepare_model_for_kbit_training(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert model.model.norm.weight.dtype == torch.float32
    assert torch.equal(breccia.dequantize(model.model.layers[0].mlp.up_proj.weight), before)
    with pytest.raises(ValueError, match=r"model must have a breccia\.nn\.QuantizedLinear"):
        breccia.peft.prepare_model_for_kbit_training(torch.nn.Linear(3, 3))


def test_diffusers_add_an_adapter():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip
    breccia.quantize_(model, "mxfp8", lambda layer, name: name.endswith(("to_q", "to_v")))
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    layers = [m for m in model.modules() if isinstance(m, breccia.peft.QuantizedLora)]
    assert layers
    y = model(torch.ones(1, 4, 8, 8), 1, torch.ones(1, 5, 32)).sample
    y.square().mean().backward()
    assert all(layer.lora_B["default"].weight.grad is not None for layer in layers)


# --- a real model ---------------------------------------------------------------------------------------------------


def text(tokenizer, rows, length):
    from pydoc_data.topics import topics

    words = tokenizer("\n".join(topics[name] for name in sorted(topics)[:4]))["input_ids"]
    return torch.tensor(words[: rows * length]).reshape(rows, length)


@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_a_real_model_learns_as_its_values_do(recipe, smollm2_folder, tmp_path):
    """The loss of LoRA over NVFP4 within 2 % of that over the dequantized model, step by step, by Trainer on a CPU."""
    model, tokenizer = lora_peer.smollm2(smollm2_folder)
    ids = text(tokenizer, 2, 32)
    losses = {}
    for name in ("codes", "values"):
        one = copy.deepcopy(model)
        breccia.quantize_(one, recipe, lambda layer, name: name != "lm_head")
        if name == "values":
            for path, layer in list(one.named_modules()):
                if isinstance(layer, QuantizedLinear):
                    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                    plain.weight = torch.nn.Parameter(breccia.dequantize(layer.weight))
                    one.set_submodule(path, plain)
        torch.manual_seed(0)
        wanted = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
        losses[name] = trained(peft.get_peft_model(one, wanted), ids, tmp_path / name, lr=2e-3, steps=5)
    assert len(losses["codes"]) == 5
    assert losses["codes"][-1] < losses["codes"][0]
    np.testing.assert_allclose(losses["codes"], losses["values"], rtol=0.02)


def test_every_recipe_of_the_package_is_here():
    assert {type(recipe) for recipe in WEIGHTS.values()} == set(recipes.all_recipes())


@pytest.mark.parametrize("recipe", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_all_linear_layers_are_those_of_codes_too(recipe):
    config = peft.LoraConfig(target_modules="all-linear", r=4)
    model = peft.get_peft_model(base(recipe), config)
    model.add_adapter("other", peft.LoraConfig(target_modules="all-linear", r=4))
    for adapter in ("default", "other"):
        names = {name.split(".")[-4] for name, _ in model.named_parameters() if f".lora_A.{adapter}." in name}
        assert names == {"first", "second", "head"}


def test_all_linear_layers_leave_out_a_head_of_codes():
    model = breccia.quantize_(llama(), "mxfp8")
    assert isinstance(model.lm_head, QuantizedLinear)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
    names = {name.split(".")[-4] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert names == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
