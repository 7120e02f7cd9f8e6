# SPDX-License-Identifier: Apache-2.0
"""Ten kinds of quantized models, each converted to every format: what of their inputs and KV cache is kept, what is
said to change, and what is refused. docs/schemes.md has the table."""

import json
import random
from functools import cache
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.bridges import bridge, registry
from breccia.bridges.written import same_grid
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert
from breccia.checkpoint.planning.asked import _of_line
from breccia.schemes import UNSAID, KVCache, ModelScheme, differences
from scheme_models import MADE, MODULES, SOURCES, write_model, write_moments, write_source

TARGETS = [name for name, bridge in registry().items() if bridge.writes and name not in ("breccia", "onnx")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return cache(lambda name: write_source(name, folder))


def quantized(path):
    return {one.name.removesuffix(".weight") for one in Checkpoint(path).found if one.format != "plain"}


def one(source: Path, to: str, out: Path) -> str:
    """What becomes of a model: "kept", "noted", "refused", or "no layer" is quantized. No change is without a note."""
    try:
        notes = convert(source, out, to)["notes"]
    except ValueError as error:
        assert len(str(error)) > 40
        return "refused"
    before, after = breccia.load_scheme(source), breccia.load_scheme(out)
    changed = differences(before, after, sorted(quantized(out)))
    for text in changed:
        what = text.partition(":")[0].split()[0]  # "inputs", "outputs" or "KV"
        assert any(note.startswith(what) and "→" in note for note in notes), (text, notes)
    if not quantized(out):
        assert any("no tensor is quantized" in note or "no form" in note for note in notes), notes
        return "no layer"
    return "noted" if changed else "kept"


@pytest.fixture(scope="module")
def results(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")

    @cache
    def made(name, to):
        place = folder / f"{SOURCES.index(name)}-{to}"
        return one(sources(name), to, place.with_suffix(".gguf") if to == "gguf" else place)

    return made


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_changes_without_a_note(name, results):
    assert {to: results(name, to) for to in TARGETS}


@pytest.mark.parametrize("kind", [name for name in bridge("gguf").kinds if name not in ("f16", "bf16")])
def test_no_type_of_gguf_changes_inputs_without_a_note(kind, sources, tmp_path):
    assert one(sources("INT8 × INT8 per token dynamic"), f"gguf:{kind}", tmp_path / "out.gguf") == "noted"


@pytest.mark.parametrize(
    "name", [name for name, (to, _, _) in MADE.items() if to in ("compressed-tensors", "modelopt")]
)
def test_there_and_back(name, sources, tmp_path):
    """The same format gives the same scheme, and the same bytes of scales; so does the other one, and back."""
    to = MADE[name][0]
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[to]
    convert(sources(name), tmp_path / "same", to)
    same_model(sources(name), tmp_path / "same", exact=True)
    convert(sources(name), tmp_path / "there", other)
    if (
        breccia.load_scheme(tmp_path / "there").kv_cache == breccia.load_scheme(sources(name)).kv_cache
        and "INT8" not in name
    ):
        convert(tmp_path / "there", tmp_path / "back", to)
        same_model(sources(name), tmp_path / "back", exact=False)


def same_model(first, second, exact):
    before, after = breccia.load_scheme(first), breccia.load_scheme(second)
    modules = sorted(quantized(first))
    assert modules == sorted(quantized(second))
    assert differences(before, after, modules) == []
    for module in modules:
        was, now = before.rule(module), after.rule(module)
        assert type(was.weights) is type(now.weights)
    assert before.kv_cache == after.kv_cache
    high = [rule for rule in before.rules if rule.weights is None]
    for match in (match for rule in high for match in rule.match if match.kind == "name"):
        rule = after.rule(match.pattern)
        assert rule is None or rule.weights is None
    arrays = [dict(SafetensorsFile(path / "model.safetensors").items()) for path in (first, second)]
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        if exact:
            np.testing.assert_array_equal(array, arrays[1][name], name)
        elif "scale" in name and array.dtype == np.float32:
            fused = name.endswith("input_scale") and np.all(arrays[1][name] > array)  # one of the parts of a layer
            np.testing.assert_allclose(array, array if fused else arrays[1][name], rtol=2e-7, err_msg=name)
    if exact:
        said = [json.loads((path / "config.json").read_text())["quantization_config"] for path in (first, second)]
        assert said[0] == said[1]


def table(results):
    """The lines of docs/schemes.md."""
    lines = ["| " + " | ".join(["", *TARGETS]) + " |", "|" + "---|" * (len(TARGETS) + 1)]
    return [*lines, *("| " + " | ".join([name, *(results(name, to) for to in TARGETS)]) + " |" for name in SOURCES)]


def test_the_documented_table(results):
    page = (Path(__file__).parent.parent / "docs/schemes.md").read_text()
    assert "\n".join(table(results)) in page, "\n".join(table(results))


def test_a_cache_of_fp8_survives_where_it_can(sources, tmp_path):
    name = "INT4 g128, KV FP8"
    convert(sources(name), tmp_path / "out", "modelopt")
    assert breccia.load_scheme(tmp_path / "out").kv_cache == KVCache("float8_e4m3fn")


RECIPES = ["fp8", "fp8-row", "fp8-block", "nvfp4", "mxfp8", "mxfp4", "int8", "int8:64", "int4:64", "int4:asym:128"]
WORDS = ["dynamic", "static", "local", "none", "left out"]


def asked(chance):
    """A scheme of any two recipes that takes any inputs beside them, and its rules in words."""
    rules = []
    for pattern in ("*.self_attn.*", "*.experts.*"):
        words = chance.sample(WORDS, len(WORDS))
        recipe = chance.choice(RECIPES)
        for word in words:
            text = f"{pattern}={recipe}" + ("" if word == "left out" else f",inputs={word}")
            try:
                rules.append(_of_line(text))
                break
            except ValueError:
                continue
    return ModelScheme(tuple(rules), chance.choice([UNSAID, None, KVCache("float8_e4m3fn")]))


def holds(stored, recipe):
    """Whether a weight is in a recipe: ModelOpt has FP8's one scale for each row, MLX its own groups of integers, and
    GPTQ a row as one group."""
    if stored.recipe is None:
        return stored.format != "plain" and recipe.name.startswith("int")
    if getattr(stored.recipe, "group_size", None) == stored.shape[-1] and recipe.group_size is None:
        return type(stored.recipe) is type(recipe)
    return {stored.recipe.name, recipe.name} == {"current"} or same_grid(stored.recipe, recipe)


@pytest.mark.in_turn
@pytest.mark.parametrize("to", [*TARGETS, "nvfp4"])
def test_what_is_read_is_what_was_asked_or_there_is_a_note(to, tmp_path):
    model, moments = write_model(tmp_path / "bf16"), write_moments(tmp_path / "m.safetensors")
    for seed in range(25):
        scheme = asked(random.Random(seed))
        out = tmp_path / (f"{seed}.gguf" if to == "gguf" else str(seed))
        try:
            report = convert(model, out, to, scheme=scheme, amax=moments)
        except ValueError as error:  # such as a format of one recipe that is asked for two
            assert len(str(error)) > 40
            continue
        notes, read = " ".join(report["notes"]), breccia.load_scheme(out)
        opened = Checkpoint(out)
        found = {one.name.removesuffix(".weight"): opened.refined(one) for one in opened.found}
        for module in MODULES:
            rule, now = scheme.rule(module), read.rule(module)
            stored = found.get(module)
            if stored is None and "experts" in module:
                continue  # all in one
            if not holds(stored, rule.weights):
                assert "left as it is" in notes or "no tensor is quantized" in notes, (seed, module, rule, notes)
                continue
            wanted = None if rule.inputs is UNSAID else rule.inputs
            got = None if now is None or now.inputs is UNSAID else now.inputs
            assert wanted == got or "inputs of" in notes, (seed, module, wanted, got, notes)
        cache = scheme.kv_cache
        if isinstance(cache, KVCache) and any(one.recipe for one in found.values()):
            assert read.kv_cache == cache or "KV cache" in notes, (seed, notes)
        if cache is None:
            assert not isinstance(read.kv_cache, KVCache)


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.startswith("GGUF")])
def test_compressed_tensors_accepts_what_is_said(name, sources, tmp_path):
    """By its own classes, which check each group; what they write again is read as the same scheme."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    convert(sources(name), tmp_path / "ct", "compressed-tensors")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    if "quantization_config" not in config:
        return
    before = breccia.load_scheme(tmp_path / "ct")
    theirs = QuantizationConfig.model_validate(config["quantization_config"]).model_dump(mode="json")
    config["quantization_config"] |= {key: value for key, value in theirs.items() if key != "format"}
    (tmp_path / "ct" / "config.json").write_text(json.dumps(config))
    after = breccia.load_scheme(tmp_path / "ct")
    modules = sorted(quantized(tmp_path / "ct"))
    assert differences(before, after, modules) == []
    for module in modules:
        was, now = before.rule(module), after.rule(module)
        assert (was.weights, was.inputs) == (now.weights, now.inputs)
