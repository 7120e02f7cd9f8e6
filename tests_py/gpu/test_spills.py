# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compile for sm_90 without a GPU, and keep every accumulator in registers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import pytest
import torch
import triton
from breccia.kernels.triton import adamw, recipes
from breccia.kernels.triton.casts import cast_feedback, cast_search, cast_words
from breccia.kernels.triton.conversions import dequant, dequant_words, transpose
from breccia.kernels.triton.device.elements import ELEMENTS, Form, form_of
from breccia.kernels.triton.device.words import decode_asm
from breccia.kernels.triton.products import configs, gemm, hopper_dense, hopper_weights, int8_gemm, w4_gemv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

pytestmark = pytest.mark.offline
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def descriptor(dtype: str, shape: list[int], swizzle: int, bits: int) -> str:
    return f"tensordesc<{dtype}{shape},{NVMMASharedLayout(swizzle, bits, 2)!r}>"


def compiled_for(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int = 90, **options: Any
) -> Any:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    # As at run time: pointers always, strides where rows are aligned.
    aligned = [n for n in names if signature[n].startswith("*") or n in ("x_stride", "w_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})


def usage(kernel: Any, types: dict[str, str], constants: dict[str, Any], tmp: Path, **options: Any) -> dict[str, int]:
    compiled = compiled_for(kernel, types, constants, **options)
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
        **{name: told.count(name) for name in ("HGMMA.", "IGMMA.", "QGMMA.")},
        "waits": told.count("WARPGROUP.DEPBAR"),
    }


FP8_CASES = [
    (configs.LARGE["block"], 2, 1, False, 0),
    (configs.LARGE["block"], 2, 2, False, 0),
    (configs.LARGE["block"], 1, 1, False, 0),
    (configs.LARGE["fast"], 0, 0, True, 1),
    (configs.LARGE["fast"], 0, 0, True, 2),
    (configs.LARGE["precise"], 0, 0, False, 2),
    (configs.fp8_tile(16, 7168, 4096, "block"), 1, 2, False, 0),
    (configs.fp8_tile(64, 7168, 4096, "block"), 2, 1, False, 0),
    (configs.fp8_tile(128, 7168, 4096, "block"), 2, 1, False, 0),
    (configs.Tile(True, 64, 16, 1, 1, 8, parts=2, pairs=True), 1, 2, False, 0),
    (configs.Tile(True, 64, 16, 1, 1, 8, parts=2, pairs=True), 1, 1, False, 0),
    (configs.Tile(False, 64, 64, 1, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
    (configs.Tile(False, 64, 128, 1, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
    (configs.Tile(False, 128, 64, 2, 1, 6, parts=4, pairs=True), 2, 1, False, 0),
]


def dense(
    element: str, tile: configs.Tile, scales: tuple[int, int], zeros: bool, fast: bool, epilogue: int, out: str,
    bias: bool, tmp: Path, experts: int = 0, own_k: bool = False,
) -> dict[str, int]:  # fmt: skip
    store = not tile.swap and out == "bf16"
    bits = 16 if element == "bf16" else 8
    types = {
        "row_desc": descriptor(element, [tile.rows, 1024 // bits], 128, bits),
        "col_desc": descriptor(element, [tile.cols, 1024 // bits], 128, bits),
        "row_scale_desc": descriptor("fp32", [1, max(32, tile.rows)], 0, 32),
        "col_scale_desc": descriptor("fp32", [1, max(32, tile.cols)], 0, 32),
        "out_desc": descriptor("bf16", [64 if store else 8, tile.cols], min(128, 2 * tile.cols), 16),
        "out_ptr": f"*{out}",
        "row_scale_ptr": "*fp32",
        "col_scale_ptr": "*fp32",
        "row_zero_ptr": "*i8",
        "col_zero_ptr": "*i8",
        "row_total_ptr": "*i32",
        "col_total_ptr": "*i32",
        "bias_ptr": "*bf16",
        "offset_ptr": "*i32",
    }
    constants = {
        "ROW_SCALE": scales[0],
        "COL_SCALE": scales[1],
        "ROW_ZERO": zeros,
        "COL_ZERO": zeros,
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
        "PAIRS": tile.pairs and not fast,
        "EXPERTS": experts,
        "EP": triton.next_power_of_2(experts + 1),
        "OWN_K": own_k,
    }
    return usage(hopper_dense.dense_kernel, types, constants, tmp, maxnreg=tile.maxnreg)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("tile", "rows", "cols", "fast", "epilogue"), FP8_CASES, ids=str)
@pytest.mark.parametrize(("out", "bias"), [("bf16", False), ("bf16", True), ("fp32", True)])
def test_fp8(
    tile: configs.Tile, rows: int, cols: int, fast: bool, epilogue: int, out: str, bias: bool, tmp_path: Path
) -> None:
    used = dense("fp8e4nv", tile, (rows, cols), False, fast, epilogue, out, bias, tmp_path)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("each", [64, 128, 256, 512])
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_fp8_of_experts(each: int, weights: int, out: str, tmp_path: Path) -> None:
    tile = configs.experts_tile(16 * each, 16, weights == 2)
    used = dense("fp8e4nv", tile, (3, weights), False, False, 0, out, False, tmp_path, experts=16)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_gradients_of_experts(parts: int, out: str, tmp_path: Path) -> None:
    tile = dataclasses.replace(configs.LARGE["block"], parts=parts)
    used = dense("fp8e4nv", tile, (1, 1), False, False, 0, out, False, tmp_path, own_k=True)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used


@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("count", [False, True])
def test_transposes_of_codes(group: int, count: bool, tmp_path: Path) -> None:
    types = {"code_ptr": "*u8", "scale_ptr": "*u8", "source_ptr": "*i32", "out_ptr": "*u8", "out_scale_ptr": "*u8"}
    constants = {"ELEMENT": ELEMENTS["e4m3"], "G": group, "GATHER": not count, "SQUARES": not count, "COUNT": count,
                 "HALVES": not count, "BM": transpose.SIDE, "BN": transpose.SIDE}  # fmt: skip
    used = usage(transpose.transpose_kernel, types | {"count_ptr": "*i64"}, constants, tmp_path, num_warps=8)
    assert used["local"] == 0, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("element", "products"), [("i8", "IGMMA."), ("bf16", "HGMMA.")])
@pytest.mark.parametrize(("m", "block"), [(16, False), (64, False), (128, False), (2048, False), (2048, True)])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_dense_integers_and_halves(element: str, products: str, m: int, block: bool, out: str, tmp_path: Path) -> None:
    """What float32 results of wide tiles keep in memory are addresses at their end, no sums."""
    kept = 48 if out == "fp32" and m > 1024 else 0
    tile = configs.dense_tile(m, 4096, 4096, element.replace("i8", "int8"), block)
    scales = (2, 2) if block else (0, 0)
    for zeros in (False, True)[: 2 if element == "i8" and not block else 1]:
        used = dense(element, tile, scales, zeros, not block, 0 if block else 2, out, False, tmp_path)
        assert used["local"] == 0 and used["stack"] <= kept and used["shared"] <= 232_448, used
        assert used[products] > 0


SCALES = {"nvfp4": "*i16", "mxfp4": "*u8", "int4": "*fp16", "mxfp8": "*u8", "block": "*fp32", "whole": "*fp32"}


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(("m", "experts"), [(8, 0), (16, 0), (32, 0), (64, 0), (128, 0), (256, 0), (512, 0), (512, 16)])
def test_weights(kind: str, m: int, experts: int, tmp_path: Path) -> None:
    words = 16 if kind in configs.FOUR_BITS else 32
    if m == 8 and words == 16:
        pytest.skip("w4_gemv takes these")
    tile = configs.weight_tile(m, 7168, 4096, kind, experts)
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
    used = usage(cast_words.amax_words_kernel, types, constants, tmp_path, num_warps=8)
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


PORTABLE = {"e4m3": ("e4m3", "float", (1, 128)), "mxfp8": ("e4m3", "e8m0", (1, 32)), "e5m2": ("e5m2", "float", (0, 0)),
            "mxfp6": ("e2m3", "e8m0", (1, 32)), "nvfp4": ("e2m1", "e4m3", (1, 16)), "int4": ("int4", "float", (1, 128)),
            "int8": ("int8", "float", (1, 0))}  # fmt: skip


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(
    ("fmt", "multiply", "zero"), [("e2m1", True, None), ("e4m3", False, None), ("uint4", False, 0)]
)
def test_feedback(fmt: str, multiply: bool, zero: object, fed: bool, tmp_path: Path) -> None:
    names = ("x", "fed", "share", "scale", "factor", "zero")
    types = {f"{name}_ptr": "*fp32" for name in names} | {"code_ptr": "*u8", "order_ptr": "*i64"}
    constants = {"FED": fed, "MULTIPLY": multiply, "FORM": Form(ELEMENTS[fmt], zero_point=zero is not None)}
    constants |= {"R": cast_feedback.ROWS, "W": 128}
    found = usage(cast_feedback.round_run_kernel, types, constants, tmp_path, num_warps=cast_feedback.WARPS)
    assert found["stack"] == found["local"] == 0, found


def compile_portable(capability: int) -> None:
    """Products, products of experts and dequantization, of FP8 by FP8 too."""
    for kind, (fmt, sfmt, block) in PORTABLE.items():
        scale = "*u8" if sfmt != "float" else "*fp16" if fmt == "int4" else "*fp32"
        form = form_of(fmt, sfmt, block, fmt in ("e2m1", "int4"), None, 1 if kind == "nvfp4" else None)
        pointers = {"w_ptr": "*u8", "s_ptr": scale, "z_ptr": "*u8", "g_ptr": "*fp32", "bias_ptr": "*bf16"}
        pointers |= {"xs_ptr": "*fp32", "offset_ptr": "*i32"}
        for x, experts in (("bf16", 0), ("fp16", 8), ("u8", 0))[: 3 if kind == "e4m3" else 2]:
            types = {**pointers, "x_ptr": f"*{x}", "out_ptr": f"*{x}".replace("u8", "bf16")}
            constants = {"X": ELEMENTS["e4m3"] if x == "u8" else None, "FORM": form, "FOLD": sfmt != "float"}
            constants |= {"BIAS": False, "E": experts, "EP": max(1, experts), "BM": 64, "BN": 64, "BK": 128}
            assert compiled_for(gemm.gemm_kernel, types, constants, capability).asm["cubin"]
        types = {"code_ptr": "*u8", "scale_ptr": scale, "zero_ptr": "*u8", "global_ptr": "*fp32", "out_ptr": "*bf16"}
        constants = {"FORM": form, "BM": 16, "BK": 256, "EARLY": capability >= 90}
        assert compiled_for(dequant.dequantize_kernel, types, constants, capability).asm["cubin"]


@pytest.mark.parametrize("capability", [80, 89, 120])
def test_portable_kernels_compile_for_other_gpus(capability: int) -> None:
    """In a process of its own, which takes FP8 instructions to be there or not, as on such a GPU."""
    fp8 = capability >= 89
    code = "from breccia.kernels.triton import runtime; "
    code += f"runtime.FP8 = {fp8}; import test_spills; test_spills.compile_portable({capability})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 89, 120])
def test_integer_products_compile_for_other_gpus(capability: int) -> None:
    codes = {"x_ptr": "*i8", "w_ptr": "*i8", "xz_ptr": "*i8", "wz_ptr": "*i8", "xt_ptr": "*i32", "wt_ptr": "*i32"}
    types = {**codes, "xs_ptr": "*fp32", "ws_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    for tile in ({"BM": 16, "BN": 64, "BK": 128}, {"BM": 128, "BN": 128, "BK": 64}):
        constants = {"X_ZERO": True, "W_ZERO": True, "BIAS": True, **tile}
        made = compiled_for(int8_gemm.int8_kernel, types, constants, capability)
        assert "mma.sync" in made.asm["ptx"] and ".s32.s8.s8.s32" in made.asm["ptx"]


@pytest.mark.parametrize(
    ("element", "rule", "group"), [("e4m3", "divide", 128), ("int8", "divide", 128), ("e4m3", "rceil", 32)]
)
def test_a_step_of_adamw_stays_in_registers(element: str, rule: str, group: int, tmp_path: Path) -> None:
    form = Form(ELEMENTS[element], "float" if rule == "divide" else "e8m0", rule, 1, group)
    kernel = adamw.expanded_kernel if rule == "divide" else adamw.stochastic_kernel
    scale = "*fp32" if rule == "divide" else "*u8"
    types = {"w_ptr": "*fp32", "g_ptr": "*fp32", "code1_ptr": "*u8", "code2_ptr": "*u8"}
    types |= {"scale1_ptr": scale, "scale2_ptr": scale, "exponent1_ptr": "*fp16", "exponent2_ptr": "*fp16"}
    types |= dict.fromkeys(("beta1", "beta2", "rest1", "rest2", "keep", "rate", "correction", "eps"), "fp32")
    constants = {"FORM": form, "G": adamw.NUMBERS // group}
    used = usage(kernel, types, constants, tmp_path, num_warps=adamw.WARPS, enable_fp_fusion=False)
    assert used["stack"] == used["local"] == 0, used
    assert used["registers"] <= 128, used
