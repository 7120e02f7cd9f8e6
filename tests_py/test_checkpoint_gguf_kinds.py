# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints in GGUF's kinds that no recipe makes: K-quants and floats."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.bridges import dequantize_gguf, quantize_gguf
from breccia.bridges.gguf import KINDS, TYPES
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, finish, plan, save_arrays, target_names, verify
from breccia.checkpoint.judging.verify import values
from checkpoints import weight
from tiny_models import made_once, transformers

K_QUANTS = [key for key, kind in KINDS.items() if kind.encode is not None and not kind.whole]
FLOATS = [key for key, kind in KINDS.items() if kind.encode is None]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with rows of whole super-blocks."""
    transformers()
    return made_once(tmp_path_factory.mktemp("models"))("llama-wide")


def gguf_tensors(path: Path) -> dict[str, Any]:
    reader = pytest.importorskip("gguf.gguf_reader")
    return {tensor.name: tensor for tensor in reader.GGUFReader(path).tensors}


def test_kinds_are_targets() -> None:
    assert {f"gguf:{key}" for key in KINDS} <= set(target_names())


@pytest.mark.parametrize("key", K_QUANTS)
def test_matrices_are_quantized(key: str, wide: Path, tmp_path: Path) -> None:
    """Each matrix as `quantize_gguf` makes it, rows of queries and keys in GGUF's order; embeddings when asked for."""
    report = convert(wide, tmp_path / "a.gguf", f"gguf:{key}")
    assert report["tensors"] == {"encode": 14, "copy": 2, "float": 5}
    assert verify(wide, tmp_path / "a.gguf", min_sqnr_db=10)["ok"]
    (source,) = wide.glob("*.safetensors")
    arrays = SafetensorsFile(source)
    opened = Checkpoint(tmp_path / "a.gguf")
    found = {one.name: one for one in opened.found}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        wanted = dequantize_gguf(quantize_gguf(arrays[name], key.upper()), key.upper())
        np.testing.assert_array_equal(values(opened.load(found[name])), wanted)
    stored = gguf_tensors(tmp_path / "a.gguf")
    kinds = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.1.ffn_down.weight"] == key.upper()
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "BF16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    convert(wide, tmp_path / "all.gguf", f"gguf:{key}", include=["*"])
    kinds = {name: tensor.tensor_type.name for name, tensor in gguf_tensors(tmp_path / "all.gguf").items()}
    assert {name for name, kind in kinds.items() if kind != key.upper()} == {n for n in kinds if "norm" in n}


@pytest.mark.parametrize("key", FLOATS)
def test_all_matrices_are_floats(key: str, wide: Path, tmp_path: Path) -> None:
    report = convert(wide, tmp_path / "a.gguf", f"gguf:{key}")
    assert not [note for note in report["notes"] if "tokenizer" not in note]
    for name, tensor in gguf_tensors(tmp_path / "a.gguf").items():
        assert tensor.tensor_type.name == ("F32" if "norm" in name else key.upper())
    opened, (source,) = Checkpoint(tmp_path / "a.gguf"), wide.glob("*.safetensors")
    for name, array in SafetensorsFile(source).items():
        one = next(found for found in opened.found if found.name == name)
        wide_one = array.astype(np.float32)
        wanted = wide_one.astype(np.float16).astype(np.float32) if key == "f16" and array.ndim > 1 else wide_one
        np.testing.assert_array_equal(values(opened.load(one)).astype(np.float32), wanted)
    # Quantized sources become floats too, and patterns leave tensors alone.
    convert(tmp_path / "a.gguf", tmp_path / "q.gguf", "gguf:q8_0")
    convert(tmp_path / "q.gguf", tmp_path / "back.gguf", f"gguf:{key}")
    assert {t.tensor_type.name for t in gguf_tensors(tmp_path / "back.gguf").values()} == {"F32", key.upper()}
    assert verify(tmp_path / "q.gguf", tmp_path / "back.gguf", min_sqnr_db=45)["ok"]
    save_arrays({"a.weight": weight(32, 64), "b.weight": weight(32, 64)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", f"gguf:{key}", exclude=["b.*"])
    kinds = {name: tensor.tensor_type.name for name, tensor in gguf_tensors(tmp_path / "x.gguf").items()}
    assert kinds == {"a.weight": key.upper(), "b.weight": "F32"}


@pytest.mark.in_turn
@pytest.mark.parametrize("key", K_QUANTS)
def test_the_same_kind_is_kept_and_others_are_made_of_values(key: str, wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "a.gguf", f"gguf:{key}")
    report = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", f"gguf:{key}")
    assert report["tensors"] == {"keep": 14, "copy": 7}
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    other = next(one for one in K_QUANTS if one != key)
    for to in (other, "q8_0"):
        convert(tmp_path / "a.gguf", tmp_path / f"{to}.gguf", f"gguf:{to}")
        assert verify(tmp_path / "a.gguf", tmp_path / f"{to}.gguf", min_sqnr_db=10)["ok"]
    convert(wide, tmp_path / "scaled", "nvfp4")
    convert(tmp_path / "scaled", tmp_path / "c.gguf", f"gguf:{key}")
    floats = Checkpoint(tmp_path / "scaled")
    found = {one.name: one for one in Checkpoint(tmp_path / "c.gguf").found}
    opened = Checkpoint(tmp_path / "c.gguf")
    for one in floats.found:
        if one.recipe is not None:
            wanted = dequantize_gguf(quantize_gguf(values(floats.load(one)), key.upper()), key.upper())
            np.testing.assert_array_equal(values(opened.load(found[one.name])), wanted)


@pytest.mark.parametrize("key", ["q4_k", "f16"])
def test_parts_make_the_whole(key: str, wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "whole.gguf", f"gguf:{key}", include=["*"])
    for piece in plan(wide, tmp_path / "out.gguf", f"gguf:{key}", 3, include=["*"]):
        piece.run(threads=1)
    finish(wide, tmp_path / "out.gguf", f"gguf:{key}", include=["*"])
    whole, made = (gguf_tensors(tmp_path / name) for name in ("whole.gguf", "out.gguf"))
    assert whole.keys() == made.keys()
    assert all(np.array_equal(whole[name].data, made[name].data) for name in whole)


@pytest.mark.parametrize("shape", [(700, 4096), (3, 300, 2048)])
def test_large_tensors_are_made_in_pieces(shape: tuple[int, ...], tmp_path: Path) -> None:
    """More rows than one piece has; batches of matrices, plain and quantized."""
    x = weight(*shape)
    save_arrays({"a.weight": x}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", "gguf:q6_k", include=["*"], threads=2)
    raw = gguf_tensors(tmp_path / "a.gguf")["a.weight"].data
    np.testing.assert_array_equal(raw, quantize_gguf(x, "Q6_K"))
    convert(tmp_path / "a.safetensors", tmp_path / "q.safetensors", "int8", include=["*"])
    convert(tmp_path / "q.safetensors", tmp_path / "q.gguf", "gguf:q6_k", threads=2)
    opened = Checkpoint(tmp_path / "q.safetensors")
    (found,) = opened.found
    raw = gguf_tensors(tmp_path / "q.gguf")["a.weight"].data
    np.testing.assert_array_equal(raw, quantize_gguf(values(opened.load(found)), "Q6_K"))


@pytest.mark.parametrize(
    ("key", "instead"), [("q2_k", "IQ4_NL"), ("q3_k", "IQ4_NL"), ("q4_k", "Q5_0"), ("q5_k", "Q5_1"), ("q6_k", "Q8_0")]
)
def test_rows_that_are_no_whole_blocks_become_what_llama_quantize_takes(key: str, instead: str, tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 320), "b.weight": weight(64, 300)}, tmp_path / "a.safetensors")
    report = convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", f"gguf:{key}")
    why = f"a.weight: written as {instead}: {key.upper()} takes 256 columns at a time, there are 320"
    assert report["notes"][-2] == why
    assert report["notes"][-1].startswith("b.weight: left as it is: ")
    kinds = {name: tensor.tensor_type.name for name, tensor in gguf_tensors(tmp_path / "a.gguf").items()}
    assert kinds == {"a.weight": instead, "b.weight": "F32"}
    # What is of that type already stays.
    report = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", f"gguf:{key}")
    assert report["tensors"] == {"repack" if instead == "Q8_0" else "keep": 1, "copy": 1}


MIXED = {  # of a Llama of two layers, whose output layer has a weight of its own
    "q3_k_s": {},
    "q3_k_m": {"attn_v": "Q5_K", "ffn_down": "Q4_K", "attn_output": "Q4_K"},
    "q3_k_l": {"attn_v": "Q5_K", "ffn_down": "Q5_K", "attn_output": "Q5_K"},
    "q4_k_s": {"attn_v": "Q5_K"},
    "q4_k_m": {"1.attn_v": "Q6_K", "1.ffn_down": "Q6_K"},
    "q5_k_s": {},
    "q5_k_m": {"1.attn_v": "Q6_K", "1.ffn_down": "Q6_K"},
}


@pytest.mark.parametrize("key", [key for key, kind in KINDS.items() if kind.whole])
def test_mixes_have_more_bits_in_some_tensors(key: str, wide: Path, tmp_path: Path) -> None:
    """The table is what llama-quantize of build 9190 made of the same model: programs/test_llama_cpp.py runs it."""
    report = convert(wide, tmp_path / "a.gguf", f"gguf:{key}")
    assert report["tensors"] == {"encode": 16, "float": 5}
    kinds = {name: tensor.tensor_type.name for name, tensor in gguf_tensors(tmp_path / "a.gguf").items()}
    for name, kind in kinds.items():
        wanted = next((of for part, of in MIXED[key].items() if f".{part}." in name), key[:4].upper())
        wanted = "Q6_K" if name == "output.weight" else "F32" if "norm" in name else wanted
        assert kind == wanted, name
    assert verify(wide, tmp_path / "a.gguf", min_sqnr_db=10)["ok"]
    again = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", f"gguf:{key}")
    assert again["tensors"] == {"keep": 16, "copy": 5}
    # Without names of a model every matrix is of the type that most are of.
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", f"gguf:{key}")
    assert gguf_tensors(tmp_path / "x.gguf")["a.weight"].tensor_type.name == key[:4].upper()


@pytest.mark.parametrize("key", KINDS)
def test_the_type_of_a_file_is_that_of_its_matrices(key: str, wide: Path, tmp_path: Path) -> None:
    constants, reader = pytest.importorskip("gguf.constants"), pytest.importorskip("gguf.gguf_reader")
    convert(wide, tmp_path / "a.gguf", f"gguf:{key}", include=[] if key == "bf16" or KINDS[key].whole else ["*"])
    said = reader.GGUFReader(tmp_path / "a.gguf").fields["general.file_type"].contents()
    name = constants.LlamaFileType(said).name
    assert name.removeprefix("MOSTLY_").removesuffix("_S") == key.upper().removesuffix("_S")


def test_options_of_recipes_are_refused(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    for to, options, message in (
        ("gguf:q4_k:mse", {}, "the option after 'gguf:q4_k:' must be left out, got 'mse'"),
        ("gguf:q4_k", {"group_size": 64}, "group_size must be left out: gguf:q4_k has no group_size"),
        ("gguf:f16", {"scale_search": "mse"}, "scale_search must be left out: gguf:f16 has no scale_search"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", to, **options)
    x = weight(64, 256)
    x[3, 5] = np.inf
    save_arrays({"a.weight": x}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"b.safetensors: tensor 'a.weight': x must be finite to be quantized to Q4_K"):
        convert(tmp_path / "b.safetensors", tmp_path / "b.gguf", "gguf:q4_k")
    assert not (tmp_path / "b.gguf").exists()


def test_numbers_of_bytes() -> None:
    for kind in KINDS.values():
        x = np.zeros((3, 512), np.float32)
        if kind.encode is not None:
            assert kind.encode(x).shape == (3, 512 // kind.block * TYPES[kind.name][2])
