# SPDX-License-Identifier: Apache-2.0
"""Moments at every door: what is not finite, and what fits no layer of the model, is an error."""

import json

import breccia.checkpoint
import cases
import numpy as np
import pytest
from breccia.moments import Moments, save_moments

save_file = pytest.importorskip("safetensors.numpy").save_file

NAMES = [f"model.layers.{i}.mlp.up_proj" for i in range(3)]


def model(folder):
    folder.mkdir()
    save_file({f"{n}.weight": cases.normal((64, 128), i) for i, n in enumerate(NAMES)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def moments(names, path, spoil=None):
    x = cases.normal((256, 128), 7)
    full = (x.T @ x).astype(np.float32)
    diag = np.diag(full).copy()
    if spoil is not None:
        full[3, 4] = full[4, 3] = spoil
        diag[5] = spoil
    save_moments({n: Moments(diag, np.asarray(256), full=full) for n in names}, path)
    return path


def merge(source, file, out):
    """An adapter of all layers into codes of the model, by feedback."""
    adapter = source.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    shapes = {"A": (4, 128), "B": (64, 4)}
    parts = {f"base_model.model.{n}.lora_{k}.weight": cases.normal(s, 1) for n in NAMES for k, s in shapes.items()}
    save_file(parts, adapter / "adapter_model.safetensors")
    breccia.checkpoint.convert(source, source.parent / "codes", "int4")
    return breccia.checkpoint.merge_lora(source.parent / "codes", adapter, out, rounding="feedback", moments=file)


DOORS = {
    "convert": lambda source, file, out: breccia.checkpoint.convert(source, out, "int4", moments=file, method="gptq"),
    "by importance": lambda source, file, out: breccia.checkpoint.convert(source, out, "int4", moments=file),
    "plan_bits": lambda source, file, out: breccia.checkpoint.plan_bits(source, file, 6.0, ["nvfp4", "bf16"]),
    "merge_lora": merge,
    "verify": lambda source, file, out: breccia.checkpoint.verify(source, source, moments=file),
}


@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("door", DOORS)
def test_moments_that_are_not_finite_are_refused(door, spoil, tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES, tmp_path / "moments", spoil)
    with pytest.raises(ValueError, match=r"moments .*must be finite"):
        DOORS[door](source, file, tmp_path / "out")


@pytest.mark.parametrize("door", DOORS)
def test_moments_that_fit_no_layer_are_refused(door, tmp_path):
    source, file = model(tmp_path / "m"), moments(["other.layer"], tmp_path / "moments")
    with pytest.raises(ValueError, match=r"moments must be of "):
        DOORS[door](source, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_without_moments_are_counted_first(tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES[:1], tmp_path / "moments")
    notes = DOORS["convert"](source, file, tmp_path / "out")["notes"]
    assert notes[0].startswith("2 of 3 tensors are rounded to nearest, not by GPTQ")
    notes = DOORS["merge_lora"](source, file, tmp_path / "merged")["notes"]
    assert notes[0].startswith("2 of 3 tensors are rounded by the adapter's own matrices")
    notes = breccia.checkpoint.plan_bits(source, file, 28.0, ["nvfp4", "bf16"])["notes"]
    assert notes[0].startswith("2 of 3 groups of layers get the widest format")


def test_moments_with_nan_in_full_are_refused_where_they_feed_back():
    from breccia.checkpoint.lora.feedback import OfMoments

    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="moments must be finite"):
            OfMoments(np.full((64, 64), bad, np.float32))


@pytest.mark.parametrize("name", [name for name in breccia.checkpoint.target_names() if ":" in name])
def test_plan_bits_refuses_formats_that_no_scheme_names(name, tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES, tmp_path / "moments")
    with pytest.raises(ValueError, match="formats must be recipes or float dtypes"):
        breccia.checkpoint.plan_bits(source, file, 6.0, [name, "bf16"])


@pytest.mark.parametrize(
    "target", ["nvfp4", "fp8-row", "int8", "int8_expanded", "compressed-tensors:int8", "gguf:q8_0"]
)
def test_a_reference_that_is_the_quantized_one_is_no_reference(target, tmp_path):
    """Those of 8-bit integers are nearest to what they are of."""
    source, codes = model(tmp_path / "m"), tmp_path / "q"
    breccia.checkpoint.convert(source, codes, target)
    assert breccia.checkpoint.verify(source, codes)["ok"]
    assert not breccia.checkpoint.verify(codes, source)["ok"]
    for dtype in ("bf16", "fp16", "fp32"):
        breccia.checkpoint.convert(codes, tmp_path / dtype, dtype)
        assert breccia.checkpoint.verify(codes, tmp_path / dtype)["ok"]
