# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``_extra_state``: static scales of inputs in a pickle, beside weights in high precision."""

import io
import json
import pickle
import pickletools

import breccia
import numpy as np
import pytest
import te_stub
from breccia.bridges.extra_state import from_extra_state, to_extra_state
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays
from breccia.schemes import UNSAID, Activations
from checkpoints import weight

STATIC = Activations("float8_e4m3fn", "tensor", "static")
LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("proj", "fc1")]


def state(scales, seen=True):
    """As `TransformerEngineBaseModule.get_extra_state` of 2.20 makes it, by its own recipe."""
    torch = pytest.importorskip("torch")
    with te_stub.importable():
        from transformer_engine.common import recipe

        said = {
            "recipe": recipe.DelayedScaling(margin=1),
            "scale_fwd": torch.tensor(scales),
            "amax_history_fwd": torch.full((16, len(scales)), float(seen)),
            "scale_bwd": torch.ones(2),
            "amax_history_bwd": torch.zeros(16, 2),
            "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": len(scales) // 3},
        }
        return np.frombuffer(pickle.dumps(said), np.uint8)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "te"
    folder.mkdir()
    arrays = {f"{name}.weight": weight(64, 128) for name in LAYERS}
    arrays |= {f"{name}._extra_state": state([4.0 * (i + 1), 2.0, 1.0]) for i, name in enumerate(LAYERS[:3])}
    arrays[f"{LAYERS[3]}._extra_state"] = np.zeros(0, np.uint8)  # of a recipe that keeps nothing
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_state_is_read_without_what_it_names():
    assert from_extra_state(state([4.0, 2.0, 1.0])) == (0.25,)
    assert from_extra_state(state([4.0, 2.0, 1.0, 8.0, 1.0, 1.0])) == (0.25, 0.125)
    assert from_extra_state(state([4.0, 2.0, 1.0], seen=False)) == ()
    assert from_extra_state(np.zeros(0, np.uint8)) == ()


class _Harm:
    def __reduce__(self):
        return pytest.fail, ("a pickle was obeyed",)


def test_nothing_of_a_pickle_runs():
    raw = pickle.dumps({"recipe": _Harm(), "scale_fwd": _Harm()})
    with pytest.raises(ValueError, match="a state must be a pickle of TransformerEngine"):
        from_extra_state(np.frombuffer(raw, np.uint8))
    good = bytes(state([4.0, 2.0, 1.0]))
    places = [at for _, _, at in pickletools.genops(io.BytesIO(good))]
    for at in [*places, *range(600), *range(0, len(good), 97)]:
        for changed in (good[:at], good[:at] + bytes([good[at] ^ 0x5A]) + good[at + 1 :]):
            try:
                numbers = from_extra_state(np.frombuffer(changed, np.uint8))
            except ValueError:
                continue
            assert all(number > 0 for number in numbers)


def test_the_scheme_of_a_model_in_training(model):
    scheme = breccia.load_scheme(model)
    assert [scheme.rule(name).inputs if scheme.rule(name) else UNSAID for name in LAYERS] == [STATIC] * 3 + [UNSAID]
    assert {one.module: one.multiplier for one in scheme.scales} == {
        LAYERS[0]: (0.25,),
        LAYERS[1]: (0.125,),
        LAYERS[2]: (float(np.float32(1) / np.float32(12)),),
    }
    assert {one.form for one in scheme.scales} == {"divisor"}


@pytest.mark.parametrize("to", ["compressed-tensors:fp8-tensor", "modelopt:fp8", "quark:fp8-tensor"])
def test_scales_are_carried_to_fp8(to, model, tmp_path):
    report = convert(model, tmp_path / "out", to)
    stored = dict(SafetensorsFile(tmp_path / "out" / "model.safetensors").items())
    assert not [name for name in stored if "_extra_state" in name]
    for i, name in enumerate(LAYERS[:3]):
        assert float(stored[f"{name}.input_scale"].reshape(())) == pytest.approx(1 / (4 * (i + 1)), rel=1e-6)
    scheme = breccia.load_scheme(tmp_path / "out")
    assert [scheme.rule(name).inputs for name in LAYERS[:3]] == [STATIC] * 3
    assert [note for note in report["notes"] if "states of TransformerEngine (4" in note and "3 static scales" in note]
    assert not [note for note in report["notes"] if note.startswith("inputs of 3")]


@pytest.mark.parametrize("to", ["nvfp4", "mlx:mxfp8", "awq", "modelopt:nvfp4"])
def test_elsewhere_they_are_noted(to, model, tmp_path):
    report = convert(model, tmp_path / "out", to)
    assert not [name for name in Checkpoint(tmp_path / "out").entries if "_extra_state" in name]
    assert [note for note in report["notes"] if "states of TransformerEngine" in note]
    lost = [note for note in report["notes"] if note.startswith("inputs of 3 layers: FP8 static → ")]
    assert len(lost) == 1, report["notes"]
    with pytest.raises(ValueError, match="strict"):
        convert(model, tmp_path / "strict", to, strict=True)


def test_a_float_target_keeps_them(model, tmp_path):
    convert(model, tmp_path / "out", "bf16")
    before, after = (dict(SafetensorsFile(path / "model.safetensors").items()) for path in (model, tmp_path / "out"))
    for name in LAYERS:
        assert before[f"{name}._extra_state"].tobytes() == after[f"{name}._extra_state"].tobytes()


def test_a_state_is_made_of_scales():
    pytest.importorskip("torch")
    with te_stub.importable():
        made = to_extra_state(0.25, 0.5)
        said = pickle.loads(bytes(made.numpy()))  # as its set_extra_state does
    assert said["scale_fwd"].tolist() == [4.0, 2.0, 1.0]
    assert type(said["recipe"]).__name__ == "DelayedScaling"
    assert said["amax_history_fwd"][0].tolist() == [112.0, 224.0, 0.0]
    assert from_extra_state(made.numpy()) == (0.25,)
    with pytest.raises(ValueError, match="inputs must be a multiplier above 0"), te_stub.importable():
        to_extra_state(0.0, 0.5)
