# SPDX-License-Identifier: Apache-2.0
"""An option of a conversion that changes nothing says so in one line, or is refused."""

import numpy as np
import pytest
from breccia.checkpoint import convert, target_names
from breccia.moments import Moments, save_moments
from scheme_models import MODULES, K, write_model, write_moments

NO_PART = "no part in what is written"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in high precision, one in NVFP4 with static scales of inputs, and magnitudes."""
    folder = tmp_path_factory.mktemp("options")
    write_model(folder / "bf16")
    write_moments(folder / "m.safetensors")
    rules = {"rules": ["*=nvfp4,inputs=local"], "amax": folder / "m.safetensors"}
    convert(folder / "bf16", folder / "four", "compressed-tensors", **rules)
    return folder


def notes(folder, source, to, **options):
    report = convert(folder / source, folder / "out", to, dry_run=True, **options)
    return [note for note in report["notes"] if NO_PART in note]


def test_options_that_have_a_part_are_no_notes(folder):
    amax = folder / "m.safetensors"
    assert not notes(folder, "bf16", "modelopt", rules=["*=fp8,inputs=static"], amax=amax)
    assert not notes(folder, "bf16", "nvfp4", scale_search="mse")
    assert not notes(folder, "bf16", "nvfp4:mse")
    assert not notes(folder, "bf16", "mlx", rules=["*=int4"], group_size=64)
    assert not notes(folder, "bf16", "compressed-tensors:fp8", activations="dynamic")
    assert not notes(folder, "bf16", "modelopt", rules=["*.q_proj=nvfp4", "*=fp8"], scale_search="mse")
    assert not notes(folder, "four", "compressed-tensors:mxfp4", imatrix=None, scale_search="mse")


@pytest.mark.parametrize("to", [to for to in target_names() if not to.startswith("onnx")])
def test_a_plain_conversion_says_nothing_of_options(to, folder):
    """No recipe's own way to find scales is taken for an option."""
    for source in ("bf16", "four"):
        try:
            assert notes(folder, source, to) == []
        except ValueError as error:
            assert NO_PART not in str(error)


@pytest.mark.parametrize(
    ("source", "to", "options", "text"),
    [
        ("bf16", "modelopt", {"rules": ["*=nvfp4,inputs=none"], "amax": True}, "(--amax) have no part"),
        ("bf16", "modelopt", {"rules": ["*=fp8-row,inputs=dynamic"], "amax": True}, "(--amax) have no part"),
        ("four", "modelopt", {"activations": "static", "amax": True}, "(--amax) have no part"),
        ("bf16", "mlx:nvfp4", {"activations": "static", "amax": True}, "(--amax) have no part"),
        ("four", "compressed-tensors:nvfp4", {"scale_search": "mse"}, "scale_search mse has no part"),
        ("four", "nvfp4:mse", {}, "scale_search mse has no part"),
        ("four", "modelopt", {"rules": ["*=nvfp4:mse"]}, "scale_search mse of the rule of all has no part"),
        ("bf16", "modelopt", {"rules": ["*=none"], "scale_search": "mse"}, "scale_search mse has no part"),
        ("bf16", "modelopt", {"rules": ["*=fp8"], "group_size": 64}, "group size 64 has no part"),
        (
            "bf16",
            "modelopt",
            {"rules": ["*=fp8,inputs=none"], "activations": "dynamic"},
            "the rules say how the inputs",
        ),
        ("bf16", "modelopt", {"rules": ["*=none"], "activations": "dynamic"}, "no layer is quantized"),
        ("bf16", "modelopt", {"rules": ["*=fp8", "*.q_proj=nvfp4"]}, "the rule of *.q_proj has no part"),
        ("four", "modelopt", {"unmarked": "comfyui"}, "--unmarked comfyui has no part"),
        ("four", "modelopt", {"moments": True}, "importance has no part"),
        ("bf16", "bf16", {"imatrix": True}, "importance has no part"),
    ],
)
def test_an_option_without_effect_is_a_line(source, to, options, text, folder):
    options = {key: folder / "m.safetensors" if value is True else value for key, value in options.items()}
    said = notes(folder, source, to, **options)
    assert len(said) == 1, said
    assert text in said[0]
    with pytest.raises(ValueError, match="strict"):
        convert(folder / source, folder / "out", to, dry_run=True, strict=True, **options)


@pytest.mark.parametrize("to", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("options", [{"scale_search": "mse"}, {"group_size": 32}])
def test_floats_have_no_scales(to, options, folder):
    ((name, _),) = options.items()
    with pytest.raises(ValueError, match=f"^{name} must be left out: {to} has no {name}"):
        convert(folder / "bf16", folder / "out", to, **options)


def test_magnitudes_of_other_layers_are_named(folder):
    """Where the file has those of no layer that asks for them, nothing is written at all."""
    save_moments({"other": Moments(np.ones(K, np.float32), np.int64(1), amax=np.float32(1))}, folder / "o.safetensors")
    with pytest.raises(ValueError, match="need their largest magnitudes"):
        convert(folder / "bf16", folder / "out", "modelopt:fp8", activations="static", amax=folder / "o.safetensors")
    assert len(MODULES) == 10
