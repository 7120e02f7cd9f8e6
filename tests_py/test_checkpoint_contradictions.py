# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose config.json says other than their tensors: decided once, where they are read, or refused."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import from_awq, from_gptq
from breccia.checkpoint import Checkpoint, SafetensorsFile, complete, convert, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from checkpoints import weight

ROWS, COLUMNS, GROUP = 64, 128, 32
RNG = np.random.default_rng(5)


def packed(codes: Any, bits: int) -> Any:
    """Codes one after another from the low bit on, down the columns, in 32-bit words (K · bits / 32, N)."""
    stream = ((codes.T[..., None] >> np.arange(bits)) & 1).reshape(codes.shape[1], -1).astype(np.uint8)
    return np.ascontiguousarray(np.packbits(stream, axis=-1, bitorder="little").view("<i4").T)


def gptq(folder: Path, width: int = 4, zero: Any = None, **said: Any) -> tuple[Path, Any]:
    """A checkpoint with these zero points as they are stored, and the values that codes minus ``zero`` have where it is
    in version 2."""
    middle = 1 << (width - 1)
    codes = RNG.integers(0, 1 << width, (COLUMNS, ROWS))
    zeros = np.broadcast_to(middle if zero is None else zero, (COLUMNS // GROUP, ROWS)).astype(np.int64)
    scales = RNG.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    arrays = {
        "a.qweight": packed(codes, width),
        "a.qzeros": np.ascontiguousarray(packed(zeros.T, width).T),
        "a.scales": scales,
        "a.g_idx": (np.arange(COLUMNS) // GROUP).astype(np.int32),
    }
    wide = (codes - zeros.repeat(GROUP, 0)) * scales.astype(np.float32).repeat(GROUP, 0)
    config = {"quant_method": "gptq", "bits": width, "group_size": GROUP, "sym": True, "desc_act": False, **said}
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder, wide.T.astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("said", "stored"), [("gptq", 0), ("gptq_v2", -1), ("gptq", -1), ("gptq_v2", 0), (None, 0)])
def test_a_symmetric_gptq_of_the_wrong_version(bits: int, said: Any, stored: int, tmp_path: Path, capsys: Any) -> None:
    """``stored`` is how far stored zero points are from the middle of the codes: -1 in version 1."""
    middle = 1 << (bits - 1)
    folder, wide = gptq(tmp_path / "in", bits, middle + stored, **({} if said is None else {"checkpoint_format": said}))
    if stored:  # version 1: one more is meant
        file = SafetensorsFile(folder / "model.safetensors")
        wide = wide - np.float32(1) * np.asarray(file["a.scales"], np.float32).repeat(GROUP, 0).T
    report = convert(folder, tmp_path / "out", "fp32")
    np.testing.assert_allclose(Checkpoint(tmp_path / "out").array("a.weight"), wide, rtol=1e-6, atol=1e-7)
    wrong = (said or "gptq") != ("gptq" if stored else "gptq_v2")
    assert any(note.startswith("a.weight: zero points are stored as") for note in report["notes"]) == wrong
    assert verify(folder, tmp_path / "out", min_sqnr_db=100)["ok"]
    assert complete(folder)["ok"] != wrong
    checkpoint = Checkpoint(folder)
    (found,) = checkpoint.found
    np.testing.assert_array_equal(values(checkpoint.load(found)), values(checkpoint.load(checkpoint.refined(found))))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_gptq_that_is_not_symmetric_as_it_says(bits: int, tmp_path: Path) -> None:
    zero = RNG.integers(1, 1 << bits, (COLUMNS // GROUP, ROWS))
    folder, _ = gptq(tmp_path / "in", bits, zero, checkpoint_format="gptq_v2")
    message = rf"zero points \(qzeros\) must all be {1 << (bits - 1)} for a symmetric checkpoint"
    for to in ("fp32", "int8"):
        with pytest.raises(ValueError, match=message):
            convert(folder, tmp_path / "out", to)
    file = SafetensorsFile(folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        from_gptq({name.removeprefix("a."): array for name, array in file.items()}, version="gptq_v2", symmetric=True)
    assert message.partition("\\")[0] in complete(folder)["problems"][0]["problem"]
    folder, wide = gptq(tmp_path / "asymmetric", bits, zero, checkpoint_format="gptq_v2", sym=False)
    convert(folder, tmp_path / "out", "fp32")
    np.testing.assert_allclose(Checkpoint(tmp_path / "out").array("a.weight"), wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_of_few_bits_becomes_4_bits_without_loss(bits: int, tmp_path: Path) -> None:
    zero = RNG.integers(1, 1 << bits, (COLUMNS // GROUP, ROWS))
    folder, wide = gptq(tmp_path / "in", bits, zero, checkpoint_format="gptq_v2", sym=False)
    for to in ("gptq", "awq", "compressed-tensors", "breccia"):
        report = convert(folder, tmp_path / to, to)
        assert report["tensors"] == {"repack": 1}, to
        checkpoint = Checkpoint(tmp_path / to)
        (found,) = checkpoint.found
        np.testing.assert_allclose(values(checkpoint.load(checkpoint.refined(found))), wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"bits": 8}, "bits must be 4 of such tensors, config.json says 8"),
        ({"group_size": 64}, "group_size must be 32 of such tensors, config.json says 64"),
        ({"group_size": -1}, "group_size must be 32 of such tensors, config.json says -1"),
    ],
)
def test_gptq_of_other_numbers_than_it_says(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = gptq(tmp_path / "in", 4, **said)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out", "fp32")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"version": "gemv"}, "version must be 'gemm' of tensors"),
        ({"bits": 8}, "bits must be 4 of such tensors, config.json says 8"),
        ({"group_size": 64}, "group_size must be 32 of such tensors, config.json says 64"),
        ({"zero_point": False}, r"zero points \(qzeros\) must all be 8 where config.json says zero_point false"),
        ({}, ""),
    ],
)
def test_awq_that_contradicts_itself(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(ROWS, COLUMNS)}, tmp_path / "floats.safetensors")
    convert(tmp_path / "floats.safetensors", f"{tmp_path}/in/", "awq:int4:32")
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **said}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": config}))
    if not message:
        assert convert(tmp_path / "in", tmp_path / "out", "fp32")["notes"] == []
        return
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in", tmp_path / "out", "fp32")
    if "zero_point" in said:
        file = SafetensorsFile(tmp_path / "in" / "model.safetensors")
        parts = {name.removeprefix("a."): array for name, array in file.items()}
        with pytest.raises(ValueError, match="zero points"):
            from_awq(parts, symmetric=True)
        symmetric = breccia.cast(weight(ROWS, COLUMNS), breccia.INT4Scaling(group_size=32, scale_dtype="fp16"))
        assert from_awq(breccia.bridges.to_awq(symmetric), symmetric=True).zero_point.max() == 8


def integers(folder: Path, bits: int, arrays: dict[str, Any], **weights: Any) -> Path:
    """A checkpoint of compressed-tensors with these tensors, of which config.json says so."""
    said = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, **weights}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if "a.weight_packed" in arrays else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}},
    }
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def in_words(codes: Any, bits: int) -> Any:
    """Codes of rows one after another in 32-bit words, the last filled up."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(codes.shape[0], -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(stream, axis=-1, bitorder="little").view("<i4"))


def read(folder: Path) -> Any:
    """The values, whether what headers leave open is looked at before or not."""
    checkpoint = Checkpoint(folder)
    (found,) = (one for one in checkpoint.found if one.format != "plain")
    wide = values(checkpoint.load(checkpoint.refined(found)))
    np.testing.assert_array_equal(values(checkpoint.load(found)), wide)
    convert(folder, folder.with_name(f"{folder.name}-out"), "fp32")
    np.testing.assert_array_equal(Checkpoint(folder.with_name(f"{folder.name}-out")).array("a.weight"), wide)
    return wide


SCALES = {"group": (ROWS, COLUMNS // GROUP), "channel": (ROWS, 1), "tensor": (1,), "block": (ROWS // 32, COLUMNS // 32)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", SCALES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_of_every_width_and_strategy(bits: int, strategy: str, symmetric: bool, tmp_path: Path) -> None:
    middle, shape = 1 << (bits - 1), SCALES[strategy]
    codes = RNG.integers(0, 1 << bits, (ROWS, COLUMNS))
    scale = RNG.uniform(0.01, 0.1, shape).astype(np.float16)
    zero = np.full(shape, middle) if symmetric else RNG.integers(0, 1 << bits, shape)
    arrays = {"a.weight_packed": in_words(codes, bits), "a.weight_scale": scale}
    arrays["a.weight_shape"] = np.array([ROWS, COLUMNS], np.int64)
    if not symmetric and strategy in ("tensor", "block"):
        arrays["a.weight_zero_point"] = (zero - middle).astype(np.int8)
    elif not symmetric:
        arrays["a.weight_zero_point"] = np.ascontiguousarray(in_words(zero.T, bits).T)

    def wide(of: Any) -> Any:
        of = of if of.ndim > 1 else of.reshape(1, 1)
        return of.repeat(ROWS // of.shape[0], 0).repeat(COLUMNS // of.shape[1], 1)

    wanted = (codes - wide(zero)).astype(np.float32) * wide(scale.astype(np.float32))
    folder = integers(tmp_path / "in", bits, arrays, strategy=strategy, symmetric=symmetric)
    np.testing.assert_array_equal(read(folder), wanted)
    report = convert(folder, tmp_path / "same", "compressed-tensors")
    assert set(report["tensors"]) == {"repack"}
    checkpoint = Checkpoint(tmp_path / "same")
    (found,) = checkpoint.found
    np.testing.assert_array_equal(values(checkpoint.load(checkpoint.refined(found))), wanted)


@pytest.mark.parametrize("strategy", SCALES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_of_bytes_of_every_strategy(strategy: str, symmetric: bool, tmp_path: Path) -> None:
    shape = SCALES[strategy]
    codes = RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scale, zero = RNG.uniform(0.01, 0.1, shape).astype(np.float16), RNG.integers(-128, 128, shape).astype(np.int8)
    arrays = {"a.weight": codes, "a.weight_scale": scale} | ({} if symmetric else {"a.weight_zero_point": zero})
    spread = [of.reshape(1, 1) if of.ndim < 2 else of for of in (zero.astype(np.float32), scale.astype(np.float32))]
    wide = [of.repeat(ROWS // of.shape[0], 0).repeat(COLUMNS // of.shape[1], 1) for of in spread]
    wanted = (codes - (0 if symmetric else wide[0])) * wide[1]
    folder = integers(tmp_path / "in", 8, arrays, strategy=strategy, symmetric=symmetric)
    np.testing.assert_array_equal(read(folder), wanted.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_in_order_of_activation(bits: int, tmp_path: Path) -> None:
    codes = RNG.integers(0, 1 << bits, (ROWS, COLUMNS))
    scale = RNG.uniform(0.01, 0.1, SCALES["group"]).astype(np.float16)
    arrays = {"a.weight_packed": in_words(codes, bits), "a.weight_scale": scale}
    arrays["a.weight_shape"] = np.array([ROWS, COLUMNS], np.int64)
    mixed = RNG.permutation(np.arange(COLUMNS) // GROUP).astype(np.int32)
    for i, order in enumerate((mixed, np.sort(mixed), np.full(COLUMNS, -1, np.int32))):
        folder = integers(tmp_path / str(i), bits, arrays | {"a.weight_g_idx": order}, actorder="group")
        of = order if order[0] != -1 else np.arange(COLUMNS) // GROUP
        wanted = (codes - (1 << (bits - 1))).astype(np.float32) * scale.astype(np.float32)[:, of]
        np.testing.assert_array_equal(read(folder), wanted)
    with pytest.raises(ValueError, match="must give every group 32 columns"):
        odd = {"a.weight_g_idx": np.minimum(mixed, 2)}
        convert(integers(tmp_path / "odd", bits, arrays | odd), tmp_path / "out", "fp32")


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_are_packed_as_the_peer_packs_them(bits: int) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = RNG.integers(0, 1 << bits, (ROWS, COLUMNS))
    theirs = helpers.pack_to_int32(torch.from_numpy((codes - (1 << (bits - 1))).astype(np.int8)), bits)
    np.testing.assert_array_equal(theirs.numpy(), in_words(codes, bits))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_config_json_denies(packed: bool, bits: int, tmp_path: Path) -> None:
    middle = 1 << (bits - 1)
    if packed:
        arrays: dict[str, Any] = {"a.weight_packed": in_words(RNG.integers(0, 1 << bits, (ROWS, COLUMNS)), bits)}
        arrays["a.weight_shape"] = np.array([ROWS, COLUMNS], np.int64)
    elif bits == 4:
        return
    else:
        arrays = {"a.weight": RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)}
    arrays["a.weight_scale"] = RNG.uniform(0.01, 0.1, SCALES["channel"]).astype(np.float16)

    def with_zeros(folder: str, zero: Any, symmetric: bool) -> Path:
        stored = np.ascontiguousarray(in_words(zero.T + middle, bits).T) if packed else zero.astype(np.int8)
        return integers(tmp_path / folder, bits, arrays | {"a.weight_zero_point": stored}, symmetric=symmetric)

    none, some = np.zeros((ROWS, 1), np.int64), RNG.integers(-middle, middle, (ROWS, 1))
    denied = with_zeros("denied", some, True)
    with pytest.raises(ValueError, match=r"weight_zero_point must be 0 everywhere where config\.json says symmetric"):
        convert(denied, tmp_path / "out", "fp32")
    assert not complete(denied)["ok"]
    np.testing.assert_array_equal(read(with_zeros("none", none, True)), read(with_zeros("said", none, False)))
    with pytest.raises(ValueError, match=r"weight_zero_point must be there where config\.json says symmetric false"):
        convert(integers(tmp_path / "missing", bits, arrays, symmetric=False), tmp_path / "out", "fp32")


@pytest.mark.parametrize("where", ["format", "config_groups"])
@pytest.mark.parametrize("name", ["mixfp4-pack-quantized", "marlin-24", "sparse-24-bitmask", "nvfp4-quantized-2"])
@pytest.mark.parametrize("to", ["compressed-tensors:nvfp4", "compressed-tensors:int4", "compressed-tensors:fp8"])
def test_an_unknown_format_is_refused_by_its_name(where: str, name: str, to: str, tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(ROWS, COLUMNS)}, tmp_path / "floats.safetensors")
    (tmp_path / "floats").mkdir()
    (tmp_path / "floats.safetensors").rename(tmp_path / "floats" / "model.safetensors")
    (tmp_path / "floats" / "config.json").write_text("{}")
    convert(tmp_path / "floats", tmp_path / "in", to)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    said = config["quantization_config"]
    place = said if where == "format" else said["config_groups"]["group_0"]
    place["format"] = name
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"format must be one that is read here .* config\.json says '{name}'"):
        convert(tmp_path / "in", tmp_path / "out", "bf16")
