# SPDX-License-Identifier: Apache-2.0
"""torch: memory, dtypes, compilation, gradients, trees and files."""

import dataclasses
import io
import subprocess
import sys

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import cast, dequantize, linear, matmul, requantize

torch = pytest.importorskip("torch")
from breccia.frameworks.torch import operators, tensors  # noqa: E402
from breccia.frameworks.torch.meta import flatten, recipe_key  # noqa: E402

PEER = peers.Torch()
MXFP8, NVFP4, INT4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.INT4Scaling()


def weight(recipe=NVFP4, rows=48, k=256):
    return cast(torch.from_numpy(cases.normal((rows, k), seed=1)), recipe)


# --- the implementation for other devices, run on CPU tensors ---------------------------------------------------------


@cases.ALL
@pytest.mark.in_turn
def test_any_device_implementation_makes_the_cores_bytes(recipe):
    for kind in ("student", "spread", "ties", "tiny", "special"):
        x = cases.heavy_tailed(kind, (6, 256)) if kind != "special" else cases.normal((6, 256))
        if kind == "special":
            x[1, 3], x[2, 7], x[3, 9] = np.nan, np.inf, -np.nan
        reference = cast(x, recipe)
        made = operators._cast_anywhere(torch.from_numpy(x), recipe_key(recipe))
        mine = tensors.parts_to_tensor(made, x.shape, recipe, "float32")
        peers.same_parts(PEER, mine, reference, kind)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = operators._dequantize_anywhere(*flatten(mine), dtype)
            name = str(dtype).removeprefix("torch.")
            expected = dequantize(reference, name).astype(np.float32)
            np.testing.assert_array_equal(values.float().numpy(), expected)
        for source in (breccia.MXFP4BlockScaling(), INT4, breccia.Float8CurrentScaling()):
            other = cast(x, source)
            if other.recipe == recipe:
                continue
            made = operators._requantize_anywhere(*flatten(cast(torch.from_numpy(x), source)), recipe_key(recipe))
            again = tensors.parts_to_tensor(made, x.shape, recipe, "float32")
            peers.same_parts(PEER, again, requantize(other, recipe), f"{source} {kind}")


def test_any_device_matmul():
    x, w = torch.from_numpy(cases.normal((5, 256))), weight()
    product = operators._matmul_anywhere([x], "", *flatten(w.T), torch.float32, "exact")
    torch.testing.assert_close(product, matmul(x, w.T), rtol=1e-5, atol=1e-4)


def test_meta_tensors_have_shapes_and_nothing_else():
    x = torch.empty((4, 256), device="meta")
    scaled = cast(x, NVFP4)
    assert scaled.data.device.type == "meta"
    assert scaled.shape == (4, 256)
    assert dequantize(scaled).shape == (4, 256)
    assert matmul(x, cast(torch.empty((8, 256), device="meta"), NVFP4).T).shape == (4, 8)
    assert cast(torch.ones(2, 32), MXFP8).to("meta").scale.device.type == "meta"


# --- memory and dtypes ------------------------------------------------------------------------------------------------


def test_native_dtypes():
    x = torch.from_numpy(cases.normal((4, 256)))
    expected = {
        breccia.Float8CurrentScaling(): (torch.float8_e4m3fn, torch.float32),
        breccia.Float8CurrentScaling(fp8_format="E5M2"): (torch.float8_e5m2, torch.float32),
        breccia.Float8BlockScaling(scale_format="bf16"): (torch.float8_e4m3fn, torch.bfloat16),
        breccia.Float8BlockScaling(scale_format="e8m0"): (torch.float8_e4m3fn, torch.float8_e8m0fnu),
        MXFP8: (torch.float8_e4m3fn, torch.float8_e8m0fnu),
        breccia.MXFP6BlockScaling(): (torch.uint8, torch.float8_e8m0fnu),
        breccia.MXFP4BlockScaling(): (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
        NVFP4: (torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        INT4: (torch.uint8, torch.float16),
        breccia.INT8Scaling(): (torch.int8, torch.float32),
    }
    for recipe, (data, scale) in expected.items():
        scaled = cast(x, recipe)
        assert (scaled.data.dtype, scaled.scale.dtype) == (data, scale), recipe
        assert scaled.view().data.dtype == data
    assert cast(x, NVFP4).data.shape == (4, 128)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: x[:, None, 1:3].expand(-1, 5, -1, -1)[0],
        lambda x: x.to(torch.bfloat16)[1::3],
        lambda x: x.double()[:, :, ::2],
        lambda x: x.half().transpose(0, 1),
    ],
)
def test_any_strides(view):
    x = view(torch.from_numpy(cases.normal((6, 4, 512))))
    for recipe in (MXFP8, NVFP4, breccia.Float8CurrentScaling()):
        width = x.shape[-1] - x.shape[-1] % 32
        peers.same_parts(PEER, cast(x[..., :width], recipe), cast(x[..., :width].float().numpy(), recipe))


def test_requires_grad_is_no_obstacle():
    x = torch.from_numpy(cases.normal((4, 256))).requires_grad_()
    for value in (x, torch.nn.Parameter(x.detach()), x * 1):
        scaled = cast(value, MXFP8)
        assert not scaled.data.requires_grad
        peers.same_parts(PEER, scaled, cast(x.detach().numpy(), MXFP8))


def test_subclasses_of_tensor():
    class Mine(torch.Tensor):
        pass

    x = torch.from_numpy(cases.normal((4, 256)))
    scaled = cast(x.as_subclass(Mine), MXFP8)
    peers.same_parts(PEER, scaled, cast(x.numpy(), MXFP8))


def test_no_copies():
    """What a call allocates is what it returns."""
    x = torch.from_numpy(cases.normal((512, 512)))
    w = cast(x, MXFP8)
    half = x.to(torch.bfloat16)
    calls = {
        "cast": (lambda: cast(x, MXFP8), w.nbytes),
        "cast of a view": (lambda: cast(half.T, NVFP4), cast(half.T.contiguous(), NVFP4).nbytes),
        "dequantize": (lambda: dequantize(w, torch.bfloat16), 512 * 512 * 2),
        "requantize": (lambda: requantize(w, NVFP4), cast(x, NVFP4).nbytes),
        "matmul": (lambda: matmul(x, w.T), 512 * 512 * 4),
        "to numpy": (lambda: w.to("numpy"), 0),
        "T": (lambda: w.T, 0),
    }
    for name, (call, expected) in calls.items():
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        allocated = sum(e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0)
        assert allocated <= expected + 64, f"{name}: {allocated} bytes for a result of {expected}"


def test_out():
    w = weight()
    out = torch.empty(48, 256, dtype=torch.bfloat16)
    assert dequantize(w, out=out) is out
    torch.testing.assert_close(out, dequantize(w, torch.bfloat16), rtol=0, atol=0)
    with pytest.raises(TypeError, match="out must be a torch tensor"):
        dequantize(w, out=np.empty((48, 256), np.float32))
    with pytest.raises(ValueError, match="shape"):
        dequantize(w, out=torch.empty(3, 3))


def test_clear_errors():
    x = torch.from_numpy(cases.normal((4, 256)))
    with pytest.raises(TypeError, match="dense"):
        cast(x.to_sparse(), MXFP8)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        cast(x.to(torch.float8_e4m3fn), MXFP8)
    with pytest.raises(TypeError, match="one device"):
        matmul(x.to("meta"), weight().T)
    scaled = cast(x, MXFP8)
    with pytest.raises(TypeError, match="scale must be on the device of data"):
        breccia.from_buffer(scaled.data, scaled.scale.to("meta"), MXFP8, MXFP8.layout)
    with pytest.raises(ValueError, match="divisible by 32"):
        cast(x[:, :100], MXFP8)
    with pytest.raises(ValueError, match="target must be"):
        scaled.to("nowhere")


# --- compilation ------------------------------------------------------------------------------------------------------

CALLS = {
    "round trip": lambda x, w: dequantize(cast(x, MXFP8)),
    "linear": linear,
    "fast linear": lambda x, w: linear(x, w, precision="fast"),
    "both quantized": lambda x, w: matmul(cast(x, MXFP8), w.T, torch.bfloat16),
    "requantize": lambda x, w: dequantize(requantize(w, MXFP8)),
    "straight through": lambda x, w: breccia.cast_ste_clipped(x, NVFP4),
    "returns a ScaledTensor": lambda x, w: cast(x, NVFP4),
}


OPTIONS = {
    "stochastic": lambda x: cast(x, MXFP8, rounding="stochastic", seed=4),
    "hadamard": lambda x: cast(x, MXFP8, hadamard=breccia.Hadamard(16)),
    "amax": lambda x: cast(x, breccia.Float8CurrentScaling(), amax=3.0),
}


@pytest.mark.parametrize("call", OPTIONS.values(), ids=OPTIONS.keys())
def test_compiled_casts_with_options_have_the_same_bytes(call):
    torch._dynamo.reset()
    x = torch.from_numpy(cases.normal((6, 256)))
    peers.same_parts(PEER, torch.compile(call, backend="eager")(x), call(x).to("numpy"))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_compile_of_a_parameter(call):
    torch._dynamo.reset()
    p, w = torch.nn.Parameter(torch.from_numpy(cases.normal((6, 256)))), weight()
    expected, compiled = call(p, w), torch.compile(lambda: call(p, w), fullgraph=True, backend="aot_eager")()
    values = [dequantize(x) if isinstance(x, breccia.ScaledTensor) else x for x in (compiled, expected)]
    assert torch.equal(*values)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_compile(call):
    torch._dynamo.reset()
    x, w = torch.from_numpy(cases.normal((6, 256))), weight()
    expected, compiled = call(x, w), torch.compile(call, fullgraph=True, backend="aot_eager")(x, w)
    if isinstance(expected, breccia.ScaledTensor):
        peers.same_parts(PEER, compiled, expected.to("numpy"))
        torch.testing.assert_close(dequantize(compiled), dequantize(expected), rtol=0, atol=0)
    else:
        torch.testing.assert_close(compiled, expected, rtol=0, atol=0)


@cases.ALL
@pytest.mark.in_turn
def test_compile_of_a_recipe_made_inside(recipe):
    torch._dynamo.reset()
    kind, fields = type(recipe), {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}

    def call(x):
        scaled = cast(x, kind(**fields))
        return scaled, dequantize(scaled.T)

    x = torch.from_numpy(cases.normal((6, 256)))
    expected, (scaled, transposed) = cast(x, recipe), torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert (scaled.recipe, scaled.layout) == (recipe, recipe.layout)
    peers.same_parts(PEER, scaled, expected.to("numpy"))
    torch.testing.assert_close(transposed, dequantize(expected).T, rtol=0, atol=0)


def test_compile_of_dynamic_shapes_and_gradients():
    torch._dynamo.reset()
    w = weight(MXFP8)
    recipes = breccia.autograd.LinearRecipes.mxfp8()
    master = torch.from_numpy(cases.normal((48, 256), seed=2)).requires_grad_()

    def loss(x):
        return (linear(x, w) * breccia.autograd.linear(x, master, None, recipes)).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 8, 16):
        x = torch.from_numpy(cases.normal((rows, 256))).requires_grad_()
        expected = torch.autograd.grad(loss(x), (x, master))
        for a, b in zip(torch.autograd.grad(compiled(x), (x, master)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


def test_export():
    w = weight()

    class Model(torch.nn.Module):
        def forward(self, x):
            return linear(cast(x, MXFP8), w), cast(x, NVFP4)

    x = torch.from_numpy(cases.normal((6, 256)))
    program = torch.export.export(Model(), (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"breccia.cast.default", "breccia.matmul.default"} <= targets
    y, scaled = program.module()(x)
    torch.testing.assert_close(y, Model()(x)[0], rtol=0, atol=0)
    peers.same_parts(PEER, scaled, cast(x.numpy(), NVFP4))


def test_operators_keep_their_promises():
    x, w = torch.from_numpy(cases.normal((4, 256))), weight(INT4)
    ops = torch.ops.breccia
    # opcheck compares outputs, which torch cannot do in its low-precision dtypes.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.cast.default, (x, recipe_key(INT4)), test_utils=utils)
    torch.library.opcheck(ops.cast.default, (x, recipe_key(NVFP4)), test_utils=utils[1:])
    torch.library.opcheck(ops.dequantize.default, (*flatten(w), torch.bfloat16), test_utils=utils)
    torch.library.opcheck(ops.requantize.default, (*flatten(w), recipe_key(INT4)), test_utils=utils)
    arguments = ([x.requires_grad_()], "", *flatten(w.T), torch.float32, "exact")
    torch.library.opcheck(ops.matmul.default, arguments, test_utils=utils)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_matmul_is_differentiable_in_plain_operands():
    w = weight(MXFP8)
    values = dequantize(w)
    for shape in [(5, 256), (2, 3, 256)]:
        x = torch.from_numpy(cases.normal(shape)).requires_grad_()
        mine, reference = linear(x, w), x @ values.T
        grad = torch.from_numpy(cases.normal(tuple(mine.shape), seed=7))
        (a,), (b,) = torch.autograd.grad(mine, x, grad), torch.autograd.grad(reference, x, grad)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    y = torch.from_numpy(cases.normal((256, 3))).requires_grad_()
    (a,) = torch.autograd.grad(matmul(w, y).sum(), y)
    torch.testing.assert_close(a, values.sum(0)[:, None].expand(256, 3), rtol=1e-4, atol=1e-4)


# --- trees, copies and files ------------------------------------------------------------------------------------------


@cases.ALL
def test_trees_and_files(recipe):
    scaled = cast(torch.from_numpy(cases.normal((4, 256))), recipe)
    leaves, spec = torch.utils._pytree.tree_flatten({"w": scaled})
    assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)["w"]
    peers.same_parts(PEER, again, scaled.to("numpy"))
    assert again.recipe == recipe
    file = io.BytesIO()
    torch.save({"w": scaled, "t": scaled.mT}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["w"].recipe == recipe
    assert loaded["w"].data.dtype == scaled.data.dtype
    peers.same_parts(PEER, loaded["w"], scaled.to("numpy"))
    torch.testing.assert_close(dequantize(loaded["t"]), dequantize(scaled.mT), rtol=0, atol=0)
    bytes_ = torch.utils._pytree.treespec_dumps(spec)
    assert torch.utils._pytree.treespec_loads(bytes_) == spec


def test_registered_with_torch_whichever_is_imported_first():
    for order in ("import torch, breccia", "import breccia, torch"):
        code = f"{order}; r = breccia.MXFP8BlockScaling(); f = lambda x: breccia.dequantize(breccia.cast(x, r))\n"
        code += "x = torch.ones(2, 32); g = torch.compile(f, fullgraph=True, backend='eager'); assert (g(x) == x).all()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_verb_may_be_compiled_before_one_was_called():
    """What is known of torch when the first call is traced is made while it is traced."""
    for verb in ("cast(x, 'mxfp8').data", "linear(x, breccia.cast(x, 'mxfp8'))"):
        code = f"import breccia, torch; torch.compile(lambda x: breccia.{verb}, fullgraph=True, backend='eager')"
        subprocess.run([sys.executable, "-c", f"{code}(torch.ones(4, 64))"], check=True, timeout=120)
