# SPDX-License-Identifier: Apache-2.0
"""Schemes: what formats say of activations, KV caches and layers left alone, read, compared and carried on."""

import dataclasses
import json
import re
import struct
import time

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, verify
from breccia.schemes import UNSAID, Activations, KVCache, Match, ModelScheme, Rule, differences, folded
from breccia.schemes.dialects import Said, methods, scheme_of

FP8_STATIC = Activations("float8_e4m3fn", "tensor", "static")
FP8_TILE = Activations("float8_e4m3fn", "group", "dynamic", 128)
FP8_TOKEN = Activations("float8_e4m3fn", "token", "dynamic")
FP8_CACHE = KVCache("float8_e4m3fn")
NVFP4_LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
LAYERS = ["q_proj", "k_proj", "v_proj"]
MODULES = [f"model.layers.0.self_attn.{name}" for name in LAYERS] + ["model.layers.0.mlp.down_proj"]
N = 64
PART = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
NVFP4 = PART | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}


def read(quantization, **config):
    return scheme_of(Said(quantization, config, {}, {}, None))


def compressed(weights, inputs, cache=None, ignore=("lm_head",), targets=("Linear",), form="float-quantized"):
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "kv_cache_scheme": cache}
    return said | {"config_groups": {"group_0": group}}


def checkpoint(folder, tensors, quantization):
    """A model of a few layers: name → (dtype, array)."""
    folder.mkdir()
    header, blobs, at = {}, [], 0
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(np.shape(array)), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        blobs.append(raw)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return folder


def numbers(*shape, value):
    return "F32", np.full(shape, value, np.float32)


def nvfp4(rng, inputs, cache=False):
    tensors = {}
    for i, module in enumerate(MODULES):
        tensors[f"{module}.weight_packed"] = "U8", rng.integers(0, 256, (N, N // 2), np.uint8)
        tensors[f"{module}.weight_scale"] = "F8_E4M3", rng.integers(40, 90, (N, N // 16), np.uint8)
        tensors[f"{module}.weight_global_scale"] = numbers(1, value=1000)
        if inputs:
            tensors[f"{module}.input_global_scale"] = numbers(1, value=500 + i)
    for which in "kv" if cache else "":
        tensors[f"model.layers.0.self_attn.{which}_scale"] = numbers(1, value=0.05)
    return tensors


def fp8(rng, per_row, inputs=False):
    tensors = {}
    for module in MODULES:
        tensors[f"{module}.weight"] = "F8_E4M3", rng.integers(0, 120, (N, N), np.uint8)
        tensors[f"{module}.weight_scale"] = numbers(*((N, 1) if per_row else (1,)), value=0.01)
        if inputs:
            tensors[f"{module}.input_scale"] = numbers(1, value=0.02)
    return tensors


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_compressed_tensors_names_beat_expressions_and_these_beat_classes():
    said = compressed(PART, None)
    down = ["re:model.*down_proj", "model.layers.0.mlp.down_proj"]
    said["config_groups"]["more"] = {"targets": down, "weights": None}
    said["config_groups"]["block"] = {
        "targets": ["re:.*up_proj"],
        "weights": PART | {"strategy": "block", "block_structure": [128, 128]},
        "input_activations": PART | {"strategy": "group", "group_size": 128, "dynamic": True},
    }
    scheme = read(said)
    assert scheme.rule("model.layers.0.mlp.down_proj").weights is None
    assert scheme.rule("model.layers.7.mlp.up_proj").weights == breccia.Float8BlockScaling(block_m=128)
    assert scheme.rule("model.layers.7.mlp.up_proj").inputs == Activations("float8_e4m3fn", "group", "dynamic", 128)
    assert scheme.rule("model.layers.0.self_attn.q_proj").weights == breccia.Float8CurrentScaling()
    assert scheme.rule("lm_head").weights is None
    assert scheme.rule("model.embed_tokens", ("Embedding",)) is None


@pytest.mark.parametrize(
    ("said", "weights", "inputs", "cache"),
    [
        ({"quant_algo": "FP8"}, breccia.Float8CurrentScaling(), FP8_STATIC, None),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, breccia.Float8CurrentScaling(granularity="row"), FP8_TOKEN, None),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, breccia.NVFP4BlockScaling(), NVFP4_LOCAL, FP8_CACHE),
        ({"quant_algo": "W4A16_NVFP4"}, breccia.NVFP4BlockScaling(), None, None),
        ({"quant_algo": "fp8_pb_wo"}, breccia.Float8BlockScaling(block_m=128), FP8_TILE, None),
        (
            {"quant_algo": "W4A16_AWQ", "kv_cache_scheme": "NVFP4"},
            breccia.INT4Scaling(),
            None,
            KVCache("float4_e2m1fn", "group", "local", 16),
        ),
    ],
)
def test_modelopt(said, weights, inputs, cache):
    scheme = read({"quant_method": "modelopt", "exclude_modules": ["lm_head", "model.layers.0.*"], **said})
    rule = scheme.rule("model.layers.1.mlp.up_proj")
    assert (rule.weights, rule.inputs, scheme.kv_cache) == (weights, inputs, cache)
    assert scheme.rule("model.layers.0.mlp.up_proj").weights is None
    assert scheme.rule("model.layers.01.mlp.up_proj").weights == weights


def test_modelopt_mixed_is_by_full_names():
    layers = {"a.q_proj": {"quant_algo": "FP8"}, "a.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16}}
    scheme = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert scheme.rule("a.q_proj").inputs == FP8_STATIC
    assert scheme.rule("a.experts.0.w1").inputs == NVFP4_LOCAL
    assert scheme.rule("a.k_proj") is None


def test_fp8_scale_fmt_is_of_activations_too():
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    assert read(said).rule("a").inputs == FP8_TILE
    scheme = read(said | {"scale_fmt": "ue8m0"})
    assert scheme.rule("a").inputs.scale == "float8_e8m0fnu"
    assert scheme.rule("model.layers.0.mlp.gate").weights is None
    assert scheme.rule("model.layers.0.mlp.gate_proj").weights is not None
    assert read({"quant_method": "fp8", "activation_scheme": "static"}).rule("a").inputs == FP8_STATIC
    bounded = read({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}).rule("a").inputs
    assert bounded == Activations("float8_e4m3fn", "token", "dynamic", bound=1200.0)


def test_formats_of_integers():
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    scheme = read(gptq | {"dynamic": {r"+:.*\.v_proj": {"bits": 8}, r"-:.*\.down_proj": {}}})
    assert scheme.rule("l.v_proj").weights == breccia.INT8Scaling(group_size=128)
    assert scheme.rule("l.down_proj").weights is None
    assert scheme.rule("l.q_proj").weights == breccia.INT4Scaling()
    assert scheme.rule("l.q_proj").inputs is None
    left = {"modules_to_not_convert": ["gate"]}
    awq = read({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, **left})
    assert awq.rule("l.mlp.gate.x").weights is None
    assert awq.rule("l.q_proj").weights == breccia.INT4Scaling(64, signed=False, symmetric=False)
    told = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    auto = read(told | {"act_bits": 8, "extra_config": {"lm_head": {"bits": 16}, r".*\.v_proj$": {"bits": 8}}})
    assert auto.rule("lm_head").weights is None
    assert auto.rule("l.v_proj").weights == breccia.INT8Scaling(group_size=32)
    assert auto.rule("l.q_proj").inputs == Activations("int8", "token", "dynamic")
    assert read({"quant_method": "bitsandbytes", "load_in_8bit": True}).rule("a").inputs.element == "int8"
    assert read({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}).rule("a").weights == "NF4"


def test_quark_layer_then_class_then_all():
    part = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    blocks = [part, {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": True}]
    said = {
        "quant_method": "quark",
        "global_quant_config": {"weight": part, "input_tensors": part, "output_tensors": None},
        "layer_quant_config": {"*.experts.*": {"weight": blocks, "input_tensors": blocks}},
        "exclude": ["lm_head", "re:.*gate$"],
        "kv_cache_quant_config": {"*k_proj": {"output_tensors": part}},
    }
    scheme = read(said)
    assert scheme.rule("a.q_proj").inputs == FP8_STATIC
    assert scheme.rule("a.experts.3.w1").inputs == NVFP4_LOCAL
    assert scheme.rule("a.mlp.gate") == scheme.rule("lm_head")
    assert scheme.kv_cache == FP8_CACHE


def test_what_says_nothing_is_not_high_precision():
    weights = {"model.layers.0.mlp.experts": breccia.MXFP4BlockScaling()}
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    scheme = scheme_of(Said(said, {}, weights, {}, None))
    assert scheme.rule("model.layers.0.mlp.experts").inputs is UNSAID
    assert scheme.kv_cache is UNSAID
    assert differences(scheme, ModelScheme((Rule((Match("all"),), None, None),), None), weights) == []


EXAMPLES = [
    compressed(NVFP4, NVFP4 | {"dynamic": "local"}, PART),
    {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD", "lora_rank": 32, "kv_cache_quant_algo": "NVFP4_AFFINE"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    {"quant_method": "gptq", "bits": 3, "group_size": -1, "dynamic": {"-:a.*": {}}},
]


@pytest.mark.parametrize("said", EXAMPLES, ids=[said["quant_method"] for said in EXAMPLES])
def test_json_both_ways(said):
    scheme = read(said)
    again = ModelScheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert again == scheme
    assert hash(again) == hash(scheme)
    assert again.raw == scheme.raw
    assert repr(scheme).startswith("ModelScheme(")
    assert all(len(line) < 120 for line in folded(scheme, ["lm_head", "model.layers.0.self_attn.q_proj"]))


@pytest.mark.parametrize("wrong", [None, {}, {"version": 2}, {"version": 1}, {"version": 1, "rules": [{}]}])
def test_from_dict_refuses_what_is_no_scheme(wrong):
    with pytest.raises(ValueError, match="a scheme must"):
        ModelScheme.from_dict(wrong)


@pytest.mark.parametrize("kind", [Activations, KVCache])
@pytest.mark.parametrize("value", [{}, {"a": 1}, [], ["int8"]])
def test_no_field_is_an_object_or_a_list(kind, value):
    """JSON may have one anywhere; parts of schemes are keys."""
    said = {"element": "int8", "per": "token", "when": "dynamic"}
    hash(kind(**said))
    for field in dataclasses.fields(kind):
        with pytest.raises(ValueError, match=f"{field.name} must be a word or a number, got "):
            kind(**{**said, field.name: value})


FIELDS = ["ignore", "config_groups", "quantized_layers", "weight_block_size", "dynamic", "exclude", "recipe", "bits"]
FIELDS += ["layer_quant_config", "extra_config", "modules_to_not_convert", "activation_scale_ub", "kv_cache_scheme"]
WRONG = [7, "x", [1], {"a": 1}, {"(a+)+": {"weights": 3}}, ["re:(a+)+b"]]


@pytest.mark.parametrize("method", methods())
def test_a_field_of_another_form_is_one_sentence_or_nothing(method):
    for field in FIELDS:
        for value in WRONG:
            try:
                read({"quant_method": method, "bits": 4, "quant_algo": "MIXED_PRECISION", field: value})
            except ValueError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 400


WAYS = {"regex": re.fullmatch, "regex-start": re.match, "regex-search": re.search}


@pytest.mark.parametrize("kind", WAYS)
def test_expressions_match_what_python_matches(kind):
    """In names of layers, by patterns of one repetition to many, of those that calibrators write among them."""
    patterns = [
        r".*lm_head",
        r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj$",
        r"^(?!.*mlp).*q_proj.*$",
        "mlp.gate",
    ]
    patterns += [
        r".*\.(1|2[0-9])\..*gate.*",
        r"(\w+\.)+q_proj",
        r".*?layers.*?\d+.*?proj",
        r"(a|b)_proj",
        "",
        ".*l.*l.*o.*j",
    ]
    names = [
        "lm_head",
        "model.layers.21.mlp.gate",
        "model.layers.2.self_attn.q_proj",
        "model.layers.3.mlp.experts.11.up_proj",
    ]
    names += ["a_proj", "a_proj_more", "model.layers.21.mlp.gate_proj", ""]
    for pattern in patterns:
        for name in names:
            assert Match(kind, pattern).matches(name) == (WAYS[kind](pattern, name) is not None), (pattern, name)


ENDLESS = [".*a" * 20 + "x", "(a|a)*b", "(a+)+b", "(.*)*x", "(a?){40}x", "((a*)*)*", "a*" * 30 + "b", "(?=a)(.*a){3}x"]


@pytest.mark.parametrize("pattern", [*ENDLESS, "(?=a).*a.*a.*a.*x"])
def test_expressions_of_strangers_end(pattern):
    begin = time.process_time()
    try:
        for kind in WAYS:
            assert Match(kind, pattern).matches("a" * 2000) in (False, True)
    except ValueError as error:
        assert "pattern must " in str(error)
    assert time.process_time() - begin < 2


def test_expressions_that_are_none_are_refused():
    with pytest.raises(ValueError, match="regular expression"):
        Match("regex", r"(")
    assert Match("regex-start", r"(a|b)_proj").matches("a_proj_more")
    assert not Match("regex", r"(a|b)_proj").matches("a_proj_more")


def kept(path, name="quantization_config"):
    return json.loads((path / "config.json").read_text())[name]


def test_compressed_tensors_to_itself_keeps_inputs_and_cache(tmp_path, rng):
    said = compressed(NVFP4, NVFP4 | {"dynamic": "local"}, PART, form="nvfp4-pack-quantized")
    source = checkpoint(tmp_path / "in", nvfp4(rng, inputs=True, cache=True), said)
    report = convert(source, tmp_path / "out", "compressed-tensors")
    assert differences(breccia.load_scheme(source), breccia.load_scheme(tmp_path / "out"), MODULES) == []
    assert not [note for note in report["notes"] if "→" in note]
    assert "made one number" in " ".join(report["notes"])
    group = next(iter(kept(tmp_path / "out")["config_groups"].values()))
    assert group["input_activations"]["dynamic"] == "local"
    by_module = {(one.module, one.of): one for one in breccia.load_scheme(tmp_path / "out").scales}
    for module in MODULES[:3]:  # parts of one layer of a server, which takes the largest of what is stored
        assert by_module[module, "input"].multiplier == (np.float32(1) / np.float32(500),)
    assert by_module[MODULES[3], "input"].multiplier == (np.float32(1) / np.float32(503),)
    assert by_module["model.layers.0.self_attn", "k"].multiplier == (np.float32(0.05),)


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
def test_nvfp4_inputs_survive_both_ways(tmp_path, rng, target):
    said = compressed(NVFP4, NVFP4 | {"dynamic": "local"}, form="nvfp4-pack-quantized")
    source = checkpoint(tmp_path / "in", nvfp4(rng, inputs=True), said)
    convert(source, tmp_path / "out", target)
    convert(tmp_path / "out", tmp_path / "back", "compressed-tensors")
    for path in (tmp_path / "out", tmp_path / "back"):
        assert breccia.load_scheme(path).rule(MODULES[0]).inputs == NVFP4_LOCAL
        assert breccia.load_scheme(path).rule("lm_head").weights is None


def test_inputs_by_token_survive(tmp_path, rng):
    said = compressed(PART | {"strategy": "channel"}, PART | {"strategy": "token", "dynamic": True})
    source = checkpoint(tmp_path / "in", fp8(rng, per_row=True), said)
    convert(source, tmp_path / "out", "compressed-tensors")
    assert breccia.load_scheme(tmp_path / "out").rule(MODULES[0]).inputs == FP8_TOKEN


def test_a_changed_meaning_is_a_note_and_verify_says_it(tmp_path, rng):
    source = checkpoint(tmp_path / "in", fp8(rng, per_row=True), compressed(PART | {"strategy": "channel"}, None))
    report = convert(source, tmp_path / "out", "modelopt")
    line = "inputs of 4 layers: high precision → FP8 per token dynamic"
    assert line in report["notes"]
    assert line in verify(source, tmp_path / "out")["scheme"]


def test_scale_fmt_survives(tmp_path, rng):
    tensors = {}
    for module in MODULES:
        tensors[f"{module}.weight"] = "F8_E4M3", rng.integers(0, 120, (256, 256), np.uint8)
        tensors[f"{module}.weight_scale_inv"] = numbers(2, 2, value=0.0078125)
    said = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    }
    source = checkpoint(tmp_path / "in", tensors, said)
    convert(source, tmp_path / "out", "deepseek")
    assert kept(tmp_path / "out")["scale_fmt"] == "ue8m0"


def test_inspect_prints_the_scheme(tmp_path, rng, capsys):
    from breccia.cli import main

    said = compressed(NVFP4, NVFP4 | {"dynamic": "local"}, PART, form="nvfp4-pack-quantized")
    source = checkpoint(tmp_path / "in", nvfp4(rng, inputs=True, cache=True), said)
    assert main(["inspect", str(source), "--scheme"]) == 0
    printed = capsys.readouterr().out
    assert "attention: NVFP4 × NVFP4 local" in printed
    assert "KV cache: FP8 static" in printed
    assert main(["inspect", str(source), "--scheme", "--json"]) == 0
    assert ModelScheme.from_dict(json.loads(capsys.readouterr().out)) == breccia.load_scheme(source)


@pytest.mark.parametrize("fields", [{"name.weight": 1}, {"scale_search": 5}, {"scale_search": ["mse"]}])
@pytest.mark.parametrize("key", ["recipe", "activations", "modules"])
def test_own_recipes_with_odd_fields_are_refused(key, fields):
    recipe = {"name": "nvfp4", **fields}
    told = {"quant_method": "breccia", "recipe": {"name": "nvfp4"}, key: {"a": recipe} if key == "modules" else recipe}
    with pytest.raises(ValueError, match=rf"^(?:{key} must have the fields of a recipe: |scale_search must )"):
        read(told)
