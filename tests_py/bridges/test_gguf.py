# SPDX-License-Identifier: Apache-2.0
"""ggml's blocks against gguf-py, both ways."""

from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import OutsideTensor, dequantize_gguf, from_gguf
from breccia.bridges import gguf as bridge
from breccia.bridges import parts as _parts
from breccia.bridges.gguf import TYPES, scales_of_blocks
from breccia.bridges.gguf.values import SCALES
from breccia.checkpoint import SafetensorsFile, convert, save_arrays

quants = pytest.importorskip("gguf.quants")
constants = pytest.importorskip("gguf.constants")


NAMED_ALONE = ("Q8_K", "Q1_0")  # types that files are told of by name, and whose values gguf-py does not know


def kind(name: str) -> Any:
    return constants.GGMLQuantizationType[name]


def weight() -> Any:
    return np.random.default_rng(5).normal(0, 0.02, (64, 512)).astype(np.float32)


def test_types_are_theirs() -> None:
    for name, (number, size, nbytes) in bridge.TYPES.items():
        assert int(kind(name)) == number
        assert constants.GGML_QUANT_SIZES[kind(name)] == (size, nbytes)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_their_bytes_to_their_values_and_back(name: str) -> None:
    raw = quants.quantize(weight(), kind(name))
    made = from_gguf(raw, name)
    values = made.dequantize() if isinstance(made, OutsideTensor) else breccia.dequantize(made)
    np.testing.assert_array_equal(values, quants.dequantize(raw, kind(name)))
    (back,) = _parts.materialize(bridge.lay_out(made)).values()
    assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("key", bridge.RECIPES)
def test_our_bytes_are_their_values(key: str) -> None:
    scaled = breccia.cast(weight(), bridge.RECIPES[key])
    parts = _parts.materialize(bridge.lay_out(scaled))
    values = quants.dequantize(parts[key.upper()], kind(key.upper()))
    blocks = from_gguf(parts[key.upper()], key.upper())
    np.testing.assert_array_equal(values, breccia.dequantize(blocks))
    if "scale" in parts:  # a tensor of its own, which llama.cpp multiplies products by
        np.testing.assert_array_equal(parts["scale"], [scaled.global_scale])
        back = from_gguf(parts["NVFP4"], "NVFP4", parts["scale"])
        np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(scaled))
    else:
        np.testing.assert_array_equal(values, breccia.dequantize(scaled))


@pytest.mark.parametrize("name", [n for n, (_, size, _) in bridge.TYPES.items() if size > 1 and n not in NAMED_ALONE])
def test_any_bytes_have_their_values(name: str) -> None:
    _, _, nbytes = bridge.TYPES[name]
    raw = np.random.default_rng(1).integers(0, 256, (32, 4 * nbytes), dtype=np.uint8)
    blocks = raw.reshape(32, 4, nbytes)
    if name == "MXFP4":
        blocks[..., 0] = 100 + blocks[..., 0] % 50
    if name == "NVFP4":
        blocks[..., :4] %= 0x7F
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(raw, kind(name))
        got = dequantize_gguf(raw, name)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", NAMED_ALONE)
def test_a_type_without_values_is_refused_by_name(name: str) -> None:
    raw = np.zeros((2, bridge.TYPES[name][2]), np.uint8)
    with pytest.raises(ValueError, match=name):
        dequantize_gguf(raw, name)
    with pytest.raises(NotImplementedError, match="not yet implemented"):
        quants.dequantize(raw, kind(name))


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole Q8_0 blocks of 34 bytes"):
        from_gguf(np.zeros((2, 33), np.uint8), "Q8_0")
    with pytest.raises(ValueError, match="use dequantize_gguf"):
        from_gguf(np.zeros((2, 144), np.uint8), "Q4_K")


def test_their_reader_reads_our_file(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf.gguf_reader")
    w = weight()
    save_arrays({"blk.0.w.weight": w, "blk.0.norm.weight": w[0]}, tmp_path / "a.safetensors")
    for key, recipe in bridge.RECIPES.items():
        convert(tmp_path / "a.safetensors", tmp_path / f"{key}.gguf", f"gguf:{key}")
        tensors = {t.name: t for t in reader.GGUFReader(tmp_path / f"{key}.gguf").tensors}
        values = quants.dequantize(tensors["blk.0.w.weight"].data, tensors["blk.0.w.weight"].tensor_type)
        scaled = breccia.cast(w, recipe)
        if key == "nvfp4":
            np.testing.assert_array_equal(tensors["blk.0.w.scale"].data, [scaled.global_scale])
            recipe = breccia.NVFP4BlockScaling(two_level=False)
            scaled = breccia.ScaledTensor(scaled.data, scaled.scale, recipe, scaled.layout)
        np.testing.assert_array_equal(values, breccia.dequantize(scaled))
        np.testing.assert_array_equal(tensors["blk.0.norm.weight"].data, w[0])


def test_we_read_their_writers_file(tmp_path: Path) -> None:
    writer_module = pytest.importorskip("gguf.gguf_writer")
    writer = writer_module.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("x.rope", 0.5)
    w, wanted = weight(), {}
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "MXFP4"):
        raw = quants.quantize(w, kind(name))
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=kind(name))
        wanted[f"blk.0.{name}.weight"] = quants.dequantize(raw, kind(name))
    for name in ("IQ4_NL", "IQ4_XS"):  # gguf-py reads these and makes none: blocks of any codes, with finite scales
        _, size, nbytes = bridge.TYPES[name]
        blocks = np.random.default_rng(7).integers(0, 256, (64, 512 // size, nbytes), dtype=np.uint8)
        blocks[..., :2] = np.array([0.003], "<f2").view(np.uint8)
        raw = blocks.reshape(64, -1)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=kind(name))
        wanted[f"blk.0.{name}.weight"] = quants.dequantize(raw, kind(name))
    writer.add_tensor("norm.weight", w[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "fp32")
    back = SafetensorsFile(tmp_path / "b.safetensors")
    for name, values in wanted.items():
        np.testing.assert_array_equal(back[name], values)
    np.testing.assert_array_equal(back["norm.weight"], w[0])


@pytest.mark.parametrize("kind", sorted(SCALES))
def test_scales_are_the_steps_of_the_values(kind):
    """Values of a run, as gguf-py decodes them, are whole steps apart, and no larger step is common to them."""
    gguf = pytest.importorskip("gguf")
    _, block, size = TYPES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (40 * 256 // block, size), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q5_1": (0, 2)}
    for at in halves.get(kind, (0,)):
        raw[:, at : at + 2] = np.frombuffer(np.float16(2**-5).tobytes(), np.uint8)
    scales = np.abs(scales_of_blocks(raw, kind))
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(len(scales), -1)
    assert values.shape[1] in (16, 32)
    there = scales > 0
    assert (np.ptp(values[~there], axis=1) == 0).all()
    steps = (values - values.min(axis=1, keepdims=True))[there] / scales[there, None]
    np.testing.assert_array_equal(steps, steps.round())
    assert np.mean(np.gcd.reduce(steps.astype(int), axis=1) == 1) > 0.9
