# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of groups with exponents: what is asked for is done, or refused before anything is written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges, checkpoint
from breccia.moments import Moments, save_moments
from breccia.recipes import all_recipes, choices

NAMES = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
WIDTH = 192  # 128 does not divide it
RNG = np.random.default_rng(0)
EXPANDED = [kind() for kind in all_recipes() if choices(kind()).expanded]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four weights, and a file of moments of their inputs beside their folder."""
    weights = {f"{name}.weight": RNG.standard_normal((WIDTH, WIDTH), dtype=np.float32) for name in NAMES}
    (tmp_path / "model").mkdir()
    checkpoint.save_arrays(weights, tmp_path / "model" / "model.safetensors")
    inputs = RNG.standard_normal((512, WIDTH), dtype=np.float32)
    full = inputs.T @ inputs
    one = Moments(diag=np.diag(full).copy(), count=np.array(512), full=full)
    save_moments(dict.fromkeys(NAMES, one), tmp_path / "moments")
    return tmp_path / "model"


def recipes_of(path: Path) -> set[Any]:
    return {found.recipe for found in checkpoint.Checkpoint(path).found}


@pytest.mark.parametrize("to", [recipe.name for recipe in EXPANDED])
def test_auto_takes_the_largest_group_that_divides(to: str, source: Path, tmp_path: Path) -> None:
    kind = {recipe.name: type(recipe) for recipe in EXPANDED}[to]
    report = checkpoint.convert(source, tmp_path / "out", to, group_size="auto")
    assert report["notes"] == [] and recipes_of(tmp_path / "out") == {kind(group_size=64)}
    asked = {"rules": ["*_proj=" + to], "group_size": "auto"}
    checkpoint.convert(source, tmp_path / "by_rules", "int4", **asked)
    assert recipes_of(tmp_path / "by_rules") == {kind(group_size=64)}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("options", "what"),
    [({}, r"importance \(imatrix, moments\)"), ({"method": "gptq"}, "method gptq")],
)
def test_data_is_refused_by_the_plan(
    options: dict[str, Any], what: str, dry_run: bool, source: Path, tmp_path: Path
) -> None:
    """Also where a rule asks for such groups of one layer, which comes last."""
    out = tmp_path / "out"
    for asked in ({"to": "expanded:64"}, {"to": "mxfp8", "rules": ["*v_proj=int8_expanded:64"]}):
        message = f"{what} must be left out for tensor 'model.*_proj.weight', which becomes .*expanded"
        with pytest.raises(ValueError, match=message) as error:
            checkpoint.convert(source, out, moments=tmp_path / "moments", dry_run=dry_run, **asked, **options)
        way_out = "groups with exponents take none; give the tensor another recipe (rules, scheme), or convert without"
        assert way_out in str(error.value)
    assert not out.exists()


def test_another_recipe_is_the_way_out(source: Path, tmp_path: Path) -> None:
    """As the message says."""
    asked = {"to": "expanded:64", "rules": ["*_proj=mxfp8"]}
    checkpoint.convert(source, tmp_path / "out", moments=tmp_path / "moments", **asked)
    assert all(not breccia.recipes.has_exponents(recipe) for recipe in recipes_of(tmp_path / "out"))


def test_codes_that_stay_take_no_data(source: Path, tmp_path: Path) -> None:
    """Importance is of what is quantized anew alone."""
    checkpoint.convert(source, tmp_path / "first", "expanded:64")
    report = checkpoint.convert(tmp_path / "first", tmp_path / "out", "expanded:64", moments=tmp_path / "moments")
    assert report["notes"] == ["importance has no part in what is written: no tensor is quantized anew"]


def test_feedback_of_a_merge_is_refused_by_its_plan(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint.convert(source, tmp_path / "base", "expanded:64")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    of = {"A": (4, WIDTH), "B": (WIDTH, 4)}
    changes = {
        f"base_model.model.{NAMES[0]}.lora_{side}.weight": RNG.standard_normal(shape, dtype=np.float32)
        for side, shape in of.items()
    }
    checkpoint.save_arrays(changes, adapter / "adapter_model.safetensors")
    said = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    begun: list[Any] = []
    monkeypatch.setattr("breccia.checkpoint.lora.merge.Merge._execute", lambda *arguments: begun.append(arguments))
    message = "rounding 'feedback' needs a recipe without exponents, tensor 'model.*q_proj.weight' has Float8Expanded"
    with pytest.raises(ValueError, match=message):
        checkpoint.merge_lora(tmp_path / "base", adapter, tmp_path / "out", rounding="feedback")
    assert not begun


@pytest.mark.parametrize("recipe", EXPANDED, ids=lambda recipe: recipe.name)
def test_no_format_of_others_holds_them(recipe: Any) -> None:
    for size in (32, 128):
        grouped = dataclasses.replace(recipe, group_size=size)
        assert [name for name, one in bridges.registry().items() if one.carries(grouped)] == [bridges.OWN]


@pytest.mark.parametrize("recipe", EXPANDED, ids=lambda recipe: recipe.name)
def test_qwix_says_so(recipe: Any) -> None:
    q = breccia.cast(RNG.standard_normal((4, 256), dtype=np.float32), recipe)
    with pytest.raises(ValueError, match=r"scaled must have a recipe that qwix can hold, got .*ExpandedScaling"):
        bridges.qwix.to_qwix(q)


@pytest.mark.parametrize("recipe", [*EXPANDED, breccia.INT8Scaling(group_size=64, symmetric=False)], ids=str)
def test_servers_hold_exponents_as_they_are(recipe: Any) -> None:
    """What parameters of vLLM and SGLang are made of: what is copied into them keeps its bytes."""
    torch = pytest.importorskip("torch")
    from breccia._serving.slices import Slice, layers_of
    from breccia.bridges import native

    q = breccia.cast(RNG.standard_normal((32, 256), dtype=np.float32), recipe)
    held = Slice(32, 256, 256, recipe)
    stored = {name.removeprefix("w."): part.make() for name, part in native.store("w", q)[0].items()}
    parts = {}
    for role, piece in held.pieces().items():
        array = stored[role].view(np.uint8) if stored[role].dtype.itemsize == 1 else stored[role]
        parts[role] = torch.zeros(piece.shape, dtype=piece.dtype).copy_(torch.from_numpy(np.ascontiguousarray(array)))
    (layer,) = layers_of(held, parts, [32], None)
    x = torch.from_numpy(RNG.standard_normal((3, 256), dtype=np.float32))
    assert torch.equal(layer(x), breccia.linear(x, q.to("torch")))
