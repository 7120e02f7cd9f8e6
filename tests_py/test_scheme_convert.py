# SPDX-License-Identifier: Apache-2.0
"""Conversions by a scheme: which weights become what, how inputs and KV cache are said, and what is kept."""

import json

import breccia
import numpy as np
import pytest
from breccia.bridges import to_compressed_tensors
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays
from breccia.checkpoint.planning.asked import Amax
from breccia.cli import main
from breccia.moments import Moments, save_moments
from breccia.schemes import Activations, KVCache, Match, ModelScheme, Rule
from checkpoints import weight
from scheme_models import ATTENTION, EXPERTS, MODULES, OTHERS, K, N, write_model, write_moments

ROW, NVFP4 = breccia.Float8CurrentScaling(granularity="row"), breccia.NVFP4BlockScaling()
TOKEN = Activations("float8_e4m3fn", "token", "dynamic")
STATIC = Activations("float8_e4m3fn", "tensor", "static")
LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
BOTH = ["*.experts.*=nvfp4", "*=fp8-row,inputs=dynamic"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "bf16")


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    return write_moments(tmp_path_factory.mktemp("moments") / "m.safetensors")


def said(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def arrays(path):
    return dict(SafetensorsFile(path / "model.safetensors").items())


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_rules_make_a_mixed_model(to, model, tmp_path):
    report = convert(model, tmp_path / "out", to, rules=BOTH, kv="fp8")
    scheme = breccia.load_scheme(tmp_path / "out")
    for module in ATTENTION:
        rule = scheme.rule(module)
        assert (rule.weights, rule.inputs) == (ROW, TOKEN), module
    for module in EXPERTS:
        rule = scheme.rule(module)
        assert type(rule.weights) is breccia.NVFP4BlockScaling
        assert rule.inputs is None
    for module in OTHERS:
        kinds = ("Embedding",) if "embed" in module else ("Linear",)
        rule = scheme.rule(module, kinds)
        assert rule is None or rule.weights is None, module
    assert scheme.kv_cache == KVCache("float8_e4m3fn")
    notes = [note for note in report["notes"] if not note.startswith("experts in")]
    assert len(notes) == 1
    assert "programs take 1" in notes[0]
    for found in Checkpoint(tmp_path / "out").found:
        assert (found.format != "plain") == (found.name.removesuffix(".weight") in MODULES)


def test_a_file_of_a_scheme_and_the_line_before_it(model, tmp_path):
    path = tmp_path / "scheme.toml"
    path.write_text(
        'kv_cache = "none"\n[[rule]]\nmatch = "*.self_attn.*"\nweights = "mxfp8"\n'
        '[[rule]]\nmatch = "lm_head"\nweights = "fp8-row"\n'
    )
    out = tmp_path / "out"
    words = ["convert", str(model), str(out), "--to", "compressed-tensors", "--scheme", str(path), "--quiet", "--json"]
    assert main([*words, "--set", "*.q_proj=fp8,inputs=dynamic"]) == 0
    kinds = {one.name: one.recipe for one in Checkpoint(out).found if one.format != "plain"}
    assert kinds.pop("lm_head.weight") == ROW  # named by itself
    assert kinds.pop(f"{ATTENTION[0]}.weight") == breccia.Float8CurrentScaling()
    assert set(kinds) == {f"{module}.weight" for module in ATTENTION[1:]}
    assert set(kinds.values()) == {breccia.MXFP8BlockScaling()}
    scheme = ModelScheme.from_toml(path.read_text())
    again = convert(
        model, tmp_path / "again", "compressed-tensors", scheme=scheme, rules=["*.q_proj=fp8,inputs=dynamic"]
    )
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    fused = [note for note in again["notes"] if "servers fuse" in note]
    assert len(fused) == 1
    assert "model.layers.0.self_attn." in fused[0]


@pytest.mark.parametrize("when", ["static", "dynamic", "none"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-tensor", "fp8", "int8", "mxfp8", "fp8-block", "int4"])
def test_activations_of_all_layers(recipe, when, model, moments, tmp_path):
    options = {"amax": moments} if when == "static" else {}
    unable = recipe in ("mxfp8", "fp8-block") and when == "static"
    to = f"compressed-tensors:{recipe}"
    if unable:
        with pytest.raises(ValueError, match="must not be static"):
            convert(model, tmp_path / "out", to, activations=when, **options)
        return
    report = convert(model, tmp_path / "out", to, activations=when, **options)
    scheme, made = breccia.load_scheme(tmp_path / "out"), arrays(tmp_path / "out")
    changed = [note for note in report["notes"] if note.startswith("inputs of 10 layers")]
    if recipe == "fp8-block" and when == "none":
        assert changed == ["inputs of 10 layers: high precision → FP8 g128 dynamic"]
        return
    if recipe == "int4" and when == "static":
        assert changed == ["inputs of 10 layers: INT8 static → high precision"]
        return
    assert not changed
    if recipe == "int8":  # byte by byte, as servers read integers whose inputs are quantized, too
        form = "pack-quantized" if when == "none" else "int-quantized"
        assert said(tmp_path / "out")["format"] == form
        assert (
            (made[f"{MODULES[0]}.weight"].dtype == np.int8) if when != "none" else f"{MODULES[0]}.weight_packed" in made
        )
    for i, module in enumerate(MODULES):
        inputs = scheme.rule(module).inputs
        if when == "none":
            assert inputs is None
            continue
        element = {"nvfp4": "float4_e2m1fn", "int8": "int8", "int4": "int8"}.get(recipe, "float8_e4m3fn")
        assert inputs.element == element
        assert inputs.when == ("local" if recipe == "nvfp4" and when == "static" else when)
        if when == "static":
            amax = 2.0 + (MODULES.index("model.layers.0.mlp.experts.0.up_proj") if "1.up" in module else i)
            _check_scale(recipe, module, amax, made)


def _check_scale(recipe, module, amax, made):
    if recipe != "nvfp4":
        number = made[f"{module}.input_scale"]
        assert number == np.float32(amax / (127.5 if recipe == "int8" else 448)), module
        return
    number = made[f"{module}.input_global_scale"]
    if module.endswith(("o_proj", "down_proj")):
        assert number == np.float32(2688 / amax)
    else:
        assert number <= np.float32(2688 / amax)  # one number for the parts of a fused layer


def test_static_scales_need_magnitudes(model, tmp_path):
    with pytest.raises(ValueError, match=r"magnitudes.* has none, nor have 9 others"):
        convert(model, tmp_path / "out", "compressed-tensors:fp8", activations="static")
    with pytest.raises(ValueError, match="amax must be left out"):
        convert(model, tmp_path / "out", "compressed-tensors:fp8", amax="x")


def test_what_no_rule_names_is_kept(model, moments, tmp_path):
    """Of a quantized source: its bytes, its scales of inputs, its KV cache."""
    convert(model, tmp_path / "a", "modelopt", rules=["*=nvfp4,inputs=local"], amax=moments, kv="fp8")
    before = arrays(tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", "modelopt", rules=["*.self_attn.*=fp8,inputs=static"])
    after = arrays(tmp_path / "b")
    scheme = breccia.load_scheme(tmp_path / "b")
    for module in EXPERTS:
        for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            np.testing.assert_array_equal(before[f"{module}.{name}"], after[f"{module}.{name}"])
        assert scheme.rule(module).inputs == LOCAL
    for module in ATTENTION:
        assert scheme.rule(module).inputs == STATIC
        assert after[f"{module}.input_scale"] == pytest.approx(before[f"{module}.input_scale"] * 6, rel=1e-6)
    assert said(tmp_path / "b")["quant_algo"] == "MIXED_PRECISION"
    assert scheme.kv_cache == KVCache("float8_e4m3fn")
    assert report["requantized"]["tensors"] == 4
    convert(tmp_path / "b", tmp_path / "c", "modelopt", rules=["*.experts.*=none", "*.self_attn.*=kept,inputs=none"])
    scheme = breccia.load_scheme(tmp_path / "c")
    assert all(scheme.rule(module).weights is None for module in EXPERTS)
    assert not [name for name in arrays(tmp_path / "c") if name.endswith("input_scale")]
    report = convert(tmp_path / "a", tmp_path / "d", "modelopt", kv="none")
    assert breccia.load_scheme(tmp_path / "d").kv_cache is None
    assert not any("KV cache" in note for note in report["notes"])
    again = convert(tmp_path / "a", tmp_path / "e", "modelopt", scheme=breccia.load_scheme(tmp_path / "a"))
    assert (tmp_path / "e" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    assert again["requantized"] is None


@pytest.mark.parametrize(
    ("to", "rules", "kinds"),
    [
        ("gptq", ["*.o_proj=int8:128", "*.self_attn.*=int4:128"], {"int8", "int4"}),
        ("mlx", ["*.o_proj=nvfp4", "*.self_attn.*=mxfp8"], {"mxfp8", "nvfp4"}),
        ("nvfp4", ["*.self_attn.*=int8"], {"int8", "nvfp4"}),
        ("comfyui", ["*.self_attn.*=fp8", "*.experts.*=nvfp4"], {"current", "nvfp4"}),
        ("torchao", ["*.o_proj=nvfp4", "*.self_attn.*=fp8-row"], {"current", "nvfp4"}),
    ],
)
def test_other_formats_hold_mixed_models(to, rules, kinds, model, tmp_path):
    convert(model, tmp_path / "out", to, rules=rules)
    found = {one.recipe.name for one in Checkpoint(tmp_path / "out").found if one.recipe is not None}
    assert found == kinds


def test_gguf_types_by_rule(model, tmp_path):
    rules = ["*.v_proj=q6_k", "*.self_attn.*=q4_k", "*.experts.*=q8_0"]
    convert(model, tmp_path / "out.gguf", "gguf", rules=rules)
    kinds = {one.name.rpartition(".weight")[0]: one.kind for one in Checkpoint(tmp_path / "out.gguf").found}
    assert kinds["model.layers.0.self_attn.v_proj"] == "Q6_K"
    assert kinds["model.layers.0.self_attn.q_proj"] == "Q4_K"
    assert "Q8_0" in kinds["model.layers.0.mlp.experts.0.down_proj"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["*.self_attn.*"]}, "a rule must be PATTERN=RECIPE"),
        ({"rules": ["*=nvfp5"]}, "did you mean nvfp4"),
        ({"rules": ["*=nvfp4,input=local"]}, "must be inputs="),
        ({"rules": ["*=nvfp4,inputs=some"]}, "inputs must be one of"),
        ({"activations": "some"}, "activations must be one of"),
        ({"kv": "fp4"}, "kv must be one of"),
        ({"rules": ["*=q4_k"]}, "must be a recipe or a type of compressed-tensors"),
    ],
)
def test_mistakes_are_named(options, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(model, tmp_path / "out", "compressed-tensors", **options)
    assert not (tmp_path / "out").exists()


def test_a_pattern_without_a_layer_is_noted(model, tmp_path):
    report = convert(model, tmp_path / "out", "modelopt", rules=["*.self_atn.*=nvfp4", "*.experts.*=nvfp4"])
    assert "patterns of the scheme match no layer: *.self_atn.*" in report["notes"]
    with pytest.raises(ValueError, match="strict"):
        convert(model, tmp_path / "b", "modelopt", rules=["*.x=nvfp4", "*.experts.*=nvfp4"], strict=True)
    with pytest.raises(ValueError, match="must be left out where to is 'bf16'"):
        convert(model, tmp_path / "b", "bf16", rules=["*=nvfp4"])


def test_rules_may_be_values(model, tmp_path):
    rule = Rule((Match("regex", r".*\.experts\.\d+\..*"),), NVFP4, None)
    convert(model, tmp_path / "out", "modelopt", rules=[rule])
    assert {one.name.removesuffix(".weight") for one in Checkpoint(tmp_path / "out").found if one.recipe} == set(
        EXPERTS
    )


def test_gptq_says_bits_of_layers_by_name(model, tmp_path):
    """And keeps both widths of a source that has them."""
    convert(model, tmp_path / "a", "gptq", rules=["*.o_proj=int8:64", "*.self_attn.*=int4:128"])
    said_of = said(tmp_path / "a")
    o_proj = said_of["dynamic"][r"+:^model\.layers\.0\.self_attn\.o_proj$"]
    assert (said_of["bits"], said_of["group_size"], o_proj) == (4, 128, {"bits": 8, "group_size": 64})
    scheme = breccia.load_scheme(tmp_path / "a")
    assert scheme.rule(ATTENTION[3]).weights == breccia.INT8Scaling(group_size=64)
    assert scheme.rule(EXPERTS[0]).weights is None
    convert(tmp_path / "a", tmp_path / "b", "gptq")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    values = breccia.load(tmp_path / "a")[f"{ATTENTION[3]}.weight"].dequantize()
    wanted = breccia.load(model)[f"{ATTENTION[3]}.weight"]
    assert np.abs(values - wanted).max() <= np.abs(wanted).max() / 127


def test_patterns_that_leave_layers_alone_stay(model, tmp_path):
    """Those of layers in other files, too; not those of what is quantized."""
    convert(model, tmp_path / "a", "compressed-tensors", rules=["*.self_attn.*=fp8,inputs=none"])
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    more = ["re:.*vision.*", "re:.*mlp.*", "Conv2d"]
    config["quantization_config"]["ignore"] += more
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    assert set(more) <= set(said(tmp_path / "b")["ignore"])
    convert(tmp_path / "a", tmp_path / "c", "compressed-tensors", rules=["*.experts.*=fp8,inputs=none"])
    ignored = said(tmp_path / "c")["ignore"]
    assert "re:.*vision.*" in ignored
    assert "re:.*mlp.*" not in ignored


def test_strict_refuses_what_is_lost_and_no_remarks(model, tmp_path):
    report = convert(
        model, tmp_path / "a", "modelopt", rules=["*.self_attn.*=nvfp4,inputs=none"], kv="fp8", strict=True
    )
    assert len(report["notes"]) == 1
    with pytest.raises(ValueError, match=r"strict: .* inputs of 4 layers: high precision → FP8 per token dynamic"):
        convert(model, tmp_path / "b", "modelopt", rules=["*.self_attn.*=fp8-row,inputs=none"], strict=True)


QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "mlx"])
def test_scales_of_keys_and_values_of_quark(to, tmp_path):
    """Which are those of the outputs of two layers, and of no layer else."""
    source = tmp_path / "quark"
    source.mkdir()
    stored = {}
    for module in ATTENTION:
        parts = to_compressed_tensors(breccia.cast(weight(N, K), "fp8"))
        stored |= {f"{module}.{role}": array for role, array in parts.items()}
        stored[f"{module}.input_scale"] = np.float32(0.5).reshape(())
    for which, number in (("k", 0.25), ("v", 0.125)):
        stored[f"model.layers.0.self_attn.{which}_proj.output_scale"] = np.float32(number).reshape(())
    save_arrays(stored, source / "model.safetensors", {"format": "pt"})
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": QUARK, "input_tensors": QUARK, "output_tensors": None},
        "kv_cache_quant_config": {"*k_proj": {"output_tensors": QUARK}, "*v_proj": {"output_tensors": QUARK}},
    }
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quark}))
    assert breccia.load_scheme(source).kv_cache == KVCache("float8_e4m3fn")
    report = convert(source, tmp_path / "out", to)
    made = {name: float(array.reshape(())) for name, array in arrays(tmp_path / "out").items() if "output_" in name}
    assert not made
    if to == "mlx":
        assert not [name for name in arrays(tmp_path / "out") if name.endswith(("k_scale", "v_scale"))]
        assert any("KV cache" in note for note in report["notes"])
        return
    assert breccia.load_scheme(tmp_path / "out").kv_cache == KVCache("float8_e4m3fn")
    middle = {"compressed-tensors": "", "modelopt": "{}_proj."}[to]
    names = {f"model.layers.0.self_attn.{middle.format(which)}{which}_scale" for which in "kv"}
    found = {name: float(arrays(tmp_path / "out")[name].reshape(())) for name in names}
    assert sorted(found.values()) == [0.125, 0.25]
    assert breccia.load_scheme(tmp_path / "out").rule(ATTENTION[1]).inputs == STATIC


def test_transforms_stay_or_are_turned_back(model, tmp_path):
    """compressed-tensors' own words for what is done to inputs before a product."""
    convert(model, tmp_path / "a", "compressed-tensors", rules=["*.self_attn.*=fp8,inputs=none"])
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*"], "location": "input"}]}}}
    config["quantization_config"]["transform_config"] = transforms
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    report = convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    assert said(tmp_path / "b")["transform_config"] == transforms
    assert report["notes"] == []
    report = convert(tmp_path / "a", tmp_path / "c", "mlx")
    assert any(note.startswith("rotations (transform_config) are turned back in weights") for note in report["notes"])
    assert "transform_config" not in (tmp_path / "c" / "config.json").read_text()


def test_the_scheme_of_one_model_makes_another_alike(model, moments, tmp_path, capsys):
    convert(model, tmp_path / "a", "modelopt", rules=["*.self_attn.*=fp8,inputs=static", "*=nvfp4"], amax=moments)
    assert main(["inspect", str(tmp_path / "a"), "--toml"]) == 0
    (tmp_path / "scheme.toml").write_text(capsys.readouterr().out)
    assert ModelScheme.from_toml((tmp_path / "scheme.toml").read_text()) == breccia.load_scheme(tmp_path / "a")
    convert(model, tmp_path / "b", "modelopt", scheme=tmp_path / "scheme.toml", amax=moments)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert said(tmp_path / "a") == said(tmp_path / "b")


def test_outputs_stay_in_their_own_format(model, moments, tmp_path):
    """compressed-tensors' static scales of outputs, beside those of inputs."""
    convert(model, tmp_path / "a", "compressed-tensors", rules=["*.self_attn.*=int8,inputs=static"], amax=moments)
    stored = {name: np.array(array) for name, array in arrays(tmp_path / "a").items()}
    stored |= {f"{module}.output_scale": np.full(1, 0.25, np.float32) for module in ATTENTION}
    save_arrays(stored, tmp_path / "a" / "new.safetensors", {"format": "pt"})
    (tmp_path / "a" / "new.safetensors").replace(tmp_path / "a" / "model.safetensors")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["output_activations"] = dict(group["input_activations"])
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    outputs = breccia.load_scheme(tmp_path / "a").rule(ATTENTION[0]).outputs
    assert outputs == Activations("int8", "tensor", "static")
    assert convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")["notes"] == []
    assert breccia.load_scheme(tmp_path / "b").rule(ATTENTION[0]).outputs == outputs
    assert arrays(tmp_path / "a").keys() == arrays(tmp_path / "b").keys()
    assert said(tmp_path / "a") == said(tmp_path / "b")
    notes = convert(tmp_path / "a", tmp_path / "c", "int8")["notes"]
    assert any(note.startswith("outputs of 4 layers: INT8 static") for note in notes)
    assert any("(output_scale) are left out" in note for note in notes)


def test_options_are_for_the_recipes_of_rules(model, tmp_path):
    """They turn nothing on that no rule names, and reach the recipes that have them."""
    convert(model, tmp_path / "a", "compressed-tensors", rules=["*.self_attn.*=nvfp4"], scale_search="mse")
    found = {one.name: one for one in Checkpoint(tmp_path / "a").found}
    assert found[f"{ATTENTION[0]}.weight"].format == "compressed-tensors"
    assert found[f"{EXPERTS[0]}.weight"].format == "plain"
    wanted = breccia.cast(dict(SafetensorsFile(model / "model.safetensors").items())[f"{ATTENTION[0]}.weight"], "nvfp4")
    assert breccia.load(tmp_path / "a")[f"{ATTENTION[0]}.weight"].scale.tolist() != wanted.scale.tolist()
    rules = ["*.self_attn.*=int4", "*.experts.*=int8"]
    convert(model, tmp_path / "b", "compressed-tensors", rules=rules, group_size="auto")
    loaded = breccia.load(tmp_path / "b")
    assert loaded[f"{ATTENTION[0]}.weight"].recipe.group_size in (32, 64, 128)
    assert loaded[f"{EXPERTS[0]}.weight"].recipe.group_size is None


def test_what_of_a_scheme_is_not_written_is_said(model, tmp_path):
    rule = Rule((Match("all"),), breccia.Float8CurrentScaling(), None, FP8_OUT, True, 8)
    notes = convert(model, tmp_path / "out", "compressed-tensors", scheme=ModelScheme((rule,)), dry_run=True)["notes"]
    assert [name for name in ("outputs", "input_factor", "low_rank") for note in notes if note.startswith(name)] == [
        "outputs",
        "input_factor",
        "low_rank",
    ]


FP8_OUT = Activations("float8_e4m3fn", "tensor", "dynamic")


def test_amax_is_for_static_scales(model, moments, tmp_path):
    for options in ({"activations": "dynamic"}, {"kv": "fp8"}):
        with pytest.raises(ValueError, match="amax must be left out where no static scales"):
            convert(model, tmp_path / "out", "modelopt", amax=moments, **options)


def test_amax_of_experts_in_one_parameter(tmp_path):
    amax = np.array([2.0, 0.0, 3.0], np.float32)
    file = tmp_path / "m.safetensors"
    prefix = "model.layers.0.mlp.experts."
    one = Moments(np.ones((3, 8), np.float32), np.ones(3, np.int64), amax=amax)
    save_moments({f"{prefix}gate_up_proj": one}, file)
    found = Amax(file)
    assert [found.of(f"{prefix}{i}.gate_proj") for i in range(3)] == [2.0, 3.0, 3.0]
    assert found.of(f"{prefix}0.down_proj") is None


@pytest.mark.parametrize("said", ['kv_cache = ["fp8"]', "[[rule]]\nmatch = 5\nweights = 'nvfp4'"])
def test_a_file_of_another_form_is_named(said, model, tmp_path):
    (tmp_path / "s.toml").write_text(said)
    with pytest.raises(ValueError, match=r"s\.toml: "):
        convert(model, tmp_path / "out", "modelopt", scheme=tmp_path / "s.toml")
