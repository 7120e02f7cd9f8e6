# SPDX-License-Identifier: Apache-2.0
"""Quantize a torch model, compile it, and save it. Needs torch."""

import io

import breccia
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 32))
x = torch.randn(4, 256)
exact = model(x)

breccia.quantize_(model, breccia.NVFP4BlockScaling())
print(model)
print("relative error:", ((model(x) - exact).norm() / exact.norm()).item())

compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x), model(x))

file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
model.load_state_dict(torch.load(file, weights_only=True))

# Quantization-aware training: values are quantized, gradients pass.
w = torch.randn(32, 256, requires_grad=True)
breccia.cast_ste(w, breccia.INT4Scaling()).square().sum().backward()
print("gradient:", w.grad.norm().item())
