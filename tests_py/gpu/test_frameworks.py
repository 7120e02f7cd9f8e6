# SPDX-License-Identifier: Apache-2.0
"""The public verbs on CUDA tensors: what every framework promises, on the device and without synchronizing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import breccia
import cases
import numpy as np
import peers
import pytest
import test_contract as contract
import test_grouped as grouped
import test_torch as torch_tests
import torch
from breccia import cast, dequantize, linear, matmul, requantize


class Cuda(peers.Torch):
    name = "torch"

    def array(self, x: Any) -> Any:
        return super().array(x).cuda()

    def host(self, x: Any) -> Any:
        assert x.is_cuda
        return super().host(x.detach().cpu())


CUDA = Cuda()
MXFP8, NVFP4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(cases.normal(shape, seed)).cuda()


@cases.ALL
def test_cast_dequantize_requantize(recipe: Any) -> None:
    contract.test_cast_dequantize_requantize(CUDA, recipe)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@cases.ALL
def test_dtypes(recipe: Any, dtype: str) -> None:
    contract.test_dtypes(CUDA, recipe, dtype)


def test_the_rest_of_the_contract() -> None:
    contract.test_transposed_view(CUDA)
    contract.test_copy_and_pickle(CUDA)
    contract.test_stochastic_rounding_draws_the_same_everywhere(CUDA)
    contract.test_wrong_dtypes(CUDA)
    contract.test_ragged_and_empty(CUDA)
    contract.test_frameworks_do_not_mix(CUDA)


@cases.ALL
def test_products(recipe: Any) -> None:
    """FP8 by FP8 keeps about 13 bits of every 128 products; weights decode to bf16 for bf16 activations."""
    x, w, bias = normal((70, 256)), normal((40, 256), 1), normal((40,), 2)
    a, b = cast(x, recipe), cast(w, recipe)
    left, right = dequantize(a).double(), dequantize(b).double()
    bound = left.abs() @ right.abs().T
    for y in (matmul(a, b.T), linear(a, b), linear(a, b, bias) - bias):
        assert y.is_cuda and y.dtype == torch.float32
        assert ((y.double() - left @ right.T).abs() <= 2e-4 * bound).all()
    assert ((matmul(x, b.T).double() - x.double() @ right.T).abs() <= 1e-5 * (x.double().abs() @ right.abs().T)).all()
    half = x.bfloat16().double()
    error = (linear(x.bfloat16(), b).double() - half @ right.T).abs()
    assert (error <= 2**-8 * (half.abs() @ right.abs().T)).all()


@cases.ALL
@pytest.mark.parametrize("quantized", [False, True])
def test_grouped(recipe: Any, quantized: bool) -> None:
    x, stack = normal((40, 256)).bfloat16(), normal((4, 24, 256), 1)
    w = cast(stack, recipe)
    given = cast(x, grouped.ROW) if quantized else x
    offsets = torch.from_numpy(grouped.OFFSETS).cuda()
    y = breccia.grouped_matmul(given, w, offsets)
    values = (dequantize(given) if quantized else x).double()
    for e, (a, b) in enumerate(zip(grouped.OFFSETS, grouped.OFFSETS[1:], strict=False)):
        ref = values[a:b] @ dequantize(w)[e].double().T
        torch.testing.assert_close(y[a:b].double(), ref, rtol=0, atol=float(6e-3 * ref.abs().max()) if b > a else 0)
    assert (y[37:] == 0).all()
    with pytest.raises(TypeError, match="offsets must be on the device"):
        breccia.grouped_matmul(given, w, offsets.cpu())


@cases.ALL
def test_nothing_synchronizes(recipe: Any) -> None:
    x, w = normal((128, 512)), normal((64, 512), 1)
    calls = {
        "cast": lambda: cast(x, recipe),
        "cast of bf16": lambda: cast(x.bfloat16(), recipe),
        "dequantize": lambda: dequantize(cast(w, recipe), torch.bfloat16),
        "requantize": lambda: requantize(cast(w, MXFP8), recipe),
        "linear": lambda: linear(x.bfloat16(), cast(w, recipe), out_dtype=torch.bfloat16),
        "product": lambda: matmul(cast(x, recipe), cast(w, recipe).T),
        "straight through": lambda: breccia.cast_ste_clipped(x, recipe),
    }
    for call in calls.values():
        call()  # compiles
        with no_synchronization():
            call()


@pytest.mark.parametrize("call", torch_tests.CALLS.values(), ids=torch_tests.CALLS.keys())
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(call: Any, backend: str) -> None:
    torch._dynamo.reset()
    x, w = normal((6, 256)), cast(normal((48, 256), 1), NVFP4)
    expected, compiled = call(x, w), torch.compile(call, fullgraph=True, backend=backend)(x, w)
    if isinstance(expected, breccia.ScaledTensor):
        peers.same_parts(CUDA, compiled, expected.to("cpu").to("numpy"))
    else:
        torch.testing.assert_close(compiled, expected, rtol=0, atol=0)


def test_compile_of_a_layer_and_its_gradients() -> None:
    torch._dynamo.reset()
    recipes = breccia.autograd.LinearRecipes.mxfp8()
    master = normal((48, 256), 2).requires_grad_()

    def loss(x: Any) -> Any:
        return breccia.autograd.linear(x, master, None, recipes).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    x = normal((32, 256)).requires_grad_()
    expected = torch.autograd.grad(loss(x), (x, master))
    for a, b in zip(torch.autograd.grad(compiled(x), (x, master)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_cuda_graph() -> None:
    x = normal((64, 512)).bfloat16()
    w = cast(normal((128, 512), 1), NVFP4)

    def step() -> Any:
        return linear(dequantize(cast(x, NVFP4), torch.bfloat16), w, out_dtype=torch.bfloat16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(normal((64, 512), 3))
    graph.replay()
    torch.testing.assert_close(y, step(), rtol=0, atol=0)


def test_grouped_offsets_stay_on_the_device() -> None:
    x, w = normal((40, 256)).bfloat16(), cast(normal((4, 24, 256), 1), breccia.MXFP4BlockScaling())
    offsets = torch.from_numpy(grouped.OFFSETS).cuda()
    expected = breccia.grouped_matmul(x, w, offsets)
    with no_synchronization():
        breccia.grouped_matmul(x, w, offsets)
    compiled = torch.compile(breccia.grouped_matmul, fullgraph=True, backend="aot_eager")(x, w, offsets)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)


def test_gpu_info() -> None:
    info = breccia.gpu_info()
    assert info["available"] and info["device"] == torch.cuda.get_device_name()
    assert np.all([isinstance(v, str) for v in info["kernels"].values()])
    with pytest.raises(ValueError, match="device must be between"):
        breccia.gpu_info(99)
