# SPDX-License-Identifier: Apache-2.0
"""Conversions by moments: GPTQ for every format, what falls back, parts, experts of each form, and memory."""

import json
import pickle
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.bridges import quantize_gguf
from breccia.checkpoint import convert, finish, plan, save_arrays, target_names, verify
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.layer_moments import LayerMoments, smoothed
from breccia.checkpoint.planning.targets import FLOATS, parse_target
from breccia.cli import main
from breccia.gguf.container import GgufFile
from breccia.moments import Moments, save_moments
from breccia.recipes import choices
from fault_runner import tree
from tiny_models import LAYER_OF_LLAMA

LAYER = "model.layers.0."
SHAPES = {
    f"{LAYER}self_attn.q_proj": (256, 256),
    f"{LAYER}self_attn.k_proj": (256, 256),
    f"{LAYER}self_attn.v_proj": (256, 256),
    f"{LAYER}self_attn.o_proj": (256, 256),
    f"{LAYER}mlp.gate_proj": (512, 256),
    f"{LAYER}mlp.up_proj": (512, 256),
    f"{LAYER}mlp.down_proj": (256, 512),
}


def inputs(columns, rows=4096, seed=0):
    """Rows whose columns go together and are of different size."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, columns // 4)) @ rng.normal(size=(columns // 4, columns))
    return ((mixed + rng.normal(size=mixed.shape)) * np.exp(0.7 * rng.normal(size=columns))).astype(np.float32)


def made(folder):
    """The files of a folder without breccia.json, which says by what options and data they were made."""
    return {name: data for name, data in tree(folder).items() if name != "breccia.json"}


def moments_of(x, level="full", block=16):
    full = (x.T @ x).astype(np.float32)
    known = {"diag": np.diag(full).copy(), "count": np.asarray(len(x), np.int64)}
    if level == "block":
        known["block"] = np.stack([full[i : i + block, i : i + block] for i in range(0, len(full), block)])
    if level == "full":
        known["full"] = full
    return Moments(**known)


def model(folder, shapes, config, dtype=np.float32, **more):
    rng = np.random.default_rng(3)
    arrays = {f"{name}.weight": (0.02 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}
    arrays |= {
        "model.embed_tokens.weight": rng.normal(size=(32, 256)).astype(dtype),
        "lm_head.weight": rng.normal(size=(32, 256)).astype(dtype),
        "model.norm.weight": np.ones(256, dtype),
        f"{LAYER}input_layernorm.weight": np.ones(256, dtype),
        f"{LAYER}post_attention_layernorm.weight": np.ones(256, dtype),
        **more,
    }
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


def of_shapes(shapes, level="full"):
    """Layers of one input share its moments."""
    first, down = moments_of(inputs(256), level), moments_of(inputs(512, seed=1), level)
    other = moments_of(inputs(256, seed=2), level)
    return {name: {"o_proj": other, "down_proj": down}.get(name.rpartition(".")[2], first) for name in shapes}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with model/ and full.safetensors, and the model's arrays."""
    folder = tmp_path_factory.mktemp("llama")
    arrays = model(folder / "model", SHAPES, LAYER_OF_LLAMA)
    known = of_shapes(SHAPES)
    save_moments(known, folder / "full.safetensors")
    return folder, arrays, known


def rounds(name):
    """Whether a target has codes that GPTQ chooses."""
    target = parse_target(name)
    if target.kind:
        return target.bridge.kinds[target.kind].encode is not None
    return name not in FLOATS and target.recipe is not None and not choices(target.recipe).expanded


TARGETS = [name for name in target_names() if rounds(name)]


@pytest.mark.in_turn
@pytest.mark.parametrize("to", TARGETS)
def test_every_target_loses_less_at_the_output(llama, tmp_path, to):
    if to.startswith("onnx"):
        pytest.importorskip("onnx")
    folder, _, known = llama
    out = tmp_path / ("out.gguf" if to.startswith("gguf") else "out")
    options = {"moments": folder / "full.safetensors", "method": "gptq"}
    try:
        report = convert(folder / "model", out, to, **options)
    except ValueError as error:
        with pytest.raises(ValueError, match=r".") as plain:
            convert(folder / "model", out, to)
        assert str(plain.value) == str(error)  # the model has no place in the format, by whatever method
        return
    quantized = sum(report["tensors"].get(action, 0) for action in ("cast", "encode"))
    errors = report["output_errors"]
    fallen = [note.partition(":")[0] for note in report["notes"] if "rounded to nearest" in note]
    if not quantized:
        assert not errors
        return
    assert len(errors) + len(fallen) == quantized
    assert set(fallen) <= {"lm_head.weight", "model.embed_tokens.weight"}  # of which there are no moments
    judged = verify(folder / "model", out, moments=known, min_sqnr_db=0)
    measured = {tensor["name"]: tensor.get("output_error") for tensor in judged["tensors"]}
    for name, said in errors.items():
        assert said["output_error"] < said["nearest"] and said["level"] == "full"
        assert measured[name] == pytest.approx(said["output_error"], rel=2e-3)


@pytest.mark.parametrize("to", ["expanded", "int8_expanded"])
def test_groups_with_exponents_have_no_scale_to_choose(llama, tmp_path, to):
    folder, _, _ = llama
    with pytest.raises(ValueError, match=f"method gptq must be left out for tensor '.*weight', which becomes {to}"):
        convert(folder / "model", tmp_path / "out", to, moments=folder / "full.safetensors", method="gptq")
    report = convert(folder / "model", tmp_path / "out", to)
    judged = verify(folder / "model", tmp_path / "out")
    assert report["tensors"]["cast"] and judged["ok"]
    opened = breccia.load(tmp_path / "out" / "model.safetensors")
    assert any(getattr(value, "exponents", None) is not None for value in opened.values())


def test_codes_are_those_of_gptq(llama, tmp_path):
    folder, arrays, known = llama
    options = {"moments": folder / "full.safetensors", "method": "gptq"}
    for to, more, kept in (
        ("mxfp4", {}, {}),
        ("int4:64", {}, {"order": "act", "damp": 0.02}),
        ("nvfp4", {"order": "natural", "damp": 0.2}, {"order": "natural", "damp": 0.2}),
    ):
        convert(folder / "model", tmp_path / to.replace(":", "_"), to, **options, **more)
        out = breccia.load(tmp_path / to.replace(":", "_"))
        for name in SHAPES:
            wanted = breccia.gptq(arrays[f"{name}.weight"], known[name], to, **kept)
            assert out[f"{name}.weight"].data.tobytes() == wanted.data.tobytes(), (to, name)
            assert np.asarray(out[f"{name}.weight"].scale).tobytes() == np.asarray(wanted.scale).tobytes()


@pytest.mark.parametrize("to", ["compressed-tensors:nvfp4", "compressed-tensors:fp8"])
def test_what_servers_want_of_scales_is_kept(llama, tmp_path, to):
    """Fused layers have one global scale, and scales of a whole tensor are bfloat16's."""
    folder, _, _ = llama
    convert(folder / "model", tmp_path / "gptq", to, moments=folder / "full.safetensors", method="gptq")
    convert(folder / "model", tmp_path / "near", to, moments=folder / "full.safetensors")
    got, near = breccia.load(tmp_path / "gptq"), breccia.load(tmp_path / "near")
    for name in SHAPES:
        one, other = got[f"{name}.weight"], near[f"{name}.weight"]
        assert np.asarray(one.scale).tobytes() == np.asarray(other.scale).tobytes()
        if "nvfp4" in to:
            assert np.array_equal(one.global_scale, other.global_scale)
        assert one.data.tobytes() != other.data.tobytes()


def test_moments_alone_are_an_importance(llama, tmp_path):
    folder, _, _ = llama
    convert(folder / "model", tmp_path / "a", "nvfp4", moments=folder / "full.safetensors")
    convert(folder / "model", tmp_path / "b", "nvfp4", imatrix=folder / "full.safetensors")
    assert made(tmp_path / "a") == made(tmp_path / "b")
    convert(folder / "model", tmp_path / "c", "nvfp4")
    assert made(tmp_path / "a") != made(tmp_path / "c")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_fitted_by_the_diagonals(llama, tmp_path, kind):
    folder, arrays, known = llama
    convert(folder / "model", tmp_path / "out.gguf", f"gguf:{kind.lower()}", moments=folder / "full.safetensors")
    file = GgufFile(tmp_path / "out.gguf")
    name = f"{LAYER}mlp.down_proj"
    wanted = quantize_gguf(arrays[f"{name}.weight"], kind, known[name].diag)
    assert file.raw("blk.0.ffn_down.weight").tobytes() == wanted.tobytes()
    assert wanted.tobytes() != quantize_gguf(arrays[f"{name}.weight"], kind).tobytes()
    file.close()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
def test_codes_of_blocks_are_those_of_gptq(llama, tmp_path, kind):
    folder, arrays, known = llama
    options = {"moments": folder / "full.safetensors", "method": "gptq"}
    report = convert(folder / "model", tmp_path / "out.gguf", f"gguf:{kind.lower()}", **options)
    file = GgufFile(tmp_path / "out.gguf")
    name = f"{LAYER}mlp.down_proj"
    wanted = quantize_gguf(arrays[f"{name}.weight"], kind, moments=known[name])
    assert file.raw("blk.0.ffn_down.weight").tobytes() == wanted.tobytes()
    assert wanted.tobytes() != quantize_gguf(arrays[f"{name}.weight"], kind, known[name].diag).tobytes()
    file.close()
    assert len(report["output_errors"]) == report["tensors"]["encode"] == 7
    options |= {"order": "natural", "damp": 0.5}
    other = convert(folder / "model", tmp_path / "other.gguf", f"gguf:{kind.lower()}", **options)
    assert {one["damp"] for one in other["output_errors"].values()} == {0.5}
    assert (tmp_path / "out.gguf").read_bytes() != (tmp_path / "other.gguf").read_bytes()


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("how", ["gptq", "moments", "imatrix"])
def test_parts_give_the_bytes_and_the_report_of_one_process(llama, tmp_path, how, count):
    folder, _, _ = llama
    given = {"imatrix" if how == "imatrix" else "moments": folder / "full.safetensors"}
    given |= {"method": "gptq", "damp": 0.1} if how == "gptq" else {}
    whole = convert(folder / "model", tmp_path / "whole", "nvfp4", checksums=count != 3, **given)
    pieces = pickle.loads(pickle.dumps(plan(folder / "model", tmp_path / "out", "nvfp4", count, **given)))
    for piece in reversed(pieces):
        piece.run(threads=1, checksums=count != 3)
    with pytest.raises(ValueError, match="must be made from this source and target"):
        finish(folder / "model", tmp_path / "out", "nvfp4", checksums=False)
    report = finish(folder / "model", tmp_path / "out", "nvfp4", checksums=count != 3, **given)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (tmp_path / "out" / "breccia.json").exists() == (count != 3)
    assert report["output_errors"] == whole["output_errors"] and report["notes"] == whole["notes"]
    assert len(report["output_errors"]) == (7 if how == "gptq" else 0)


def test_parts_look_at_the_same_data(llama, tmp_path):
    folder, _, known = llama
    path = tmp_path / "m.safetensors"
    save_moments(known, path)
    given = {"moments": path, "method": "gptq"}
    first, second = plan(folder / "model", tmp_path / "out", "nvfp4", 2, **given)
    first.run(threads=1)
    save_moments({name: one for name, one in known.items() if "mlp" in name}, path)
    with pytest.raises(ValueError, match="must be as it was planned for"):
        second.run(threads=1)
    with pytest.raises(ValueError, match="must be made from this source and target"):
        plan(folder / "model", tmp_path / "out", "nvfp4", 2, **given)[0].run(threads=1)


def test_what_is_killed_goes_on_with_the_same_bytes_and_report(llama, tmp_path, monkeypatch):
    from breccia.checkpoint import convert as made_by

    module = sys.modules[made_by.__module__]
    folder, _, _ = llama
    given = {"moments": folder / "full.safetensors", "method": "gptq"}
    whole = convert(folder / "model", tmp_path / "whole", "int4", **given)
    own, calls = module.execute, []

    def stopping(*arguments):
        calls.append(arguments[1].found.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(module, "execute", stopping)
    monkeypatch.setattr(module, "_SYNC_EVERY", 0)
    with pytest.raises(KeyboardInterrupt):
        convert(folder / "model", tmp_path / "out", "int4", **given)
    seen = len(calls)
    report = convert(folder / "model", tmp_path / "out", "int4", **given)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert report["output_errors"] == whole["output_errors"]
    assert len(calls) < 2 * seen + 10 and calls[0] not in calls[seen:]


def test_moments_that_change_meanwhile_are_an_error(llama, tmp_path, monkeypatch):
    folder, _, known = llama
    path = tmp_path / "m.safetensors"
    save_moments(known, path)
    own = Importance.release

    def release(self):
        own(self)
        path.touch()

    monkeypatch.setattr(Importance, "release", release)
    with pytest.raises(ValueError, match=r"m\.safetensors: must not change while it is read, it did"):
        convert(folder / "model", tmp_path / "out", "nvfp4", moments=path, method="gptq")


def test_every_tensor_that_falls_back_is_named_with_the_reason(llama, tmp_path):
    folder, arrays, known = llama
    odd = dict(known)
    odd[f"{LAYER}self_attn.q_proj"] = moments_of(inputs(256, rows=40))
    odd[f"{LAYER}self_attn.k_proj"] = moments_of(inputs(256), "diag")
    opposed = np.full((512, 512), -1.0, np.float32) + np.eye(512, dtype=np.float32) * 2
    odd[f"{LAYER}mlp.down_proj"] = Moments(np.ones(512, np.float32), np.asarray(4096), full=opposed)
    low = np.linalg.eigvalsh(known[f"{LAYER}self_attn.o_proj"].full.astype(np.float64))[0]
    full = known[f"{LAYER}self_attn.o_proj"].full
    shifted = full - np.eye(256, dtype=np.float32) * np.float32(low + 0.2 * np.diag(full).mean())
    shifted[np.diag_indices(256)] = np.maximum(np.diag(shifted), 0)
    odd[f"{LAYER}self_attn.o_proj"] = Moments(np.diag(shifted).copy(), np.asarray(4096), full=shifted)
    del odd[f"{LAYER}mlp.up_proj"]
    save_moments(odd, tmp_path / "m.safetensors")
    given = {"moments": tmp_path / "m.safetensors", "method": "gptq"}
    report = convert(folder / "model", tmp_path / "out", "nvfp4", include=["*_proj.weight", "*embed*"], **given)
    near = "rounded to nearest"
    assert sorted(report["notes"]) == sorted(
        [
            f"model.embed_tokens.weight: {near}: it is an embedding, not a linear weight",
            f"{LAYER}mlp.up_proj.weight: {near}: there are no moments of it",
            f"{LAYER}self_attn.q_proj.weight: {near}, by importance: too few tokens: 40 for K = 256",
            f"{LAYER}self_attn.k_proj.weight: {near}, by importance: its moments are a diagonal, with which GPTQ is "
            "rounding to nearest by importance",
            f"{LAYER}mlp.down_proj.weight: {near}, by importance: moments are not positive definite",
            f"{LAYER}self_attn.o_proj.weight: damped by 0.2: with less its moments are not positive definite",
        ]
    )
    out = breccia.load(tmp_path / "out")
    plain = breccia.cast(arrays[f"{LAYER}mlp.up_proj.weight"], "nvfp4")
    assert out[f"{LAYER}mlp.up_proj.weight"].data.tobytes() == plain.data.tobytes()
    weighted = breccia.cast(
        arrays[f"{LAYER}self_attn.q_proj.weight"], "nvfp4", importance=odd[f"{LAYER}self_attn.q_proj"].diag
    )
    assert out[f"{LAYER}self_attn.q_proj.weight"].data.tobytes() == weighted.data.tobytes()
    with pytest.raises(ValueError, match="strict: there must be nothing to note, there is"):
        convert(folder / "model", tmp_path / "no", "nvfp4", strict=True, **given)
    known_only = convert(
        folder / "model", tmp_path / "yes", "nvfp4", strict=True, moments=folder / "full.safetensors", method="gptq"
    )
    assert not known_only["notes"]


MOE = LAYER_OF_LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "head_dim": 64,
}
EXPERTS = {
    f"{LAYER}mlp.experts.{i}.{part}": (256, 128) if part == "down_proj" else (128, 256)
    for i in range(4)
    for part in ("gate_proj", "up_proj", "down_proj")
}
ROWS = (1024, 0, 20, 512)  # that each of the four experts was given


def of_experts():
    """Each expert's moments of the inputs of gate and up, and of down; the second saw no token."""
    given = {}
    for key, columns in (("in", 256), ("down", 128)):
        given[key] = [moments_of(inputs(columns, rows, seed=7 + i), "block") for i, rows in enumerate(ROWS)]
    return given


def stacked(parts):
    return Moments(**{key: np.stack([one.arrays()[key] for one in parts]) for key in parts[0].arrays()})


def spelled(form, given, block=f"{LAYER}mlp"):
    if form == "apart":
        return {
            f"{block}.experts.{i}.{part}": given["down" if part == "down_proj" else "in"][i]
            for i in range(4)
            for part in ("gate_proj", "up_proj", "down_proj")
        }
    if form == "fused":
        names = {"in": f"{block}.experts.gate_up_proj", "down": f"{block}.experts.down_proj"}
        return {name: stacked(given[key]) for key, name in names.items()}
    names = {part: f"{block}.switch_mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    return {name: stacked(given["down" if part == "down_proj" else "in"]) for part, name in names.items()}


@pytest.mark.parametrize("to", ["int4:32", "nvfp4", "mlx:nvfp4", "mlx:int4", "gguf:mxfp4", "compressed-tensors:nvfp4"])
def test_experts_by_moments_of_each_form(tmp_path, to):
    more = {f"{LAYER}mlp.gate.weight": np.zeros((4, 256), np.float32)}
    arrays = model(tmp_path / "model", EXPERTS, MOE, **more)
    given, seen, reports = of_experts(), [], []
    for form in ("apart", "fused", "switch"):
        save_moments(spelled(form, given), tmp_path / f"{form}.safetensors")
        out = tmp_path / (f"{form}.gguf" if "gguf" in to else form)
        reports.append(convert(tmp_path / "model", out, to, moments=tmp_path / f"{form}.safetensors", method="gptq"))
        seen.append(made(out) if out.is_dir() else out.read_bytes())
    assert seen[0] == seen[1] == seen[2]
    assert reports[0]["output_errors"] == reports[1]["output_errors"] == reports[2]["output_errors"]
    errors = reports[0]["output_errors"]
    apart = len(errors) == 12
    assert apart or len(errors) == 3
    unseen = [name for name, said in errors.items() if said["output_error"] is None]
    assert unseen == ([name for name in errors if ".experts.1." in name] if apart else [])
    known = [said for said in errors.values() if said["output_error"] is not None]
    assert all(said["output_error"] < said["nearest"] for said in known)
    if apart:
        assert not any("rounded" in note or "tokens" in note for note in reports[0]["notes"])
    else:
        assert sum("2 of 4 experts have seen fewer than K / 4 tokens" in note for note in reports[0]["notes"]) == 3
    if to == "int4:32":
        pool = given["in"][0] + given["in"][1] + given["in"][2] + given["in"][3]
        out = breccia.load(tmp_path / "apart")
        for i in range(4):
            name = f"{LAYER}mlp.experts.{i}.up_proj.weight"
            wanted = breccia.gptq(arrays[name], smoothed(given["in"][i], pool), "int4:32")
            assert out[name].data.tobytes() == wanted.data.tobytes()


def test_experts_of_a_layer_in_one_tensor(tmp_path):
    """As batches they have one global scale, that of all of them."""
    given = of_experts()
    w = np.random.default_rng(0).normal(size=(4, 128, 256)).astype(np.float32) * np.float32([1, 2, 3, 4])[:, None, None]
    name = f"{LAYER}mlp.experts.gate_up_proj"
    (tmp_path / "model").mkdir()
    save_arrays({name: w}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "test"}))
    save_moments(spelled("fused", given), tmp_path / "m.safetensors")
    for to in ("nvfp4", "mxfp4"):
        given_to = {"moments": tmp_path / "m.safetensors", "method": "gptq"}
        report = convert(tmp_path / "model", tmp_path / to, to, **given_to)
        made = breccia.load(tmp_path / to)[name]
        pool = given["in"][0] + given["in"][1] + given["in"][2] + given["in"][3]
        each = [smoothed(one, pool) for one in given["in"]]
        full = np.zeros((4, 256, 256), np.float32)
        for i, one in enumerate(each):
            for b in range(16):
                full[i, 16 * b : 16 * b + 16, 16 * b : 16 * b + 16] = one.block[b]
        wanted = breccia.gptq(w, full, to)
        assert made.data.tobytes() == wanted.data.tobytes()
        assert np.array_equal(made.global_scale, wanted.global_scale)
        assert report["output_errors"][name]["level"] == "block"
    report = convert(tmp_path / "model", tmp_path / "fp8", "fp8", **given_to)
    assert report["notes"] == [f"{name}: rounded to nearest, by importance: current has one scale for all experts"]


def test_names_of_mixtral_in_files_and_in_models():
    given = of_experts()
    known = LayerMoments(spelled("fused", given))
    block = f"{LAYER}block_sparse_moe"
    for i in range(4):
        for kind, key, columns in (("w1", "in", 256), ("w2", "down", 128), ("w3", "in", 256)):
            found = known.of(f"{block}.experts.{i}.{kind}.weight", (128, columns))
            assert np.array_equal(found.block, given[key][i].block) and found.count == ROWS[i]
            assert known.pool(f"{block}.experts.{i}.{kind}.weight", (128, columns)).count == sum(ROWS)
    with pytest.raises(ValueError, match=r"importance of .*w1\.weight must have 64 columns, it has \(4, 256\)"):
        known.of(f"{block}.experts.0.w1.weight", (128, 64))
    with pytest.raises(ValueError, match=r"must be of more than 9 experts, it has \(4, 256\)"):
        known.of(f"{block}.experts.9.w1.weight", (128, 256))
    with pytest.raises(ValueError, match=r"must be of 8 experts, it has \(4, 256\)"):
        known.of(f"{LAYER}mlp.experts.gate_up_proj", (8, 128, 256), 0)


def test_a_source_of_codes_with_room_is_rounded_by_moments_too(llama, tmp_path):
    folder, _, known = llama
    given = {"moments": folder / "full.safetensors", "method": "gptq"}
    convert(folder / "model", tmp_path / "fp8", "fp8-row")
    report = convert(tmp_path / "fp8", tmp_path / "out", "nvfp4", **given)
    assert report["tensors"]["requantize"] == len(report["output_errors"]) == 7
    source, out = breccia.load(tmp_path / "fp8"), breccia.load(tmp_path / "out")
    for name in SHAPES:
        wanted = breccia.gptq(breccia.dequantize(source[f"{name}.weight"]), known[name], "nvfp4")
        assert out[f"{name}.weight"].data.tobytes() == wanted.data.tobytes()
    report = convert(tmp_path / "out", tmp_path / "again", "mxfp4", **given)
    assert len(report["notes"]) == 7 and all("requantized from codes of 4 bits" in note for note in report["notes"])


def test_what_was_read_of_moments_leaves_memory(llama, tmp_path, monkeypatch):
    """While a layer is rounded, the file's pages in memory are those of its own moments."""
    if not sys.platform.startswith("linux"):
        pytest.skip("pages of a mapping are counted by Linux alone")
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(6)]
    arrays = {f"{name}.weight": np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32) for name in names}
    save_arrays(arrays, tmp_path / "a.safetensors")
    save_moments({name: moments_of(inputs(512, seed=i)) for i, name in enumerate(names)}, tmp_path / "m.safetensors")
    own, seen = Importance.release, []

    def resident():
        lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
        return sum(
            int(next(row for row in lines if row.startswith("Rss:")).split()[1]) << 10
            for line in lines
            if line.rstrip().endswith("m.safetensors")
        )

    def release(self):
        seen.append(resident())
        own(self)
        seen.append(resident())

    monkeypatch.setattr(Importance, "release", release)
    convert(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        "nvfp4",
        moments=tmp_path / "m.safetensors",
        method="gptq",
    )
    one = 512 * 512 * 4
    assert len(seen) == 12
    assert max(seen) < 2.5 * one and max(seen[1::2]) < one / 2


def test_what_is_refused(llama, tmp_path):
    folder, _, known = llama
    file = folder / "full.safetensors"
    from test_imatrix import entries, write_gguf

    write_gguf(tmp_path / "i.gguf", entries())
    for error, options, message in (
        (ValueError, {"moments": file, "imatrix": file}, "moments must be left out where imatrix is given"),
        (ValueError, {"method": "gptq"}, "moments must be given for method gptq"),
        (ValueError, {"method": "awq"}, "method must be 'nearest' or 'gptq', got 'awq'"),
        (ValueError, {"moments": file, "order": "act"}, "order must be left out except with method gptq, got 'act'"),
        (ValueError, {"moments": file, "damp": 0.1}, "damp must be left out except with method gptq, got 0.1"),
        (ValueError, {"moments": file, "method": "gptq", "order": "up"}, "order must be 'act' or 'natural', got 'up'"),
        (ValueError, {"moments": file, "method": "gptq", "damp": 1.5}, "damp must be from 0 to 1, got 1.5"),
        (TypeError, {"moments": file, "method": "gptq", "damp": "x"}, "damp must be a number, got 'x'"),
        (TypeError, {"moments": 5}, "moments must be a path"),
        (ValueError, {"moments": tmp_path / "i.gguf"}, r"moments must be a file that calibrate wrote, .*i\.gguf is an"),
    ):
        for call in (convert, lambda *a, **k: plan(*a, 2, **k)):
            with pytest.raises(error, match=message):
                call(folder / "model", tmp_path / "out", "nvfp4", **options)
    save_moments({name: moments_of(inputs(128)) for name in known}, tmp_path / "narrow.safetensors")
    with pytest.raises(ValueError, match=r"importance of .*proj\.weight must have \d+ columns, it has \(128,\)"):
        convert(folder / "model", tmp_path / "out", "nvfp4", moments=tmp_path / "narrow.safetensors", method="gptq")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_the_command(llama, tmp_path, capsys):
    folder, _, _ = llama
    words = ["convert", str(folder / "model"), str(tmp_path / "out"), "--to", "nvfp4", "--quiet"]
    words += ["--moments", str(folder / "full.safetensors"), "--method", "gptq"]
    for last in (["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
        assert main([*words, "--damp", "0.1", *last]) == 0
    said = capsys.readouterr().out
    assert "gptq: output error" in said and "on average of 7 tensors, to nearest without data" in said
    assert "  the largest, " in said
    words[2] = str(tmp_path / "other")
    assert main([*words, "--order", "natural", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["output_errors"]) == 7
    assert main([*words[:6], "--damp", "0.1"]) == 2
    assert "damp must be left out except with method gptq" in capsys.readouterr().err
