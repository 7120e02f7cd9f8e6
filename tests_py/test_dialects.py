# SPDX-License-Identifier: Apache-2.0
"""What a format writes of a scheme it reads as that scheme: over every format, and random schemes."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges.contract import FileFormat
from breccia.bridges.parts import Found, Part
from breccia.bridges.written import Written, same_grid
from breccia.checkpoint import convert, save_arrays, target_names
from breccia.recipe_names import names, recipe_of
from breccia.recipes import ScalingRecipe
from breccia.schemes import Activations, KVCache, ModelScheme
from breccia.schemes.dialects import Said, dialect_of, scheme_of
from breccia.schemes.inputs import inputs_for
from test_accounting import WRITTEN, written

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

FORMATS = {name: one for name, one in bridges.registry().items() if one.writes and one.dialect.read is not None}
# Names of which one is the beginning, or a part, of another, and such as have characters of patterns.
MODULES = (
    "lm_head",
    "model.layers.1.mlp.up_proj",
    "model.layers.10.mlp.up_proj",
    "model.layers.1.mlp.up_proj_2",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.experts.1.w1",
    "model.layers.1.mlp.experts.11.w1",
    "model.a+b[0].proj",
)
# Formats in whose words all layers have one recipe, and those that leave inputs to the program.
INPUTS = {
    "compressed-tensors": {
        "fp8": "dynamic static none",
        "fp8-tensor": "dynamic static none",
        "nvfp4": "static none dynamic",
    },
    "modelopt": {"fp8": "dynamic", "fp8-tensor": "static", "nvfp4": "static none", "mxfp8": "dynamic", "int4": "none"},
    "quark": {"fp8": "dynamic static none", "fp8-tensor": "static dynamic none"},
    "breccia": {"nvfp4": "static dynamic none", "mxfp8": "dynamic none"},
    "deepseek": {"block": "dynamic"},
    "gptq": {"int4": "none"},
    "awq": {"int4": "none"},
}


def said(bridge: FileFormat, recipes: Mapping[str, ScalingRecipe | None], inputs: Mapping[str, Any], cache: Any) -> Any:
    """What the format writes of a scheme, read."""
    quantized = {module: recipe for module, recipe in recipes.items() if recipe is not None}
    static = frozenset(m for m, one in inputs.items() if one is not None and one.when != "dynamic")
    written = Written(
        quantized,
        sorted(recipes.keys() - quantized),
        static,
        bridge.sample.model,
        cache,
        {module: one for module, one in inputs.items() if one is not None},
    )
    config = {**bridge.sample.model, **bridge.dialect.write(written)}
    told = config["quantization_config"]
    assert dialect_of(told).read is bridge.dialect.read
    beside = {m: bridge.inputs_written(r, inputs.get(m)) for m, r in quantized.items()}
    beside = {m: one for m, one in beside.items() if one is None or isinstance(one, Activations)}
    assert [key for key, _, known in bridge.dialect.keys(told) if not known] == []
    return scheme_of(Said(told, config, quantized, {}, lambda name: None, beside))


def rule_is(scheme: ModelScheme, module: str, recipe: ScalingRecipe | None, inputs: Activations | None) -> bool:
    rule = scheme.rule(module)
    if recipe is None:
        return rule is None or rule.weights is None
    if rule is None or not isinstance(rule.weights, ScalingRecipe) or not same_grid(rule.weights, recipe):
        return False
    return (rule.inputs if isinstance(rule.inputs, Activations) else None) == inputs


def recipes_of(bridge: FileFormat) -> dict[str, ScalingRecipe]:
    own = {name: recipe_of(name) for name in names()}
    return dict(bridge.recipes) or {name: one for name, one in own.items() if bridge.carries(one)}


@functools.cache
def forms(name: str) -> dict[str, dict[str, Activations | None]]:
    """The recipes of a format and the inputs that it can say of each where all layers have them."""
    bridge, found = FORMATS[name], {}
    for key, recipe in recipes_of(bridge).items():
        words: dict[str, Activations | None] = {}
        for word in ("dynamic", "static", "none"):
            try:
                inputs = None if word == "none" else inputs_for(recipe, word)
                scheme = said(bridge, {"a": recipe, "b": None}, {"a": inputs}, None)
            except ValueError:
                continue
            if rule_is(scheme, "a", recipe, inputs) and rule_is(scheme, "b", None, None):
                words[word] = inputs
        if words:
            found[key] = words
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_a_format_says_the_inputs_that_it_has_words_for(name: str) -> None:
    for key, words in INPUTS[name].items():
        assert set(forms(name)[key]) == set(words.split()), key


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_of_a_scheme_is_read_as_that_scheme(name: str) -> None:
    bridge, kinds = FORMATS[name], [(key, word) for key, words in forms(name).items() for word in words]
    assert kinds
    caches = [None, *(bridge.caches if bridge.cache_scales else ())]
    layers = st.dictionaries(st.sampled_from(MODULES), st.sampled_from([*kinds, None]), min_size=1)
    refused = 0

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(layers, st.sampled_from(caches))
    def law(chosen: dict[str, tuple[str, str] | None], cache: KVCache | None) -> None:
        nonlocal refused
        recipes = {m: None if one is None else recipes_of(bridge)[one[0]] for m, one in chosen.items()}
        inputs = {m: forms(name)[one[0]][one[1]] for m, one in chosen.items() if one is not None}
        if not any(recipes.values()):
            return
        try:
            scheme = said(bridge, recipes, inputs, cache)
        except ValueError as error:
            assert "must" in str(error)
            refused += 1
            return
        for module, recipe in recipes.items():
            assert rule_is(scheme, module, recipe, inputs.get(module)), (module, recipe, scheme)
        if bridge.cache_scales:
            assert scheme.kv_cache == cache
        assert ModelScheme.from_dict(scheme.to_dict()) == scheme
        assert ModelScheme.from_toml(scheme.to_toml()).rules == scheme.rules

    law()
    assert refused < 30


ROW = breccia.INT8Scaling()


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found:
    module = name.removesuffix("codes")
    parts = {"codes": name, "size": module + "size"}
    return Found(module + "weight", "acme", "int8", parts, entries[name].shape, ROW, ROW.layout, "float32")


def lay_out(scaled: Any, place: Any) -> dict[str, Part]:
    codes = Part("I8", scaled.shape, lambda: scaled.data.view("int8"))
    return {"codes": codes, "size": Part("F32", scaled.scale.shape, lambda: scaled.scale)}


ACME = FileFormat(
    "acme",
    recipes={"int8": ROW},
    anchors=(".codes",),
    find=find,
    read=lambda parts, found: breccia.ScaledTensor(parts["codes"].view("uint8"), parts["size"], ROW, ROW.layout),
    carries=lambda recipe: recipe == ROW,
    lay_out=lay_out,
    config=lambda written: {"quantization_config": {"quant_method": "acme", "speed": 3}, "acme": {"rows": True}},
)


@pytest.fixture
def acme() -> Iterator[FileFormat]:
    bridges.register(ACME)
    yield ACME
    bridges.unregister("acme")


def test_an_outside_format_has_schemes_erasing_and_accounting(acme: FileFormat, tmp_path: Path) -> None:
    """Of a format that has a function to write alone."""
    source, start = written(acme, tmp_path)
    config = json.loads((source / "config.json").read_text())
    assert config["acme"] == {"rows": True}
    assert dialect_of(config["quantization_config"]) is acme.dialect
    rule = breccia.load_scheme(source).rule(start[:-1])
    assert rule is not None
    assert rule.weights == ROW
    for to in ("bf16", "compressed-tensors:int8", "modelopt:fp8", "nvfp4", "mlx:int4"):
        report = convert(source, tmp_path / to, to)
        assert not [note for note in report["notes"] if "nobody" in note]
        assert "acme" not in (tmp_path / to / "config.json").read_text(), to
        assert report["account"]["keys"] == {"quant_method": "read", "speed": "read"}
    convert(source, tmp_path / "again", "acme", strict=True)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
    save_arrays({f"{start}shift": np.ones(4, np.float32)}, source / "more.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"shift.*stands beside a quantized weight"):
        convert(source, tmp_path / "out", "bf16")


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"gpt-oss"}))
def test_no_output_keeps_what_another_format_says(name: str, tmp_path: Path) -> None:
    source, _ = written(WRITTEN[name], tmp_path)
    config = json.loads((source / "config.json").read_text())
    stale = {"expert_dtype": "fp4", "quantize_activations": True, "compression_config": {"format": "dense"}}
    (source / "config.json").write_text(json.dumps({**stale, **config, "text_config": {"expert_dtype": "fp4"}}))
    last = {one.partition(":")[0]: one for one in target_names()}  # of each format
    for to in sorted({"bf16", "deepseek:block", *(last[one] for one in last.keys() - {"gpt-oss", "gguf", "onnx"})}):
        try:
            convert(source, tmp_path / "out", to, force=True, checksums=False)
        except ValueError as error:
            assert "model_type" in str(error) or "even" in str(error), to  # deepseek:mxfp4
            continue
        left = json.loads((tmp_path / "out" / "config.json").read_text())
        assert not left["text_config"], to
        wanted = {"expert_dtype"} if to == "deepseek:mxfp4" else set()
        assert left.keys() & (stale.keys() | {"quantization"}) <= wanted | (
            {"quantization"} if "mlx" in to else set()
        ), to
        if to in ("bf16", "fp16", "fp32"):
            assert "quantization_config" not in left


@pytest.mark.parametrize("name", ["breccia"])
def test_inputs_of_a_single_module_are_told_apart(name: str) -> None:
    recipe, inputs = recipe_of("mxfp8"), inputs_for(recipe_of("mxfp8"), "dynamic")
    wanted = {"a": inputs, "b": inputs, "c": None}
    scheme = said(FORMATS[name], dict.fromkeys(wanted, recipe), wanted, None)
    assert {module: rule.inputs for module in wanted if (rule := scheme.rule(module))} == wanted
