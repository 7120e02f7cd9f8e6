# SPDX-License-Identifier: Apache-2.0
"""What a user wrote into a checkpoint beside its tensors stays: metadata of headers, the index, the model's card."""

import json
from pathlib import Path

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays, target_names
from checkpoints import weight, write_shards

ml_dtypes = pytest.importorskip("ml_dtypes")
WORDS = {"modelspec.title": "mine", "ss_tag_frequency": "{}", "config": "{}"}
BASE = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256}


@pytest.mark.parametrize("to", target_names())
def test_metadata_of_a_file_is_in_every_target_or_said(to: str, tmp_path: Path) -> None:
    arrays = {"layers.0.mlp.up_proj.weight": weight(128, 256), "layers.0.input_layernorm.weight": np.ones(256, "f4")}
    save_arrays(arrays, tmp_path / "in.safetensors", {"format": "pt", **WORDS})
    try:
        report = convert(tmp_path / "in.safetensors", tmp_path / "out", to)
    except ValueError as error:
        assert "GGUF" in str(error) or "architecture" in str(error) or "DeepSeek V4" in str(error), error
        return
    checkpoint = Checkpoint(tmp_path / "out")
    if checkpoint.container.title != "safetensors":
        assert any(note.startswith("metadata of the source has no place") for note in report["notes"])
        return
    (file,) = checkpoint.files
    assert WORDS.items() <= file.metadata.items()
    convert(tmp_path / "out", tmp_path / "back", "bf16")
    back = SafetensorsFile(tmp_path / "back").metadata
    assert back == {"format": "pt", **WORDS}  # nothing of how it was quantized


def test_metadata_that_is_no_longer_true_is_left_out_and_said(tmp_path: Path) -> None:
    words = {"modelspec.hash_sha256": "0x1", "sshs_model_hash": "2", "my_quantization": "exl9", "keep": "me"}
    save_arrays({"l.weight": weight(64, 128)}, tmp_path / "in.safetensors", words)
    report = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "fp16")
    assert report["notes"] == [
        "metadata of how the source was quantized is left out: my_quantization",
        "metadata with checksums of the source's bytes is left out: modelspec.hash_sha256 and 1 more",
    ]
    assert SafetensorsFile(tmp_path / "out.safetensors").metadata == {"format": "pt", "keep": "me"}
    with pytest.raises(ValueError, match=r"^strict: .*my_quantization"):
        convert(tmp_path / "in.safetensors", tmp_path / "strict.safetensors", "fp16", strict=True)


def test_other_keys_of_an_index_and_unknown_files_stay(tmp_path: Path) -> None:
    arrays = {f"model.layers.{n}.mlp.up_proj.weight": weight(128, 256) for n in range(2)}
    source = write_shards(tmp_path / "in", [{name: array} for name, array in arrays.items()], BASE)
    index = source / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["metadata"] |= {"total_parameters": 65536, "total_size": 1}
    index.write_text(json.dumps({**said, "mine": [1, 2]}))
    (source / "something.xyz").write_bytes(b"kept")
    (source / "pytorch_model.bin").write_bytes(b"not kept")
    report = convert(source, tmp_path / "out", "nvfp4")
    made = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert made["mine"] == [1, 2]
    assert made["metadata"] == {"total_parameters": 65536, "total_size": report["bytes_written"]}
    assert (tmp_path / "out" / "something.xyz").read_bytes() == b"kept"
    assert report["notes"] == ["pytorch_model.bin: weights in other files of the folder are not copied"]
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


CARD = (
    "---\nlicense: mit\nbase_model:\n- org/older\nbase_model_relation: finetune\ntags:\n- x\n---\n# Mine\n\n---\nend\n"
)


@pytest.mark.parametrize("how", ["config", "folder", "none"])
def test_the_card_says_what_was_quantized(how: str, tmp_path: Path) -> None:
    place = tmp_path / "models--org--Name-1.5" / "snapshots" / "abc" if how == "folder" else tmp_path / "in"
    place.parent.mkdir(parents=True, exist_ok=True)
    more = {"_name_or_path": "org/Name-1.5"} if how == "config" else {"_name_or_path": "/home/me/model"}
    source = write_shards(place, [{"model.layers.0.mlp.up_proj.weight": weight(128, 256)}], {**BASE, **more})
    own = CARD if how != "config" else CARD.replace("base_model:\n- org/older\nbase_model_relation: finetune\n", "")
    (source / "README.md").write_text(own)
    convert(source, tmp_path / "out", "compressed-tensors:nvfp4")
    card = (tmp_path / "out" / "README.md").read_text()
    if how == "none":
        assert card == CARD
        return
    head = "---\nlicense: mit\ntags:\n- x\nbase_model: org/Name-1.5\nbase_model_relation: quantized\n---\n"
    assert card == head + "# Mine\n\n---\nend\n"
    convert(source, tmp_path / "floats", "bf16")
    assert (tmp_path / "floats" / "README.md").read_text() == own
    (source / "README.md").unlink()
    convert(source, tmp_path / "new", "mlx:int4")
    assert (tmp_path / "new" / "README.md").exists() == (how == "folder")
    if how == "config":  # of whose card another model is the base
        (source / "README.md").write_text(CARD)
        convert(source, tmp_path / "other", "mlx:int4")
        assert (tmp_path / "other" / "README.md").read_text() == CARD
