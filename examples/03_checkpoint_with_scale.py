# SPDX-License-Identifier: Apache-2.0
"""Weights and their scales in one file: save them, load them without a copy, convert the file, check what it lost.

Works in a temporary folder and removes it. Needs NumPy alone.
"""

import tempfile
from pathlib import Path

import breccia
import numpy as np
from breccia import checkpoint

rng = np.random.default_rng(0)
weights = {
    "layers.0.up_proj.weight": rng.standard_normal((512, 256), dtype=np.float32) * 0.02,
    "layers.0.down_proj.weight": rng.standard_normal((256, 512), dtype=np.float32) * 0.02,
}
folder = tempfile.TemporaryDirectory()
here = Path(folder.name)

# A ScaledTensor is stored as its parts; recipe, layout and shape go to the file's header, as JSON.
quantized = {name: breccia.cast(w, "nvfp4") for name, w in weights.items()}
breccia.save(quantized, here / "nvfp4.safetensors", {"made_by": "03_checkpoint_with_scale.py"})

# Loading maps the file: the arrays are views of it. Nobody has to be told what the bytes mean.
for name, q in breccia.open(here / "nvfp4.safetensors"):
    assert q.recipe == quantized[name].recipe
    assert np.array_equal(q.data, quantized[name].data)
    print(f"{name:28} {q.shape} {q.recipe.name}, scale {q.scale.shape}, {q.nbytes:,} bytes")

# The same for a whole checkpoint of floats, and in another program's format.
checkpoint.save_arrays(weights, here / "model.safetensors")
for target in ("nvfp4", "compressed-tensors:nvfp4", "gguf:q8_0"):
    out = here / ("converted.gguf" if target.startswith("gguf") else "to-" + target.replace(":", "-") + ".safetensors")
    report = checkpoint.convert(here / "model.safetensors", out, target)
    judged = checkpoint.verify(here / "model.safetensors", out)
    least = min(float(row["sqnr_db"]) for row in judged["tensors"])
    print(f"{target:26} {out.stat().st_size:>9,} bytes; least SQNR {least:.1f} dB; {report['tensors']}")
    assert judged["ok"]

# What was quantized elsewhere is repacked: codes and scales move, nothing is rounded again.
report = checkpoint.convert(here / "nvfp4.safetensors", here / "modelopt.safetensors", "modelopt:nvfp4")
print("nvfp4 → modelopt:", report["tensors"])
assert checkpoint.verify(here / "nvfp4.safetensors", here / "modelopt.safetensors", min_sqnr_db=200)["ok"]
folder.cleanup()
