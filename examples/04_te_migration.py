# SPDX-License-Identifier: Apache-2.0
"""FP8 weights of a TransformerEngine model: keep the bytes, leave the GPU, go on elsewhere.

TransformerEngine imports only where CUDA is, so this script does not import it. `from_transformer_engine` reads a
tensor's buffers by their names; the class below has the names and shapes of a Float8Tensor of TransformerEngine 2.20
and stands for one. On a machine with TransformerEngine pass `layer.weight` instead. The way back,
`to_transformer_engine`, makes TransformerEngine's own classes and does need it. Needs torch.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import breccia
import torch
from breccia.autograd import LinearRecipes
from breccia.bridges import from_transformer_engine, load_safetensors, save_safetensors
from breccia.nn import ScaledLinear


@dataclass
class Float8Stand:
    _data: torch.Tensor  # uint8 codes
    _scale_inv: torch.Tensor  # float32, one number; it multiplies
    _fp8_dtype: str = "kFloat8E4M3"
    _transpose: torch.Tensor | None = None
    _transpose_invalid: bool = True


torch.manual_seed(0)
weight = torch.randn(256, 512) * 0.02
scale_inv = weight.abs().max() / 448
codes = (weight / scale_inv).to(torch.float8_e4m3fn)
theirs = Float8Stand(codes.view(torch.uint8), scale_inv.reshape(1))

# 1. Wrap it. Codes and scale are theirs; the values are theirs, too.
w = from_transformer_engine(theirs, breccia.Float8CurrentScaling())
print(w)
assert torch.equal(breccia.dequantize(w), codes.float() * scale_inv)

# 2. Multiply on a CPU, and look what FP8 had cost.
x = torch.randn(8, 512)
error = (breccia.linear(x, w) - x @ weight.T).norm() / (x @ weight.T).norm()
print(f"FP8 product on a CPU: relative error {error:.2%}")

# 3. Another recipe, for other hardware, without the original weights. MXFP8 has blocks of 32 and power-of-two scales.
for recipe in (breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()):
    other = breccia.requantize(w, recipe)
    error = (breccia.dequantize(other) - breccia.dequantize(w)).norm() / breccia.dequantize(w).norm()
    print(f"requantized to {recipe.name}: {other.nbytes:,} bytes, {error:.2%} away from the FP8 values")

# 4. A file that says what it holds.
with tempfile.TemporaryDirectory() as folder:
    save_safetensors({"layer.weight": w}, Path(folder) / "te.safetensors")
    loaded = load_safetensors(Path(folder) / "te.safetensors", "torch")["layer.weight"]
    assert torch.equal(loaded.data.view(torch.uint8), theirs._data)

# 5. te.Linear under fp8_autocast(DelayedScaling) becomes ScaledLinear with LinearRecipes.delayed().
layer = ScaledLinear(512, 256, recipes=LinearRecipes.delayed(amax_history_len=16))
target = x @ weight.T
optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
for step in range(21):
    loss = (layer(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2} loss {loss.item():.5f}")
