# SPDX-License-Identifier: Apache-2.0
"""What runs a scheme: layers of `breccia.transformers` and `quantize_` multiply inputs as the scheme says, and give the
logits of compressed-tensors' own fake quantization of the same checkpoint."""

import warnings

import breccia
import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert
from breccia.schemes import Activations, Match, ModelScheme, Rule, StoredScale
from breccia.schemes.inputs import inputs_for
from loaded_models import layers, load, run
from tiny_models import made_once, transformers

torch = pytest.importorskip("torch")
STATIC = Activations("float8_e4m3fn", "tensor", "static")
# Recipe and inputs → the form of the inputs, and how far a layer's output may be from compressed-tensors', of its norm.
KINDS = {
    ("nvfp4", "static"): ("NVFP4 local", 2e-2),  # values halfway between two codes fall elsewhere
    ("fp8", "dynamic"): ("FP8 per token dynamic", 1e-5),
    ("fp8-tensor", "static"): ("FP8 static", 1e-5),
    ("int8", "dynamic"): ("INT8 per token dynamic", 1e-5),
    ("int8", "static"): ("INT8 static", 1e-5),
    ("fp8-block", "dynamic"): ("FP8 g128 dynamic", 1e-5),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    transformers()
    import breccia.transformers  # noqa: F401 (registers)

    return made_once(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def moments(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("moments") / "m.safetensors"
    with pytest.warns(UserWarning, match="rows"):
        breccia.calibrate(load(models("llama")), [torch.arange(3, 63)[None]], "diag").save(path)
    return path


def distance(got, wanted):
    assert not got.isnan().any()
    return float((got - wanted).norm() / wanted.norm())


def met_layers(model, theirs):
    """Name and layer, its inputs in the other model, and what they gave there."""
    seen = {}
    for name in layers(model):
        hook = lambda _, given, made, name=name: seen.update({name: (given[0], made)})  # noqa: E731
        theirs.get_submodule(name).register_forward_hook(hook)
    run(theirs)
    assert len(seen) == 14
    return [(name, layer, *seen[name]) for name, layer in layers(model).items()]


def same_layers(model, theirs, most):
    """Each layer on its inputs in the other model. INT8 with amax / 127.5, as compressed-tensors has it where servers
    have amax / 127: a row's largest input, and others of 16 bits, lie halfway between two codes and may have either."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    for name, layer, given, made in met_layers(model, theirs):
        module = theirs.get_submodule(name)
        args, largest = module.quantization_scheme.input_activations, given.abs().amax(-1, keepdim=True)
        scale, zero = compute_dynamic_scales_and_zp(given, args, module)
        wanted, weight = fake_quantize(given, scale, zero, args), layer.weight.dequantize()
        assert distance(wanted @ weight.T, made) <= most, name
        inputs = breccia.cast(given, layer.activations, amax=largest * 127 / 127.5).dequantize()
        apart = (inputs - wanted).abs()
        between = ((given / scale) % 1 - 0.5).abs() < 1e-3
        assert not ((apart > 1e-3 * scale) & ~between).any(), name
        assert bool((apart <= 1.001 * scale).all())
        own = breccia.cast(given, layer.activations).dequantize()
        assert distance(layer(given), own @ weight.T) <= most, name


@pytest.mark.parametrize(("recipe", "when"), KINDS)
def test_logits_are_those_of_compressed_tensors(recipe, when, models, moments, tmp_path):
    pytest.importorskip("compressed_tensors")
    label, most = KINDS[recipe, when]
    options = {"amax": moments} if when == "static" else {}
    convert(models("llama"), tmp_path / "ct", f"compressed-tensors:{recipe}", activations=when, **options)
    own = {"fp8": "fp8-row", "fp8-tensor": "fp8"}.get(recipe, recipe)
    report = convert(tmp_path / "ct", tmp_path / "own", own)
    assert not [note for note in report["notes"] if "inputs" in note]
    assert report["requantized"] is None or report["requantized"]["lossless"] == report["requantized"]["tensors"]
    model = load(tmp_path / "own")
    assert len(layers(model)) == 14
    scheme = breccia.load_scheme(tmp_path / "own")
    for name, layer in layers(model).items():
        assert str(scheme.rule(name).inputs) == label
        assert layer.activations is not None
        assert ("input_scale" in layer._buffers) == (when == "static")
    got = run(model)
    theirs = load_compressed(tmp_path / "ct")
    wanted = run(theirs)
    if (recipe, when) == ("int8", "dynamic"):
        assert distance(got, wanted) < 0.1
        same_layers(model, theirs, most)
    else:
        for name, layer, given, made in met_layers(model, theirs):
            assert distance(layer(given), made) <= most, name
        # The last bit of a sum, which torch adds as the processor likes, may take an input over the edge of its code.
        assert distance(got, wanted) <= max(most, 1e-3)
    for layer in layers(model).values():
        layer.activations = None
    assert distance(run(model), wanted) > 2e-3  # that the inputs were quantized can be seen
    model = load(tmp_path / "own")
    model.save_pretrained(tmp_path / "saved")
    assert run(load(tmp_path / "saved")).equal(got)
    assert breccia.load_scheme(tmp_path / "saved").rule(next(iter(layers(model)))) == scheme.rule(
        next(iter(layers(model)))
    )


NVFP4 = breccia.NVFP4BlockScaling()
SCHEME = ModelScheme(
    (
        Rule(
            (Match("glob", "*.o_proj"),), breccia.NVFP4BlockScaling(), inputs_for(breccia.NVFP4BlockScaling(), "local")
        ),
        Rule((Match("glob", "*.self_attn.*"),), breccia.Float8CurrentScaling(), STATIC),
        Rule((Match("glob", "*.down_proj"),), None),
        Rule((Match("glob", "*.mlp.*"),), breccia.MXFP8BlockScaling(), None),
    )
)


def test_quantize_by_a_scheme(models, moments):
    """The layers that `convert` and the loader make of the same scheme."""
    from breccia.transformers import BrecciaConfig

    model = load(models("llama"))
    with breccia.moments.load_moments(moments) as known:
        breccia.quantize_(model, SCHEME, moments=known)
        loaded = load(models("llama"), quantization_config=BrecciaConfig(scheme=SCHEME, moments=dict(known)))
    assert run(loaded).equal(run(model))
    assert layers(model).keys() == layers(loaded).keys()
    for name, layer in layers(model).items():
        rule = SCHEME.rule(name)
        assert layer.recipe == rule.weights
        assert (layer.activations is None) == (rule.inputs is None)
        assert ("input_scale" in layer._buffers) == (rule.inputs is not None)
    assert len(layers(model)) == 12
    assert type(model.lm_head) is torch.nn.Linear


def test_what_is_quantized_on_load_is_saved_with_its_scheme(models, moments, tmp_path):
    from breccia.transformers import BrecciaConfig

    with breccia.moments.load_moments(moments) as known:
        model = load(models("llama"), quantization_config=BrecciaConfig(scheme=SCHEME, moments=dict(known)))
    model.save_pretrained(tmp_path / "saved")
    scheme = breccia.load_scheme(tmp_path / "saved")
    for name in layers(model):
        assert (scheme.rule(name).weights, scheme.rule(name).inputs) == (
            SCHEME.rule(name).weights,
            SCHEME.rule(name).inputs,
        )
    assert scheme.rule("model.layers.0.mlp.down_proj").weights is None
    assert run(load(tmp_path / "saved")).equal(run(model))


def test_static_scales_must_be_known(models):
    model = load(models("llama"))
    with pytest.raises(ValueError, match=r"q_proj: a static scale of inputs must be in the scheme"):
        breccia.quantize_(model, SCHEME)
    assert not layers(model)
    scale = StoredScale("a", "input", (0.5,), "multiplier", "a.input_scale", "F32", ())
    rule = Rule((Match("all"),), breccia.Float8CurrentScaling(), STATIC)
    made = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64)})
    breccia.quantize_(made, ModelScheme((rule,), None, (scale,)))
    assert float(made["a"].input_scale) == 0.5
    x = torch.full((1, 64), 1000.0)  # 448 · 0.5 is the largest input
    assert made["a"](x).equal(made["a"](torch.full((1, 64), 224.0)))
    with pytest.raises(ValueError, match="activations must be left out with a scheme"):
        breccia.quantize_(made, SCHEME, activations="fp8")
    with pytest.raises(ValueError, match="moments must be left out without a scheme"):
        breccia.quantize_(made, "fp8", moments={})


def test_gradients_pass_a_static_scale():
    layer = breccia.nn.QuantizedLinear(
        breccia.cast(torch.randn(32, 64), "fp8-row"), None, "fp8", input_scale=torch.tensor(0.02)
    )
    x = torch.randn(4, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.allclose(x.grad, layer.weight.dequantize().sum(0).expand(4, 64), atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(layer(x), y, atol=1e-4)
    with pytest.raises(ValueError, match="input_scale must be a tensor of one number"):
        breccia.nn.QuantizedLinear(layer.weight, None, "fp8", input_scale=torch.ones(2))


def load_compressed(path):
    """transformers' own loader: inputs are quantized and dequantized by compressed-tensors. It rounds the values of
    weights to bfloat16, in whose place are the exact ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        run(model)  # which makes the weights of the codes
    torch.nn.Module.float(model)
    exact = {name: one for name, one in breccia.load(path).items() if isinstance(one, breccia.ScaledTensor)}
    assert len(exact) == 14
    for name, one in exact.items():
        weight = model.get_parameter(name)
        values = torch.from_numpy(one.dequantize())
        assert float((weight - values).norm() / values.norm()) < 1e-2
        weight.data = values
    stored = {name: one for name, one in SafetensorsFile(path / "model.safetensors").items() if "input" in name}
    for name, number in stored.items():  # rounded, too
        model.get_parameter(name).data = torch.from_numpy(np.array(number, np.float32))
    return model
