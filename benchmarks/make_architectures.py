# SPDX-License-Identifier: Apache-2.0
"""Write what transformers' classes say of a model's tensors, so that a conversion knows it without transformers.

    python benchmarks/make_architectures.py            # write python/breccia/checkpoint/planning/architectures.json
    python benchmarks/make_architectures.py --check    # exit 1 where it would change

Each class is built of its own defaults on torch's meta device, which takes no memory. Of a class that its defaults do
not build, what the class itself says is written, and no towers. Modules other than linear layers are written where
their names do not tell it (breccia.checkpoint.planning.left_alone).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breccia.checkpoint.planning.left_alone import left_alone

PLACE = Path(__file__).parents[1] / "python" / "breccia" / "checkpoint" / "planning" / "architectures.json"
_MAPPINGS = (
    *("FOR_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", "FOR_MULTIMODAL_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM"),
    *("FOR_SPEECH_SEQ_2_SEQ", "FOR_MASKED_LM", "FOR_SEQUENCE_CLASSIFICATION", "FOR_TOKEN_CLASSIFICATION", ""),
)
_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def classes() -> dict[str, str]:
    """The name of each class that is installed whole, and the model type whose config it takes."""
    import transformers
    from transformers.utils.import_utils import DummyObject

    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for model_type, names in getattr(auto, f"MODEL_{mapping}_MAPPING_NAMES".replace("__", "_")).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    there = [name for name in sorted(found) if isinstance(getattr(transformers, name, None), type)]
    return {name: found[name] for name in there if not isinstance(getattr(transformers, name), DummyObject)}


def built(name: str, model_type: str) -> Any:
    """A model of a class on no device; None where its defaults do not build one, or what it needs is not there."""
    import torch
    import transformers

    kinds = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = getattr(transformers, name)
    for own in (False, True):
        try:
            config = kind.config_class if own else kinds[model_type]
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                return kind._from_config(config())
        except Exception:  # a package of others, on defaults that nobody may have tried
            continue
    return None


def _bare(name: str) -> str:
    """A module's name without numbers of layers."""
    return _NUMBER.sub("", name).strip(".")


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that have a weight of two axes or more, by their names."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name and hasattr(weight, "ndim") and weight.ndim > 1:
            yield name, module


def parts(model: Any) -> tuple[list[str], list[str], list[str], list[str]]:
    """Modules beside the language model, by the first word in which they differ from it; then by their names without
    numbers the linear layers of the language model, its other modules with matrices, and the linear layers of those
    that are beside it."""
    import torch
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    text = model.config.get_text_config(decoder=True)
    models = ((name, one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel) and name)
    own = [name for name, one in models if one.config is text]
    apart = text is not model.config and bool(own) and not model.config.is_encoder_decoder
    own = [name for name in own if not any(name.startswith(f"{other}.") for other in own)]
    heads = [name for name, one in model.named_modules() if one is model.get_output_embeddings()] if apart else []
    stem = {".".join(name.split(".")[:depth]) for name in own for depth in range(len(name.split(".")))}
    towers, linear, others, beside = set(), set(), set(), set()
    for name, module in _weights(model):
        is_linear = isinstance(module, (torch.nn.Linear, Conv1D))
        if not apart or name in heads or any(name.startswith(f"{one}.") for one in own):
            if is_linear or module.weight.ndim == 2:  # experts of a layer in one are linear, too
                (linear if is_linear else others).add(_bare(name))
            continue
        words = name.split(".")
        depth = next(n for n in range(1, len(words) + 1) if ".".join(words[:n]) not in stem)
        towers.add(words[depth - 1])
        if is_linear:
            beside.add(_bare(name))
    return sorted(towers), sorted(linear), sorted(others - linear), sorted(beside)


def said(name: str, model_type: str) -> dict[str, list[str]]:
    """What is written of a class."""
    import transformers

    model = built(name, model_type)
    source = model if model is not None else getattr(transformers, name)
    towers, _, others, _ = parts(model) if model is not None else ([], [], [], [])
    tails = {".".join(one.split(".")[-2:]) for one in others if not left_alone({}).weight(f"{one}.weight")}
    told = {
        "towers": towers,
        "float32": sorted(source._keep_in_fp32_modules_strict or ()),
        "float32, not float16": sorted(source._keep_in_fp32_modules or ()),
        "not linear": sorted(tails),
        "not built": ["towers", "not linear"] if model is None else [],
    }
    return {key: values for key, values in told.items() if values}


def text() -> str:
    """The file."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    lines = [f"  {json.dumps(name)}: {json.dumps(said(name, kind))}" for name, kind in classes().items()]
    version = json.dumps(transformers.__version__)
    return f'{{"transformers": {version}, "classes": {{\n' + ",\n".join(lines) + "\n}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    made = text()
    if parser.parse_args().check:
        return int(made != PLACE.read_text())
    PLACE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
