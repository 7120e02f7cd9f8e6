# SPDX-License-Identifier: Apache-2.0
"""What torch's users try first: its own functions, dtypes that follow, methods of its tensors, layers by pattern."""

import inspect
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.recipes import all_recipes

torch = pytest.importorskip("torch")
F = torch.nn.functional
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def weight(rows: int = 64, columns: int = 128, dtype: str = "bfloat16") -> Any:
    return torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, (rows, columns))).to(getattr(torch, dtype))


@pytest.mark.parametrize("recipe", [kind.name for kind in all_recipes()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_multiply_gives_the_dtype_of_the_activations(recipe: str, dtype: str) -> None:
    q, x = breccia.cast(weight(), recipe), weight(5, 128, dtype)
    wanted = breccia.linear(x, q, out_dtype=x.dtype)
    ways = [
        breccia.linear(x, q),
        breccia.matmul(x, q.T),
        x @ q.T,
        (q @ x.T).T,
        F.linear(x, q),
        torch.matmul(x, q.T),
        torch.mm(x, q.T),
        x.matmul(q.T),
    ]
    for y in ways:
        assert y.dtype == x.dtype
    for y in (*ways[:3], *ways[4:]):
        assert torch.equal(y, wanted)
    numbers = x.float().numpy()
    assert breccia.linear(numbers, breccia.cast(weight().float().numpy(), recipe)).dtype == np.float32


def test_other_dtypes_are_those_that_are_asked_for() -> None:
    q, x = breccia.cast(weight(), "nvfp4"), weight(5, 128)
    assert breccia.linear(x, q, out_dtype="float32").dtype == torch.float32
    assert breccia.matmul(x, q.T, torch.float16).dtype == torch.float16
    assert breccia.linear(breccia.cast(x, "mxfp8"), breccia.cast(weight(), "mxfp8")).dtype == torch.float32
    assert breccia.linear(torch.ones(2, 128, dtype=torch.int32), q).dtype == torch.float32
    assert breccia.matmul(weight(3, 128), weight().T).dtype == torch.bfloat16
    bias = torch.ones(64)
    assert breccia.linear(x, q, bias).dtype == F.linear(x, q, bias).dtype == torch.bfloat16
    assert torch.equal(breccia.linear(x, q, bias), F.linear(x, q, bias))


def test_functions_of_several_tensors() -> None:
    a, b = (breccia.cast(weight() * i, "mxfp8") for i in (1, 2))
    both = torch.cat([a, b])
    assert both == breccia.concatenate([a, b])
    assert torch.cat((a, b), dim=1) == breccia.concatenate([a, b], 1)
    assert torch.stack([a, b]) == breccia.stack([a, b])
    with pytest.raises(ValueError, match="dim must be 0 for ScaledTensors, got 1"):
        torch.stack([a, b], dim=1)
    assert torch.equal(a, a)
    assert torch.equal(both[:64], a)
    assert not torch.equal(a, b)
    assert not torch.equal(a, weight())
    assert torch.numel(a) == a.numel() == a.size == 64 * 128


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("add", lambda q: torch.add(q, 1)),
        ("softmax", lambda q: F.softmax(q, -1)),
        ("allclose", lambda q: torch.allclose(q, q)),
        ("mul", lambda q: torch.mul(weight(), q)),
        ("conv1d", lambda q: F.conv1d(weight(1, 64)[None], q)),
    ],
)
def test_others_are_refused_in_one_sentence(name: str, call: Any) -> None:
    q = breccia.cast(weight(), "nvfp4")
    sentence = rf"torch's {name} has no form for a ScaledTensor, which F\.linear, matmul, .* dequantize\(\) gives its"
    with pytest.raises(TypeError, match=sentence):
        call(q)


def test_operators_of_python_stay_as_they_were() -> None:
    q = breccia.cast(weight(), "nvfp4")
    assert (weight() == q) is False
    assert weight() != q
    with pytest.raises(TypeError, match="unsupported operand"):
        weight() * q


def test_gradients_flow_through_torchs_own_functions() -> None:
    q = breccia.cast(weight(dtype="float32"), "mxfp8")
    grads = []
    for product in (lambda x: breccia.linear(x, q), lambda x: F.linear(x, q), lambda x: x @ q.T):
        x = weight(5, 128, "float32").requires_grad_()
        product(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    assert grads[0].abs().sum() > 0


def test_a_compiled_function_of_torchs_names() -> None:
    q, x = breccia.cast(weight(), "mxfp8"), weight(5, 128)
    compiled = torch.compile(lambda x, q: breccia.linear(x, q) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, q), breccia.linear(x, q) + 1)


def test_methods_of_torchs_tensors() -> None:
    q = breccia.cast(weight(), "nvfp4")
    assert q.cpu() is q
    assert q.detach() == q
    assert q.to("cpu") == q
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="target must be a framework or a torch device, got 'cuda'"):
            q.cuda()
        with pytest.raises(ValueError, match="got 'cuda:1'"):
            q.cuda(1)
    for dtype in (torch.bfloat16, "bfloat16", np.float16):
        with pytest.raises(
            TypeError, match=r"target must be a framework or a device, .* dequantize\(.*\) gives values"
        ):
            q.to(dtype)
    array = breccia.cast(weight().float().numpy(), "nvfp4")
    assert array.cpu() is array
    assert array.detach() is array
    assert array.numel() == 64 * 128


def test_compare_takes_what_cast_takes() -> None:
    w = weight()
    q = breccia.cast(w, "nvfp4")
    found = breccia.compare(w, q)
    error = (q.dequantize() - w.float()).double()
    assert found.noise == pytest.approx(float((error**2).sum()), rel=1e-9)
    assert 15 < found.sqnr_db < 25
    assert breccia.compare(w.float().numpy(), q) == found
    assert breccia.compare(q, q).equal


def model() -> Any:
    layers = {name: torch.nn.Linear(64, 64) for name in ("q_proj", "k_proj", "up", "lm_head")}
    return torch.nn.ModuleDict(
        {"0": torch.nn.ModuleDict(layers), "1": torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64)})}
    )


def quantized(made: Any) -> set[str]:
    return {name for name, layer in made.named_modules() if isinstance(layer, breccia.nn.QuantizedLinear)}


ALL = {"0.q_proj", "0.k_proj", "0.up", "0.lm_head", "1.up"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ALL),
        ({"exclude": ["*lm_head*"]}, ALL - {"0.lm_head"}),
        ({"exclude": ["*.q_proj.weight", "*k_proj"]}, ALL - {"0.q_proj", "0.k_proj"}),
        ({"include": ["*up*"]}, {"0.up", "1.up"}),
        ({"include": ["*up*"], "exclude": ["1.*"]}, {"0.up"}),
        ({"include": ["*up*"], "filter": lambda layer, name: name.startswith("1")}, {"1.up"}),
    ],
)
def test_patterns_choose_layers(options: Any, wanted: set[str]) -> None:
    assert quantized(breccia.quantize_(model(), "mxfp8", **options)) == wanted


def test_patterns_are_checked_before_anything_is_changed() -> None:
    made = model()
    with pytest.raises(
        ValueError, match=r"exclude '\*v_proj\*' must match the name of a linear layer, it matches none of 5"
    ):
        breccia.quantize_(made, "mxfp8", exclude=["*v_proj*"])
    with pytest.raises(TypeError, match=r"include must be a list of patterns, as \['\*\.q_proj'\], got '\*up\*'"):
        breccia.quantize_(made, "mxfp8", include="*up*")
    assert quantized(made) == set()


def test_a_lone_layer() -> None:
    layer = torch.nn.Linear(64, 32).eval()
    made = breccia.quantize_layer(layer, "nvfp4")
    assert made.weight == breccia.cast(layer.weight.detach(), "nvfp4")
    assert not made.training
    x = torch.randn(3, 64)
    assert torch.equal(made(x), breccia.quantize_(torch.nn.Sequential(layer), "nvfp4")(x))
    with pytest.raises(
        TypeError, match=r"layer must be a torch\.nn\.Linear, got Sequential: quantize_\(model, recipe\)"
    ):
        breccia.quantize_layer(torch.nn.Sequential(layer), "nvfp4")


def test_a_width_that_no_block_divides_names_the_way_out() -> None:
    odd = torch.nn.Sequential(torch.nn.Linear(65, 64), torch.nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"0\.weight cannot be quantized: .* filter= or exclude=\['0'\] leaves it"):
        breccia.quantize_(odd, "nvfp4")
    assert quantized(breccia.quantize_(odd, "nvfp4", exclude=["0"])) == {"1"}


def test_a_weight_that_is_not_turned() -> None:
    q, x = breccia.cast(weight(), "nvfp4"), weight(5, 128)
    for product in (lambda: breccia.matmul(x, q), lambda: x @ q, lambda: x.float().numpy() @ q.to("numpy")):
        with pytest.raises(ValueError, match=r"shape mismatch: .*a weight is stored \(N, K\): use linear or q\.T"):
            product()


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_have_the_dtype_of_their_rows(dtype: str) -> None:
    stack = breccia.stack([breccia.cast(weight(), "mxfp8")] * 2)
    offsets = torch.tensor([0, 2, 5])
    assert breccia.grouped_matmul(weight(5, 128, dtype), stack, offsets).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", ["quantize_layer", "quantize_"])
def test_a_name_without_torch_takes_what_its_implementation_takes(name: str) -> None:
    face, inner = (inspect.signature(getattr(module, name)).parameters.values() for module in (breccia, breccia.nn))
    assert [(one.name, one.kind, one.default) for one in face] == [(one.name, one.kind, one.default) for one in inner]
