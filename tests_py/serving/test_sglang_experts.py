# SPDX-License-Identifier: Apache-2.0
"""Experts in breccia's own format in SGLang's own classes: its layer, that layer's loader and its dispatcher."""

import json
from typing import Any

import breccia
import pytest
from breccia import checkpoint
from serving import vllm_layers
from serving.programs import needs_files
from tiny_models import tiny

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
PREFIX = "model.layers.0.mlp.experts"
RECIPES = ["nvfp4", "mxfp4", "mxfp8", "int4", "int8", "fp8", "fp8-row", "fp8-block"]
NAMES = ("gate_proj", "up_proj", "down_proj")


def described(sglang: Any, folder: Any) -> Any:
    """SGLang's own description of a checkpoint's quantization."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    return sglang.quantization.get_quantization_config(said["quant_method"]).from_config(said)


def made(
    sglang: Any,
    config: Any,
    tensors: dict[str, Any],
    names: tuple[str, ...] = NAMES,
    rank: tuple[Any, ...] = (0, 1),
    **more: Any,
) -> Any:
    """SGLang's layer of experts on a rank, filled as its models fill it."""
    options = {"num_experts": 4, "hidden_size": 128, "intermediate_size": 256, "layer_id": 0, "top_k": 2, **more}
    with sglang.ranks(*rank):
        layer = sglang.experts(quant_config=config, prefix=PREFIX, params_dtype=torch.bfloat16, **options)
    parameters = {f"{PREFIX}.{name}": value for name, value in layer.named_parameters()}
    gate, up, down = names
    mapping = sglang.experts.make_expert_params_mapping(gate, down, up, 4)
    for name, value in tensors.items():
        for to, of, expert, shard in mapping:
            if of in name:
                key = name.replace(of, to)
                parameters[key].weight_loader(parameters[key], value, key, shard_id=shard, expert_id=expert)
                break
        else:
            raise AssertionError(name)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def stored(folder: Any) -> dict[str, Any]:
    return {k: v for k, v in vllm_layers.stored(folder).items() if k.startswith(f"{PREFIX}.")}


def source(folder: Any) -> Any:
    """A model with experts, whose layers are wide enough for two ranks and tiles of 128 rows."""
    return tiny("qwen3-moe-wide", folder)


def products(folder: Any, x: Any, ids: Any, share: Any) -> Any:
    """What the experts in the files make of each row, in float64."""
    opened = breccia.open(folder)
    weights = {
        (number, name): torch.from_numpy(breccia.dequantize(opened[f"{PREFIX}.{number}.{name}.weight"])).double()
        for number in range(4)
        for name in NAMES
    }
    wanted = torch.zeros(*x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for number, part in zip(ids[row].tolist(), share[row], strict=True):
            gate, up, down = (weights[number, name] for name in NAMES)
            one = x[row].double()
            wanted[row] += part.double() * (down @ (torch.nn.functional.silu(gate @ one) * (up @ one)))
    return wanted


def rows(sglang: Any) -> tuple[Any, Any, Any, Any]:
    """Inputs, chosen experts, their shares, and the last two as SGLang's router says them."""
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [0, 1], [2, 1], [1, 0]], dtype=torch.int32)
    share = torch.rand(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return x, ids, share, sglang.chosen(share, ids, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts(recipe: str, sglang: Any, tmp_path: Any) -> None:
    """One rank, two ranks with halves of each expert, and two with half of the experts give the same sums."""
    checkpoint.convert(source(tmp_path / "model"), tmp_path / "out", to=recipe)
    config, tensors = described(sglang, tmp_path / "out"), stored(tmp_path / "out")
    x, ids, share, router = rows(sglang)
    wanted = products(tmp_path / "out", x, ids, share)
    layer = made(sglang, config, tensors)
    got = layer.forward_impl(x, router)
    assert got.dtype == x.dtype
    assert (got.double() - wanted).norm() <= 1e-2 * wanted.norm()
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, layer.dispatcher.dispatch(x, router))[0])
    torch._dynamo.reset()
    assert compiled(x).equal(got)
    for kind in ("tp", "ep"):
        total = torch.zeros_like(wanted)
        for rank in (0, 1):
            part = made(sglang, config, tensors, rank=(rank, 2, kind))
            with sglang.ranks(rank, 2, kind):
                total += part.forward_impl(x, router).double()
        assert (total - wanted).norm() <= 2e-2 * wanted.norm(), kind


def test_experts_by_mixtrals_names(sglang: Any, tmp_path: Any) -> None:
    """Names of Mixtral, and of experts that stayed in high precision: all, and one alone."""
    checkpoint.convert(source(tmp_path / "model"), tmp_path / "out", to="mxfp4")
    config, short = described(sglang, tmp_path / "out"), ("w1", "w3", "w2")
    tensors = {
        name.replace(long, one): value
        for name, value in stored(tmp_path / "out").items()
        for long, one in zip(NAMES, short, strict=True)
        if long in name
    }
    x, ids, share, router = rows(sglang)
    wanted = products(tmp_path / "out", x, ids, share)
    got = made(sglang, config, tensors, short).forward_impl(x, router)
    assert (got.double() - wanted).norm() <= 1e-2 * wanted.norm()
    config.ignore = [f"{PREFIX}.1.w2"]
    with pytest.raises(ValueError, match=rf"fused into {PREFIX} must have one recipe, .*{PREFIX}.1.w2 has None"):
        made(sglang, config, {})
    config.ignore = [f"{PREFIX}.{i}.{name}" for i in range(4) for name in short]
    plain = sglang.experts(4, 128, 256, 0, top_k=2, quant_config=config, prefix=PREFIX)
    assert type(plain.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_experts_of_other_kinds_are_refused(sglang: Any, tmp_path: Any) -> None:
    checkpoint.convert(source(tmp_path / "model"), tmp_path / "out", to="mxfp4")
    config = described(sglang, tmp_path / "out")
    for more in ({"activation": "gelu"}, {"with_bias": True}, {"gemm1_alpha": 1.7}, {"swiglu_limit": 7.0}):
        with pytest.raises(ValueError, match=rf"experts of {PREFIX} must be gated by silu without bias or limit"):
            made(sglang, config, {}, **more)
    with pytest.raises(ValueError, match=r"must be kept one by one in the checkpoint, no tensor of one was loaded"):
        made(sglang, config, {})
    with sglang.context().override_server_args(device="cpu", load_format="dummy"):
        made(sglang, config, {})
