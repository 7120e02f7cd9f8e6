# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors of formats that are not read: refused, never copied as if they were numbers."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays
from breccia.checkpoint.judging.verify import values
from checkpoints import weight

ml_dtypes = pytest.importorskip("ml_dtypes")


def checkpoint(path: Path, arrays: dict[str, Any], said: dict[str, Any]) -> Path:
    path.mkdir()
    save_arrays({"model.norm.weight": np.ones(64, np.float32), **arrays}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": said} if said else {}))
    return path


def words(*shape: int) -> Any:
    return np.random.default_rng(0).integers(-(2**31), 2**31 - 1, shape, dtype=np.int32)


GPTQ5 = {"a.qweight": words(20, 64), "a.qzeros": words(1, 10), "a.scales": np.ones((1, 64), np.float16)}
UNREAD = {
    "gptq of 5 bits": (GPTQ5, {"quant_method": "gptq", "bits": 5, "group_size": 128}),
    "hqq": ({"a.W_q": words(64, 16).view(np.uint8), "a.scale": np.ones((64, 1), np.float32)}, {"quant_method": "hqq"}),
    "bitnet": ({"a.weight": np.ones((16, 64), np.uint8), "a.weight_scale": np.ones(1, np.float32)}, {}),
    "an unknown method": ({"a.packed_codes": words(64, 8).view(np.uint8)}, {"quant_method": "new"}),
    "integers without a scale": ({"a.weight": np.ones((64, 64), np.int8)}, {}),
}


@pytest.mark.parametrize("to", ["bf16", "fp32", "compressed-tensors:fp8", "gguf"])
@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_is_refused(kind: str, to: str, tmp_path: Path) -> None:
    arrays, said = UNREAD[kind]
    source = checkpoint(tmp_path / "in", arrays, said)
    with pytest.raises(
        ValueError, match=r"all quantized tensors must be in a format that is read here.*'a\."
    ) as caught:
        convert(source, tmp_path / "out", to)
    assert said.get("quant_method", "") in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def quark(kind: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A weight, its tensors as AMD's Quark names and packs them, and what it says of them in config.json."""
    scaled = breccia.cast(weight(64, 128), kind)
    data, scale = np.asarray(scaled.data), np.asarray(scaled.scale)
    said = {"mxfp4": "fp4", "nvfp4": "fp4", "mxfp6": "fp6_e2m3"}.get(kind, "fp8_e4m3")
    if "fp8" in kind:
        data = data.view(ml_dtypes.float8_e4m3fn)
    if kind == "mxfp6":
        four = data.reshape(64, 32, 4).astype(np.uint32)
        word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
        data = np.stack([word & 255, word >> 8 & 255, word >> 16], -1).astype(np.uint8).reshape(64, 96)
    more = {}
    if kind == "nvfp4":
        scale, more = scale.view(ml_dtypes.float8_e4m3fn), {"a.weight_scale_2": np.asarray(scaled.global_scale)}
    if kind.startswith("mx"):
        scale = scale.view(np.uint8)
    scale = scale.reshape(-1) if kind == "fp8-row" else scale
    config = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": said}}, "exclude": ["lm_head"]}
    return scaled, {"a.weight": data, "a.weight_scale": scale, **more}, config


@pytest.mark.parametrize("kind", ["fp8", "fp8-row", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_quark(kind: str, tmp_path: Path) -> None:
    scaled, arrays, said = quark(kind)
    source = checkpoint(tmp_path / "in", arrays, said)
    found = Checkpoint(source)
    one = next(each for each in found.found if each.format != "plain")
    np.testing.assert_array_equal(breccia.dequantize(found.load(one)), breccia.dequantize(scaled))
    report = convert(source, tmp_path / "out", "breccia")
    assert report["tensors"]["repack"] == 1
    written = Checkpoint(tmp_path / "out")
    one = next(each for each in written.found if each.format != "plain")
    np.testing.assert_array_equal(breccia.dequantize(written.load(one)), breccia.dequantize(scaled))


def test_quark_of_another_kind_is_refused(tmp_path: Path) -> None:
    _, arrays, said = quark("mxfp6")
    said["global_quant_config"]["weight"]["dtype"] = "fp6_e3m2"
    with pytest.raises(ValueError, match=r"not, quant_method 'quark' in config.json: 'a\.weight'"):
        convert(checkpoint(tmp_path / "in", arrays, said), tmp_path / "out", "bf16")


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fnuz_is_named(kind: str, tmp_path: Path) -> None:
    """Without a scale beside it; with one it is read (bridges/test_fnuz.py)."""
    arrays = {"a.weight": weight(64, 128).astype(getattr(ml_dtypes, f"float8_{kind}fnuz"))}
    with pytest.raises(
        ValueError, match=rf"'a\.weight' \[64, 128\]: F8_{kind.upper()}FNUZ codes, AMD's fnuz, without a scale"
    ):
        convert(checkpoint(tmp_path / "in", arrays, {"quant_method": "fp8"}), tmp_path / "out", "bf16")


@pytest.mark.parametrize("quantized", [True, False])
def test_integers_that_are_no_weights_are_copied(quantized: bool, tmp_path: Path) -> None:
    tables = {
        "h.0.attn.bias": np.ones((1, 1, 128, 128), np.uint8),
        "embeddings.position_ids": np.arange(512)[None],
        "attn.relative_position_index": np.arange(4096, dtype=np.int32).reshape(64, 64),
        "bn.num_batches_tracked": np.array(3, np.int64),
    }
    arrays = {**tables, "a.weight": weight(64, 64)}
    source = checkpoint(tmp_path / "in", arrays, {"quant_method": "compressed-tensors"} if quantized else {})
    convert(source, tmp_path / "out", "bf16")
    written = Checkpoint(tmp_path / "out")
    for name, table in tables.items():
        np.testing.assert_array_equal(written.array(name), table)


def test_bitsandbytes_of_8_bits(tmp_path: Path) -> None:
    """Its own arithmetic: the integers, times the largest magnitude of a row, times 1 / 127."""
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    w = torch.from_numpy(weight(64, 128))
    codes, rows, _ = functional.int8_vectorwise_quant(w.to(torch.float16))
    wanted = functional.int8_vectorwise_dequant(codes, rows).numpy()
    arrays = {"a.weight": codes.numpy(), "a.SCB": rows.numpy(), "a.weight_format": np.array(0, np.uint8)}
    source = checkpoint(tmp_path / "in", arrays, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    convert(source, tmp_path / "out", "fp32")
    written = Checkpoint(tmp_path / "out")
    assert {found.name for found in written.found} == {"a.weight", "model.norm.weight"}
    np.testing.assert_array_equal(written.array("a.weight"), wanted)


def test_bitsandbytes_of_4_bits_has_its_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.from_numpy(weight(64, 128)), quant_type="nf4")
    wanted = functional.dequantize_4bit(packed, state).numpy()
    parts = {name: part.numpy() for name, part in state.as_dict(packed=True).items()}
    arrays = {"a.weight": packed.numpy(), **{f"a.weight.{name}": part for name, part in parts.items()}}
    source = checkpoint(tmp_path / "in", arrays, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    convert(source, tmp_path / "out", "fp32")
    np.testing.assert_array_equal(Checkpoint(tmp_path / "out").array("a.weight"), wanted)
    convert(source, tmp_path / "q", "compressed-tensors:fp8")
    (found,) = (f for f in Checkpoint(tmp_path / "q").found if f.format != "plain")
    assert found.shape == (64, 128)
    error = np.abs(values(Checkpoint(tmp_path / "q").load(found)) - wanted).max()
    assert error < 0.05 * np.abs(wanted).max()
