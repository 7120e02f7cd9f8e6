# SPDX-License-Identifier: Apache-2.0
"""TorchTitan's own training loop with breccia's layers in its debug model, on two ranks.

    python tests_py/torchtitan_runner.py cuda     # two GPUs, over NCCL
    python tests_py/torchtitan_runner.py cpu      # gloo; what its trainer asks of torch.cuda is answered here

A model converter, as TorchTitan's configuration names them, puts `breccia.nn.ScaledLinear` in the place of the linear
layers of the blocks, whose weights FSDP2 then gathers as codes. The run is saved at its middle by TorchTitan's own
checkpoints, and resumed from there by other processes; a run without a converter stands beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import breccia
import torch
import torch.multiprocessing as mp
from breccia.autograd import LinearRecipes
from breccia.nn import ScaledLinear

ROOT = Path(__file__).parents[1]
STEPS, MIDDLE = 6, 3
RECIPES = {
    "fp8": LinearRecipes.fp8(),
    "fp8-block": LinearRecipes(
        breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128), breccia.Float8BlockScaling()
    ),
}
SENT = {"gathers": 0, "bytes": 0, "numbers": 0}


class Converter:
    """TorchTitan's protocol `ModelConverter`."""

    recipes = RECIPES["fp8"]

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        pass

    def convert(self, model: torch.nn.Module) -> None:
        for block in model.layers.values():
            for parent in list(block.modules()):
                for name, layer in list(parent.named_children()):
                    if type(layer) is torch.nn.Linear:
                        made = ScaledLinear(
                            layer.in_features, layer.out_features, layer.bias is not None, self.recipes, device="meta"
                        )
                        made.weight, made.bias = layer.weight, layer.bias
                        setattr(parent, name, made)
        breccia.distributed.make_shardable_(model)

    def post_optimizer_hook(self, model: Any) -> None:
        for part in model if isinstance(model, list) else [model]:
            breccia.distributed.precompute_amax_(part)


def count_what_travels() -> None:
    """Notes what each weight sends when it is gathered."""
    parameter = breccia.distributed.ScaledParameter
    send = parameter.fsdp_pre_all_gather

    def noted(self: Any, mesh: Any) -> Any:  # FSDP2 counts its parameters
        sent, about = send(self, mesh)
        SENT["gathers"] += 1
        SENT["bytes"] += sum(tensor.nbytes for tensor in sent)
        SENT["numbers"] += self.numel()
        return sent, about

    parameter.fsdp_pre_all_gather = noted


def answer_for_cuda() -> None:
    """Where there is no GPU, TorchTitan asks torch.cuda all the same: for a device, its name and its memory."""
    device = types.ModuleType("a stand-in for torch.cuda")
    about = types.SimpleNamespace(total_memory=1 << 34)
    device.__dict__.update(
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "a CPU",
        get_device_properties=lambda device=None: about,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
        synchronize=lambda: None,
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: device
    wait = torch.distributed.barrier

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return wait(group, async_op)

    torch.distributed.barrier = barrier


def leave_out_what_is_missing() -> None:
    """TorchTitan imports kernels of Triton and TensorBoard's writer at its beginning; these runs use neither."""
    if importlib.util.find_spec("triton") is None:
        kernels = sys.modules["torchtitan.models.moe.kernels"] = types.ModuleType("no kernels")
        kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    if importlib.util.find_spec("tensorboard") is None:
        writer = sys.modules["torch.utils.tensorboard"] = types.ModuleType("no writer")
        writer.SummaryWriter = None  # type: ignore[attr-defined]


def write_texts(folder: Path) -> None:
    """The pages of the documents, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "texts").mkdir()
    pages = [json.dumps({"text": page.read_text()}) for page in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "texts/pages.jsonl").write_text("\n".join(pages) + "\n")


def arguments(folder: Path, dump: str, converted: bool, load: int) -> list[str]:
    given = {
        "job.dump_folder": folder / dump,
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": folder / "tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": folder / "texts",
        "training.seq_len": 128,
        "training.local_batch_size": 2,
        "training.steps": STEPS,
        "lr_scheduler.warmup_steps": 2,
        "optimizer.lr": 0.001,
        "metrics.log_freq": 1,
        "checkpoint.interval": MIDDLE,
        "checkpoint.load_step": load,
        "debug.seed": 0,
    }
    words = [f"--{name}={value}" for name, value in given.items()]
    words += [
        "--checkpoint.enable",
        "--checkpoint.no-last-save-model-only",
        "--debug.deterministic",
        "--debug.deterministic-warn-only",
    ]
    return words + (["--model.converters=breccia"] if converted else [])


def train(rank: int, world: int, device: str, recipe: str, folder: str, dump: str, load: int, out: str) -> None:
    """A run of TorchTitan on one rank; the first one writes the losses of its steps to `out`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MASTER_PORT": Path(folder, "port").read_text()}
    if device == "cpu":
        torch.set_num_threads(1)
        answer_for_cuda()
    leave_out_what_is_missing()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.model_converter import register_model_converter
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    count_what_travels()
    Converter.recipes = RECIPES.get(recipe, RECIPES["fp8"])
    register_model_converter(Converter, "breccia")
    trainer = Trainer(ConfigManager().parse_args(arguments(Path(folder), dump, recipe != "floats", load)))
    for module in trainer.model_parts[0].modules():
        if device == "cpu" and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
    losses = {}
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, *rest: Any, **more: Any) -> None:
        losses[step] = float(loss)
        log(step, loss, *rest, **more)

    trainer.metrics_processor.log = noted
    trainer.train()
    layers = [type(layer).__name__ for layer in trainer.model_parts[0].modules()]
    trainer.close()
    torch.distributed.destroy_process_group()
    if rank == 0:
        told = {"losses": losses, "sent": SENT, "layers": layers.count("ScaledLinear")}
        Path(out).write_text(json.dumps(told))


def run(device: str, recipe: str, folder: Path, dump: str, load: int = -1) -> dict[str, Any]:
    """Losses by step, what was gathered, and how many layers were converted, of one run on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    out = folder / "told.json"
    mp.spawn(train, (2, device, recipe, str(folder), dump, load, str(out)), nprocs=2)
    told = json.loads(out.read_text())
    return told | {"losses": {int(step): loss for step, loss in told["losses"].items()}}


def runs(device: str, recipe: str) -> tuple[dict[str, Any], ...]:
    """A run of floats, one of codes, and the second half of that one, resumed."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        write_texts(folder)
        return (
            run(device, "floats", folder, "floats"),
            run(device, recipe, folder, "codes"),
            run(device, recipe, folder, "codes", MIDDLE),
        )


def check(floats: dict[str, Any], codes: dict[str, Any], resumed: dict[str, Any]) -> None:
    steps = range(1, STEPS + 1)
    assert list(codes["losses"]) == [*steps], codes["losses"]
    assert codes["losses"][STEPS] < codes["losses"][1], codes["losses"]
    assert (floats["layers"], codes["layers"]) == (0, 6 * 7)
    far = max(abs(codes["losses"][step] / floats["losses"][step] - 1) for step in steps)
    assert far < 0.02, (floats["losses"], codes["losses"])
    assert resumed["losses"] == {step: codes["losses"][step] for step in steps if step > MIDDLE}, resumed["losses"]
    assert floats["sent"]["gathers"] == 0 < codes["sent"]["gathers"]
    assert codes["sent"]["bytes"] < 1.02 * codes["sent"]["numbers"], codes["sent"]  # a byte a number, and scales


def main() -> None:
    device, *names = sys.argv[1:]
    for recipe in names or RECIPES:
        found = runs(device, recipe)
        for name, told in zip(("floats", "codes", "resumed"), found, strict=True):
            print("TITAN", recipe, name, json.dumps(told), flush=True)
        check(*found)
        print("TITAN", recipe, "passed on", device, flush=True)


if __name__ == "__main__":
    main()
