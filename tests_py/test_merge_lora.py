# SPDX-License-Identifier: Apache-2.0
"""`breccia merge-lora`: against a dense merge made here in float32, and PEFT's own where it is installed."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import breccia
import lora_peer
import numpy as np
import pytest
from breccia.bridges.common import bfloat16_bits, float32
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, merge_lora, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.judging.verify_lines import render
from breccia.moments import Moments, save_moments
from checkpoints import write_shards

RANK = 4
MODULES = ("self_attn.q_proj", "mlp.down_proj")
TARGETS = [
    "nvfp4", "mxfp8", "int4:asym:32", "int8", "fp8-block", "modelopt:nvfp4", "modelopt:fp8", "modelopt:int4",
    "compressed-tensors:nvfp4", "compressed-tensors:fp8", "compressed-tensors:int4", "compressed-tensors:mxfp4",
    "torchao:int4", "deepseek:block", "gptq:int4", "awq:int4", "mlx:mxfp8", "comfyui:nvfp4",
]  # fmt: skip


def weight(rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, columns)).astype(np.float32)


def base(path: Path, sharded: bool = False) -> Path:
    """Two layers in bfloat16."""
    arrays: dict[str, Any] = {"model.embed_tokens.weight": weight(64, 128, 9)}
    for i in range(2):
        for part, seed in (("q_proj", 1), ("k_proj", 2), ("v_proj", 3)):
            arrays[f"model.layers.{i}.self_attn.{part}.weight"] = weight(128, 128, 10 * i + seed)
        arrays[f"model.layers.{i}.self_attn.q_proj.bias"] = weight(1, 128, 4)[0]
        arrays[f"model.layers.{i}.mlp.down_proj.weight"] = weight(128, 256, 10 * i + 5)
    arrays["model.norm.weight"] = np.ones(128, np.float32)
    config = {"model_type": "llama", "tie_word_embeddings": True}
    if sharded:
        write_shards(path, [dict(list(arrays.items())[:5]), dict(list(arrays.items())[5:])], config)
    else:
        write_shards(path, [arrays], config)
    bf16 = path.with_name(path.name + "-bf16")
    convert(path, bf16, "bf16")
    return bf16


def adapter(
    path: Path, *, factor: float = 0.05, config: Any = None, more: Any = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Write an adapter of two modules of each layer; its products by the names of the tensors they are added to."""
    path.mkdir()
    rng = np.random.default_rng(3)
    arrays, products = {}, {}
    for i in range(2):
        for module, columns in zip(MODULES, (128, 256), strict=True):
            a = rng.normal(0, factor, (RANK, columns)).astype(np.float32)
            b = rng.normal(0, factor, (128, RANK)).astype(np.float32)
            name = f"model.layers.{i}.{module}"
            arrays[f"base_model.model.{name}.lora_A.weight"] = a
            arrays[f"base_model.model.{name}.lora_B.weight"] = b
            products[f"{name}.weight"] = b @ a
    save_arrays({**arrays, **(more or {})}, path / "adapter_model.safetensors", {"format": "pt"})
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**said, **(config or {})}))
    return products


def loaded(path: Path) -> dict[str, Any]:
    opened = Checkpoint(path)
    return {found.name: opened.load(opened.refined(found)) for found in opened.found}


def rounded(x: Any) -> Any:
    return float32(bfloat16_bits(x))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_plain_model(sharded: bool, tmp_path: Path) -> None:
    source = base(tmp_path / "base", sharded)
    products = adapter(tmp_path / "adapter")
    report = merge_lora(source, tmp_path / "adapter", tmp_path / "out")
    assert report["tensors"]["merge"] == len(products)
    before, after = loaded(source), loaded(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, x in before.items():
        wanted = rounded(float32(x) + 2 * products[name]) if name in products else float32(x)
        np.testing.assert_array_equal(float32(after[name]), wanted, err_msg=name)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 + sharded


@pytest.mark.parametrize("to", TARGETS)
def test_a_quantized_model_keeps_its_form(to: str, tmp_path: Path) -> None:
    products = adapter(tmp_path / "adapter")
    convert(base(tmp_path / "base"), tmp_path / "q", to)
    report = merge_lora(tmp_path / "q", tmp_path / "adapter", tmp_path / "out")
    first, second = Checkpoint(tmp_path / "q"), Checkpoint(tmp_path / "out")
    assert [(f.name, f.format, f.kind, f.recipe) for f in first.found] == [
        (f.name, f.format, f.kind, f.recipe) for f in second.found
    ]
    before, after = loaded(tmp_path / "q"), loaded(tmp_path / "out")
    changed = 0
    for name, tensor in before.items():
        x = values(tensor)
        if name not in products:
            if name.endswith(("k_proj.weight", "v_proj.weight")) and report["tensors"]["merge"] > len(products):
                continue  # a part of a fused layer, whose global scale is shared
            np.testing.assert_array_equal(values(after[name]), x, err_msg=name)
            continue
        dense = x + 2 * products[name]
        error = np.linalg.norm(values(after[name]) - dense) / np.linalg.norm(dense)
        again = breccia.cast(dense, tensor.recipe if hasattr(tensor, "recipe") else tensor.scaled.recipe)
        best = np.linalg.norm(breccia.dequantize(again) - dense) / np.linalg.norm(dense)
        assert error <= 1.1 * best + 1e-3, name
        assert np.linalg.norm(x - dense) / np.linalg.norm(dense) > 2 * best, "the change is larger than the rounding"
        changed += 1
    assert changed == len(products)
    said = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("q", "out")]
    assert said[0] == said[1]


def test_parts_of_a_fused_layer_go_on_sharing_their_scale(tmp_path: Path) -> None:
    convert(base(tmp_path / "base"), tmp_path / "q", "modelopt:nvfp4")
    for name, factor in (("small", 0.001), ("large", 0.3)):
        adapter(tmp_path / name, factor=factor)
        merge_lora(tmp_path / "q", tmp_path / name, tmp_path / f"out-{name}")
        new, old = (Checkpoint(tmp_path / path).array for path in (f"out-{name}", "q"))
        layer = "model.layers.0.self_attn"
        scales = {part: float(new(f"{layer}.{part}.weight_scale_2")) for part in ("q_proj", "k_proj", "v_proj")}
        assert scales["q_proj"] == pytest.approx(scales["k_proj"], rel=1e-6)
        assert scales["q_proj"] == pytest.approx(scales["v_proj"], rel=1e-6)
        for part in ("weight", "weight_scale", "weight_scale_2"):
            same = new(f"{layer}.k_proj.{part}").tobytes() == old(f"{layer}.k_proj.{part}").tobytes()
            assert same or name == "large"  # codes may be the same with other scales
        assert same == (name == "small")


def test_what_else_an_adapter_says(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    whole, bias = weight(64, 128, 77), weight(1, 128, 78)[0]
    more = {
        "base_model.model.model.embed_tokens.weight": whole,
        "base_model.model.model.layers.1.self_attn.q_proj.bias": bias,
    }
    config = {"use_rslora": True, "alpha_pattern": {"layers.1.mlp.down_proj": 16}, "modules_to_save": ["embed_tokens"]}
    products = adapter(tmp_path / "adapter", config=config, more=more)
    merge_lora(source, tmp_path / "adapter", tmp_path / "out")
    before, after = loaded(source), loaded(tmp_path / "out")
    np.testing.assert_array_equal(float32(after["model.embed_tokens.weight"]), rounded(whole))
    np.testing.assert_array_equal(float32(after["model.layers.1.self_attn.q_proj.bias"]), rounded(bias))
    for name, product in products.items():
        scale = np.float32((16 if name == "model.layers.1.mlp.down_proj.weight" else 8) / np.sqrt(RANK))
        np.testing.assert_array_equal(float32(after[name]), rounded(float32(before[name]) + scale * product))


def test_embeddings_and_turned_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 0.1, (RANK, 64)).astype("f4"), rng.normal(0, 0.1, (128, RANK)).astype("f4")
    save_arrays({"model.embed_tokens.weight": weight(64, 128, 1)}, tmp_path / "in.safetensors")
    (tmp_path / "a").mkdir()
    names = ("lora_embedding_A", "lora_embedding_B")
    arrays = {f"base_model.model.model.embed_tokens.{n}": x for n, x in zip(names, (a, b), strict=True)}
    save_arrays(arrays, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK})
    )
    merge_lora(tmp_path / "in.safetensors", tmp_path / "a", tmp_path / "out.safetensors")
    before, after = (SafetensorsFile(tmp_path / f"{n}.safetensors")["model.embed_tokens.weight"] for n in ("in", "out"))
    np.testing.assert_allclose(after, before + (b @ a).T, rtol=1e-6, atol=1e-7)


def test_rounding_by_chance_keeps_small_changes_on_average(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    convert(source, tmp_path / "q", "int4:32")
    products = adapter(tmp_path / "adapter", factor=0.004)
    name = "model.layers.0.mlp.down_proj.weight"
    before = values(loaded(tmp_path / "q")[name])
    change = 2 * products[name]
    merge_lora(tmp_path / "q", tmp_path / "adapter", tmp_path / "nearest")
    nearest = values(loaded(tmp_path / "nearest")[name]) - before
    drawn = []
    for seed in range(24):
        merge_lora(tmp_path / "q", tmp_path / "adapter", tmp_path / f"s{seed}", seed=seed)
        drawn.append(values(loaded(tmp_path / f"s{seed}")[name]) - before)
    again = tmp_path / "again"
    merge_lora(tmp_path / "q", tmp_path / "adapter", again, seed=0)
    np.testing.assert_array_equal(values(loaded(again)[name]) - before, drawn[0])

    def kept(x: Any) -> float:
        return float((x * change).sum() / (change * change).sum())

    assert abs(kept(np.mean(drawn, axis=0)) - 1) < 0.2
    assert abs(kept(nearest) - 1) > abs(kept(np.mean(drawn, axis=0)) - 1)


def test_feedback_keeps_small_changes(tmp_path: Path) -> None:
    """Of each format: more than rounding to nearest, which strict refuses, without moments and with."""
    source = base(tmp_path / "base")
    adapter(tmp_path / "adapter", factor=0.012)
    rng = np.random.default_rng(0)
    moments = {}
    for i in range(2):
        for module, columns in zip(MODULES[:1], (128,), strict=True):
            inputs = rng.normal(size=(256, columns)).astype(np.float32)
            full = inputs.T @ inputs
            said = Moments(full.diagonal().copy(), np.asarray(256, np.int64), full=full)
            moments[f"model.layers.{i}.{module}"] = said
    save_moments(moments, tmp_path / "moments.safetensors")
    for to in ("nvfp4", "int4:asym:32", "modelopt:nvfp4", "compressed-tensors:mxfp4", "mxfp8"):
        convert(source, tmp_path / "q", to, force=True)
        reports = {}
        for name, options in {
            "nearest": {},
            "feedback": {"rounding": "feedback"},
            "moments": {"rounding": "feedback", "moments": tmp_path / "moments.safetensors"},
        }.items():
            reports[name] = merge_lora(tmp_path / "q", tmp_path / "adapter", tmp_path / name, force=True, **options)
            said = verify(tmp_path / "q", tmp_path / name, adapter=tmp_path / "adapter", min_sqnr_db=1)
            assert said["kept"] == pytest.approx(reports[name]["change"]["kept"], abs=1e-3)
        kept = {name: report["change"]["kept"] for name, report in reports.items()}
        assert abs(1 - kept["feedback"]) < 0.25, (to, kept)
        assert abs(1 - kept["moments"]) < 0.25, (to, kept)
        note = [one for one in reports["moments"]["notes"] if "has no moments of" in one]
        assert len(note) == 1
        assert note[0].endswith("has no moments of model.layers.0.mlp.down_proj.weight and 1 more")
        if to != "mxfp8":
            assert kept["nearest"] < 0.7
            assert "4 of 4 tensors keep less than 90% of the adapter's change" in reports["nearest"]["notes"][-1]
            with pytest.raises(ValueError, match=r"strict: .* 4 of 4 tensors keep less than 90%.*--rounding feedback"):
                merge_lora(tmp_path / "q", tmp_path / "adapter", tmp_path / "strict", strict=True)
            assert not (tmp_path / "strict").exists()


def test_the_command_says_what_is_kept(tmp_path: Path) -> None:
    convert(base(tmp_path / "base"), tmp_path / "q", "nvfp4")
    adapter(tmp_path / "adapter", factor=0.012)
    command = [sys.executable, "-m", "breccia", "merge-lora", tmp_path / "q", tmp_path / "adapter", tmp_path / "out"]
    asked = [*map(str, command), "--rounding", "feedback"]
    run = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert re.search(r"out:\s+\d+(\.\d+)? kB in [\d.]+ s \(.* merge.*\)\n", run.stdout)
    assert re.search(r"\d+\.\d% of the adapter's change kept, rounding: feedback\n", run.stdout)
    following = " ".join(run.stdout[run.stdout.index("next:") :].replace("\\\n", "").split())
    assert following == f"next: breccia verify {tmp_path / 'q'} {tmp_path / 'out'} --adapter {tmp_path / 'adapter'}"
    assert all(len(line) <= 80 or str(tmp_path) in line for line in run.stdout.splitlines())
    asked[-3:] = [str(tmp_path / "other"), "--rounding", "nearest"]
    with_seed = subprocess.run([*asked, "--seed", "1"], capture_output=True, text=True, check=False)
    assert with_seed.returncode == 2
    assert "seed must be left out with rounding nearest, which draws nothing, got 1" in with_seed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, feedback, or None, got 'up'"),
        ({"rounding": "nearest", "moments": "m"}, "moments must be left out except with rounding feedback"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str, tmp_path: Path) -> None:
    adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        merge_lora(base(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"peft_type": "IA3"}, {}, "adapter must be of peft_type 'LORA', got 'IA3'"),
        ({"use_dora": True}, {}, "adapter must not have use_dora: DoRA scales rows"),
        (
            {},
            {"base_model.model.model.nowhere.weight": np.ones((2, 2), "f4")},
            "'model.nowhere.weight' must have its place",
        ),
        ({}, {"base_model.model.model.norm.weight": np.ones(7, "f4")}, r"must have shape \(128,\), it has \(7,\)"),
        ({}, {"base_model.model.a.lora_A.weight": np.ones((4, 2), "f4")}, "must have lora_A and lora_B of 'a'"),
        ({}, {"base_model.model.a.lora_magnitude_vector": np.ones(4, "f4")}, "must be of LoRA or take"),
        ({"lora_alpha": "x"}, {}, "lora_alpha must be a number of float32, got 'x'"),
        ({"lora_alpha": float("nan")}, {}, "lora_alpha must be a number of float32, got nan"),
        ({"lora_alpha": 1e39}, {}, r"lora_alpha must be a number of float32, got 1e\+39"),
        (
            {},
            {
                "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": np.ones((0, 128), "f4"),
                "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight": np.ones((128, 0), "f4"),
            },
            r"matrices of .*k_proj' must be \(r, IN\) and \(OUT, r\), got \(0, 128\), \(128, 0\)",
        ),
        ({"alpha_pattern": ["q_proj"]}, {}, r"alpha_pattern must map patterns to numbers, got \['q_proj'\]"),
        ({"alpha_pattern": {"(": 1}}, {}, "alpha_pattern must be of regular expressions of .*, got '\\('"),
        ({"alpha_pattern": {"q{2}": 1}}, {}, "alpha_pattern must be of regular expressions of .*, got"),
        ({"alpha_pattern": {".*q_proj": "x"}}, {}, "lora_alpha must be a number of float32, got 'x'"),
    ],
)
def test_what_cannot_be_merged_is_refused(config: Any, more: Any, message: str, tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    adapter(tmp_path / "adapter", config=config, more=more)
    with pytest.raises(ValueError, match=message):
        merge_lora(source, tmp_path / "adapter", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "base-bf16"]


def test_the_command(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    adapter(tmp_path / "adapter")
    command = [
        sys.executable,
        "-m",
        "breccia",
        "merge-lora",
        str(source),
        str(tmp_path / "adapter"),
        str(tmp_path / "out"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "4 merge" in first.stdout
    assert verify(source, tmp_path / "out", min_sqnr_db=1)["ok"]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "OUT must not be there" in second.stderr


@pytest.mark.parametrize("to", TARGETS)
def test_verify_says_how_much_is_kept(to: str, tmp_path: Path) -> None:
    """Nearest rounding keeps little of a small change, chance all of it on average."""
    products = adapter(tmp_path / "adapter", factor=0.012)
    convert(base(tmp_path / "base"), tmp_path / "q", to)
    kept = {}
    for seed in (None, 7):
        out = tmp_path / f"out-{seed}"
        merge_lora(tmp_path / "q", tmp_path / "adapter", out, seed=seed)
        report = verify(tmp_path / "q", out, adapter=tmp_path / "adapter", min_sqnr_db=1)
        assert report["ok"], report["failed"]
        changed = {t["name"]: t["kept"] for t in report["tensors"] if "kept" in t}
        assert changed.keys() == products.keys()
        kept[seed] = report["kept"]
        before, after = loaded(tmp_path / "q"), loaded(out)
        dots = [(2 * products[n] * (values(after[n]) - values(before[n]))).sum() for n in products]
        np.testing.assert_allclose(kept[seed], sum(dots) / sum((4 * p * p).sum() for p in products.values()), rtol=1e-3)
    bits = 4 if "4" in to.replace("e4m3", "") else 8
    assert kept[None] < (0.6 if bits == 4 else 1.2)
    assert abs(kept[7] - 1) < 0.35
    text = render(report)
    assert f"{kept[7]:.1%} of the adapter's change kept, in 4 tensors\n" in text


def test_verify_with_an_adapter_of_plain_floats(tmp_path: Path) -> None:
    """And tensors that take another's place, and the sentence of one that changes what is not there."""
    source = base(tmp_path / "base")
    norm = {"base_model.model.model.norm.weight": np.full(128, 3, np.float32)}
    adapter(tmp_path / "adapter", more=norm)
    merge_lora(source, tmp_path / "adapter", tmp_path / "out")
    command = [sys.executable, "-m", "breccia", "verify", source, tmp_path / "out", "--adapter", tmp_path / "adapter"]
    run = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True, check=True)
    report = json.loads(run.stdout)
    assert abs(report["kept"] - 1) < 1e-2
    assert len([t for t in report["tensors"] if "kept" in t]) == 5
    adapter(tmp_path / "other", more={"base_model.model.model.none.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"adapter must change tensors of .*, which has no 'model\.none\.weight'"):
        verify(source, tmp_path / "out", adapter=tmp_path / "other")


def test_pefts_own_merge_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora_peer.hide(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = lora_peer.peft()
        from tiny_models import tiny, transformers

        torch = pytest.importorskip("torch")
        source = tiny("llama-tied", tmp_path / "base")
        convert(source, tmp_path / "fp32", "fp32")
        model = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.float32)
        said = peft.LoraConfig(
            r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj", "embed_tokens"]
        )
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, said)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.05)
        wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        merged = wrapped.merge_and_unload().state_dict()
    merge_lora(tmp_path / "fp32", tmp_path / "adapter", tmp_path / "out")
    mine = loaded(tmp_path / "out")
    assert mine
    for name, x in mine.items():
        np.testing.assert_allclose(x, merged[name].numpy(), rtol=1e-5, atol=1e-7, err_msg=name)
