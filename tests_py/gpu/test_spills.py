# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compile for sm_90 without a GPU, and keep every accumulator in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import breccia
import pytest
import torch
import triton
from breccia.kernels.triton import recipes
from breccia.kernels.triton.casts import amax_words, cast_search, cast_words
from breccia.kernels.triton.conversions import dequant_words
from breccia.kernels.triton.device.words import decode_asm
from breccia.kernels.triton.products import configs, hopper_fp8, hopper_weights, w4_gemv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

pytestmark = pytest.mark.offline
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def descriptor(dtype: str, shape: list[int], swizzle: int, bits: int) -> str:
    return f"tensordesc<{dtype}{shape},{NVMMASharedLayout(swizzle, bits, 2)!r}>"


def usage(kernel: Any, types: dict[str, str], constants: dict[str, Any], tmp: Path, **options: Any) -> dict[str, int]:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    # As at run time: pointers always, strides where rows are aligned.
    aligned = [n for n in names if signature[n].startswith("*") or n in ("x_stride", "w_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    binary = tmp / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    told = subprocess.run([CUOBJDUMP, "-res-usage", "-sass", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found is not None
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": compiled.metadata.shared,
        "products": told.count("HGMMA."),
        "waits": told.count("WARPGROUP.DEPBAR"),
    }


FP8_CASES = [
    (configs.LARGE["block"], 2, 1, False, 0),
    (configs.LARGE["block"], 2, 2, False, 0),
    (configs.LARGE["fast"], 0, 0, True, 1),
    (configs.LARGE["fast"], 0, 0, True, 2),
    (configs.LARGE["precise"], 0, 0, False, 2),
    (configs.fp8_tile(16, 7168, 4096, "block"), 1, 2, False, 0),
    (configs.fp8_tile(64, 7168, 4096, "block"), 2, 1, False, 0),
    (configs.fp8_tile(128, 7168, 4096, "block"), 2, 1, False, 0),
    (configs.Tile(True, 64, 16, 1, 1, 8, parts=2, pairs=True), 1, 2, False, 0),
    (configs.Tile(False, 64, 64, 1, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
    (configs.Tile(False, 64, 128, 1, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
    (configs.Tile(False, 128, 64, 2, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
]


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("tile", "rows", "cols", "fast", "epilogue"), FP8_CASES, ids=str)
@pytest.mark.parametrize(("out", "bias"), [("bf16", False), ("bf16", True), ("fp32", True)])
def test_fp8(
    tile: configs.Tile, rows: int, cols: int, fast: bool, epilogue: int, out: str, bias: bool, tmp_path: Path
) -> None:
    store = not tile.swap and out == "bf16"
    types = {
        "row_desc": descriptor("fp8e4nv", [tile.rows, 128], 128, 8),
        "col_desc": descriptor("fp8e4nv", [tile.cols, 128], 128, 8),
        "row_scale_desc": descriptor("fp32", [1, max(32, tile.rows)], 0, 32),
        "col_scale_desc": descriptor("fp32", [1, max(32, tile.cols)], 0, 32),
        "out_desc": descriptor("bf16", [64 if store else 8, tile.cols], min(128, 2 * tile.cols), 16),
        "out_ptr": f"*{out}",
        "row_scale_ptr": "*fp32",
        "col_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
    }
    constants = {
        "ROW_SCALE": rows,
        "COL_SCALE": cols,
        "FAST": fast,
        "EPILOGUE": epilogue,
        "BIAS": bias,
        "SWAP": tile.swap,
        "TMA_STORE": store,
        "CONSUMERS": tile.consumers,
        "WAVES": tile.waves,
        "STAGES": tile.stages,
        "OUT_BUFS": tile.out_bufs,
        "GROUP": tile.group,
        "PARTS": tile.parts,
        "PAIRS": tile.pairs,
    }
    used = usage(hopper_fp8.fp8_kernel, types, constants, tmp_path, maxnreg=tile.maxnreg)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used


SCALES = {"nvfp4": "*i16", "mxfp4": "*u8", "int4": "*fp16", "mxfp8": "*u8", "block": "*fp32", "whole": "*fp32"}


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("m", "experts"), [(8, 0), (16, 0), (32, 0), (64, 0), (128, 0), (256, 0), (512, 0), (512, 16)])
def test_weights(kind: str, m: int, experts: int, tmp_path: Path) -> None:
    words = 16 if kind in configs.FOUR_BITS else 32
    if m == 8 and words == 16:
        pytest.skip("w4_gemv takes these")
    tile = configs.weight_tile(m, 7168, kind, experts)
    types = {
        "x_desc": descriptor("bf16", [tile.cols, 64], 128, 16),
        "w_desc": descriptor("i32", [tile.rows, words], 4 * words, 32),
        "out_desc": descriptor("bf16", [tile.cols, 64], 128, 16),
        "s_ptr": "*i32" if tile.order == "w" and kind in ("nvfp4", "mxfp4", "mxfp8") else SCALES[kind],
        "g_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "out_ptr": "*bf16",
        "table_ptr": "*i32",
    }
    constants = {
        "KIND": kind,
        "FMT": "e4m3",
        "SN": 128 if kind == "block" else 1,
        "ROUND": tile.rounds(kind, experts),
        "GLOBAL": kind == "nvfp4",
        "BIAS": False,
        "EXPERTS": experts,
        "SPLIT": tile.split,
        "ORDER": tile.order,
        "CONSUMERS": tile.consumers,
        "X_STAGES": tile.x_stages,
        "X_UNITS": tile.x_units,
        "W_STAGES": tile.w_stages,
        "GROUP": tile.group,
        "TMA_STORE": tile.cols > 128,
    }
    used = usage(hopper_weights.weights_kernel, types, constants, tmp_path, maxnreg=168)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used
    # Four products to a unit and one wait; where ptxas cannot follow products in flight, each has its own.
    assert 0 < 2 * used["waits"] <= used["products"], used


CASTS = [
    ("e4m3", (1, 128), "divide", "fp32"),
    ("e4m3", (128, 128), "divide", "fp32"),
    ("e5m2", (1, 8192), "divide", "fp32"),
    ("e4m3", (1, 32), "rceil", "u8"),
    ("e2m3", (1, 32), "rceil", "u8"),
    ("e3m2", (1, 32), "floor", "u8"),
    ("e2m1", (1, 32), "rceil", "u8"),
    ("e2m1", (1, 32), "even", "u8"),
    ("int4", (1, 128), "divide", "fp16"),
    ("int4", (1, 32), "divide", "fp32"),
    ("uint4", (1, 128), "divide", "bf16"),
    ("e2m1", (1, 16), "transformer_engine", "u8"),
]
SEARCHED = [
    breccia.MXFP4BlockScaling(scale_search="mse"),
    breccia.NVFP4BlockScaling(scale_search="mse"),
    breccia.INT4Scaling(scale_search="mse"),
    breccia.INT4Scaling(symmetric=False, signed=False),
    breccia.Float8BlockScaling(scale_search="mse"),
]
SCALE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8}


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("fmt", "block", "rule", "scale"), CASTS, ids=str)
def test_cast_words(
    fmt: str, block: tuple[int, int], rule: str, scale: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    warps, repeats = cast_words.default_shape(block)
    rows, words = cast_words.tile_of(4096, block[0], block[1] // 2, warps, repeats)
    form = cast_words.WordForm.of(dtype, fmt, block, rule, SCALE_TYPES[scale], nvfp4=block == (1, 16))
    types = {"x_ptr": "*i32", "code_ptr": "*i32", "scale_ptr": f"*{scale}", "stat_ptr": "*fp32"}
    constants = {"FORM": form, "BM": rows, "BW": words}
    used = usage(cast_words.cast_words_kernel, types, constants, tmp_path, num_warps=warps)
    assert used["stack"] == used["local"] == 0, used
    assert used["shared"] <= 64 or block[1] > 128 or block[0] > 1, used  # no detour where blocks are narrow
    if block[1] <= 128:
        size = max(64, block[1])
        square = {"FORM": form, "BOTH": True, "BM": size, "BW": size // 2}
        types |= {"turned_ptr": "*i32", "turned_scale_ptr": f"*{scale}"}
        used = usage(cast_words.cast_turn_kernel, types, square, tmp_path, num_warps=4 if size == 64 else 8)
        assert used["stack"] == used["local"] == 0, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("fmt", "sfmt", "group"), [("e2m1", "e4m3", 16), ("e2m1", "e8m0", 32), ("int4", "float", 128)])
@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_dequantize_words(fmt: str, sfmt: str, group: int, target: str, tmp_path: Path) -> None:
    asm, constraints = decode_asm(fmt, target)
    constants = {
        "ASM": asm,
        "CONSTRAINTS": constraints,
        "SFMT": sfmt,
        "GLOBAL": sfmt == "e4m3",
        "SM": 1,
        "G": group // 2,
        "BM": 8,
        "BW": 128,
    }
    scales = "*fp16" if sfmt == "float" else "*u8"
    types = {"code_ptr": "*u8", "scale_ptr": scales, "global_ptr": "*fp32", "out_ptr": "*i32"}
    used = usage(dequant_words.dequantize_words_kernel, types, constants, tmp_path)
    assert used["stack"] == used["local"] == used["shared"] == 0, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("body", "even"), [(1, True), (2, True), (4, True), (2, False), (4, False)])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("warps", w4_gemv.WARPS)
def test_w4_gemv(warps: int, kind: str, body: int, even: bool, tmp_path: Path) -> None:
    scales = {"nvfp4": "*i16", "mxfp4": "*u8", "int4": "*fp16"}[kind]
    types = {
        "x_ptr": "*i32",
        "w_ptr": "*i32",
        "s_ptr": scales,
        "g_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "out_ptr": "*bf16",
    }
    constants = {
        "KIND": kind,
        "GLOBAL": kind == "nvfp4",
        "BIAS": False,
        "AHEAD": True,
        "SCALES_AHEAD": kind != "int4",
        "BODY": body,
        "EVEN": even,
        "WARPS": warps,
    }
    options = {"num_warps": warps, "maxnreg": w4_gemv.REGISTERS}
    used = usage(w4_gemv.w4_gemv_kernel, types, constants, tmp_path, **options)
    # With masks INT4 lacks registers for four slices, and is faster than with two all the same.
    kept = 80 if (kind, body, even) == ("int4", 4, False) else 0
    assert used["local"] == 0 and used["stack"] <= kept and 80 < used["registers"] <= w4_gemv.REGISTERS, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("source", ["bf16", "fp16"])
def test_amax_words(source: str, tmp_path: Path) -> None:
    types = {"x_ptr": "*i32", "part_ptr": "*fp32"}
    constants = {"SOURCE": source, "B": 4096, "N": 1024}
    used = usage(amax_words.amax_words_kernel, types, constants, tmp_path, num_warps=8)
    assert used["stack"] == used["local"] == 0, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("recipe", SEARCHED, ids=lambda recipe: recipe.name)
def test_cast_search(recipe: Any, tmp_path: Path) -> None:
    plan = recipes.plan(recipe)
    constants = cast_search.constants(plan)
    scale = {torch.float16: "fp16", torch.float32: "fp32"}[plan.scale_dtype] if constants["DIVIDE"] else "u8"
    types = {"x_ptr": "*bf16", "code_ptr": "*u8", "scale_ptr": f"*{scale}", "zero_ptr": "*u8", "stat_ptr": "*fp32"}
    used = usage(
        cast_search.cast_search_kernel, types, constants, tmp_path, num_warps=cast_search.WARPS, enable_fp_fusion=False
    )
    assert used["stack"] == used["local"] == 0, used
