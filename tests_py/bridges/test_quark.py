# SPDX-License-Identifier: Apache-2.0
"""AMD Quark's checkpoints: INT4 and FP8, whose bytes are those of Quark's own packing."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges import from_quark, to_quark
from breccia.checkpoint import Checkpoint, convert, save_arrays
from breccia.schemes import Activations

pytest.importorskip("ml_dtypes")


def weight(rows: int = 64, columns: int = 256) -> Any:
    return np.random.default_rng(7).normal(0, 0.02, (rows, columns)).astype(np.float32)


def model(path: Path) -> Path:
    path.mkdir()
    arrays = {"a.weight": weight(), "b.weight": weight(32), "lm_head.weight": weight()}
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def files(path: Path, arrays: dict[str, Any], spec: dict[str, Any], **more: Any) -> Path:
    path.mkdir()
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "quark", "global_quant_config": {"weight": spec}, **more}
    (path / "config.json").write_text(json.dumps({"quantization_config": said}))
    return path


def spec(dtype: str, symmetric: bool) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": "per_group", "ch_axis": -1, "group_size": 128, "symmetric": symmetric}


def by_hand(stored: dict[str, Any], signed: bool, order: tuple[int, ...]) -> Any:
    """Values of words, as Quark's documents have them: one nibble after another."""

    def codes(words: Any) -> Any:
        result = np.empty((words.shape[0], words.shape[1] * 8), np.int64)
        for i, at in enumerate(order):
            nibble = (words.view(np.uint32) >> np.uint32(4 * i)) & np.uint32(15)
            result[:, at::8] = np.where(signed & (nibble > 7), nibble.astype(np.int64) - 16, nibble)
        return result

    group = stored["weight"].shape[0] // stored["weight_scale"].shape[0]
    zero = codes(stored["weight_zero_point"]) if "weight_zero_point" in stored else 0
    spread = [np.repeat(part, group, 0) if np.ndim(part) else part for part in (zero, stored["weight_scale"])]
    return ((codes(stored["weight"]) - spread[0]).astype(np.float32) * spread[1]).T


REORDER, ORDER = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))


@pytest.mark.parametrize("pack_method", ["reorder", "order"])
@pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("uint4", False), ("int4", False)])
def test_int4_files(dtype: str, symmetric: bool, pack_method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    stored: dict[str, Any] = {
        "weight": rng.integers(-(2**31), 2**31, (256, 8)).astype(np.int32),
        "weight_scale": rng.random((2, 64)).astype(np.float32),
    }
    if symmetric:
        stored["weight_zero_point"] = np.zeros((2, 8), np.int32)  # which Quark may write or leave out
    else:
        stored["weight_zero_point"] = rng.integers(-(2**31), 2**31, (2, 8)).astype(np.int32)
    arrays = {f"a.{role}": array for role, array in stored.items()}
    export = {"pack_method": pack_method}
    source = files(tmp_path / "in", arrays, spec(dtype, symmetric), export=export)
    opened = Checkpoint(source)
    [found] = opened.found
    assert (found.name, found.format, found.kind, found.shape, found.findings) == (
        "a.weight",
        "quark",
        "int4",
        (64, 256),
        (),
    )
    expected = by_hand(stored, dtype == "int4", REORDER if pack_method == "reorder" else ORDER)
    loaded = opened.load(found)
    assert loaded.recipe == found.recipe
    np.testing.assert_array_equal(breccia.dequantize(loaded), expected)
    convert(source, tmp_path / "out", "fp32")
    np.testing.assert_array_equal(dict(breccia.open(tmp_path / "out"))["a.weight"], expected)


def quarks_own(name: str, torch: Any) -> Any:
    """A class of quark.torch.utils.pack, of its source: the package imports what no test needs."""
    found = importlib.util.find_spec("quark")
    if found is None or not found.submodule_search_locations:
        pytest.skip("amd-quark is not installed")
    source = (Path(found.submodule_search_locations[0]) / "torch/utils/pack.py").read_text()
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") in ("PackMethod", name)]
    classes: dict[str, Any] = {"torch": torch}
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted)), classes)
    return classes[name]


@pytest.mark.parametrize("recipe", ["int4", "int4-asym"])
def test_words_are_those_of_quark(recipe: str) -> None:
    torch = pytest.importorskip("torch")
    scaled = breccia.cast(weight(), bridges.bridge("quark").recipes[recipe])
    stored = to_quark(scaled)
    peer = quarks_own("Pack_4_bits", torch)("per_group", "int4" if recipe == "int4" else "uint4")
    data = np.asarray(scaled.data)
    codes = np.stack([data & 15, data >> 4], -1).reshape(64, 256).astype(np.int32)
    packed = peer.pack(torch.from_numpy(codes), True).numpy()
    np.testing.assert_array_equal(stored["weight"], packed)
    again = peer.unpack(torch.from_numpy(stored["weight"]), True).numpy()
    signed = np.where((codes > 7) & (recipe == "int4"), codes - 16, codes)
    np.testing.assert_array_equal(again.astype(np.int8), signed.astype(np.int8))
    if recipe == "int4-asym":
        zero = peer.unpack(torch.from_numpy(stored["weight_zero_point"]), True).numpy()
        np.testing.assert_array_equal(zero, np.asarray(scaled.zero_point))


@pytest.mark.parametrize("key", bridges.bridge("quark").recipes)
def test_written_and_read_again(key: str, tmp_path: Path) -> None:
    source, recipe = model(tmp_path / "in"), bridges.bridge("quark").recipes[key]
    report = convert(source, tmp_path / "out", f"quark:{key}")
    assert report["tensors"] == {"cast": 2, "copy": 1}
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["exclude"] == ["lm_head"]
    assert said["layer_quant_config"] == {}
    opened = Checkpoint(tmp_path / "out")
    assert {one.format for one in opened.found if one.name != "lm_head.weight"} == {"quark"}
    for one in opened.found:
        if one.name != "lm_head.weight":
            expected = breccia.cast(weight(64 if one.name == "a.weight" else 32), recipe)
            np.testing.assert_array_equal(breccia.dequantize(opened.load(one)), breccia.dequantize(expected))
    rule = breccia.load_scheme(tmp_path / "out").rule("a")
    assert rule is not None
    assert type(rule.weights) is type(recipe)
    back = convert(tmp_path / "out", tmp_path / "again", "quark")
    assert back["tensors"]["repack"] == 2
    first, second = (Checkpoint(tmp_path / name) for name in ("out", "again"))
    for name in first.entries:
        np.testing.assert_array_equal(first.array(name), second.array(name))


def test_recipes_of_layers_are_named(tmp_path: Path) -> None:
    convert(model(tmp_path / "in"), tmp_path / "part", "quark:int4", include=["a.weight"])
    mixed = convert(tmp_path / "part", tmp_path / "mixed", "quark")
    assert mixed["tensors"]["repack"] == 1
    said = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert said["global_quant_config"]["weight"]["dtype"] == "int4"
    assert said["exclude"] == ["b", "lm_head"]


def test_static_scales_of_inputs_and_the_cache_are_carried(tmp_path: Path) -> None:
    q = breccia.cast(weight(), breccia.Float8CurrentScaling())
    arrays = {
        "l.k_proj.weight": np.asarray(q.data),
        "l.k_proj.weight_scale": np.asarray(q.scale),
        "l.k_proj.input_scale": np.float32(0.5),
        "l.k_proj.k_scale": np.float32(0.25),
        "l.v_proj.v_scale": np.float32(0.25),
    }
    (tmp_path / "in").mkdir()
    save_arrays(
        {name: np.asarray(array) for name, array in arrays.items()},
        tmp_path / "in" / "model.safetensors",
        dtypes={"l.k_proj.weight": "F8_E4M3"},
    )
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": said}))
    report = convert(tmp_path / "in", tmp_path / "out", "quark")
    assert report["notes"] == []
    written = Checkpoint(tmp_path / "out")
    assert written.array("l.k_proj.input_scale") == np.float32(0.5)
    assert {name for name in written.entries if name.endswith("output_scale")} == {
        "l.k_proj.output_scale",
        "l.v_proj.output_scale",
    }
    rule = written.scheme.rule("l.k_proj")
    assert rule is not None
    assert rule.inputs == Activations("float8_e4m3fn", "tensor", "static")
    assert str(written.scheme.kv_cache) == str(Checkpoint(tmp_path / "in").scheme.kv_cache)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another group": (spec("int4", True) | {"group_size": 64}, {}, "group_size must divide the columns"),
    "another kind": ({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {}, "config.json must say int4 or uint4"),
    "another order": (spec("int4", True), {"export": {"pack_method": "spiral"}}, "pack_method must be 'reorder' or"),
    "zero points": (spec("int4", True), {}, "weight_zero_point must be 0 where config.json says symmetric"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    said, more, why = BAD[kind]
    arrays = {
        "a.weight": np.ones((256, 8), np.int32),
        "a.weight_scale": np.ones((2, 64), np.float32),
        "a.weight_zero_point": np.ones((2, 8), np.int32),
    }
    source = files(tmp_path / "in", arrays, said, **more)
    with pytest.raises(ValueError, match=why):
        convert(source, tmp_path / "out", "bf16")


def test_a_class_or_a_pattern_says_it_before_the_whole(tmp_path: Path) -> None:
    arrays = {"a.weight": np.ones((256, 8), np.int32), "a.weight_scale": np.ones((2, 64), np.float32)}
    wrong = {"weight": {"dtype": "fp8_e4m3"}}
    for i, more in enumerate(
        (
            {"layer_quant_config": {"b*": wrong, "a*": {"weight": spec("int4", True)}}},
            {"layer_type_quant_config": {"nn.Linear": {"weight": spec("int4", True)}}},
        )
    ):
        source = files(tmp_path / str(i), arrays, wrong["weight"], **more)
        assert [one.kind for one in Checkpoint(source).found] == ["int4"]


def test_without_its_method_nothing_is_taken_for_quark(tmp_path: Path) -> None:
    arrays = {"a.weight": np.ones((256, 8), np.int32), "a.weight_scale": np.ones((2, 64), np.float32)}
    source = files(tmp_path / "in", arrays, spec("int4", True))
    (source / "config.json").write_text("{}")
    assert "quark" not in {one.format for one in Checkpoint(source).found}


def test_arrays_that_do_not_fit_are_named() -> None:
    parts = {"weight": np.ones((256, 8), np.int32), "weight_scale": np.ones((3, 64), np.float32)}
    with pytest.raises(ValueError, match=r"^quark: weight \(K, N / 8\), .* must fit, got "):
        from_quark(parts)
    parts["weight_scale"] = np.ones((2, 64), np.float32)
    with pytest.raises(ValueError, match="'weight_zero_point' must be among the tensors"):
        from_quark(parts, symmetric=False)
