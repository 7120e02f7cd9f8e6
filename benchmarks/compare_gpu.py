# SPDX-License-Identifier: Apache-2.0
"""GPU benchmark: every kernel against its peers in the same run. Writes JSON, prints a table.

    python benchmarks/compare_gpu.py --out benchmarks/results/gpu.json

Times are medians of CUDA graph replays, so that launch costs count for nobody, except under "eager", where the public
verbs are called as a user calls them. Products alternate between ours and the peer. "cold" rotates eight weights, more
than the L2 cache holds. Errors are relative, against float64 of the dequantized operands. The exit status is 1 where
"pairs" finds a product that takes longer than 1 / 0.8 times bf16's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import breccia
import torch
import triton
from comparison.gpu_conversions import casts, conversions
from comparison.gpu_eager import compiled, eager, torchao_decoder
from comparison.gpu_experts import experts
from comparison.gpu_fused import fused_casts
from comparison.gpu_moe import moe
from comparison.gpu_pairs import FLOOR, below_the_floor, pairs
from comparison.gpu_peers import block_fp8
from comparison.gpu_products import accuracy, grouped, products_large, products_small, weight_only
from comparison.gpu_timing import ROWS, Fn
from comparison.gpu_weight_peers import weight_peers


def machine() -> dict[str, Any]:
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):
        told = []
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "breccia": breccia.__version__,
        **dict(zip(fields.split(","), told, strict=False)),
    }


# Few rows first: right after products that reach the power limit the clock is lower, and what is bound by instructions
# takes 20 % longer, while its peers, bound by memory, hardly do.
SECTIONS: dict[str, Fn] = {
    "eager": eager,
    "compiled": compiled,
    "torchao": torchao_decoder,
    "fused": fused_casts,
    "weights": weight_peers,
    "peers": block_fp8,
    "small": products_small,
    "decode": lambda: weight_only((1, 2, 4, 8, 16, 64, 128, 256)),
    "pairs": pairs,
    "casts": casts,
    "conversions": conversions,
    "large": lambda: products_large(
        [(2048, 2048, 2048), (4096, 4096, 4096), (4096, 7168, 2048), (4096, 4096, 7168), (8192, 8192, 8192)]
    ),
    "prefill": lambda: weight_only((512, 4096)),
    "grouped": grouped,
    "experts": experts,
    "moe": moe,
    "accuracy": accuracy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--slow-too", action="store_true", help="the exit status is 0 whatever pairs finds")
    options = parser.parse_args()
    torch.manual_seed(0)
    about: dict[str, Any] = {"before": machine()}
    print(about["before"])
    for name in options.only:
        SECTIONS[name]()
    about["after"] = machine()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": about, "results": ROWS}, indent=1) + "\n")
    slow = below_the_floor()
    if slow and not options.slow_too:
        raise SystemExit("\n".join([f"slower than {FLOOR} times bf16:", *slow]))


if __name__ == "__main__":
    main()
