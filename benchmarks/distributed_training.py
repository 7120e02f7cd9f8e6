# SPDX-License-Identifier: Apache-2.0
"""A training step under FSDP2, FP8 against bf16, on the GPUs of one host:

    torchrun --nproc-per-node 2 benchmarks/distributed_training.py --out benchmarks/results/distributed_training.json

The model has four residual blocks, 4096 wide, whose linear layers are 4096 × 16384 and back; weights and AdamW's state
are float32, products are of bf16 or of FP8. With FP8 the gathers send FP8 too. All learn a fixed function of random
tokens, the same for each; the loss of every step is kept. Tokens a second of all ranks, from the median step of the
slowest rank. `--compile` compiles each block. Without GPUs, `--quick` runs it over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import breccia
import torch
import torch.distributed as dist
from breccia.autograd import LinearRecipes
from breccia.nn import ScaledLinear
from comparison import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS, WARM_UP = 4, 3
TILES = breccia.Float8BlockScaling(block_m=128)
ROWS = breccia.Float8BlockScaling()
RECIPES = {
    "bf16": None,
    "FP8 per tensor": LinearRecipes.fp8(),
    "FP8 128x128": LinearRecipes(ROWS, TILES, ROWS),
    "MXFP8": LinearRecipes.mxfp8(),
}


class Block(torch.nn.Module):
    def __init__(self, width: int, recipes: LinearRecipes | None) -> None:
        super().__init__()

        def linear(columns: int, rows: int) -> torch.nn.Module:
            if recipes is None:
                return torch.nn.Linear(columns, rows, bias=False)
            return ScaledLinear(columns, rows, bias=False, recipes=recipes)

        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model_of(width: int, recipes: LinearRecipes | None, device: torch.device, compiled: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = torch.nn.Sequential(*[Block(width, recipes) for _ in range(BLOCKS)])
    if recipes is not None:
        breccia.distributed.make_shardable_(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batches(width: int, tokens: int, device: torch.device) -> Any:
    """Tokens of this rank, and what to make of them: a rotation that all ranks share."""
    generator = torch.Generator(device).manual_seed(1)
    turn = torch.randn(width, width, generator=generator, device=device) / width**0.5
    generator.manual_seed(2 + dist.get_rank())
    while True:
        x = torch.randn(tokens, width, generator=generator, device=device)
        yield x.bfloat16(), torch.tanh(x @ turn).bfloat16()


def measure(name: str, width: int, tokens: int, steps: int, device: torch.device, compiled: bool) -> dict[str, Any]:
    recipes = RECIPES[name]
    model = model_of(width, recipes, device, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=device.type == "cuda")
    losses, times = [], []
    for _, (x, y) in zip(range(WARM_UP + steps), batches(width, tokens, device), strict=False):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipes is not None:
            breccia.distributed.precompute_amax_(model)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(float(spent))
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        losses.append(round(float(loss) / dist.get_world_size(), 5))
    step = statistics.median(times[WARM_UP:])
    return {
        "recipe": name,
        "compiled": compiled,
        "ms_a_step": round(step * 1e3, 2),
        "tokens_a_second": round(tokens * dist.get_world_size() / step),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run at all?")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a rank and step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    options = parser.parse_args()
    device = ranks.begin(options.quick)
    size = (256, 64, 3) if options.quick else (4096, options.tokens, options.steps)
    results: list[dict[str, Any]] = []
    for name in options.recipes:
        results.append(measure(name, *size, device, options.compile))
        results[-1]["of_bf16"] = round(results[-1]["tokens_a_second"] / results[0]["tokens_a_second"], 3)
        ranks.show(results[-1])
    ranks.end(options.out, device, results, width=size[0], blocks=BLOCKS, tokens_a_rank=size[1])


if __name__ == "__main__":
    main()
