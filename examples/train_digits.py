# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer on scikit-learn's handwritten digits in fp32, FP8, MXFP8 and NVFP4.

Every linear layer's forward and backward products run through breccia; attention, norms and the optimizer stay in
fp32. Needs torch and scikit-learn:

    python examples/train_digits.py --steps 300
"""

import argparse
import math

import torch
from breccia.autograd import LinearRecipes
from breccia.nn import ScaledLinear
from sklearn.datasets import load_digits

RECIPES = {
    "fp32": None,
    "fp8-delayed": LinearRecipes.delayed(),
    "fp8-current": LinearRecipes.fp8(),
    "mxfp8": LinearRecipes.mxfp8(),
    "nvfp4": LinearRecipes.nvfp4(),
}


def make_linear(n_in, n_out, recipes):
    return torch.nn.Linear(n_in, n_out) if recipes is None else ScaledLinear(n_in, n_out, recipes=recipes)


class Block(torch.nn.Module):
    def __init__(self, width, heads, recipes):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = make_linear(width, 3 * width, recipes)
        self.out = make_linear(width, width, recipes)
        self.up = make_linear(width, 4 * width, recipes)
        self.down = make_linear(4 * width, width, recipes)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Digits(torch.nn.Module):
    """Eight tokens, the rows of an 8 × 8 image."""

    def __init__(self, recipes, width=64, heads=4, layers=2):
        super().__init__()
        self.embed = torch.nn.Linear(8, width)  # eight inputs are less than a block
        self.position = torch.nn.Parameter(torch.randn(8, width) / math.sqrt(width))
        self.blocks = torch.nn.Sequential(*(Block(width, heads, recipes) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, images):
        x = self.embed(images) + self.position
        return self.head(self.norm(self.blocks(x).mean(1)))


def data():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images, dtype=torch.float32)[order] / 16 - 0.5
    y = torch.tensor(digits.target)[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


def train(name, steps=300, batch=128, seed=0):
    """Mean loss over all steps and over the last tenth of them, and loss and accuracy on held-out images."""
    torch.manual_seed(seed)
    model = Digits(RECIPES[name])
    train_x, train_y, test_x, test_y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    batches = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(train_x), (batch,), generator=batches)
        loss = torch.nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(test_x)
    tail = losses[-max(1, steps // 10) :]
    return {
        "mean_loss": sum(losses) / len(losses),
        "last_loss": sum(tail) / len(tail),
        "test_loss": torch.nn.functional.cross_entropy(logits, test_y).item(),
        "accuracy": (logits.argmax(1) == test_y).float().mean().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", choices=RECIPES, action="append")
    arguments = parser.parse_args()
    for name in arguments.recipe or RECIPES:
        result = train(name, arguments.steps)
        print(f"{name:12}", *(f"{key} {value:.4f}" for key, value in result.items()))


if __name__ == "__main__":
    main()
