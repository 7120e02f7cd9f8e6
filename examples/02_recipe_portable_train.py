# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer on scikit-learn's handwritten digits in fp32, FP8, MXFP8 and NVFP4.

Two tasks: "draw" predicts each pixel from those before it, as a language model its next token; "classify" names the
digit. The forward and backward products of every linear layer in the blocks run through breccia; attention, norms, the
embedding, the head and the optimizer stay in fp32. Needs torch and scikit-learn:

    python examples/02_recipe_portable_train.py --task draw --steps 400 --seeds 3
"""

import argparse
import math

import torch
from breccia.autograd import LinearRecipes
from breccia.nn import ScaledLinear
from sklearn.datasets import load_digits
from torch.nn import functional

RECIPES = {
    "fp32": None,
    "fp8-delayed": LinearRecipes.delayed(),
    "fp8-current": LinearRecipes.fp8(),
    "mxfp8": LinearRecipes.mxfp8(),
    "nvfp4": LinearRecipes.nvfp4(),
}
LEVELS = 17  # of a pixel: 0 ... 16


def make_linear(n_in, n_out, recipes):
    return torch.nn.Linear(n_in, n_out) if recipes is None else ScaledLinear(n_in, n_out, recipes=recipes)


class Block(torch.nn.Module):
    def __init__(self, width, heads, causal, recipes):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = make_linear(width, 3 * width, recipes)
        self.out = make_linear(width, width, recipes)
        self.up = make_linear(width, 4 * width, recipes)
        self.down = make_linear(4 * width, width, recipes)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """``exact_blocks`` of the blocks, the last ones, stay in fp32."""

    def __init__(self, embed, tokens, classes, causal, recipes, width=64, heads=4, layers=2, exact_blocks=0):
        super().__init__()
        self.embed = embed(width)
        self.position = torch.nn.Parameter(torch.randn(tokens, width) / math.sqrt(width))
        low = layers - exact_blocks
        self.blocks = torch.nn.Sequential(
            *(Block(width, heads, causal, recipes if i < low else None) for i in range(layers))
        )
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, classes)

    def encode(self, tokens):
        return self.norm(self.blocks(self.embed(tokens) + self.position))


class Draw(Transformer):
    """64 tokens, the pixels of an 8 × 8 image."""

    def __init__(self, recipes, **sizes):
        super().__init__(lambda width: torch.nn.Embedding(LEVELS + 1, width), 64, LEVELS, True, recipes, **sizes)

    def forward(self, images):
        before = functional.pad(images.flatten(1)[:, :-1], (1, 0), value=LEVELS)
        return self.head(self.encode(before)).flatten(0, 1)

    def targets(self, images, labels):
        return images.flatten()


class Classify(Transformer):
    """Eight tokens, the rows of an 8 × 8 image."""

    def __init__(self, recipes, **sizes):
        super().__init__(lambda width: torch.nn.Linear(8, width), 8, 10, False, recipes, **sizes)

    def forward(self, images):
        return self.head(self.encode(images / 16 - 0.5).mean(1))

    def targets(self, images, labels):
        return labels


TASKS = {"draw": Draw, "classify": Classify}


def data():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.images, dtype=torch.int64)[order], torch.tensor(digits.target)[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


def train(recipe, task="draw", steps=400, batch=32, seed=0, rate=4e-3, **sizes):
    """Losses in nats: the mean of all steps, and that of the images held out after the last one; and how many of the
    latter's targets are the likeliest."""
    torch.manual_seed(seed)
    model = TASKS[task](RECIPES[recipe], **sizes)
    train_x, train_y, test_x, test_y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    batches = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(steps):
        chosen = torch.randint(len(train_x), (batch,), generator=batches)
        x, y = train_x[chosen], train_y[chosen]
        loss = functional.cross_entropy(model(x), model.targets(x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        logits, targets = model(test_x), model.targets(test_x, test_y)
    return {
        "mean_loss": total / steps,
        "held_out_loss": functional.cross_entropy(logits, targets).item(),
        "accuracy": (logits.argmax(-1) == targets).float().mean().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="draw")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--exact-blocks", type=int, default=0, help="how many of the two blocks stay in fp32")
    parser.add_argument("--recipe", choices=RECIPES, action="append")
    arguments = parser.parse_args()
    reference = None
    for name in arguments.recipe or RECIPES:
        sizes = {"exact_blocks": arguments.exact_blocks}
        runs = [
            train(name, arguments.task, arguments.steps, arguments.batch, seed, **sizes)
            for seed in range(arguments.seeds)
        ]
        results = {key: torch.tensor([run[key] for run in runs], dtype=torch.float64) for key in runs[0]}
        reference = results if reference is None else reference
        print(f"{name:12}", *(summary(key, results[key], reference[key]) for key in results), sep="  ", flush=True)


def summary(key, values, reference):
    """The mean over seeds, and the difference to the first recipe with its standard error."""
    text = f"{key} {values.mean():.4f}"
    if values is reference or key == "accuracy":
        return text
    relative = 100 * (values - reference) / reference.mean()
    error = relative.std() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{text} ({relative.mean():+.2f} ± {error:.2f} %)"


if __name__ == "__main__":
    main()
