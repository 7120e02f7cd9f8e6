# SPDX-License-Identifier: Apache-2.0
"""`breccia.sglang` in SGLang's own classes: its list of formats, its parallel layers and their weight loaders."""

import importlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import breccia
import pytest
from serving import vllm_layers
from serving.programs import files_of, needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
NOT_COMPILED = ("zmq", "orjson", "pybase64", "starlette", "IPython", "aiohttp", "tvm_ffi", "torchvision")
NOT_COMPILED += ("sentencepiece", "sgl_kernel", "partial_json_parser", "openai")
RECIPES = ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "int4", "int8", "fp8", "fp8-row", "block"]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    """SGLang's modules on its CPU platform, after `breccia.sglang.register`."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    before = torch.get_default_dtype()
    # transformers asks for the version of torchvision: it must have looked for the package before.
    importlib.import_module("transformers.models.auto.image_processing_auto")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    with files_of(*NOT_COMPILED):
        import breccia.sglang
        from sglang.srt.layers import linear, quantization

        breccia.sglang.register()
        breccia.sglang.register()
        torch.set_default_dtype(torch.bfloat16)
        yield SimpleNamespace(linear=linear, quantization=quantization)
        torch.set_default_dtype(before)


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
    if recipe == "block" and name.endswith("qkv_proj"):
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
