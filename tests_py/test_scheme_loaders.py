# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' own loader, which llm-compressor and transformers use, on what is written of ten kinds of models:
the modules that it finds quantized, how their inputs are, and the names and shapes of the tensors that it waits for."""

import breccia
import pytest
from breccia.checkpoint import Checkpoint, convert
from breccia.schemes import Activations
from scheme_models import SOURCES, write_source

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")


def empty_model(checkpoint):
    """Linear layers by the names and shapes of a checkpoint's weights, on no device."""
    root = torch.nn.Module()
    for found in checkpoint.found:
        module, _, last = found.name.rpartition(".")
        if last != "weight" or len(found.shape) != 2:
            continue
        at, *rest = [root], *module.split(".")[:-1]
        for part in rest:
            at[0] = at[0]._modules.get(part) or at[0].register_module(part, torch.nn.Module()) or at[0]._modules[part]
        kind = torch.nn.Embedding if "embed" in module else torch.nn.Linear
        sizes = found.shape if kind is torch.nn.Embedding else found.shape[::-1]
        more = {} if kind is torch.nn.Embedding else {"bias": False}
        at[0].register_module(module.rpartition(".")[2], kind(*sizes, device="meta", dtype=torch.bfloat16, **more))
    return root


@pytest.mark.parametrize("name", SOURCES)
def test_the_loader_waits_for_what_is_written(name, tmp_path):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    out = tmp_path / "out"
    convert(write_source(name, tmp_path), out, "compressed-tensors")
    checkpoint, scheme = Checkpoint(out), breccia.load_scheme(out)
    config = checkpoint.quantization  # of config.json, or of the file's header where it is made of GGUF
    model = empty_model(checkpoint)
    said = QuantizationConfig.model_validate(config)
    apply_quantization_config(model, said)
    quantized = {one.name.removesuffix(".weight") for one in checkpoint.found if one.format != "plain"}
    theirs = {name for name, one in model.named_modules() if getattr(one, "quantization_scheme", None)}
    assert theirs == {name for name in quantized if name in dict(model.named_modules())}
    if name.startswith("MXFP4"):  # all experts of a layer are one parameter and no module
        assert all("experts" in one for one in quantized)
        return
    assert theirs
    for module in theirs:
        inputs = model.get_submodule(module).quantization_scheme.input_activations
        rule = scheme.rule(module)
        assert (inputs is None) == (not isinstance(rule.inputs, Activations)), module
        if inputs is not None:
            when = {True: "dynamic", False: "static", "local": "local"}[inputs.dynamic]
            assert (when, inputs.num_bits) == (rule.inputs.when, 4 if "float4" in rule.inputs.element else 8)
    ModelCompressor(quantization_config=said).compress_model(model)
    waits = {f"{module}.{name}": value for module in theirs for name, value in parts(model.get_submodule(module))}
    stored = {name: one for name, one in checkpoint.entries.items() if name.rpartition(".")[0] in theirs}
    assert waits.keys() == stored.keys()
    for name, value in waits.items():
        assert tuple(value.shape) == tuple(stored[name].shape), name


def parts(module):
    return [*module.named_parameters(), *module.named_buffers()]
