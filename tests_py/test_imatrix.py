# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's importance matrices, both formats, and conversions by them."""

import json
import struct

import breccia
import numpy as np
import pytest
from breccia.bridges import dequantize_gguf, quantize_gguf
from breccia.checkpoint import convert
from breccia.checkpoint.files.safetensors_file import save_arrays
from breccia.checkpoint.planning.importance import Importance
from breccia.gguf.container import GgufFile, GgufWriter
from breccia.gguf.imatrix import read_imatrix
from breccia.moments import Moments, save_moments
from tiny_models import LAYER_OF_LLAMA

Q, UP, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.1.ffn_gate_exps.weight"


def sums(columns, seed, experts=None):
    rng = np.random.default_rng(seed)
    return np.exp(2 * rng.normal(size=columns if experts is None else (experts, columns))).astype(np.float32)


def write_gguf(path, entries):
    """``entries``: name → (in_sum2, counts), as llama-imatrix lays them out."""
    arrays = {}
    for name, (total, counts) in entries.items():
        arrays[f"{name}.in_sum2"] = np.atleast_2d(total)
        arrays[f"{name}.counts"] = np.asarray(counts, np.float32).reshape(-1, 1)
    plan = {name: ("F32", array.shape) for name, array in arrays.items()}
    fields = {"general.type": (8, "imatrix"), "imatrix.chunk_count": (4, 2), "imatrix.chunk_size": (4, 512)}
    with GgufWriter(path, plan, fields) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def write_dat(path, entries):
    raw = struct.pack("<i", len(entries))
    for name, (values, calls) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
        raw += np.ascontiguousarray(values, "<f4").tobytes()
    path.write_bytes(raw + struct.pack("<ii", 2, 4) + b"text")


def test_both_formats_are_read(tmp_path):
    q, experts = sums(64, 0), sums(32, 1, 4)
    write_gguf(tmp_path / "a.gguf", {Q: (q, 512.0), EXPERTS: (experts, [7, 0, 3, 2])})
    found = read_imatrix(tmp_path / "a.gguf")
    assert list(found) == [Q, EXPERTS]
    assert np.array_equal(found[Q].diag, q) and found[Q].count == 512
    assert np.array_equal(found[EXPERTS].diag, experts) and found[EXPERTS].count.tolist() == [7, 0, 3, 2]
    write_dat(tmp_path / "a.dat", {Q: (q, 5), EXPERTS: (experts, 5)})
    found = read_imatrix(tmp_path / "a.dat")
    assert np.array_equal(found[Q].diag, q) and found[Q].count == 5
    assert np.array_equal(found[EXPERTS].diag, experts.reshape(-1))


def test_files_that_are_not_valid(tmp_path):
    path = tmp_path / "bad"
    write_dat(path, {Q: (sums(64, 0), 5)})
    whole = path.read_bytes()
    for cut in (0, 3, 4, 9, 30, 100):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="must be an importance matrix"):
            read_imatrix(path)
    path.write_bytes(struct.pack("<ii", 1, -5))
    with pytest.raises(ValueError, match="the length of a name must be from 0"):
        read_imatrix(path)
    empty = struct.pack("<iii", 0, 0, 0)
    path.write_bytes(struct.pack("<i", 1 << 16) + (1 << 16) * empty)
    with pytest.raises(ValueError, match="each entry must have a name of its own and values, entry 0 is ''"):
        read_imatrix(path)
    path.write_bytes(struct.pack("<i", 1 << 20) + (1 << 20) * empty)
    with pytest.raises(ValueError, match=r"the number of its entries must be from 0 to 65536, got 1048576"):
        read_imatrix(path)
    path.write_bytes(struct.pack("<i", 2) + 2 * whole[4 : 4 + 12 + len(Q) + 4 * 64])
    with pytest.raises(ValueError, match=f"entry 1 is '{Q}'"):
        read_imatrix(path)
    plan = {f"{Q}.in_sum2": ("F32", (1, 8))}
    with GgufWriter(path, plan, {}) as writer:
        writer.write(f"{Q}.in_sum2", np.ones((1, 8), np.float32))
    with pytest.raises(ValueError, match=r"attn_q\.weight\.counts' must be there"):
        read_imatrix(path)
    with GgufWriter(path, {"x": ("F32", (2,))}, {}) as writer:
        writer.write("x", np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"has no tensor called NAME\.in_sum2"):
        read_imatrix(path)


LAYER = "model.layers.0."
MATRICES = {
    f"{LAYER}self_attn.q_proj.weight": ("blk.0.attn_q.weight", (256, 256)),
    f"{LAYER}self_attn.k_proj.weight": ("blk.0.attn_k.weight", (256, 256)),
    f"{LAYER}self_attn.v_proj.weight": ("blk.0.attn_v.weight", (256, 256)),
    f"{LAYER}self_attn.o_proj.weight": ("blk.0.attn_output.weight", (256, 256)),
    f"{LAYER}mlp.gate_proj.weight": ("blk.0.ffn_gate.weight", (512, 256)),
    f"{LAYER}mlp.up_proj.weight": ("blk.0.ffn_up.weight", (512, 256)),
    f"{LAYER}mlp.down_proj.weight": ("blk.0.ffn_down.weight", (256, 512)),
}


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, (_, shape) in MATRICES.items()}
    arrays |= {
        "model.embed_tokens.weight": rng.normal(size=(32, 256)).astype(np.float32),
        "lm_head.weight": rng.normal(size=(32, 256)).astype(np.float32),
        "model.norm.weight": np.ones(256, np.float32),
        f"{LAYER}input_layernorm.weight": np.ones(256, np.float32),
        f"{LAYER}post_attention_layernorm.weight": np.ones(256, np.float32),
    }
    folder = tmp_path / "model"
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LAYER_OF_LLAMA))
    return folder, arrays


def entries():
    return {inside: (sums(shape[1], i), 512) for i, (inside, shape) in enumerate(MATRICES.values())}


@pytest.mark.parametrize("kind", ["gguf", "dat", "moments"])
@pytest.mark.parametrize("to", ["mxfp4", "int4", "compressed-tensors:nvfp4"])
def test_a_conversion_casts_by_the_importance_of_each_tensor(tmp_path, model, kind, to):
    folder, arrays = model
    path = tmp_path / f"imatrix.{kind}"
    if kind == "gguf":
        write_gguf(path, entries())
    elif kind == "dat":
        write_dat(path, entries())
    else:
        known = {
            name.removesuffix(".weight"): Moments(entries()[inside][0], np.asarray(512))
            for name, (inside, _) in MATRICES.items()
        }
        save_moments(known, path)
    report = convert(folder, tmp_path / "out", to, imatrix=path)
    assert not any("importance" in note for note in report["notes"])
    out = breccia.load(tmp_path / "out")
    for name, (inside, _) in MATRICES.items():
        h = entries()[inside][0].astype(np.float64)
        error = np.square(out[name].numpy().astype(np.float64) - arrays[name]) @ h
        if to != "compressed-tensors:nvfp4":
            wanted = breccia.cast(arrays[name], to, importance=entries()[inside][0])
            assert out[name].data.tobytes() == wanted.data.tobytes()
        other = breccia.cast(arrays[name], "nvfp4:mse" if "nvfp4" in to else f"{to}:mse")
        plain = np.square(other.numpy().astype(np.float64) - arrays[name]) @ h
        assert error.sum() < (1 if to == "mxfp4" else 0.9) * plain.sum()


def test_a_k_quant_by_importance(tmp_path, model):
    folder, arrays = model
    write_gguf(tmp_path / "imatrix.gguf", entries())
    convert(folder, tmp_path / "out.gguf", "gguf:q4_k", imatrix=tmp_path / "imatrix.gguf")
    file = GgufFile(tmp_path / "out.gguf")
    name = f"{LAYER}mlp.down_proj.weight"
    assert (
        file.raw("blk.0.ffn_down.weight").tobytes()
        == quantize_gguf(arrays[name], "Q4_K", entries()["blk.0.ffn_down.weight"][0]).tobytes()
    )
    file.close()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_lose_less_where_it_matters(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 512)).astype(np.float32)
    h = sums(512, 9, 2)
    got = dequantize_gguf(quantize_gguf(x, kind, h), kind)
    plain = dequantize_gguf(quantize_gguf(x, kind), kind)
    ratio = (np.square(got - x) * h[:, None]).sum() / (np.square(plain - x) * h[:, None]).sum()
    assert ratio < 0.6
    assert quantize_gguf(x[1], kind, h[1]).tobytes() == quantize_gguf(x, kind, h)[1].tobytes()
    assert quantize_gguf(x, kind, h * 4).tobytes() == quantize_gguf(x, kind, h).tobytes()
    none = np.full(512, np.nan)
    assert quantize_gguf(x, kind, none).tobytes() == quantize_gguf(x, kind, np.ones(512)).tobytes()
    with pytest.raises(ValueError, match=r"importance must be \(512,\)"):
        quantize_gguf(x, kind, h[0, :-1])


def test_what_has_no_importance_is_said(tmp_path, model):
    folder, _ = model
    some = {name: value for name, value in entries().items() if "attn" in name}
    write_gguf(tmp_path / "imatrix.gguf", some)
    report = convert(folder, tmp_path / "out", "mxfp4", imatrix=tmp_path / "imatrix.gguf")
    assert any("3 of 7 tensors are quantized without importance" in note for note in report["notes"])
    again = convert(tmp_path / "out", tmp_path / "other", "nvfp4", imatrix=tmp_path / "imatrix.gguf")
    assert any("7 tensors are requantized from other codes" in note for note in again["notes"])
    plain = convert(folder, tmp_path / "floats", "bf16", imatrix=tmp_path / "imatrix.gguf")
    assert any("importance has no part in what is written" in note for note in plain["notes"])
    write_gguf(tmp_path / "imatrix.gguf", {Q: (sums(128, 0), 1)})
    with pytest.raises(ValueError, match=r"importance of .*q_proj\.weight must have 256 columns"):
        convert(folder, tmp_path / "wrong", "mxfp4", imatrix=tmp_path / "imatrix.gguf")


def test_experts_of_each_form(tmp_path):
    from breccia.gguf.models import model_map

    config = LAYER_OF_LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    names, reason = model_map(config, [])
    assert names is not None, reason
    experts, counts = sums(256, 1, 4), [8, 0, 2, 4]
    experts[1] = 0  # never chosen
    inside = "blk.0.ffn_gate_exps.weight"
    write_gguf(tmp_path / "i.gguf", {inside: (experts, counts)})
    importance = Importance(tmp_path / "i.gguf", names)
    block = f"{LAYER}block_sparse_moe."
    stacked = importance.of(f"{block}switch_mlp.gate_proj.weight", (4, 512, 256))
    assert stacked.shape == (4, 256) and np.array_equal(stacked[0], experts[0] / 8)
    for number in (0, 2, 3):
        one = importance.of(f"{block}experts.{number}.w1.weight", (512, 256))
        assert np.array_equal(one, experts[number] / counts[number])
    rare = importance.of(f"{block}experts.1.w1.weight", (512, 256))
    assert (rare > 0).all()
    assert importance.of(f"{block}experts.0.w2.weight", (256, 512)) is None
    write_dat(tmp_path / "i.dat", {inside: (experts, 5)})
    importance = Importance(tmp_path / "i.dat", names)
    assert np.array_equal(importance.of(f"{block}switch_mlp.gate_proj.weight", (4, 512, 256)), experts)
    assert np.array_equal(importance.of(f"{block}experts.2.w1.weight", (512, 256)), experts[2])


def test_another_file_is_another_conversion(tmp_path):
    write_dat(tmp_path / "a.dat", {Q: (sums(64, 0), 5)})
    one = repr(Importance(tmp_path / "a.dat", None))
    write_dat(tmp_path / "a.dat", {Q: (sums(64, 1), 5), UP: (sums(64, 1), 5)})
    assert repr(Importance(tmp_path / "a.dat", None)) != one


def test_moments_and_tensors_of_a_file_may_have_any_names(tmp_path):
    save_moments({"x": Moments(sums(64, 0), np.asarray(3))}, tmp_path / "m.safetensors")
    importance = Importance(tmp_path / "m.safetensors", None)
    assert importance.of("x.weight", (8, 64)) is not None and importance.of("y.weight", (8, 64)) is None
    save_arrays({"x": np.ones(4, np.float32)}, tmp_path / "n.safetensors")
    with pytest.raises(ValueError, match="must be called NAME"):
        Importance(tmp_path / "n.safetensors", None)
