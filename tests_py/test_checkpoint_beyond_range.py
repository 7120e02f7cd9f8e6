# SPDX-License-Identifier: Apache-2.0
"""Numbers that are finite in a source and beyond the range of what is written are said, and refused where asked."""

import re
from pathlib import Path

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, target_names
from checkpoints import weight, write_shards

ml_dtypes = pytest.importorskip("ml_dtypes")
FLOATS = ("float16", "bfloat16", "float32", "float64")
SAID = "not finite where numbers are beyond the range of what they are written in"


def _source(path: Path, large: float) -> Path:
    arrays = {f"layers.{n}.mlp.up_proj.weight": weight(128, 256) for n in range(2)}
    arrays["layers.0.mlp.up_proj.weight"][3, 5] = large
    arrays["layers.0.input_layernorm.weight"] = np.full(256, large, np.float32)
    said = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256}
    return write_shards(path, [arrays], said)


def _not_finite(path: Path) -> set[str]:
    """Tensors that have such numbers in what is stored, or in what it means."""
    checkpoint = Checkpoint(path)
    found = set()
    for one in checkpoint.found:
        for name in one.parts.values():
            array = checkpoint.array(name) if name in checkpoint.entries else np.zeros(1)
            if array.dtype.name in FLOATS and not np.isfinite(array.astype(np.float64)).all():
                found.add(one.name)
        with np.errstate(over="ignore"):
            loaded = checkpoint.load(one)
            values = np.asarray(loaded.dequantize() if hasattr(loaded, "dequantize") else loaded)
        found |= set() if np.isfinite(values.astype(np.float64)).all() else {one.name}
    return found


@pytest.mark.parametrize("large", [1e6, 3e38])
@pytest.mark.parametrize("to", target_names())
def test_every_target_says_where_it_is_not_finite(to: str, large: float, tmp_path: Path) -> None:
    source = _source(tmp_path / "in", large)
    try:
        report = convert(source, tmp_path / "out", to)
    except ValueError as error:
        assert re.search("finite|range|fit float16|DeepSeek V4", str(error)), error
        return
    said = {note.partition(":")[0] for note in report["notes"] if note.endswith(SAID)}
    assert report["not_finite"] == {}
    assert _not_finite(tmp_path / "out") == said
    if said:
        with pytest.raises(ValueError, match=r"^strict: "):
            convert(source, tmp_path / "strict", to, strict=True)
        assert not (tmp_path / "strict").exists()


def test_what_the_source_has_is_said_once(tmp_path: Path) -> None:
    values = np.array([[np.inf, 1.0], [2.0, np.nan]], np.float32)
    save_arrays({"l.weight": values, "n.bias": np.float32([7e4, 1])}, tmp_path / "in.safetensors")
    report = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "fp16")
    assert report["notes"] == ["l.weight: 2 elements are not finite", f"n.bias: {SAID}"]
    save_arrays({"l.weight": np.float32([[np.inf, 7e4], [1, 2]])}, tmp_path / "both.safetensors")
    report = convert(tmp_path / "both.safetensors", tmp_path / "o.safetensors", "fp16")
    assert report["notes"] == ["l.weight: 1 element is not finite"]
