# SPDX-License-Identifier: Apache-2.0
"""Which kernel takes which product, and that dispatch, `gpu_info` and the documents say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import breccia
import cases
import pytest
import torch
from breccia.kernels.triton import public, recipes
from breccia.kernels.triton.products import dispatch, paths
from breccia.kernels.triton.products.product import Fp8, Product

pytestmark = pytest.mark.offline

HOPPER, OTHER, BLACKWELL = (9, 0), (8, 9), (10, 0)
FP8 = breccia.Float8BlockScaling()
TILE = breccia.Float8BlockScaling(block_m=128)
TENSOR = breccia.Float8CurrentScaling()
ROW = breccia.Float8CurrentScaling(granularity="row")
NVFP4, MXFP4, INT4 = breccia.NVFP4BlockScaling(), breccia.MXFP4BlockScaling(), breccia.INT4Scaling()
MXFP8, MXFP6, INT8 = breccia.MXFP8BlockScaling(), breccia.MXFP6BlockScaling(), breccia.INT8Scaling()
ZEROS = breccia.INT8Scaling(symmetric=False)
GLUON = "Gluon, codes decode on their way to wgmma"
DECODED, FLOAT32 = "decode to the type of the activations, then cuBLAS", "decode to float32, then a float32 product"
DENSE = "codes as bf16, then Gluon, TMA and wgmma, scales in float32"
INTEGERS = "codes as INT8, then Gluon, TMA and wgmma"
PLAIN = "decode to bf16, then Gluon, TMA and wgmma"
ORDERED = "the left side decodes into the order of the right one's codes, which decode on their way to wgmma"
ROWS = "the left side decodes to bf16, then as weight-only matmul"

# (rows and their recipe or dtype, the weight's recipe, GPU) -> the path's name
TAKEN: list[tuple[int, Any, Any, tuple[int, int], str]] = [
    (4, FP8, TILE, HOPPER, "Gluon, TMA and wgmma"),
    (4, FP8, TILE, OTHER, "Triton"),
    (4, FP8, FP8, OTHER, "Triton"),
    (4, TENSOR, TENSOR, HOPPER, "Gluon, TMA and wgmma"),
    (4, ROW, ROW, OTHER, "decode to bf16, then cuBLAS, then scales"),
    (4, TILE, TILE, HOPPER, "Gluon, TMA and wgmma"),
    (4, TENSOR, TILE, HOPPER, "Gluon, TMA and wgmma"),
    (4, TILE, ROW, OTHER, "Triton"),
    (4, MXFP8, FP8, HOPPER, ROWS),
    (4097, MXFP8, FP8, HOPPER, ROWS),
    (4, MXFP8, MXFP8, BLACKWELL, "torch._scaled_mm by block scales"),
    (300, NVFP4, NVFP4, BLACKWELL, "torch._scaled_mm by block scales"),
    (300, NVFP4, NVFP4, (12, 0), "torch._scaled_mm by block scales"),
    (4, MXFP8, MXFP4, BLACKWELL, ROWS),
    (4, INT8, INT8, BLACKWELL, "Triton"),
    (4097, NVFP4, NVFP4, HOPPER, DENSE),
    (4097, NVFP4, NVFP4, OTHER, ROWS),
    (4, INT8, INT8, HOPPER, "Gluon, TMA and wgmma"),
    (4, INT8, INT8, OTHER, "Triton"),
    (4, ZEROS, INT8, HOPPER, "Gluon, TMA and wgmma"),
    (512, INT4, INT4, HOPPER, INTEGERS),
    (512, INT8, INT4, HOPPER, INTEGERS),
    (511, INT4, INT4, HOPPER, ORDERED),
    (257, MXFP8, INT4, HOPPER, ORDERED),
    (33, NVFP4, NVFP4, HOPPER, ORDERED),
    (32, NVFP4, NVFP4, HOPPER, ROWS),
    (33, NVFP4, NVFP4, OTHER, ROWS),
    (34, INT4, ROW, HOPPER, ORDERED),
    (4, INT4, INT8, OTHER, ROWS),
    (4, INT8, NVFP4, HOPPER, ROWS),
    (4097, INT8, NVFP4, HOPPER, DENSE),
    (4, torch.bfloat16, NVFP4, HOPPER, "Gluon, codes decode in registers for mma.sync"),
    (8, torch.bfloat16, INT4, HOPPER, "Gluon, codes decode in registers for mma.sync"),
    (9, torch.bfloat16, MXFP4, HOPPER, GLUON),
    (1, torch.bfloat16, ROW, HOPPER, "Triton, by rows"),
    (2, torch.bfloat16, MXFP8, HOPPER, "Triton, by rows"),
    (3, torch.bfloat16, MXFP8, HOPPER, GLUON),
    (4096, torch.bfloat16, FP8, HOPPER, GLUON),
    (4097, torch.bfloat16, FP8, HOPPER, PLAIN),
    (4097, torch.bfloat16, ROW, HOPPER, PLAIN),
    (4097, torch.bfloat16, NVFP4, HOPPER, PLAIN),
    (4097, torch.bfloat16, NVFP4, OTHER, DECODED),
    (4, torch.float16, NVFP4, HOPPER, DECODED),
    (1, torch.float16, NVFP4, HOPPER, "Triton, by rows"),
    (1, torch.bfloat16, NVFP4, OTHER, "Triton, by rows"),
    (2, torch.bfloat16, NVFP4, OTHER, DECODED),
    (2, torch.bfloat16, INT8, OTHER, "Triton, by rows"),
    (3, torch.bfloat16, INT8, OTHER, DECODED),
    (1, torch.bfloat16, MXFP6, HOPPER, PLAIN),
    (1, torch.bfloat16, breccia.INT4Scaling(symmetric=False, signed=False), HOPPER, PLAIN),
    (4, MXFP8, MXFP4, HOPPER, ROWS),
    (4, torch.float32, NVFP4, HOPPER, FLOAT32),
    (4, MXFP4, NVFP4, OTHER, ROWS),
]


# What a backward pass asks for: rows of a dtype, by the weight as it lies, to a dtype.
TURNED = [
    (torch.bfloat16, NVFP4, torch.bfloat16, "decode to bf16, then cuBLAS"),
    (torch.bfloat16, MXFP4, torch.bfloat16, "decode to bf16, then cuBLAS"),
    (torch.bfloat16, TENSOR, torch.bfloat16, "decode to bf16, then cuBLAS"),
    (torch.bfloat16, NVFP4, torch.float32, FLOAT32),
    (torch.float16, NVFP4, torch.float16, FLOAT32),
    (torch.float32, NVFP4, torch.float32, FLOAT32),
]


class Reached(Exception):  # noqa: N818
    pass


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[Product]:
    """Products are looked at as on a GPU of that kind, and none is made."""
    seen: list[Product] = []

    def stop(p: Product) -> Any:
        seen.append(p)
        raise Reached

    monkeypatch.setattr(Product, "major", capability[0])
    monkeypatch.setattr(Product, "on_hopper", capability[0] == 9)
    monkeypatch.setattr(paths, "run", stop)
    return seen


@pytest.mark.parametrize(("rows", "left", "right", "capability", "name"), TAKEN, ids=str)
def test_what_takes_a_product(
    rows: int, left: Any, right: Any, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = on(monkeypatch, capability)
    x = torch.from_numpy(cases.normal((rows, 256)))
    x = x.to(left) if isinstance(left, torch.dtype) else breccia.cast(x, left)
    w = breccia.cast(torch.from_numpy(cases.normal((128, 256), 1)), right)
    with pytest.raises(Reached):
        dispatch.linear(x, w, out_dtype="bfloat16")
    assert paths.find(seen[0]).name == name


@pytest.mark.parametrize(("dtype", "recipe", "out", "name"), TURNED, ids=str)
@pytest.mark.parametrize("capability", [HOPPER, OTHER])
def test_what_takes_the_product_of_a_backward_pass(
    dtype: Any, recipe: Any, out: Any, name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = on(monkeypatch, capability)
    w = breccia.cast(torch.from_numpy(cases.normal((128, 256), 1)), recipe)
    with pytest.raises(Reached):
        dispatch.matmul(torch.from_numpy(cases.normal((300, 128))).to(dtype), w, out)
    assert paths.find(seen[0]).name == name


@pytest.mark.parametrize(
    ("left", "right", "capability", "name"),
    [
        (MXFP8, NVFP4, HOPPER, ORDERED),
        (FP8, NVFP4, HOPPER, DENSE),
        (FP8, NVFP4, OTHER, FLOAT32),
        (INT8, INT4, HOPPER, INTEGERS),
        (ZEROS, INT4, HOPPER, FLOAT32),
        (breccia.INT4Scaling(group_size=32), INT4, HOPPER, FLOAT32),
    ],
    ids=str,
)
def test_float32_results_lose_nothing(
    left: Any, right: Any, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = on(monkeypatch, capability)
    x, w = (breccia.cast(torch.from_numpy(cases.normal((128, 256), i)), r) for i, r in enumerate((left, right)))
    with pytest.raises(Reached):
        dispatch.linear(x, w)
    assert paths.find(seen[0]).name == name


@pytest.mark.parametrize(
    ("rows", "n", "k", "name"),
    [
        (1, 128, 384, GLUON),  # `gemv8` wants multiples of 256
        (1, 4224, 256, "Triton, by rows"),
        (1, 5120, 256, GLUON),
        (1, 8448, 256, "Triton, by rows"),
        (2, 4224, 256, GLUON),
    ],
)
def test_few_rows_by_8_bits(rows: int, n: int, k: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on(monkeypatch, HOPPER)
    w = breccia.cast(torch.zeros(n, k), ROW)
    with pytest.raises(Reached):
        dispatch.linear(torch.zeros(rows, k).bfloat16(), w, out_dtype="bfloat16")
    assert paths.find(seen[0]).name == name


@pytest.mark.parametrize("capability", [HOPPER, OTHER], ids=str)
def test_groups_have_their_own_paths(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on(monkeypatch, capability)
    offsets = torch.tensor([0, 3, 8])
    x = torch.from_numpy(cases.normal((8, 256)))
    for recipe, given in ((NVFP4, x.bfloat16()), (FP8, breccia.cast(x, FP8)), (MXFP6, x), (INT8, x.half())):
        w = breccia.cast(torch.from_numpy(cases.normal((2, 128, 256), 1)), recipe)
        with pytest.raises(Reached):
            dispatch.grouped_matmul(given, w, offsets)
        path = paths.find(seen[-1])
        assert path.verb == paths.GROUPED
        assert path.hopper == (capability == HOPPER and recipe in (NVFP4, FP8))


def test_the_largest_products_of_fp8_are_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty((8192, 8192), dtype=torch.float8_e4m3fn)
    one = torch.ones((1, 1))
    for hopper, bias, dtype, cublas in (
        (True, None, torch.bfloat16, True),
        (True, one, torch.bfloat16, False),
        (True, None, torch.float32, False),
        (False, None, torch.bfloat16, False),
    ):
        monkeypatch.setattr(Product, "major", 9 if hopper else 8)
        path = paths.find(Product(dtype, bias, Fp8(x, x, one, one, False)))
        assert (path.name == "torch._scaled_mm") == cublas


def test_every_product_has_a_path_on_every_gpu() -> None:
    for verb in {path.verb for path in paths.PATHS}:
        those = [path for path in paths.PATHS if path.verb == verb]
        assert not those[-1].hopper and not those[-1].blackwell, verb
        assert len({(path.name, path.operands) for path in those}) == len(those)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpu_info_says_what_dispatch_does(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Hopper has the kernels in Gluon."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    info = public.gpu_info(0)
    assert info["capability"] == f"{capability[0]}.{capability[1]}"
    assert ("Gluon" in str(info["kernels"])) == (capability == (9, 0))
    for path in paths.PATHS:
        said = f"{path.name}: {path.operands}" in info["kernels"][path.verb]
        assert said == path.runs_on(capability[0])
    scaled = "torch._scaled_mm by block scales" in info["kernels"][paths.PAIR]
    assert scaled == (capability == (10, 0))
    order = [info["kernels"][paths.FP8_FP8].find(p.operands) for p in paths.PATHS if p.verb == paths.FP8_FP8]
    assert [at for at in order if at >= 0] == sorted(at for at in order if at >= 0)


def test_the_documents_say_what_dispatch_does() -> None:
    page = (Path(__file__).parents[2] / "docs/design/0012-which-kernel-multiplies.md").read_text()
    said = page.partition("<!-- paths -->\n")[2].partition("\n<!-- end -->")[0]
    assert said == paths.table(), "write breccia.kernels.triton.products.paths.table() between the marks"


def test_operands_of_a_weight_stand_as_they_are_stored() -> None:
    w = recipes.operand(breccia.cast(torch.from_numpy(cases.normal((128, 256))), NVFP4).mT)
    assert w.transposed
    assert w.shape == (128, 256)
