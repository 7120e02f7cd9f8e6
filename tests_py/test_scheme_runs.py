# SPDX-License-Identifier: Apache-2.0
"""What runs a scheme: layers of `breccia.transformers` and `quantize_` multiply inputs as the scheme says, and give the
logits of compressed-tensors' own fake quantization of the same checkpoint."""

import warnings

import breccia
import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert
from breccia.schemes import Activations
from loaded_models import layers, load, run
from tiny_models import made_once, transformers

torch = pytest.importorskip("torch")
STATIC = Activations("float8_e4m3fn", "tensor", "static")
# Recipe and inputs → the form of the inputs, and how far logits may be from compressed-tensors', of their norm.
KINDS = {
    ("nvfp4", "static"): ("NVFP4 local", 2e-2),  # values halfway between two codes fall elsewhere
    ("fp8", "dynamic"): ("FP8 per token dynamic", 1e-5),
    ("fp8-tensor", "static"): ("FP8 static", 1e-5),
    ("int8", "dynamic"): ("INT8 per token dynamic", 2e-2),  # amax / 127, and compressed-tensors' amax / 127.5
    ("int8", "static"): ("INT8 static", 1e-5),
    ("fp8-block", "dynamic"): ("FP8 g128 dynamic", 1e-5),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    transformers()
    import breccia.transformers  # noqa: F401 (registers)

    return made_once(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def moments(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("moments") / "m.safetensors"
    with pytest.warns(UserWarning, match="rows"):
        breccia.calibrate(load(models("llama")), [torch.arange(3, 63)[None]], "diag").save(path)
    return path


def distance(got, wanted):
    assert not got.isnan().any()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("recipe", "when"), KINDS)
def test_logits_are_those_of_compressed_tensors(recipe, when, models, moments, tmp_path):
    pytest.importorskip("compressed_tensors")
    label, most = KINDS[recipe, when]
    options = {"moments": moments} if when == "static" else {}
    convert(models("llama"), tmp_path / "ct", f"compressed-tensors:{recipe}", activations=when, **options)
    own = {"fp8": "fp8-row", "fp8-tensor": "fp8"}.get(recipe, recipe)
    report = convert(tmp_path / "ct", tmp_path / "own", own)
    assert not [note for note in report["notes"] if "inputs" in note]
    assert report["requantized"] is None or report["requantized"]["lossless"] == report["requantized"]["tensors"]
    model = load(tmp_path / "own")
    assert len(layers(model)) == 14
    scheme = breccia.scheme(tmp_path / "own")
    for name, layer in layers(model).items():
        assert str(scheme.rule(name).inputs) == label
        assert layer.activations is not None
        assert ("input_scale" in layer._buffers) == (when == "static")
    got = run(model)
    wanted = run(load_compressed(tmp_path / "ct"))
    assert distance(got, wanted) <= most
    for layer in layers(model).values():
        layer.activations = None
    assert distance(run(model), wanted) > 2e-3  # that the inputs were quantized can be seen
    model = load(tmp_path / "own")
    model.save_pretrained(tmp_path / "saved")
    assert run(load(tmp_path / "saved")).equal(got)
    assert breccia.scheme(tmp_path / "saved").rule(next(iter(layers(model)))) == scheme.rule(next(iter(layers(model))))


def load_compressed(path):
    """transformers' own loader: inputs are quantized and dequantized by compressed-tensors. It rounds the values of
    weights to bfloat16, in whose place are the exact ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        run(model)  # which makes the weights of the codes
    torch.nn.Module.float(model)
    exact = {name: one for name, one in breccia.load(path).items() if isinstance(one, breccia.ScaledTensor)}
    assert len(exact) == 14
    for name, one in exact.items():
        weight = model.get_parameter(name)
        values = torch.from_numpy(one.dequantize())
        assert float((weight - values).norm() / values.norm()) < 1e-2
        weight.data = values
    stored = {name: one for name, one in SafetensorsFile(path / "model.safetensors").items() if "input" in name}
    for name, number in stored.items():  # rounded, too
        model.get_parameter(name).data = torch.from_numpy(np.array(number, np.float32))
    return model
