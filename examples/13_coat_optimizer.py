# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose states are codes: a fourth of the memory of AdamW's moments, and the same loss.

    python 13_coat_optimizer.py

Trains one small network twice on the same rows, with the moments of AdamW in float32 and in E4M3 with dynamic range
expansion (COAT), and keeps saved activations as codes in the second run.
"""

import breccia
import torch
from breccia.optim import AdamW


def rows(seed, count=256):
    """Inputs, and what a fixed random network makes of them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 128, generator=draw)
    fixed = torch.randn(128, 32, generator=torch.Generator().manual_seed(7)) / 128**0.5
    return x, torch.tanh(x @ fixed) + 0.3 * torch.randn(count, 32, generator=draw)


def train(make, recipe=None, steps=150):
    torch.manual_seed(0)
    layers = torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 32))
    optimizer = make(model.parameters())
    for step in range(steps):
        x, wanted = rows(1 + step)
        optimizer.zero_grad()
        if recipe:
            with breccia.checkpoint_activations(recipe):
                loss = (model(x) - wanted).square().mean()
        else:
            loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
    x, wanted = rows(0, 2048)
    return (model(x) - wanted).square().mean().item(), optimizer


def stored(optimizer):
    """Bytes of moments for each parameter of 4096 numbers or more."""
    states = [state for p, state in optimizer.state.items() if p.numel() >= 4096]
    count = sum(p.numel() for p in optimizer.state if p.numel() >= 4096)
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step") / count


def main():
    exact, peer = train(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    loss, optimizer = train(lambda parameters: AdamW(parameters, lr=1e-3, states="fp8"), "fp8-row-block")
    print(f"float32 states: loss {exact:.4f}, {stored(peer):.3f} bytes a parameter")
    print(f"E4M3 states:    loss {loss:.4f}, {stored(optimizer):.3f} bytes a parameter")

    # What the exponents are for: the second moments of the run in float32, with and without them.
    v = next(state["exp_avg_sq"] for p, state in peer.state.items() if p.shape == (256, 256))
    expanded, plain = (breccia.cast(v, recipe) for recipe in ("expanded", "fp8-row-block"))
    print(f"exponents {expanded.exponents.min():.1f} to {expanded.exponents.max():.1f}; mean error of a second moment:")
    print(f"  with them    {(expanded.dequantize() / v - 1).abs().mean():.2%}")
    print(f"  without them {(plain.dequantize() / v - 1).abs().mean():.2%}")


if __name__ == "__main__":
    main()
