# SPDX-License-Identifier: Apache-2.0
"""`breccia merge-lora` of adapters in GGUF, written by gguf-py as llama.cpp's convert_lora_to_gguf.py does: the same
bytes as the same adapter in PEFT's folder gives.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.bridges.common import bfloat16_bits
from breccia.checkpoint import convert, merge_lora, save_arrays, verify
from breccia.gguf.container import GgufFile
from test_merge_lora_gguf import CHANGED, in_turn
from tiny_models import made_once

pytest.importorskip("transformers")
pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

RANK = 32  # rows of lora_b are whole blocks of Q8_0
EMBEDDING = "model.embed_tokens"
BASES = ["gguf:q4_k", "gguf:nvfp4", "compressed-tensors:nvfp4", "bf16"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory.mktemp("models"))("llama-wide")


@pytest.fixture(scope="module")
def shapes(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    path = tmp_path_factory.mktemp("shapes") / "base.gguf"
    convert(wide, path, "gguf:q8_0")
    file = GgufFile(path)
    found = {module: file.shapes[f"{inside}.weight"] for module, (inside, _) in CHANGED.items()}
    return {**found, EMBEDDING: file.shapes["token_embd.weight"]}


def rounded(x: np.ndarray[Any, Any], kind: str) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    """What a file of a type holds of x: the array for gguf-py, its type, and the values."""
    if kind == "F32":
        return x, None, x
    if kind == "F16":
        return x.astype(np.float16), None, x.astype(np.float16).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(x, number)
    values = gguf.quants.dequantize(raw, number)
    assert kind != "BF16" or np.array_equal(bfloat16_bits(values), bfloat16_bits(x))
    return raw, number, values


def write(
    path: Path, shapes: dict[str, tuple[int, ...]], kind: str = "F32", alpha: float | None = 48.0, **said: Any
) -> Path:
    """The same adapter as path.gguf and as PEFT's folder path; the folder."""
    rng = np.random.default_rng(5)
    arch = said.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path.with_suffix(".gguf"), arch)
    writer.add_type(said.pop("type", gguf.GGUFType.ADAPTER))
    writer.add_string(gguf.Keys.Adapter.TYPE, said.pop("adapter_type", "lora"))
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    if tokens := said.pop("tokens", None):
        writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, tokens)
    folder = {}
    for module, (rows, columns) in shapes.items():
        inside, heads = CHANGED.get(module, ("token_embd", 0))
        embedding = module == EMBEDDING
        a = rng.normal(0, 0.1, (rows, RANK) if embedding else (RANK, columns)).astype(np.float32)
        b = rng.normal(0, 0.1, (columns if embedding else rows, RANK)).astype(np.float32)
        for side, x, order in (("a", a, 0), ("b", b, heads)):
            stored, number, values = rounded(x, kind)
            if order:  # rounding is by rows, whose order it does not know
                stored = in_turn(stored, order)
            writer.add_tensor(f"{inside}.weight.lora_{side}", stored, raw_dtype=number)
            name = f"lora_embedding_{side.upper()}" if embedding else f"lora_{side.upper()}.weight"
            values = values.T if embedding and side == "a" else values
            folder[f"base_model.model.{module}.{name}"] = np.ascontiguousarray(values)
    for name, array in said.pop("more", {}).items():
        writer.add_tensor(name, array)
    assert not said
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.mkdir()
    save_arrays(folder, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha or RANK}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def files(path: Path) -> dict[str, bytes]:
    inside = [path] if path.is_file() else sorted(path.iterdir())
    return {"" if path.is_file() else one.name: one.read_bytes() for one in inside}


@pytest.mark.parametrize("to", BASES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_as_peft_s(to: str, kind: str, wide: Path, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """Of each type that the script writes, into bases in GGUF and in safetensors, embeddings and all."""
    end = ".gguf" if to.startswith("gguf") else ""
    base = tmp_path / f"base{end}"
    convert(wide, base, to)
    path = write(tmp_path / "adapter", shapes, kind)
    outs = {}
    for name, adapter in (("peft", path), ("llama.cpp", path.with_suffix(".gguf"))):
        outs[name] = tmp_path / f"{name}{end}"
        report = merge_lora(base, adapter, outs[name])
        assert report["tensors"]["merge"] >= len(shapes)
    assert files(outs["peft"]) == files(outs["llama.cpp"])
    assert files(outs["peft"]) != files(base)
    said = verify(base, outs["llama.cpp"], adapter=path.with_suffix(".gguf"), min_sqnr_db=1)
    assert said["ok"]
    assert said["kept"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_without_alpha_the_product_is_added(
    alpha: float | None, wide: Path, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    path = write(tmp_path / "adapter", shapes, alpha=alpha)  # PEFT's has alpha = r
    convert(wide, tmp_path / "base.gguf", "gguf:q8_0")
    merge_lora(tmp_path / "base.gguf", path, tmp_path / "peft.gguf")
    merge_lora(tmp_path / "base.gguf", path.with_suffix(".gguf"), tmp_path / "other.gguf")
    assert files(tmp_path / "peft.gguf") == files(tmp_path / "other.gguf")


ROW = np.ones((RANK, 256), np.float32)
WRONG = {
    "a model": ({"type": "model"}, r"general\.type must be 'adapter', .* has 'model'"),
    "another kind": ({"adapter_type": "ia3"}, r"adapter\.type must be 'lora', .* has 'ia3'"),
    "another model": ({"architecture": "qwen2"}, r"architecture must be the base's, 'llama', got 'qwen2'"),
    "tokens": ({"tokens": [1, 2]}, r"must not have adapter\.alora\.invocation_tokens"),
    "alpha": ({"alpha": float("nan")}, r"lora\.alpha must be a finite float32, got nan"),
    "a norm": ({"more": {"blk.0.attn_norm.weight": ROW[0]}}, r"'blk\.0\.attn_norm\.weight' must end in \.lora_a or"),
    "half a pair": ({"more": {"blk.0.attn_v.weight.lora_a": ROW}}, r"'blk\.0\.attn_v\.weight', it has no \.lora_b"),
    "ranks": (
        {"more": {"blk.0.attn_v.weight.lora_a": ROW, "blk.0.attn_v.weight.lora_b": ROW[:, :8]}},
        r"of 'blk\.0\.attn_v\.weight' must be \(r, IN\) and \(OUT, r\), got \(32, 256\), \(32, 8\)",
    ),
    "experts": (
        {"more": {f"blk.0.ffn_up_exps.weight.lora_{side}": ROW[None] for side in "ab"}},
        r"of 'blk\.0\.ffn_up_exps\.weight' must be \(r, IN\) and \(OUT, r\), got \(1, 32, 256\)",
    ),
    "a place it has not": (
        {"more": {"blk.99.attn_v.weight.lora_a": ROW, "blk.99.attn_v.weight.lora_b": ROW[:, :RANK]}},
        r"adapter's tensor of 'model\.layers\.99\.self_attn\.v_proj\.weight' must have its place in the base",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ones_are_refused(wrong: str, wide: Path, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    options, message = WRONG[wrong]
    write(tmp_path / "adapter", shapes, **options)
    with pytest.raises(ValueError, match=message):
        merge_lora(wide, tmp_path / "adapter.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_are_refused(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"adapter must be PEFT's folder or a GGUF file, got .*adapter\.bin"):
        merge_lora(wide, tmp_path / "adapter.bin", tmp_path / "out")
