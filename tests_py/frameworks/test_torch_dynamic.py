# SPDX-License-Identifier: Apache-2.0
"""One compilation for batches of every size: torch.compile with dynamic shapes, torch.export with a dynamic axis."""

import copy
import io

import breccia
import cases
import peers
import pytest
from breccia import autograd, cast, dequantize, linear, matmul, requantize

torch = pytest.importorskip("torch")
from breccia.nn import QuantizedLinear, ScaledLinear  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils import _pytree  # noqa: E402

PEER = peers.Torch()
SIZES = (6, 3, 7, 8, 9, 10, 16, 33, 2)  # the first is no number of blocks: torch would take the two for one number


def times(recipe):
    """Of tiles torch itself compiles one row of them and several apart."""
    return 1 + (getattr(recipe, "block_m", 1) > 1)


def values(rows, columns=256):
    return torch.from_numpy(cases.normal((rows, columns), seed=rows))


def compiled(call, dynamic, backend="eager"):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter), counter


def check(made, expected, what):
    for one, other in zip(_pytree.tree_leaves(made), _pytree.tree_leaves(expected), strict=True):
        if one is not None:
            peers.same_bytes(PEER, one.detach(), PEER.host(other), what)


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.forward = call


@cases.ALL
@pytest.mark.parametrize("dynamic", [None, True])
def test_verbs_are_compiled_once_for_all_batch_sizes(recipe, dynamic):
    w = cast(values(64), recipe)

    def verbs(x):
        made = cast(x, recipe)
        other = requantize(made, breccia.MXFP8BlockScaling())
        return made, other, dequantize(made), dequantize(made.mT), linear(x, w), matmul(made, w.T)

    made, counter = compiled(verbs, dynamic)
    for rows in SIZES:
        check(made(values(rows)), verbs(values(rows)), rows)
    most = times(recipe) + (dynamic is None)  # by itself torch takes the first size for the only one
    assert counter.frame_count <= most


@cases.ALL
def test_batches_of_sequences_are_compiled_once(recipe):
    made, counter = compiled(lambda x: dequantize(cast(x, recipe)), True)
    for batch, length in ((2, 3), (3, 2), (5, 9), (9, 40), (17, 4)):
        x = torch.from_numpy(cases.normal((batch, length, 256)))
        check(made(x), dequantize(cast(x, recipe)), (batch, length))
    assert counter.frame_count <= times(recipe)


def loaded(program):
    """The program as it comes out of a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue())).module()


@cases.ALL
def test_exported_layers_are_saved(recipe):
    w = cast(values(64), recipe)
    layer = QuantizedLinear(w, torch.ones(64), activations=recipe)
    verbs = Module(lambda x: (linear(x, w), cast(x, recipe), dequantize(cast(x, recipe)), requantize(w, "nvfp4")))
    for module in (layer, verbs):
        made = loaded(torch.export.export(module, (values(4),)))
        check(made(values(4)), module(values(4)), type(module))


@cases.those(lambda recipe: times(recipe) == 1)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_take_every_batch_size(recipe, strict):
    w = cast(values(64), recipe)
    module = Module(lambda x: (dequantize(cast(x, recipe)), linear(x, w), autograd.cast_ste(x, recipe)))
    program = torch.export.export(module, (values(4),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
    made = loaded(program)
    for rows in SIZES:
        check(made(values(rows)), module(values(rows)), rows)


@cases.ALL
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "gradient"])
def test_layers_with_activations_are_compiled_once(recipe, gradient):
    layer = QuantizedLinear(cast(values(64), recipe), torch.ones(64), activations=recipe)
    made, counter = compiled(layer, True, "aot_eager")
    for rows in SIZES:
        inputs = [values(rows).requires_grad_(gradient) for _ in range(2)]
        results = [made(inputs[0]), layer(inputs[1])]
        check(*results, rows)
        if gradient:
            for result in results:
                result.sum().backward()
            check(*(x.grad for x in inputs), rows)
    assert counter.frame_count <= times(recipe)


@cases.ALL
def test_scaled_layers_are_compiled_once_or_twice(recipe):
    """Gradients of the weight are cut into blocks of tokens: torch itself compiles one block and several apart."""
    layer = ScaledLinear(256, 32, recipes=autograd.LinearRecipes(recipe, recipe, recipe), bias=False)
    other = copy.deepcopy(layer)
    made, counter = compiled(layer, True, "aot_eager")
    for rows in (7, 33, 32, 64, 100, 128, 256, 300):
        found = []
        for call, module in ((made, layer), (other, other)):
            result = call(values(rows))
            grad = torch.autograd.grad((result * values(rows, 32)).sum(), module.weight)
            found.append((result, *grad, *module.buffers()))
        check(*found, rows)
    assert counter.frame_count <= 1 + (recipe.layout.block != (0, 0))


@cases.ALL
def test_tensors_are_joined_in_compiled_code_or_a_sentence_says_why_not(recipe):
    a, b = (cast(torch.from_numpy(cases.normal((128, 256), seed=seed)), recipe) for seed in (2, 3))
    if not recipe.layout.one_scale:
        made, _ = compiled(lambda a, b: dequantize(breccia.stack([a, b])), None)
        check(made(a, b), dequantize(breccia.stack([a, b])), "stack")
    made, _ = compiled(lambda a, b: breccia.concatenate([a, b]), None)
    if recipe.layout.one_scale or a.global_scale is not None:
        twice, _ = compiled(lambda a: breccia.concatenate([a, a]), None)
        check(twice(a), breccia.concatenate([a, a]), "of one scale")
        with pytest.raises(Exception, match="tensors must not be traced to be joined along axis 0"):
            made(a, b)
    else:
        check(made(a, b), breccia.concatenate([a, b]), "concatenate")
