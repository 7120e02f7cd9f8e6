# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks under torchrun begin and end with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import torch
import torch.distributed as dist


def begin(quick: bool) -> torch.device:
    """Joins the other ranks, over NCCL where there are GPUs, else or with `quick` over gloo; this rank's device."""
    cuda = torch.cuda.is_available() and not quick
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device


def show(result: dict[str, Any]) -> None:
    """Prints a result once, not on every rank."""
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def _arguments() -> list[str]:
    """Those of this program, but for where its results go."""
    given = [part for part in sys.argv if not part.startswith("--out=")]
    at = given.index("--out") if "--out" in given else len(given)
    return given[:at] + given[at + 2 :]


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def end(out: Path | None, device: torch.device, results: list[dict[str, Any]], **about: Any) -> None:
    """Writes the results with the machine they are of, if a file was named, and leaves the other ranks."""
    if out and dist.get_rank() == 0:
        cuda = device.type == "cuda"
        machine = {
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "ranks": dist.get_world_size(),
            **about,
            "command": f"torchrun --nproc-per-node {dist.get_world_size()} {shlex.join(_arguments())}",
            "driver": _driver() if cuda else None,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "breccia": breccia.__version__,
        }
        out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
