# SPDX-License-Identifier: Apache-2.0
"""Moments at every door: what is not finite, and what fits no layer of the model, is an error."""

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


DOORS = {
    "convert": lambda source, file, out: breccia.checkpoint.convert(source, out, "int4", moments=file, method="gptq"),
    "by importance": lambda source, file, out: breccia.checkpoint.convert(source, out, "int4", moments=file),
    "plan_bits": lambda source, file, out: breccia.checkpoint.plan_bits(source, file, 6.0, ["nvfp4", "bf16"]),
    "verify": lambda source, file, out: breccia.checkpoint.verify(source, source, moments=file),
}


@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("door", DOORS)
def test_moments_that_are_not_finite_are_refused(door, spoil, tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES, tmp_path / "moments", spoil)
    with pytest.raises(ValueError, match=r"moments .*must be finite"):
        DOORS[door](source, file, tmp_path / "out")


@pytest.mark.parametrize("door", ["convert", "by importance", "verify"])
def test_moments_that_fit_no_layer_are_refused(door, tmp_path):
    source, file = model(tmp_path / "m"), moments(["other.layer"], tmp_path / "moments")
    with pytest.raises(ValueError, match=r"moments must be of "):
        DOORS[door](source, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_without_moments_are_counted_first(tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES[:1], tmp_path / "moments")
    notes = DOORS["convert"](source, file, tmp_path / "out")["notes"]
    assert notes[0].startswith("2 of 3 tensors are rounded to nearest, not by GPTQ")


def test_moments_with_nan_in_full_are_refused_where_they_feed_back():
    from breccia.checkpoint.lora.feedback import OfMoments

    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="moments must be finite"):
            OfMoments(np.full((64, 64), bad, np.float32))


@pytest.mark.parametrize("name", ["gguf:q8_0", "gguf:q4_0", "gguf:q4_k", "gguf:q6_k", "gguf:q5_0"])
def test_plan_bits_refuses_types_of_other_kinds_of_file(name, tmp_path):
    source, file = model(tmp_path / "m"), moments(NAMES, tmp_path / "moments")
    with pytest.raises(ValueError, match="formats must be recipes or float dtypes"):
        breccia.checkpoint.plan_bits(source, file, 6.0, [name, "bf16"])


def test_a_reference_that_is_the_quantized_one_is_no_reference(tmp_path):
    source = model(tmp_path / "m")
    breccia.checkpoint.convert(source, tmp_path / "q", "nvfp4")
    breccia.checkpoint.convert(tmp_path / "q", tmp_path / "values", "bf16")
    assert breccia.checkpoint.verify(source, tmp_path / "q")["ok"]
    assert breccia.checkpoint.verify(tmp_path / "q", tmp_path / "values")["ok"]
    assert not breccia.checkpoint.verify(tmp_path / "q", source)["ok"]
