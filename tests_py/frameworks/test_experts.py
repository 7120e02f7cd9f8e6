# SPDX-License-Identifier: Apache-2.0
"""`breccia.nn.ScaledExperts`: experts that train in FP8 between two casts."""

import importlib.util
import itertools
import math
from collections import Counter
from pathlib import Path

import breccia
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from breccia import verbs  # noqa: E402
from breccia.nn import ScaledExperts, expert_products  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/14_moe_in_fp8.py"
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, CHOICES = 5, 256, 128, 150, 2


def drawn(dtype=torch.float32):
    """A layer and what it takes; some choices are of no expert, and one expert has no rows."""
    torch.manual_seed(0)
    layer = ScaledExperts(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype)
    index = torch.stack([torch.randperm(EXPERTS + 1)[:CHOICES] for _ in range(TOKENS)])
    index[index == 2] = -1
    x, grad = torch.randn(2, TOKENS, HIDDEN, dtype=dtype)
    return layer, x.requires_grad_(), index, torch.rand(TOKENS, CHOICES).requires_grad_(), grad


def exact(x, index, weights, gate_up, down):
    """The layer in the dtype of its operands."""
    out = torch.zeros_like(x)
    for expert in range(len(down)):
        token, choice = torch.where(index == expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out


def by_float64(layer, x, index, weights, grad):
    """Result and gradients of x, weights, gate_up_proj and down_proj."""
    leaves = [v.detach().double().requires_grad_() for v in (x, weights, layer.gate_up_proj, layer.down_proj)]
    y = exact(leaves[0], index, *leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


def by_layer(layer, x, index, weights, grad):
    y = layer(x, index, weights)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, layer.gate_up_proj, layer.down_proj], grad)]


def error(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    return float((found.double() - wanted).norm() / wanted.norm())


def one_cast():
    """The relative error of a cast of normal numbers."""
    x = torch.randn(512, 512)
    return error(breccia.dequantize(breccia.cast(x, expert_products.ROWS)), x.double())


class Naive:
    """The same products by three conversions a tensor: a cast, and for the other way round values of codes cast again.
    Scales are floats, so that the second cast rounds every value again."""

    def __init__(self, layer):
        self.w, self.v = layer.gate_up_proj.detach(), layer.down_proj.detach()
        self.calls = Counter()

    def cast(self, x):
        self.calls["cast"] += 1
        return breccia.cast(x, breccia.Float8BlockScaling())

    def turned(self, q):
        self.calls["dequantize"] += 1
        return self.cast(breccia.dequantize(q).T.contiguous())

    def run(self, x, index, weights, grad):
        routed = expert_products.routes(index, EXPERTS)
        there = (routed.source >= 0)[:, None]
        rows = [torch.where(there, t.detach()[routed.source], 0) for t in (x, grad)]
        given = expert_products._given(weights, routed)[:, None]
        tiles = breccia.Float8BlockScaling(block_m=128)
        w = breccia.cast(self.w, tiles)
        w_turned, v_turned = (breccia.cast(one.transpose(1, 2).contiguous(), tiles) for one in (self.w, self.v))
        qx = self.cast(rows[0])
        inner = breccia.grouped_matmul(qx, w, routed.offsets)
        gate, up = inner.chunk(2, -1)
        qh = self.cast(given * torch.nn.functional.silu(gate) * up)
        qy = self.cast(rows[1])
        dh = given * breccia.grouped_matmul(qy, v_turned, routed.offsets)
        s = torch.sigmoid(gate)
        du = torch.cat([dh * up * s * (1 + gate * (1 - s)), dh * gate * s], -1)
        qu = self.cast(du)
        dx = expert_products.combine(breccia.grouped_matmul(qu, w_turned, routed.offsets), routed.place)
        ends = routed.offsets.tolist()
        made = []
        for left, right in ((qu, qx), (qy, qh)):
            a, b = self.turned(left), self.turned(right)
            parts = [breccia.matmul(a[:, i:j], b[:, i:j].mT) for i, j in itertools.pairwise(ends)]
            made.append(torch.stack(parts))
        return dx, *made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_those_of_the_casts(dtype):
    """Each operand on the way to a result adds the error of one cast, whatever the products need turned round: gate and
    up come of two each, what is cast thereafter adds one."""
    given = drawn(dtype)
    unit = one_cast()
    casts = {"y": 6, "dx": 8, "dp": 6, "dW": 8, "dV": 6}
    for (name, count), found, wanted in zip(casts.items(), by_layer(*given), by_float64(*given), strict=True):
        assert error(found, wanted) < 1.2 * math.sqrt(count) * unit, name


def test_transposes_lose_less_than_casts_of_values():
    """The gradients of weights against those of twelve conversions, whose values are rounded twice."""
    layer, x, index, weights, grad = drawn()
    wanted = by_float64(layer, x, index, weights, grad)
    ours = by_layer(layer, x, index, weights, grad)
    naive = Naive(layer)
    theirs = naive.run(x, index, weights, grad)
    assert naive.calls == {"cast": 8, "dequantize": 4}
    for i, found in zip((3, 4), theirs[1:], strict=True):
        assert error(ours[i], wanted[i]) < 0.95 * error(found, wanted[i])


def test_two_casts(monkeypatch):
    """Of activations; each weight is cast once. Nothing is dequantized."""
    layer, x, index, weights, grad = drawn()
    calls = []
    for name in ("cast", "dequantize", "requantize"):
        verb = getattr(verbs, name)

        def seen(first, *rest, verb=verb, name=name, **options):
            calls.append((name, tuple(first.shape)))
            return verb(first, *rest, **options)

        monkeypatch.setattr(verbs, name, seen)
    by_layer(layer, x, index, weights, grad)
    of_weights = [("cast", tuple(p.shape)) for p in layer.parameters()]
    assert [call for call in calls if call not in of_weights] == [("cast", tuple(x.shape))] * 2
    assert len(calls) == 4


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 40, 700])
def test_routes(tokens, choices):
    """Rows of an expert follow one another in the order of tokens, from a multiple of 128 on."""
    index = torch.randint(-2, 9, (tokens, choices), generator=torch.Generator().manual_seed(tokens))
    offsets, source, place = expert_products.routes(index, 7)
    ends = offsets.tolist()
    assert ends[0] == 0 and not any(end % 128 for end in ends) and len(source) >= ends[-1] and len(source) % 128 == 0
    seen = np.zeros(len(source), bool)
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        wanted = [t for t in range(tokens) for choice in index[t].tolist() if choice == expert]
        assert source[start:end].tolist() == wanted + [-1] * (end - start - len(wanted))
        assert end - start < len(wanted) + 128
        seen[start : start + len(wanted)] = True
    assert (source[~torch.from_numpy(seen)] == -1).all()
    for t in range(tokens):
        for choice, row in zip(index[t].tolist(), place[t].tolist(), strict=True):
            assert row == -1 if not 0 <= choice < 7 else ends[choice] <= row < ends[choice + 1] and source[row] == t


def test_what_needs_no_gradient_gets_none():
    layer, x, index, weights, grad = drawn()
    wanted = by_layer(layer, x, index, weights, grad)
    layer.gate_up_proj.requires_grad_(False)
    layer(x, index, weights.detach()).backward(grad)
    assert layer.gate_up_proj.grad is None and weights.grad is None
    assert torch.equal(x.grad, wanted[1]) and torch.equal(layer.down_proj.grad, wanted[4])


def test_shapes_and_dtypes():
    layer, x, index, weights, _ = drawn()
    y = layer(x, index, weights)
    shaped = layer(x.reshape(2, 75, HIDDEN), index.reshape(2, 75, CHOICES), weights.reshape(2, 75, CHOICES))
    assert torch.equal(shaped.reshape(y.shape), y)
    assert layer(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    assert torch.equal(layer(x, torch.full_like(index, EXPERTS), weights), torch.zeros_like(y))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, index, weights)
    assert found.dtype == torch.bfloat16
    assert error(found, y.double()) < 0.05


def test_it_takes_the_weights_of_transformers():
    """Names, shapes and forward are those of its experts."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = importlib.import_module("transformers").MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS
    )
    layer, x, index, weights, _ = drawn()
    index = index.remainder(EXPERTS)
    theirs = mixtral.MixtralExperts(config)
    theirs.load_state_dict(layer.state_dict())
    wanted = theirs(hidden_states=x, top_k_index=index, top_k_weights=weights)
    assert error(layer(hidden_states=x, top_k_index=index, top_k_weights=weights), wanted.double()) < 0.08


def test_refusals():
    layer, x, index, weights, _ = drawn()
    for size in (0, 96, 1.5):
        with pytest.raises(ValueError, match=f"hidden_size must be a positive multiple of 128, got {size}"):
            ScaledExperts(2, size, 128)
    with pytest.raises(ValueError, match="num_experts must be a positive integer, got 0"):
        ScaledExperts(0, 128, 128)
    of_x, of_index, of_weights = "hidden_states must be", "top_k_index must be", "top_k_weights must be"
    wrong = [
        (TypeError, f"{of_x} a bfloat16, float16 or float32 tensor, got torch.f", (x.double(), index, weights)),
        (ValueError, rf"{of_x} \(..., 256\), got shape \(150, 128\)", (x[:, :128], index, weights)),
        (TypeError, f"{of_x} a torch tensor, got ndarray", (x.detach().numpy(), index, weights)),
        (TypeError, f"{of_index} a torch tensor, got ndarray", (x, index.numpy(), weights)),
        (TypeError, f"{of_weights} a torch tensor, got list", (x, index, weights.tolist())),
        (TypeError, f"{of_index} a tensor of integers, got torch.float32", (x, index.float(), weights)),
        (TypeError, f"{of_weights} a tensor of floats, got torch.int64", (x, index, index)),
        (ValueError, rf"{of_index} \(150, k\) as hidden_states has it, got shape \(149, 2\)", (x, index[1:], weights)),
        (ValueError, rf"{of_weights} \(150, 2\) as top_k_index, got \(150, 1\)", (x, index, weights[:, :1])),
        (ValueError, f"{of_index} on the device of hidden_states, cpu, got meta", (x, index.to("meta"), weights)),
    ]
    for kind, message, given in wrong:
        with pytest.raises(kind, match=message):
            layer(*given)


def test_a_model_around_it_compiles():
    """`torch.compile` leaves the layer out, for which Inductor has no code on CPUs, and takes what is around it."""
    torch._dynamo.reset()
    layer, x, index, weights, grad = drawn()

    def around(x):
        return layer(x * 2, index, weights) + x

    y = torch.compile(around)(x)
    found = torch.autograd.grad(y, [x, layer.gate_up_proj], grad)
    z = around(x)
    wanted = torch.autograd.grad(z, [x, layer.gate_up_proj], grad)
    for one, other in zip((y, *found), (z, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_compiling_it_says_why_not():
    torch._dynamo.reset()
    layer, x, index, weights, _ = drawn()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ScaledExperts out: .* without fullgraph"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, index, weights)


def test_exported():
    layer, x, index, weights, _ = drawn()
    with torch.no_grad():
        program = torch.export.export(layer, (torch.zeros_like(x), torch.zeros_like(index), weights)).module()
        assert torch.equal(program(x, index, weights), layer(x, index, weights))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_without_memory(kind):
    """As tools that count memory ask for them: of the backward pass, too."""
    sizes = np.int64(3), np.int32(128), np.uint16(256)  # NumPy's integers are integers
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        layer = ScaledExperts(*sizes, dtype=torch.bfloat16)
        x, weights = torch.ones(5, 128).requires_grad_(), torch.ones(5, 2).requires_grad_()
        y = layer(x, torch.zeros(5, 2, dtype=torch.long), weights)
        y.sum().backward()
    for one in (x, weights, *layer.parameters()):
        assert (one.grad.shape, one.grad.dtype) == (one.shape, one.dtype)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_14", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_is_that_of_bfloat16(example):
    fp8, bf16 = (np.array(example.train(experts)[0]) for experts in (ScaledExperts, example.BF16Experts))
    assert bf16[-10:].mean() < 0.5 * bf16[0]
    assert abs(fp8[-10:].mean() / bf16[-10:].mean() - 1) < 0.01
    assert np.abs(fp8 / bf16 - 1).mean() < 0.01


def test_saved_activations(example):
    """Beside bfloat16 layers that keep what torch keeps."""
    models = [example.Mixture(experts) for experts in (ScaledExperts, example.BF16Experts)]
    x = torch.randn(2048, example.HIDDEN).requires_grad_()
    ours, theirs = (example.saved(model, x) for model in models)
    assert ours <= 0.6 * theirs
