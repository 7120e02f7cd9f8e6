# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a Llama's block as vLLM makes and fills them: fused, by its own description of a checkpoint."""

import json
from pathlib import Path
from typing import Any, get_args

import breccia
import numpy as np
import pytest
from breccia.moments import Moments, save_moments
from breccia.schemes.inputs import Layers

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

HIDDEN, INTER, HEADS, KV, WIDTH = 256, 512, 8, 4, 32
VOCABULARY = 64
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# vLLM's layer → its parts in the checkpoint, with the shard that its loader is told
PARTS: dict[str, dict[str, Any]] = {
    "self_attn.qkv_proj": {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"},
    "self_attn.o_proj": {"self_attn.o_proj": None},
    "mlp.gate_up_proj": {"mlp.gate_proj": 0, "mlp.up_proj": 1},
    "mlp.down_proj": {"mlp.down_proj": None},
}
BLOCK = "model.layers.0."


def write_block(folder: Path) -> Path:
    """A checkpoint of one block's linear layers, random."""
    rows = {"q_proj": HEADS * WIDTH, "k_proj": KV * WIDTH, "v_proj": KV * WIDTH, "o_proj": HIDDEN}
    rows |= {"gate_proj": INTER, "up_proj": INTER, "down_proj": HIDDEN}
    columns = {"o_proj": HEADS * WIDTH, "down_proj": INTER}
    made = torch.Generator().manual_seed(0)
    tensors = {}
    for part in (part for parts in PARTS.values() for part in parts):
        last = part.rpartition(".")[2]
        values = torch.randn(rows[last], columns.get(last, HIDDEN), generator=made) * 0.05
        tensors[f"{BLOCK}{part}.weight"] = values.bfloat16()
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=made).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    said |= {"intermediate_size": INTER, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": WIDTH}
    (folder / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}))
    return folder


def quantization(folder: Any) -> Any:
    """vLLM's own description of a checkpoint's quantization, chosen as it chooses."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        QuantizationMethods,
        get_quantization_config,
    )

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    # Methods of others are asked first, as `ModelConfig` does.
    order = sorted(QUANTIZATION_METHODS, key=lambda name: name in get_args(QuantizationMethods))
    methods = {name: get_quantization_config(name) for name in order}
    claimed = [method.override_quantization_method(said, None, None) for method in methods.values()]
    name = next((one for one in claimed if one is not None), said["quant_method"])
    made = methods[name].from_config(said)
    made.packed_modules_mapping = PACKED
    return made


def make(name: str, quantization: Any, **options: Any) -> Any:
    """One of vLLM's parallel layers."""
    from vllm.model_executor.layers import linear

    said = {"bias": False, "quant_config": quantization, "prefix": BLOCK + name, "return_bias": False, **options}
    if name.endswith("qkv_proj"):
        return linear.QKVParallelLinear(HIDDEN, WIDTH, HEADS, KV, **said)
    if name.endswith("gate_up_proj"):
        return linear.MergedColumnParallelLinear(HIDDEN, [INTER, INTER], **said)
    inputs = HEADS * WIDTH if name.endswith("o_proj") else INTER
    return linear.RowParallelLinear(inputs, HIDDEN, reduce_results=False, input_is_parallel=True, **said)


def fill(layer: Any, name: str, tensors: dict[str, Any], mapper: Any = None) -> int:
    """Load a layer's tensors as vLLM's models do, by each parameter's own loader; then what vLLM does after loading.

    Returns:
        How many tensors there were.
    """
    parameters, count = dict(layer.named_parameters()), 0
    for part, shard in PARTS[name].items():
        mine = {key: value for key, value in tensors.items() if key.startswith(f"{BLOCK}{part}.")}
        for key, value in mine.items() if mapper is None else mapper.apply(mine.items()):
            parameter = parameters[key.removeprefix(f"{BLOCK}{part}.")]
            parameter.weight_loader(parameter, value, *([] if shard is None else [shard]))
            count += 1
    layer.quant_method.process_weights_after_loading(layer)
    layer.update_param_tp_status()
    return count


def stored(folder: Path) -> dict[str, Any]:
    """A checkpoint's tensors as they are stored."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def values(folder: Path, name: str) -> Any:
    """What the weight of a layer of vLLM's stands for, by breccia's own reader."""
    opened = breccia.open(folder)
    found = [breccia.dequantize(opened[f"{BLOCK}{part}.weight"]) for part in PARTS[name]]
    return torch.from_numpy(np.concatenate(found)).double()


def write_moments(path: Path) -> Path:
    """Largest magnitudes of the inputs of a block's layers, another one for each."""
    made = {}
    for i, part in enumerate(part for parts in PARTS.values() for part in parts):
        made[f"{BLOCK}{part}"] = Moments(np.ones(HIDDEN, np.float32), np.int64(1), amax=np.float32(2 + i / 4))
    save_moments(made, path)
    return path


def outputs(folder: Path, name: str, x: Any) -> Any:
    """What the parts of a layer make of an input, as the checkpoint's scheme says its inputs."""
    opened, layers = breccia.open(folder), Layers(breccia.load_scheme(folder))
    made = []
    for part in PARTS[name]:
        recipe, scale = layers.inputs(BLOCK + part, layers.scheme.rule(BLOCK + part).inputs)
        number = None if scale is None else torch.tensor(scale, dtype=torch.float32)
        weight = opened[f"{BLOCK}{part}.weight"].to("torch")
        made.append(breccia.nn.QuantizedLinear(weight, None, recipe, input_scale=number)(x))
    return torch.cat(made, -1)
