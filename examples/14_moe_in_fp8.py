# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that trains in FP8 between two casts, beside the same one in bfloat16.

    python 14_moe_in_fp8.py

Both have a router and four experts, of which each row of numbers goes to two, and learn what a fixed mixture makes of
the rows. In the first the products of the experts, forward and backward, are of E4M3 codes: the input and the gradient
of the output are cast, and all else is made of codes (FP8-Flow-MoE, arXiv:2511.02302).
"""

import torch
from breccia.nn import ScaledExperts

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 4, 2, 128, 128


class BF16Experts(ScaledExperts):
    """The same parameters; products of bfloat16."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, choice = torch.where(top_k_index == expert)
            x = hidden_states[token].bfloat16()
            gate, up = (x @ gate_up.T.bfloat16()).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ down.T.bfloat16()
            out = out.index_add(0, token, y.float() * top_k_weights[token, choice, None])
        return out


class Mixture(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = experts(EXPERTS, HIDDEN, INTERMEDIATE)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(CHOICES)
        return x + self.experts(x, index, weights / weights.sum(-1, keepdim=True))


def rows(seed, count=512):
    """Rows, and what a fixed random mixture makes of them."""
    draw = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, count, HIDDEN, generator=draw)
    fixed = torch.randn(2, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7)) / HIDDEN**0.5
    wanted = torch.where(x[:, :1] > 0, torch.tanh(x @ fixed[0]), torch.tanh(x @ fixed[1]))
    return x, x + wanted + 0.2 * noise


def train(experts, steps=100):
    """The loss of each step; eight batches come in turn."""
    model = Mixture(experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x, wanted = rows(1 + step % 8)
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def saved(model, x):
    """Bytes that a forward pass of the experts keeps, besides weights and their codes, which have three axes."""
    kept = {}

    def keep(tensor):
        if tensor.ndim < 3:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights, index = model.router(x).softmax(-1).topk(CHOICES)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.experts(x, index, weights)
    return sum(kept.values())


def main():
    bf16, peer = train(BF16Experts)
    fp8, model = train(ScaledExperts)
    for step in range(0, len(fp8), 20):
        print(f"step {step:3}: loss {fp8[step]:.4f} in FP8, {bf16[step]:.4f} in bfloat16")
    ends = [sum(losses[-10:]) / 10 for losses in (fp8, bf16)]
    print(f"the last ten: {ends[0]:.4f} and {ends[1]:.4f}, {ends[0] / ends[1] - 1:+.2%}")
    x = rows(0, 2048)[0].bfloat16().float().requires_grad_()
    print(f"kept for the backward pass: {saved(model, x) / saved(peer, x):.2f} of bfloat16's bytes")


if __name__ == "__main__":
    main()
