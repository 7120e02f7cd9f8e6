# SPDX-License-Identifier: Apache-2.0
"""``producer_runner.py PRODUCER MODEL OUT KIND…`` quantizes a model by its producer's own program, in a process of its
own, for ModelOpt changes classes of transformers: OUT/KIND is made for each, and OUT/KIND.values.safetensors with what
the producer itself decodes, where its program does. Of a kind that it cannot make OUT/KIND.error has the message."""

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

warnings.simplefilter("ignore")


def tokens(count: int, length: int = 64) -> list[Any]:
    """Texts to calibrate on."""
    import torch

    return [(torch.arange(length)[None] * 7 + text) % 256 for text in range(count)]


def tokenizer(model: Path) -> Any:
    """Of two words, saved beside the model, which some programs ask for."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b")
    made.save_pretrained(model)
    return made


def opened(model: Path, **options: Any) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options)


def keep(values: dict[str, Any], place: Path) -> None:
    """The producer's own values, by names of weights."""
    from safetensors.torch import save_file

    save_file({f"{name}.weight": one.detach().float().contiguous() for name, one in values.items()}, place)


def modelopt(model: Path, place: Path, kind: str) -> None:
    """ModelOpt's export of a model that it calibrated on a few tokens; "+" adds an FP8 KV cache."""
    import modelopt.torch.export.unified_export_hf as exporter
    import modelopt.torch.quantization as mtq

    config: Any = getattr(mtq, kind.removesuffix("+"))
    if kind.endswith("+"):
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    loaded = opened(model)
    mtq.quantize(loaded, config, lambda one: one(tokens(1)[0]))
    names, values, pack = {one: name for name, one in loaded.named_modules()}, {}, exporter._export_quantized_weight

    def kept(module: Any, *rest: Any) -> None:
        pack(module, *rest)
        values[names[module]] = decoded_by_modelopt(module)

    with patch.object(exporter, "_export_quantized_weight", kept):
        exporter.export_hf_checkpoint(loaded, export_dir=str(place))
    keep(values, values_at(place))


def decoded_by_modelopt(module: Any) -> Any:
    """What ModelOpt's own tensors decode of a layer that it has packed for its export."""
    import torch
    from modelopt.torch.quantization import qtensor

    weight, scale = module.weight.data, module.weight_scale
    quantizer = getattr(module.weight_quantizer, "block_sizes", None) or {}
    blocks = {dim: size for dim, size in quantizer.items() if isinstance(dim, int)}
    if weight.dtype == torch.float8_e4m3fn:
        sizes = [-(-weight.shape[dim] // blocks[dim]) for dim in (-2, -1)] if blocks else [*scale.shape, 1]
        scale = scale.reshape(sizes) if blocks or scale.ndim else scale
        return qtensor.FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale, block_sizes=blocks)
    if scale.dtype == torch.float8_e4m3fn:
        made = qtensor.NVFP4QTensor((len(weight), weight.shape[1] * 2), torch.float32, weight)
        return made.dequantize(scale=scale, double_scale=module.weight_scale_2, block_sizes=blocks)
    # The export has two outputs in a byte, signed; the tensor two inputs, beside an offset of 8, and it divides.
    codes = torch.stack((weight & 15, weight >> 4), 1).flatten(0, 1) ^ 8
    made = qtensor.INT4QTensor(codes.shape, torch.float32, codes[:, ::2] << 4 | codes[:, 1::2])
    return made.dequantize(scale=1 / scale.double(), block_sizes=blocks)


def mlx(model: Path, place: Path, kind: str) -> None:
    """mlx-lm's conversion: one of its mixed recipes, or "MODE-BITS-GROUP"."""
    import mlx.core as mx
    import torch
    from mlx_lm.convert import convert
    from mlx_lm.utils import load_model

    tokenizer(model)
    if kind.startswith("mixed"):
        convert(str(model), str(place), quantize=True, q_group_size=32, q_bits=4, quant_predicate=kind)
    else:
        mode, bits, group = kind.split("-")
        convert(str(model), str(place), quantize=True, q_group_size=int(group), q_bits=int(bits), q_mode=mode)
    values = {}
    for name, layer in load_model(place)[0].named_modules():
        if hasattr(layer, "scales"):
            options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            made = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **options)
            values[name] = torch.tensor(made.astype(mx.float32).tolist())
    keep(values, values_at(place))


def llmcompressor(model: Path, place: Path, kind: str) -> None:
    """A scheme of compressed-tensors, by a method before it: "gptq W4A16"; "KV" after it quantizes the cache, too."""
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import QuIPModifier, SmoothQuantModifier, SpinQuantModifier

    *methods, scheme = kind.removesuffix(" KV").split()
    before: dict[str, Callable[[], Any]] = {
        "smooth": lambda: SmoothQuantModifier(smoothing_strength=0.8),
        "spin": lambda: SpinQuantModifier(rotations=["R1", "R2"], transform_type="hadamard"),
        "quip": lambda: QuIPModifier(targets="Linear", transform_type="hadamard", ignore=["lm_head"]),
    }
    options: dict[str, Any] = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
    if kind.endswith(" KV"):
        number = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        options["kv_cache_scheme"] = number
    if scheme == "mixed":
        fp8, nvfp4 = (PRESET_SCHEMES[name] for name in ("FP8_DYNAMIC", "NVFP4A16"))
        of_layers = {"a": {"targets": ["re:.*self_attn.*_proj"], **fp8}, "b": {"targets": ["re:.*mlp.*_proj"], **nvfp4}}
        options = {"config_groups": of_layers, "ignore": ["lm_head"]}
    order = {"actorder": "weight"} if "ordered" in methods else {}
    last = GPTQModifier(**options, **order) if "gptq" in methods else QuantizationModifier(**options)
    recipe = [*(before[name]() for name in methods if name in before), last]
    texts = [one[0].tolist() for one in tokens(8)]
    data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * 64] * 8})
    loaded = opened(model)
    oneshot(
        model=loaded,
        tokenizer=tokenizer(model),
        dataset=data,
        recipe=recipe,
        num_calibration_samples=8,
        max_seq_length=64,
    )
    loaded.save_pretrained(place, save_compressed=True)


def torchao(model: Path, place: Path, kind: str) -> None:
    """A config of torchao's, which transformers applies and saves."""
    import torchao.prototype.mx_formats as mx
    import torchao.quantization as ao
    import transformers

    name, *group = kind.split("-")
    made = getattr(ao, name, None) or getattr(mx, name)
    config = transformers.TorchAoConfig(made(group_size=int(group[0])) if group else made())
    loaded = opened(model, quantization_config=config)
    own = {n: one.weight for n, one in loaded.named_modules() if type(getattr(one, "weight", None)).__name__ in TORCHAO}
    keep({name: one.dequantize() for name, one in own.items()}, values_at(place))
    loaded.save_pretrained(place)


TORCHAO = ("Float8Tensor", "Int8Tensor", "Int4Tensor", "IntxUnpackedToInt8Tensor", "MXTensor", "NVFP4Tensor")


def values_at(place: Path) -> Path:
    return place.with_name(f"{place.name}.values.safetensors")


def main(producer: str, model: Path, out: Path, kinds: list[str]) -> None:
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # whose package asks for a GPU when imported
    for kind in kinds:
        try:
            globals()[producer](model, out / kind, kind)
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr)
            (out / f"{kind}.error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
