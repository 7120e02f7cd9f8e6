# SPDX-License-Identifier: Apache-2.0
"""LoRA over layers of codes under FSDP2, over gloo: the steps of one process."""

import copy

import cases
import lora_peer
import pytest

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
peft = lora_peer.peft()
from breccia import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402


def tuned(recipe, **options):
    """Two layers of codes with adapters that do something already."""
    with pytest.MonkeyPatch.context() as patch:
        lora_peer.hide(patch)
        import breccia.peft

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.GELU(), torch.nn.Linear(384, 256))
        breccia.quantize_(model, recipe)
        made = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0", "2"], **options))
    for name, parameter in made.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return made


def learned(model):
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for name, p in named}


def steps(model, rows):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return learned(model)


def same_steps(rank, world):
    rows = torch.from_numpy(cases.normal((4 * world, 256)))
    mesh = init_device_mesh("cpu", (world,))
    for recipe, options in (("nvfp4", {}), ("int4:32", {"use_rslora": True}), ("mxfp8", {}), ("fp8", {})):
        whole = tuned(recipe, **options)
        model = copy.deepcopy(whole)
        before, expected = learned(whole), steps(whole, rows)
        distributed.make_shardable_(model)
        for layer in model.base_model.model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        codes = [p for name, p in model.named_parameters() if "base_layer" in name and "weight_data" in name]
        assert len(codes) == 2
        assert all(isinstance(p, DTensor) and 2 * p.to_local().numel() == p.numel() for p in codes)
        found = steps(model, rows.chunk(world)[rank])
        assert found.keys() == expected.keys()
        assert len(found) == 4
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=f"{recipe}: {name}")
            assert not torch.equal(value, before[name])


def test_two_ranks_take_the_steps_of_one_process():
    distributed_ranks.run(2, same_steps)
