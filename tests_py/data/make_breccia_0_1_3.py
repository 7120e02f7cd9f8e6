# SPDX-License-Identifier: Apache-2.0
"""Run once with the published breccia 0.1.3, torch and safetensors: the file that its `save_safetensors` writes of
every recipe it has, and the values that its `dequantize` makes of them. Both lie beside this script."""

from pathlib import Path

import breccia
import numpy as np
import torch
from breccia.bridges import save_safetensors

assert breccia.__version__ == "0.1.3"
here = Path(__file__).parent
RECIPES = {
    "delayed": breccia.DelayedScaling(),
    "current": breccia.Float8CurrentScaling(),
    "current_e5m2": breccia.Float8CurrentScaling(fp8_format="E5M2"),
    "block": breccia.Float8BlockScaling(),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "int4": breccia.INT4Scaling(),
    "int4_asymmetric": breccia.INT4Scaling(signed=False, symmetric=False),
}
x = np.random.default_rng(0).normal(0, 1, (2, 256)).astype(np.float32)
tensors, values = {}, {}
for name, recipe in RECIPES.items():
    for kind, source in {"numpy": x, "torch": torch.from_numpy(x)}.items():
        made = breccia.cast(source, recipe)
        tensors[f"{name}.{kind}"] = made
        values[f"{name}.{kind}"] = np.asarray(breccia.dequantize(made), np.float32)
save_safetensors(tensors, str(here / "breccia_0_1_3.safetensors"), {"note": "by breccia 0.1.3"})
np.savez_compressed(here / "breccia_0_1_3.npz", **values)
