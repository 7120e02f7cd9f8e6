# SPDX-License-Identifier: Apache-2.0
"""Launch plans: a repeated call gives what a call in full gives, whatever changes between the two."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import breccia
import cases
import pytest
import torch
from breccia.frameworks.torch import launches
from breccia.kernels.triton.products import dense_matmul, pairs
from breccia.nn import QuantizedLinear

BF16 = torch.bfloat16
NVFP4, FP8 = breccia.NVFP4BlockScaling(), breccia.Float8CurrentScaling()


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    launches._plans.clear()
    launches.refusals.clear()
    yield
    launches._plans.clear()


def made_in_full(call: Any) -> Any:
    """The result of a call with no plan, and none recorded."""
    run, again = launches._run, launches.grouped_again
    launches._run = lambda key, operands, function: function()
    launches.grouped_again = lambda *operands: None
    try:
        return call()
    finally:
        launches._run, launches.grouped_again = run, again


def randn(*shape: int, dtype: Any = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same(a: Any, b: Any) -> None:
    names = ("data", "scale", "zero_point", "global_scale")
    parts = [(a, b)] if isinstance(a, torch.Tensor) else [(getattr(a, name), getattr(b, name)) for name in names]
    for left, right in parts:
        if left is None or right is None:
            assert left is right
            continue
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.stride() == right.stride()
        assert torch.equal(as_bytes(left), as_bytes(right))


def repeated(call: Any, arguments: list[Any]) -> None:
    """Each call of a series against the same call in full: the first two record, the others repeat."""
    for argument in [*arguments, *arguments]:
        same(call(argument), made_in_full(lambda a=argument: call(a)))


@cases.ALL
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_casts_and_dequantizes(recipe: Any, dtype: Any) -> None:
    repeated(lambda x: breccia.cast(x, recipe), [randn(64, 512, dtype=dtype) for _ in range(3)])
    values = [breccia.cast(randn(64, 512, dtype=dtype), recipe) for _ in range(3)]
    repeated(lambda q: breccia.dequantize(q, BF16), values)
    repeated(breccia.dequantize, values)


@cases.ALL
@pytest.mark.parametrize("m", [1, 2, 16, 100])
def test_products(recipe: Any, m: int) -> None:
    weights = [breccia.cast(randn(256, 512), recipe) for _ in range(2)]
    for w in weights:
        repeated(lambda x, w=w: breccia.linear(x, w, out_dtype=BF16), [randn(m, 512) for _ in range(3)])
        repeated(lambda x, w=w: breccia.linear(x, w, randn(256) * 0, BF16), [randn(m, 512)])


@pytest.mark.parametrize(
    ("left", "right"),
    [(FP8, FP8), (breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128)),
     (breccia.Float8CurrentScaling(granularity="row"), breccia.Float8CurrentScaling(granularity="row"))],
)  # fmt: skip
@pytest.mark.parametrize("lead", [(16,), (300,), (2, 64)])
def test_products_of_quantized_activations(left: Any, right: Any, lead: tuple[int, ...]) -> None:
    w = breccia.cast(randn(256, 512), right)
    repeated(lambda x: breccia.linear(x, w, out_dtype=BF16), [breccia.cast(randn(*lead, 512), left) for _ in range(3)])


def test_main_calls_have_plans() -> None:
    x, w = randn(16, 512), randn(256, 512)
    for recipe in (FP8, breccia.Float8BlockScaling(), breccia.MXFP8BlockScaling(), breccia.MXFP4BlockScaling(), NVFP4,
                   breccia.INT4Scaling(), breccia.INT8Scaling()):  # fmt: skip
        for _ in range(2):
            q = breccia.cast(w, recipe)
            breccia.dequantize(q, BF16)
            breccia.linear(x, q, out_dtype=BF16)
    assert launches.refusals == {}
    assert all(not isinstance(plan, int) for plan in launches._plans.values())


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16])
def test_calls_of_few_tokens_have_plans(tokens: int) -> None:
    """Scales of 1 x 128 blocks lie with gaps where rows are no multiple of 4."""
    x, w = randn(tokens, 512), randn(256, 512)
    rows = breccia.Float8CurrentScaling(granularity="row")
    pairs = [(FP8, FP8), (rows, rows), (breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128))]
    for activations, weights in pairs:
        layer = QuantizedLinear(breccia.cast(w, weights), activations=activations)
        for _ in range(2):
            layer(x)
            breccia.nn.functional.silu_mul(x, x + 1, activations)
        repeated(lambda x, recipe=activations: breccia.cast(x, recipe), [randn(tokens, 512) for _ in range(3)])
    known = {key: why for key, why in launches.refusals.items() if key[0] != "silu mul" or "block" in key[1]}
    assert known == {}


# What QuantizedLinear multiplies: activations, weights.
QUANTIZED = [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("int4", "int4"),
             ("int8", "int8"), ("int8", "int4"), ("fp8-block", "mxfp8"), ("mxfp8", "nvfp4")]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 16, 300, 4100])
@pytest.mark.parametrize(("activations", "weights"), QUANTIZED, ids=str)
def test_both_sides_quantized_have_plans(activations: str, weights: str, tokens: int) -> None:
    layer = QuantizedLinear(breccia.cast(randn(256, 512), weights), activations=activations)
    repeated(layer, [randn(tokens, 512) for _ in range(3)])
    assert launches.refusals == {}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-row", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int4", "int8"])
def test_many_rows_have_plans(recipe: str) -> None:
    layer = QuantizedLinear(breccia.cast(randn(256, 512), recipe))
    for tokens in (2048, 4100):
        repeated(layer, [randn(tokens, 512) for _ in range(3)])
    assert launches.refusals == {}


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "nvfp4", "int4", "int8"])
@pytest.mark.parametrize("quantized", [False, True])
def test_grouped_products_have_plans(recipe: str, quantized: bool) -> None:
    """Offsets are read on the device: they may change from call to call."""
    stack = breccia.cast(randn(4, 256, 512), recipe)
    x = randn(300, 512)
    given = breccia.cast(x, "fp8-block") if quantized else x
    offsets = [
        torch.tensor(ends, dtype=torch.int32, device="cuda")
        for ends in ([0, 3, 90, 90, 300], [0, 100, 200, 250, 280], [0, 0, 0, 0, 0])
    ]
    repeated(lambda ends: breccia.grouped_matmul(given, stack, ends, BF16), offsets)
    if not quantized or recipe == "fp8-block":
        assert launches.refusals == {}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("out", [BF16, None])
def test_repeated_grouped_products_are_not_checked_anew(
    quantized: bool, out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, x = breccia.cast(randn(4, 256, 512), "fp8-block"), randn(300, 512)
    offsets = torch.tensor([0, 3, 90, 90, 300], dtype=torch.int32, device="cuda")
    more = {} if out is None else {"out_dtype": out}

    def call(rows: Any, ends: Any = offsets) -> Any:
        return breccia.grouped_matmul(breccia.cast(rows, "fp8-block") if quantized else rows, stack, ends, **more)

    wanted = [made_in_full(lambda rows=rows: call(rows)) for rows in (x, 2 * x)]
    for _ in range(3):
        call(x)
    seen: list[Any] = []
    checked = launches.grouped_matmul
    monkeypatch.setattr(launches, "grouped_matmul", lambda *given: seen.append(1) or checked(*given))
    same(call(x), wanted[0])
    same(call(2 * x), wanted[1])
    assert not seen
    call(x[:200], torch.clamp(offsets, max=200))  # another form
    assert seen
    with pytest.raises(TypeError, match="offsets must be on the device of w_stack"):
        call(x, offsets.cpu())
    with pytest.raises(ValueError, match=r"x must be \(T, 512\)"):
        call(randn(300, 256))
    with pytest.raises(TypeError, match="offsets must be a tensor of integers"):
        call(x, offsets.float())
    if not quantized:
        needs = x.clone().requires_grad_()
        assert breccia.grouped_matmul(needs, stack, offsets, **more).requires_grad


def test_strides_offsets_and_alignment() -> None:
    q = breccia.cast(randn(256, 512), NVFP4)
    wide = randn(16, 1024)
    forms = [wide[:, :512], wide[:, 512:], wide[::2, :512], wide[:, 8:520], wide[:, 1:513], randn(512, 16).T]
    for x in forms:
        repeated(lambda x: breccia.linear(x, q, out_dtype=BF16), [x])
        repeated(lambda x: breccia.cast(x, NVFP4), [x])


def test_results_are_new_memory_each_time() -> None:
    q, x = breccia.cast(randn(256, 512), NVFP4), randn(16, 512)
    made = [breccia.linear(x, q, out_dtype=BF16) for _ in range(4)]
    assert len({y.data_ptr() for y in made}) == 4
    casts = [breccia.cast(x, FP8) for _ in range(4)]
    assert len({c.scale.data_ptr() for c in casts}) == 4


def test_weights_of_one_form_share_a_plan_and_differ() -> None:
    one, other, x = breccia.cast(randn(256, 512), NVFP4), breccia.cast(randn(256, 512), NVFP4), randn(16, 512)
    for q in (one, other, one, other):
        y = breccia.linear(x, q, out_dtype=BF16)
        torch.testing.assert_close(y.float(), x.float() @ breccia.dequantize(q).T, rtol=2e-2, atol=2e-1)
    assert sum(key[0] == "linear" for key in launches._plans) == 1


def test_layers_follow_their_buffers() -> None:
    layer = QuantizedLinear(breccia.cast(randn(256, 512), NVFP4))
    x = randn(16, 512)
    layer(x)
    layer(x)
    new = breccia.cast(randn(256, 512), NVFP4)
    layer.load_state_dict(QuantizedLinear(new).state_dict())
    same(layer(x), breccia.linear(x, new, out_dtype=BF16))
    layer.weight_data = breccia.cast(randn(256, 512), NVFP4).data
    same(layer(x), made_in_full(lambda: breccia.linear(x, layer.weight, out_dtype=BF16)))


def test_errors_are_those_of_a_call_in_full() -> None:
    q = breccia.cast(randn(256, 512), NVFP4)
    breccia.linear(randn(16, 512), q)
    with pytest.raises(ValueError, match="agree in K"):
        breccia.linear(randn(16, 256), q)
    with pytest.raises(ValueError, match=r"divisible|multiple"):
        breccia.cast(randn(16, 17), NVFP4)
    with pytest.raises(TypeError, match="device"):
        breccia.linear(torch.randn(16, 512), q)
    with pytest.raises(TypeError, match="dtype must be"):
        breccia.linear(randn(16, 512), q, out_dtype=torch.int8)


def test_graphs_and_streams() -> None:
    q, x = breccia.cast(randn(256, 512), NVFP4), randn(16, 512)
    want = breccia.linear(x, q, out_dtype=BF16)
    breccia.linear(x, q, out_dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = breccia.linear(x, q, out_dtype=BF16)
        c = breccia.cast(y, FP8)
    y.zero_()
    graph.replay()
    same(y, want)
    same(c, breccia.cast(want, FP8))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = breccia.linear(x, q, out_dtype=BF16)
    side.synchronize()
    same(z, want)


def test_threads() -> None:
    weights = [breccia.cast(randn(256, 512), NVFP4) for _ in range(8)]
    x = randn(16, 512)
    want = [breccia.linear(x, q, out_dtype=BF16) for q in weights]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(50):
                if not torch.equal(breccia.linear(x, weights[i], out_dtype=BF16), want[i]):
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_profiler_hears_of_every_launch() -> None:
    import triton

    heard: list[str] = []

    def hear(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    q, x = breccia.cast(randn(256, 512), NVFP4), randn(16, 512)
    for _ in range(3):
        breccia.linear(x, q, out_dtype=BF16)
    triton.knobs.runtime.launch_enter_hook.add(hear)
    try:
        breccia.linear(x, q, out_dtype=BF16)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hear)
    assert heard


def test_activations_of_layers() -> None:
    """QuantizedLinear(activations=…) is the product of the two quantized operands; few rows are left as they are."""
    rows = breccia.Float8CurrentScaling(granularity="row")
    q = breccia.cast(randn(256, 512), rows)
    layer = QuantizedLinear(q, activations=rows, exact_rows=4)
    for lead in ((16,), (2, 64), (300,)):
        x = randn(*lead, 512)
        same(layer(x), breccia.linear(breccia.cast(x, rows), q, out_dtype=BF16))
        exact = breccia.dequantize(breccia.cast(x, rows)).double() @ breccia.dequantize(q).double().T
        assert float((layer(x).double() - exact).norm() / exact.norm()) < 4e-3
    x = randn(4, 512)
    same(layer(x), breccia.linear(x, q, out_dtype=BF16))
    compiled = torch.compile(layer, fullgraph=True)
    same(compiled(randn(300, 512) * 0 + 1), layer(randn(300, 512) * 0 + 1))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "nvfp4"])
def test_operators_of_compiled_code_are_repeated(recipe: str, mode: str) -> None:
    """Each call with other values, by a plan where code is not captured in a graph."""
    torch._dynamo.reset()
    w = breccia.cast(randn(256, 512), recipe)

    def layer(x: torch.Tensor) -> torch.Tensor:
        scaled = breccia.cast(x, recipe)
        return breccia.linear(scaled, w, out_dtype=BF16) + breccia.linear(breccia.dequantize(scaled, BF16), w)

    launches._plans.clear()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(6):
        x = randn(128, 512)
        made = compiled(x).clone()
        torch.testing.assert_close(made, layer(x), rtol=0, atol=0)
    planned = {key[1] for key, plan in launches._plans.items() if key[0] == "operator" and plan not in (1, 2)}
    assert {"cast", "matmul", "dequantize"} <= planned, launches.refusals


def test_what_kernels_keep_lies_outside_of_graphs() -> None:
    """The first call ever may be one that a compiler captures, whose pool nothing may stay in."""
    torch._dynamo.reset()
    dense_matmul.zero_scales.cache_clear()
    dense_matmul.zero_outputs.cache_clear()
    pairs.one.cache_clear()
    w = breccia.cast(randn(256, 512), "mxfp8")
    layer = torch.compile(lambda x: breccia.linear(x, w, out_dtype=BF16), mode="reduce-overhead")
    for _ in range(4):
        x = randn(5000, 512)
        torch.testing.assert_close(layer(x).clone(), breccia.linear(x, w, out_dtype=BF16), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 512), (16, 512), (3, 5, 256), (300, 384)])
def test_scales_of_one_row_blocks_lie_as_products_read_them(shape: tuple[int, ...]) -> None:
    """Compiled code relies on the strides that the operator announces, empty and turned inputs included."""
    recipe = breccia.Float8BlockScaling()
    compiled = torch.compile(lambda x: breccia.cast(x, recipe), fullgraph=True, dynamic=False)
    for x in (randn(*shape), randn(*shape, dtype=torch.float32)):
        q = breccia.cast(x, recipe)
        assert q.scale.stride(-2) == 1 or shape[-2] == 1
        same(q, compiled(x))
        same(breccia.dequantize(q), breccia.dequantize(breccia.cast(x.cpu(), recipe)).cuda())
        assert torch.equal(q.scale.cpu(), breccia.cast(x.cpu(), recipe).scale)
    turned = randn(shape[-1], 128).T
    assert torch.equal(breccia.cast(turned, recipe).scale.cpu(), breccia.cast(turned.cpu(), recipe).scale)


def test_no_call_imports_torchs_compiler() -> None:
    """It takes seconds, and a first call does not need it."""
    calls = """
import sys, breccia, torch
x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
for name in ("fp8", "fp8-block", "mxfp8", "nvfp4", "int4"):
    q = breccia.cast(x, name)
    breccia.linear(x, q, out_dtype="bfloat16")
    breccia.dequantize(q, "bfloat16")
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", calls], check=True)
