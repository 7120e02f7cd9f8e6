# SPDX-License-Identifier: Apache-2.0
"""Formats of layers at so many bits a weight: the choice beside enumeration, and what it is made of."""

import itertools
import json
import re

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, plan_bits, save_arrays
from breccia.checkpoint.planning.bits import Group, Option, spread, to_toml
from breccia.cli import main
from breccia.moments import Moments, save_moments
from test_convert_by_moments import EXPERTS, LAYER, MOE, SHAPES, model, of_experts, of_shapes, spelled
from tiny_models import LAYER_OF_LLAMA

tomllib = pytest.importorskip("tomllib")


def random_groups(seed, count=5):
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(count):
        weights = int(rng.integers(1, 9)) * 100
        errors = np.sort(rng.exponential(size=3))[::-1]
        options = [
            Option(name, bits * weights, float(error))
            for name, bits, error in zip("abc", (4, 8, 16), errors, strict=True)
        ]
        groups.append(Group((f"l{i}",), weights, tuple(options[: 3 - (seed + i) % 2])))
    return groups


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_but_for_one_step(seed):
    """Against all choices: none with as few bits is better, and none within the bound by more than one step."""
    groups = random_groups(seed)
    weights = sum(group.weights for group in groups)
    every = [
        (sum(one.bits for one in some), sum(one.error for one in some))
        for some in itertools.product(*(group.options for group in groups))
    ]
    for bits in (4.0, 4.8, 6.3, 9.0, 16.0):
        chosen = spread(groups, bits)
        used, error = sum(one.bits for one in chosen), sum(one.error for one in chosen)
        assert used <= bits * weights * (1 + 1e-9)
        assert all(one in group.options for one, group in zip(chosen, groups, strict=True))
        best = min(e for b, e in every if b <= bits * weights * (1 + 1e-9))
        step = max(a.error - b.error for group in groups for a, b in itertools.pairwise(group.options))
        assert best <= error <= best + step
    assert [one.name for one in spread(groups, 4.0)] == ["a"] * 5
    assert sum(one.error for one in spread(groups, 16.0)) == min(e for _, e in every)
    with pytest.raises(ValueError, match=r"bits must be at least 4\.00, the least of formats, got 3\.9"):
        spread(groups, 3.9)


def test_options_that_cost_more_and_lose_more_are_not_taken():
    group = Group(("l",), 100, (Option("a", 400, 1.0), Option("b", 500, 2.0), Option("c", 1600, 0.5)))
    assert [one.name for one in spread([group], 6.0)] == ["a"]
    assert [one.name for one in spread([group], 16.0)] == ["c"]


@pytest.fixture
def llama(tmp_path):
    arrays = model(tmp_path / "model", SHAPES, LAYER_OF_LLAMA)
    known = of_shapes(SHAPES)
    save_moments(known, tmp_path / "m.safetensors")
    return tmp_path, arrays, known


def test_errors_are_those_of_the_outputs(llama):
    folder, arrays, known = llama
    report = plan_bits(folder / "model", folder / "m.safetensors", 9.0, ["nvfp4", "fp8-row", "bf16"])
    assert sorted(len(layers) for layers in (group["layers"] for group in report["groups"])) == [1, 1, 2, 3]
    (fused,) = [group for group in report["groups"] if f"{LAYER}self_attn.q_proj" in group["layers"]]
    assert sorted(fused["layers"]) == [f"{LAYER}self_attn.{p}_proj" for p in "kqv"]
    for name, recipe in (("nvfp4", "nvfp4"), ("fp8-row", "fp8-row")):
        wanted = 0.0
        for layer in fused["layers"]:
            w, h = arrays[f"{layer}.weight"].astype(np.float64), known[layer].full.astype(np.float64)
            made = breccia.cast(arrays[f"{layer}.weight"], recipe, importance=known[layer].diag)
            lost = w - made.numpy().astype(np.float64)
            wanted += np.sum((lost @ h) * lost) / np.sum((w @ h) * w)
        assert fused["errors"][name] == pytest.approx(wanted, rel=1e-3)
    assert fused["errors"]["bf16"] == 0
    assert report["error"] == pytest.approx(sum(g["errors"][g["format"]] for g in report["groups"]))
    assert report["bits"] <= 9.0 and report["errors"]["nvfp4"] > report["error"] > report["errors"]["bf16"]
    least = plan_bits(folder / "model", folder / "m.safetensors", 4.6, ["nvfp4", "fp8-row", "bf16"])
    assert set(least["rules"]) == {"nvfp4"} and 4.5 <= least["bits"] < 4.6 < least["bits_of_all"]
    most = plan_bits(folder / "model", folder / "m.safetensors", 32.0, ["nvfp4", "fp8-row", "bf16"])
    assert set(most["rules"]) == {"bf16"} and most["bits"] == 32.0  # as the source has them
    errors = [
        plan_bits(folder / "model", folder / "m.safetensors", bits, ["nvfp4", "fp8-row"])["error"]
        for bits in (4.6, 5.5, 6.5, 8.2)
    ]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1]


def test_a_size_is_of_the_whole_model(llama):
    """What the scheme makes of the model is no larger, and not much smaller."""
    folder, _, _ = llama
    formats = ["nvfp4", "fp8-row", "bf16"]
    for size in (600_000, 900_000, 1_500_000):
        report = plan_bits(folder / "model", folder / "m.safetensors", size=size, formats=formats)
        (folder / "plan.toml").write_text(to_toml(report))
        convert(folder / "model", folder / "out", "compressed-tensors", scheme=folder / "plan.toml", force=True)
        written = (folder / "out" / "model.safetensors").stat().st_size
        assert report["bytes"] <= written <= size, report["rules"]
    with pytest.raises(ValueError, match=r"^size must be at least ([\d,]+) bytes, got 100,000$") as told:
        plan_bits(folder / "model", folder / "m.safetensors", size=100_000, formats=formats)
    least = int(re.search(r"at least ([\d,]+)", str(told.value))[1].replace(",", ""))
    assert set(plan_bits(folder / "model", folder / "m.safetensors", size=least, formats=formats)["rules"]) == {"nvfp4"}


@pytest.mark.parametrize("given", [{}, {"bits": 5.0, "size": 10**6}], ids=["neither", "both"])
def test_bits_or_a_size_must_be_given(given, llama):
    folder, _, _ = llama
    with pytest.raises(TypeError, match=r"^one of bits and size must be given"):
        plan_bits(folder / "model", folder / "m.safetensors", **given)


def test_groups_with_exponents_are_planned_without_importance(llama):
    folder, arrays, known = llama
    recipe = breccia.INT8ExpandedScaling(group_size=32)
    report = plan_bits(folder / "model", folder / "m.safetensors", 32.0, ["nvfp4", "int8_expanded:32", "bf16"])
    for group in report["groups"]:
        wanted = 0.0
        for layer in group["layers"]:
            w, h = arrays[f"{layer}.weight"].astype(np.float64), known[layer].full.astype(np.float64)
            lost = w - breccia.cast(arrays[f"{layer}.weight"], recipe).numpy().astype(np.float64)
            wanted += np.sum((lost @ h) * lost) / np.sum((w @ h) * w)
        assert group["errors"]["int8_expanded:32"] == pytest.approx(wanted, rel=1e-3)


def test_layers_without_moments_get_the_widest(llama):
    folder, _, known = llama
    del known[f"{LAYER}self_attn.v_proj"]
    save_moments(known, folder / "m.safetensors")
    report = plan_bits(folder / "model", folder / "m.safetensors", 20.0, ["nvfp4", "fp8-row", "bf16"])
    (fused,) = [group for group in report["groups"] if f"{LAYER}self_attn.q_proj" in group["layers"]]
    assert fused["format"] == "bf16" and list(fused["errors"]) == ["bf16"]
    (note,) = report["notes"]
    assert note.startswith(f"1 of {len(report['groups'])} groups of layers get the widest format: ")
    assert note.endswith(f"has no moments of {LAYER}self_attn.v_proj.weight")


def test_experts_of_a_layer_get_one_format(tmp_path):
    more = {f"{LAYER}mlp.gate.weight": np.zeros((4, 256), np.float32)}
    model(tmp_path / "model", EXPERTS, MOE, **more)
    save_moments(spelled("fused", of_experts()), tmp_path / "m.safetensors")
    report = plan_bits(tmp_path / "model", tmp_path / "m.safetensors", 8.5, ["nvfp4", "mxfp8"])
    (group,) = report["groups"]
    assert group["layers"] == [f"{LAYER}mlp.experts.*"] and group["format"] == "mxfp8"
    assert group["weights"] == 4 * 3 * 128 * 256
    assert 0 < group["errors"]["mxfp8"] < group["errors"]["nvfp4"] < 3


def test_a_format_without_a_place_for_a_layer_is_no_choice(tmp_path):
    arrays = {"a.weight": np.ones((32, 48), np.float32), "b.weight": np.ones((32, 64), np.float32)}
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=w.shape).astype(np.float32) for name, w in arrays.items()}
    save_arrays(arrays, tmp_path / "a.safetensors")
    save_moments({n: Moments(np.ones(k, np.float32), np.asarray(9)) for n, k in (("a", 48), ("b", 64))}, tmp_path / "m")
    report = plan_bits(tmp_path / "a.safetensors", tmp_path / "m", 9.0, ["nvfp4", "mxfp8"])
    assert {tuple(g["layers"]): list(g["errors"]) for g in report["groups"]} == {
        ("a",): ["nvfp4"],
        ("b",): ["nvfp4", "mxfp8"],
    }


def test_what_is_refused(llama):
    folder, _, _ = llama
    given = folder / "model", folder / "m.safetensors"
    for error, arguments, message in (
        (TypeError, (*given, "4.8"), "bits must be a number, got '4.8'"),
        (TypeError, (*given, 4.8, "nvfp4"), "formats must be a list of recipes and float dtypes, got 'nvfp4'"),
        (ValueError, (*given, 4.8, []), "formats must have at least one, got none"),
        (ValueError, (*given, 4.8, ["bf16"]), "formats must have a recipe to quantize to, got bf16"),
        (ValueError, (*given, 4.8, ["nvfp4", "gguf"]), "formats must be recipes or float dtypes, got 'gguf'"),
        (ValueError, (*given, 3.0), r"bits must be at least 4\.51, the least of formats, got 3"),
    ):
        with pytest.raises(error, match=message):
            plan_bits(*arguments)
    with pytest.raises(ValueError, match="there must be a weight to plan"):
        plan_bits(*given, 4.8, include=["*norm*"])


def test_the_command(llama, capsys):
    folder, _, _ = llama
    words = ["plan-bits", str(folder / "model"), "--moments", str(folder / "m.safetensors"), "--bits", "7"]
    assert main([*words, "--quiet"]) == 0
    printed = capsys.readouterr().out
    rules = tomllib.loads(printed)["rule"]  # what is said of it stands in comments
    assert main([*words, "--out", str(folder / "plan.toml")]) == 0
    said = capsys.readouterr().out
    assert "bits a planned weight" in said and "summed output error" in said and "nvfp4 alone" in said
    following = " ".join(said[said.index("next:") :].replace("\\\n", "").split())
    assert following == f"next: breccia convert {folder / 'model'} OUT --to FORMAT --scheme {folder / 'plan.toml'}"
    assert tomllib.loads((folder / "plan.toml").read_text())["rule"] == rules
    names = [name for rule in rules for name in rule["match"]]
    assert sorted(names) == sorted(SHAPES)
    assert {rule["weights"] for rule in rules} <= {"nvfp4", "fp8", "none"} and len(rules) > 1
    assert main([*words, "--out", str(folder / "plan.toml")]) == 2
    assert main([*words, "--out", str(folder / "plan.toml"), "--force", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert to_toml(report) == (folder / "plan.toml").read_text()
