# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compile for sm_90 without a GPU, and keep every accumulator in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from breccia.kernels.triton import configs, hopper_fp8, hopper_w4
from triton.backends.compiler import GPUTarget
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
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, values, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    binary = tmp / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    told = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found is not None
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared}


FP8_CASES = [
    (configs.LARGE["block"], 2, 1, False, 0),
    (configs.LARGE["block"], 2, 2, False, 0),
    (configs.LARGE["fast"], 0, 0, True, 1),
    (configs.LARGE["fast"], 0, 0, True, 2),
    (configs.LARGE["precise"], 0, 0, False, 2),
    (configs.fp8_tile(16, 7168, 4096, "block"), 1, 2, False, 0),
    (configs.fp8_tile(64, 7168, 4096, "block"), 2, 1, False, 0),
    (configs.fp8_tile(128, 7168, 4096, "block"), 2, 1, False, 0),
]


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(("tile", "rows", "cols", "fast", "epilogue"), FP8_CASES, ids=str)
def test_fp8(tile: configs.Tile, rows: int, cols: int, fast: bool, epilogue: int, tmp_path: Path) -> None:
    store = not tile.swap
    types = {
        "row_desc": descriptor("fp8e4nv", [tile.rows, 128], 128, 8),
        "col_desc": descriptor("fp8e4nv", [tile.cols, 128], 128, 8),
        "row_scale_desc": descriptor("fp32", [1, max(32, tile.rows)], 0, 32),
        "col_scale_desc": descriptor("fp32", [1, max(32, tile.cols)], 0, 32),
        "out_desc": descriptor("bf16", [64 if store else 8, tile.cols], min(128, 2 * tile.cols), 16),
        "out_ptr": "*bf16",
        "row_scale_ptr": "*fp32",
        "col_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
    }
    constants = {
        "ROW_SCALE": rows,
        "COL_SCALE": cols,
        "FAST": fast,
        "EPILOGUE": epilogue,
        "BIAS": False,
        "SWAP": tile.swap,
        "TMA_STORE": store,
        "CONSUMERS": tile.consumers,
        "WAVES": tile.waves,
        "STAGES": tile.stages,
        "GROUP": tile.group,
    }
    used = usage(hopper_fp8.fp8_kernel, types, constants, tmp_path, maxnreg=tile.maxnreg)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("m", [2, 16, 64])
def test_w4(kind: str, m: int, tmp_path: Path) -> None:
    tile = configs.w4_tile(m, 7168, 4096, kind)
    scale = {"nvfp4": "*i16", "mxfp4": "*u8", "int4": "*fp16"}[kind]
    types = {
        "x_desc": descriptor("bf16", [tile.cols, 128], 128, 16),
        "w_ptr": "*i32",
        "s_ptr": scale,
        "g_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "out_ptr": "*bf16",
    }
    constants = {
        "KIND": kind,
        "GLOBAL": kind == "nvfp4",
        "BIAS": False,
        "SPLIT": tile.split,
        "CONSUMERS": tile.consumers,
        "STAGES": tile.stages,
        "GROUP": tile.group,
        "REGS": 240,
    }
    used = usage(hopper_w4.w4_kernel, types, constants, tmp_path, maxnreg=168)
    assert used["stack"] == used["local"] == 0 and used["shared"] <= 232_448, used
