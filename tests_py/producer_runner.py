# SPDX-License-Identifier: Apache-2.0
"""``producer_runner.py PRODUCER MODEL OUT KIND…`` quantizes a model by its producer's own program, in a process of its
own, for ModelOpt changes classes of transformers: OUT/KIND is made for each."""

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")


def modelopt(model: Path, out: Path, kind: str) -> None:
    """ModelOpt's export of a model that it calibrated on a few tokens; "+" adds an FP8 KV cache."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # whose package asks for a GPU when imported
    import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    config: Any = getattr(mtq, kind.removesuffix("+"))
    if kind.endswith("+"):
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    mtq.quantize(loaded, config, lambda one: one(torch.arange(3, 63)[None]))
    export_hf_checkpoint(loaded, export_dir=str(out / kind))


def mlx(model: Path, out: Path, kind: str) -> None:
    """mlx-lm's conversion by one of its mixed recipes."""
    import tokenizers
    import transformers
    from mlx_lm.convert import convert

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    convert(str(model), str(out / kind), quantize=True, q_group_size=32, q_bits=4, quant_predicate=kind)


if __name__ == "__main__":
    for name in sys.argv[4:]:
        {"modelopt": modelopt, "mlx": mlx}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), name)
