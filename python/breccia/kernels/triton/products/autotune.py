# SPDX-License-Identifier: Apache-2.0
"""`autotune=True`: times candidate tiles on the caller's shape and keeps the best in a file.

The file is `breccia/gpu_tiles.json` under `$XDG_CACHE_HOME` (or `~/.cache`); delete it to forget.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import triton

from breccia.kernels.triton.products.configs import Tile, candidates
from breccia.kernels.triton.products.product import Fp8


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "breccia" / "gpu_tiles.json"


def _load() -> dict[str, Any]:
    try:
        loaded = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _save(key: str, tile: Tile) -> None:
    table = _load()
    table[key] = dataclasses.asdict(tile)
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(table, indent=1))
        part.replace(path)
    except OSError:
        pass  # a read-only home: tune again next time


def tuned(dtype: torch.dtype, bias: torch.Tensor | None, p: Fp8) -> torch.Tensor:
    """A product on Hopper with the best configuration for exactly this shape."""
    from breccia.kernels.triton.products.dense_matmul import dense_matmul

    (m, k), n = p.x.shape, p.w.shape[0]
    key = f"{torch.cuda.get_device_name(p.x.device)}|{triton.__version__}|{p.mode}|{m}x{n}x{k}|{dtype}"
    operands = p.x, p.w, p.x_scale, p.w_scale, dtype, bias, p.blocks, p.fast
    known = _load().get(key)
    try:
        tile = None if known is None else Tile(**known)
    except TypeError:
        tile = None
    if tile is None:
        times = {}
        for candidate in candidates(m, n, k, p.mode):
            times[candidate] = triton.testing.do_bench(lambda c=candidate: dense_matmul(*operands, c), warmup=5, rep=20)
        tile = min(times, key=lambda c: times[c])
        _save(key, tile)
    return dense_matmul(*operands, tile)
