# SPDX-License-Identifier: Apache-2.0
"""`breccia merge-lora` into GGUF files: against what is stored, dequantized, added to and quantized again."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import dequantize_gguf, from_gguf, quantize_gguf, to_gguf
from breccia.bridges.common import bfloat16_bits, float32
from breccia.bridges.gguf import KINDS, RECIPES
from breccia.bridges.gguf.quantize import QUANTIZE
from breccia.checkpoint import convert, merge_lora, save_arrays, verify
from breccia.gguf.container import GgufFile, GgufWriter, block_bytes
from tiny_models import made_once

pytest.importorskip("transformers")
pytest.importorskip("torch")

RANK, HEADS, KEY_HEADS = 4, 4, 2  # of the tiny models
# A module of the model → GGUF's name, and in how many heads its rows are put in another order.
CHANGED = {
    "model.layers.0.self_attn.q_proj": ("blk.0.attn_q", HEADS),
    "model.layers.1.self_attn.k_proj": ("blk.1.attn_k", KEY_HEADS),
    "model.layers.1.mlp.down_proj": ("blk.1.ffn_down", 0),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with rows of whole super-blocks."""
    return made_once(tmp_path_factory.mktemp("models"))("llama-wide")


def adapter(path: Path, shapes: dict[str, tuple[int, ...]], factor: float = 0.15) -> dict[str, np.ndarray[Any, Any]]:
    """Write an adapter; what it adds to each weight, in the model's own order of rows."""
    path.mkdir()
    rng = np.random.default_rng(3)
    arrays, products = {}, {}
    for name, (rows, columns) in shapes.items():
        a = rng.normal(0, factor, (RANK, columns)).astype(np.float32)
        b = rng.normal(0, factor, (rows, RANK)).astype(np.float32)
        arrays[f"base_model.model.{name}.lora_A.weight"], arrays[f"base_model.model.{name}.lora_B.weight"] = a, b
        products[name] = 2 * (b @ a)
    save_arrays(arrays, path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (path / "adapter_config.json").write_text(json.dumps(said))
    return products


def shapes_of(file: GgufFile) -> dict[str, tuple[int, ...]]:
    return {module: file.shapes[f"{inside}.weight"] for module, (inside, _) in CHANGED.items()}


def in_turn(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of halves of each head as GGUF has them, in turn."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def encoded(kind: str, raw: np.ndarray[Any, Any], shape: tuple[int, ...], change: Any, second: Any) -> Any:
    """Bytes of a type, with a change."""
    if kind in ("F32", "F16", "BF16"):
        stored = raw.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]).reshape(shape)
        values = float32(stored) + change
        return {"F32": lambda: values, "F16": lambda: values.astype(np.float16), "BF16": lambda: bfloat16_bits(values)}[
            kind
        ]()
    blocks = raw.reshape(shape[0], -1)
    if kind in QUANTIZE:
        return quantize_gguf(dequantize_gguf(blocks, kind) + change, kind)
    scaled = from_gguf(blocks, kind, second)
    values = breccia.dequantize(scaled) + change
    options = {} if second is None else {"amax": second[0] * np.float32(448 * 6)}
    return to_gguf(breccia.cast(values, scaled.recipe, **options))[kind]


@pytest.mark.parametrize("to", [*RECIPES, *KINDS, "fp32"])
def test_bytes(to: str, wide: Path, tmp_path: Path) -> None:
    """What changes has its type's bytes of the sum, all else and the metadata those that were there."""
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    if to == "fp32":
        convert(wide, tmp_path / "fp32", "fp32")
    convert(
        tmp_path / "fp32" if to == "fp32" else wide,
        base,
        "gguf" if to == "fp32" else f"gguf:{to}",
        **({"exclude": ["*"]} if to == "fp32" else {}),
    )
    before = GgufFile(base)
    products = adapter(tmp_path / "adapter", shapes_of(before))
    report = merge_lora(base, tmp_path / "adapter", out)
    assert report["tensors"]["merge"] == len(products)
    after = GgufFile(out)
    start = min(entry.start for entry in before.entries.values())
    assert base.read_bytes()[:start] == out.read_bytes()[:start]
    changed = {f"{inside}.weight": (module, heads) for module, (inside, heads) in CHANGED.items()}
    for name, kind in before.kinds.items():
        if name not in changed:
            if name.removesuffix("scale") + "weight" not in changed:
                assert before.raw(name).tobytes() == after.raw(name).tobytes(), name
            continue
        module, heads = changed[name]
        second = f"{name.removesuffix('weight')}scale"
        stored = before.raw(second).view("<f4") if second in before.entries else None
        if stored is not None and stored.tobytes() != after.raw(second).tobytes():
            stored = after.raw(second).view("<f4")  # a larger one was needed
            old = from_gguf(before.raw(name).reshape(before.shapes[name][0], -1), kind, before.raw(second).view("<f4"))
            wanted = breccia.dequantize(old) + in_turn(products[module], heads)
            made = to_gguf(breccia.cast(wanted, old.recipe, amax=np.abs(wanted).max()))
            assert made["scale"].tobytes() == stored.tobytes()
            assert made[kind].tobytes() == after.raw(name).tobytes(), name
            continue
        wanted = encoded(kind, before.raw(name), before.shapes[name], in_turn(products[module], heads), stored)
        assert np.ascontiguousarray(wanted).tobytes() == after.raw(name).tobytes(), name
        assert after.raw(name).tobytes() != before.raw(name).tobytes(), name
    verified = verify(base, out, adapter=tmp_path / "adapter", min_sqnr_db=1)
    assert verified["ok"]
    assert verified["kept"] == pytest.approx(report["change"]["kept"], abs=1e-3)
    assert report["change"]["kept"] == pytest.approx(1, abs=0.1)


def test_what_k_quants_cannot_do_is_noted(wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "base.gguf", "gguf:q4_k")
    adapter(tmp_path / "adapter", shapes_of(GgufFile(tmp_path / "base.gguf")))
    report = merge_lora(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "out.gguf", rounding="feedback")
    notes = [note for note in report["notes"] if "Q4_K is rounded to nearest: feedback has no form in it" in note]
    assert len(notes) == len(CHANGED)
    with pytest.raises(ValueError, match="strict: there must be nothing to note"):
        merge_lora(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "x.gguf", rounding="feedback", strict=True)
    assert not (tmp_path / "x.gguf").exists()


def test_feedback_is_named_only_where_it_helps(wide: Path, tmp_path: Path) -> None:
    for kind, helps in (("q4_k", False), ("q4_0", True)):
        base, out = tmp_path / f"{kind}.gguf", tmp_path / f"{kind}-out.gguf"
        convert(wide, base, f"gguf:{kind}")
        adapter(tmp_path / kind, shapes_of(GgufFile(base)), factor=0.01)
        (note,) = (one for one in merge_lora(base, tmp_path / kind, out)["notes"] if "keep less than" in one)
        assert ("--rounding feedback keeps more" in note) == helps, kind


def test_feedback_in_types_with_recipes(wide: Path, tmp_path: Path) -> None:
    for kind in RECIPES:
        convert(wide, tmp_path / "base.gguf", f"gguf:{kind}", force=True)
        (tmp_path / kind).mkdir()
        adapter(tmp_path / kind / "a", shapes_of(GgufFile(tmp_path / "base.gguf")), factor=0.01)
        kept = {}
        for rounding in ("nearest", "feedback"):
            out = tmp_path / "out.gguf"
            report = merge_lora(tmp_path / "base.gguf", tmp_path / kind / "a", out, rounding=rounding, force=True)
            kept[rounding] = report["change"]["kept"]
            assert verify(tmp_path / "base.gguf", out, min_sqnr_db=1)["ok"]
        assert abs(1 - kept["feedback"]) < 0.35, (kind, kept)
        assert kind == "q8_0" or abs(1 - kept["nearest"]) > 0.5, (kind, kept)


def test_types_that_are_not_written_are_refused(wide: Path, tmp_path: Path) -> None:
    """A file whose table says IQ4_XS of a matrix: its bytes are none that can be made."""
    convert(wide, tmp_path / "q8.gguf", "gguf:q8_0")
    file = GgufFile(tmp_path / "q8.gguf")
    plan = {name: (kind, file.shapes[name]) for name, kind in file.kinds.items()}
    plan["blk.0.attn_q.weight"] = ("IQ4_XS", plan["blk.0.attn_q.weight"][1])
    with GgufWriter(tmp_path / "base.gguf", plan, file.fields) as writer:
        for name, (kind, shape) in plan.items():
            writer.write(name, np.zeros(block_bytes(kind, shape), np.uint8) if kind == "IQ4_XS" else file.raw(name))
    adapter(tmp_path / "adapter", shapes_of(file))
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' must be of .*, it is IQ4_XS"):
        merge_lora(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_one_experts_matrix_is_refused(tmp_path: Path) -> None:
    source = made_once(tmp_path)("qwen3-moe-wide")
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "norm_topk_prob": True}))  # which GGUF's programs do
    convert(source, tmp_path / "base.gguf", "gguf:q8_0")
    adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts.1.down_proj": (128, 256)})
    with pytest.raises(ValueError, match=r"down_proj\.weight' must be one in the file, which keeps it with others"):
        merge_lora(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "out.gguf")
