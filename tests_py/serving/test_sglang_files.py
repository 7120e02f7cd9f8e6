# SPDX-License-Identifier: Apache-2.0
"""`breccia.sglang` in SGLang's own classes: its list of formats, its parallel layers, its output layer and their weight
loaders."""

import json
from types import SimpleNamespace
from typing import Any

import breccia
import pytest
from breccia import checkpoint
from serving import vllm_layers
from serving.programs import needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
RECIPES = ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "int4", "int8", "fp8", "fp8-row", "fp8-block"]


def made(sglang: Any, folder: Any, name: str, patch: pytest.MonkeyPatch, rank: int = 0, ranks: int = 1) -> Any:
    """One of SGLang's layers on a rank, filled as its models fill it."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = sglang.quantization.get_quantization_config(said["quant_method"]).from_config(said)
    config.update_packed_modules_mapping(vllm_layers.PACKED)
    group = None if ranks == 1 else SimpleNamespace(rank_in_group=rank, world_size=ranks)
    patch.setattr(sglang.linear, "_resolve_linear_group", lambda _: group)
    patch.setattr(sglang.linear, "get_parallel", lambda: SimpleNamespace(tp_size=ranks, tp_rank=rank))
    sizes = vllm_layers
    options = {"bias": False, "quant_config": config, "prefix": sizes.BLOCK + name}
    if name.endswith("qkv_proj"):
        layer = sglang.linear.QKVParallelLinear(sizes.HIDDEN, sizes.WIDTH, sizes.HEADS, sizes.KV, **options)
    elif name.endswith("gate_up_proj"):
        layer = sglang.linear.MergedColumnParallelLinear(sizes.HIDDEN, [sizes.INTER, sizes.INTER], **options)
    else:
        inputs = sizes.HEADS * sizes.WIDTH if name.endswith("o_proj") else sizes.INTER
        layer = sglang.linear.RowParallelLinear(inputs, sizes.HIDDEN, reduce_results=False, **options)
    parameters, loaded = dict(layer.named_parameters()), 0
    for part, shard in sizes.PARTS[name].items():
        for key, value in sizes.stored(folder).items():
            if key.startswith(f"{sizes.BLOCK}{part}."):
                parameter = parameters[key.removeprefix(f"{sizes.BLOCK}{part}.")]
                parameter.weight_loader(parameter, value, *([] if shard is None else [shard]))
                loaded += 1
    assert loaded == len(parameters) * len(sizes.PARTS[name])
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", vllm_layers.PARTS)
def test_own_format(recipe: str, name: str, sglang: Any, converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers give the logits of breccia's own linear on the parts; two ranks give those of one."""
    folder = converted(recipe)
    layer, opened = made(sglang, folder, name, monkeypatch), breccia.open(folder)
    columns = layer.breccia_held.columns
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weights = [opened[f"{vllm_layers.BLOCK}{part}.weight"].to("torch") for part in vllm_layers.PARTS[name]]
    wanted = torch.cat([breccia.linear(x, one, None, x.dtype) for one in weights], -1)
    assert layer.quant_method.apply(layer, x).equal(wanted)
    if recipe == "fp8-block" and name.endswith("qkv_proj"):
        with pytest.raises(ValueError, match="must be whole blocks of 128"):
            made(sglang, folder, name, monkeypatch, 0, 2)
        return
    halves = [made(sglang, folder, name, monkeypatch, rank, 2) for rank in (0, 1)]
    if len(weights) == 1:
        half = columns // 2
        parts = [one.quant_method.apply(one, x[:, i * half : (i + 1) * half]) for i, one in enumerate(halves)]
        assert (sum(parts) - wanted).norm() <= 1e-5 * wanted.norm()
        return
    first, second = (one.quant_method.apply(one, x).split(one.logical_widths, -1) for one in halves)
    assert torch.cat([part for pair in zip(first, second, strict=True) for part in pair], -1).equal(wanted)


@pytest.mark.parametrize(("recipe", "when"), [("fp8", "static"), ("nvfp4", "static"), ("fp8-row", "dynamic")])
@pytest.mark.parametrize("name", vllm_layers.PARTS)
def test_inputs_are_those_of_the_scheme(
    recipe: str, when: str, name: str, sglang: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a static scale of each part of a fused layer."""
    source = vllm_layers.write_block(tmp_path / "model")
    moments = vllm_layers.write_moments(tmp_path / "m.safetensors") if when == "static" else None
    checkpoint.convert(source, tmp_path / "out", recipe, activations=when, amax=moments)
    layer = made(sglang, tmp_path / "out", name, monkeypatch)
    x = torch.randn(3, layer.breccia_held.columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    assert layer.quant_method.apply(layer, x).equal(vllm_layers.outputs(tmp_path / "out", name, x))


def test_what_sglang_takes_apart_stays(sglang: Any, converted: Any) -> None:
    said = json.loads((converted("nvfp4") / "config.json").read_text())["quantization_config"]
    config = sglang.quantization.get_quantization_config("breccia").from_config(said)
    prefix = f"{vllm_layers.BLOCK}self_attn.kv_b_proj"
    with pytest.raises(ValueError, match=r"kv_b_proj must stay in high precision, .* --exclude '\*.kv_b_proj.\*'"):
        sglang.linear.ColumnParallelLinear(256, 256, quant_config=config, prefix=prefix)
    config.ignore = [prefix]
    sglang.linear.ColumnParallelLinear(256, 256, quant_config=config, prefix=prefix)


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_layer(recipe: str, sglang: Any, tmp_path: Any) -> None:
    """A quantized output layer, whose rows SGLang fills up, computes with the stored values; tiles are refused."""
    source = vllm_layers.write_block(tmp_path / "model")
    checkpoint.convert(source, tmp_path / "out", to=recipe, include=["lm_head.weight"])
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = sglang.quantization.get_quantization_config(said["quant_method"]).from_config(said)
    x = torch.randn(3, vllm_layers.HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted = breccia.linear(x, breccia.open(tmp_path / "out")["lm_head.weight"].to("torch"), None, x.dtype)

    def of_rank(rank: int, ranks: int) -> Any:
        with sglang.ranks(rank, ranks):
            head = sglang.embedding.ParallelLMHead(
                vllm_layers.VOCABULARY, vllm_layers.HIDDEN, quant_config=config, prefix="lm_head", padding_size=96
            )
        parameters = dict(head.named_parameters())
        tensors = {k: v for k, v in vllm_layers.stored(tmp_path / "out").items() if k.startswith("lm_head.")}
        assert {name.removeprefix("lm_head.") for name in tensors} == set(parameters)
        for name, value in tensors.items():
            parameter = parameters[name.removeprefix("lm_head.")]
            parameter.weight_loader(parameter, value)
        head.quant_method.process_weights_after_loading(head)
        assert sglang.logits.should_apply_lm_head_quant_method(head, head.quant_method)
        return head.quant_method.apply(head, x, None)

    if recipe == "fp8-block":
        with pytest.raises(ValueError, match=r"lm_head must have scales of one row each .* --exclude 'lm_head.\*'"):
            of_rank(0, 1)
        return
    assert of_rank(0, 1)[:, : vllm_layers.VOCABULARY].equal(wanted)
    assert torch.cat([of_rank(0, 2), of_rank(1, 2)], -1)[:, : vllm_layers.VOCABULARY].equal(wanted)
