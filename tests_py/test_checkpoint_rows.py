# SPDX-License-Identifier: Apache-2.0
"""Some rows of a tensor, of every format that is written here: the values of the whole, of those rows' bytes alone."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia import bridges
from breccia.checkpoint import Checkpoint, convert, target_names
from breccia.checkpoint.files.input_file import InputFile
from breccia.checkpoint.planning.targets import parse_target
from breccia.checkpoint.reading.rows import rows_of, stored_shape, together
from checkpoints import MAKERS, weight, write_shards
from fault_runner import tree

ml_dtypes = pytest.importorskip("ml_dtypes")

execute_module = importlib.import_module("breccia.checkpoint.writing.execute")
rows_module = importlib.import_module("breccia.checkpoint.reading.rows")

TARGETS = [name for name in target_names() if ":" in name and not parse_target(name).quantizes_nothing]


def values(tensor: Any) -> Any:
    return np.asarray(tensor.dequantize() if hasattr(tensor, "dequantize") else tensor).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"q_proj": (384, 256), "o_proj": (328, 512), "up_proj": (256, 256), "wide": (64, 1024)}
    shapes |= {f"mlp.experts.{i}.{name}_proj": (64, 128) for i in range(2) for name in ("gate", "up", "down")}
    arrays: dict[str, Any] = {f"model.layers.0.{name}.weight": weight(*shape) for name, shape in shapes.items()}
    arrays["model.layers.1.mlp.experts.gate_up_proj"] = weight(3, 64, 128)
    arrays["model.norm.weight"] = weight(256).astype(ml_dtypes.bfloat16)
    arrays["model.embed_tokens.weight"] = weight(100, 256).astype(ml_dtypes.bfloat16)
    return write_shards(tmp_path_factory.mktemp("rows") / "in", [arrays], {"model_type": "deepseek_v4"})


@pytest.fixture(params=[*TARGETS, *MAKERS])
def source(request: Any, model: Path, tmp_path: Path) -> Path:
    if request.param in MAKERS:
        return MAKERS[request.param](tmp_path / "made")
    convert(model, tmp_path / "made", request.param)
    return tmp_path / "made"


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are read from now on."""
    counted = [0]
    read = InputFile.array

    def counting(self: InputFile, start: int, stop: int) -> Any:
        counted[0] += stop - start
        return read(self, start, stop)

    monkeypatch.setattr(InputFile, "array", counting)
    return counted


@pytest.mark.in_turn
def test_rows_are_those_of_the_whole(source: Path, count: list[int]) -> None:
    checkpoint = Checkpoint(source, mapped=False)
    quantized = 0
    for found in map(checkpoint.refined, checkpoint.found):
        shape, step = stored_shape(checkpoint, found), together(checkpoint, found)
        if not shape:
            continue
        whole = values(checkpoint.load(found)) if not found.origin.turned else None
        quantized += found.format != "plain"
        for start in range(0, shape[0], step):
            for stop in {start + step, shape[0]} if start in (0, step) else {start + step}:
                count[0] = 0
                part = values(rows_of(checkpoint, found, start, min(stop, shape[0])))
                assert part.shape == (min(stop, shape[0]) - start, *shape[1:])
                if whole is not None:
                    assert part.tobytes() == whole[start:stop].tobytes(), (found.name, start, stop)
                share = (min(stop, shape[0]) - start) / shape[0]
                assert count[0] <= share * checkpoint.nbytes(found) + 128 + 4 * shape[-1]
    assert quantized
    checkpoint.close()


def test_most_formats_are_read_by_rows(source: Path) -> None:
    """A format that is read whole says so in one place: it has no axis of rows."""
    checkpoint = Checkpoint(source, mapped=False)
    for found in map(checkpoint.refined, checkpoint.found):
        if found.format != "plain" and bridges.bridge(found.format).row_axis is not None:
            assert together(checkpoint, found) <= 128, (found.name, found.format, found.kind)
    checkpoint.close()


def test_rows_in_the_order_of_gguf(tmp_path: Path) -> None:
    """Llama's query and key rows have another order in GGUF."""
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "mlp.up_proj": (128, 64)}
    arrays = {f"model.layers.0.{part}.weight": weight(*shape) for part, shape in shapes.items()}
    said = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    said |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "intermediate_size": 128}
    said |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "vocab_size": 32}
    source = write_shards(tmp_path / "source", [arrays], said)
    (source / "tokenizer.json").unlink()
    for include in ((), ["*up_proj*"]):  # the others stay plain
        convert(source, tmp_path / "model.gguf", "gguf:q8_0", include=include)
        checkpoint = Checkpoint(tmp_path / "model.gguf", mapped=False)
        assert any(found.origin.row_order is not None for found in checkpoint.found)
        for found in checkpoint.found:
            whole = values(checkpoint.load(found))
            for start in range(0, found.shape[0] - 24, 8):
                part = values(rows_of(checkpoint, found, start, start + 24))
                assert part.tobytes() == whole[start : start + 24].tobytes()
        checkpoint.close()
        (tmp_path / "model.gguf").unlink()


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Converts so that no tensor is small; gives how many were cut."""

    def converted(source: Path, out: Path, to: str, **options: Any) -> int:
        cut = [0]
        real = rows_module.pieces_of

        def counting(*arguments: Any) -> Any:
            runs = real(*arguments)
            cut[0] += len(runs) > 1
            return runs

        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "_LARGE", 1 << 13)
            patch.setattr(execute_module, "pieces_of", counting)
            convert(source, out, to, **options)
        return cut[0]

    return converted


PIECES_TO = (
    "nvfp4",
    "fp8",
    "fp8-row",
    "mxfp8",
    "int4:asym",
    "bf16",
    "compressed-tensors:nvfp4",
    "torchao:fp8",
    "gguf:q4_k",
)


@pytest.mark.in_turn
@pytest.mark.parametrize("to", PIECES_TO)
def test_pieces_of_any_format_make_the_whole(source: Path, to: str, in_pieces: Any, tmp_path: Path) -> None:
    """A tensor that is read and quantized some rows at a time has the bytes of one that was read whole."""
    try:
        convert(source, tmp_path / "whole", to)
    except ValueError:
        pytest.skip("there is no such conversion")
    in_pieces(source, tmp_path / "pieces", to)
    assert tree(tmp_path / "pieces") == tree(tmp_path / "whole")


UNCUT = ("fp32", "gguf:f16", "gguf:bf16", "deepseek:mxfp4")  # which change none of these tensors


@pytest.mark.parametrize("to", [to for to in target_names() if to not in UNCUT])
def test_pieces_of_floats_make_the_whole(to: str, in_pieces: Any, tmp_path: Path) -> None:
    """Of odd numbers, too, experts in one tensor, those with inputs before outputs, and rows that fill no piece."""
    odd = weight(300, 256)
    odd[17, 5], odd[290, 9], odd[200] = (0, 0, 0) if "gguf" in to else (np.inf, np.nan, 0)  # which it refuses
    layer = "model.layers.0."
    arrays: dict[str, Any] = {
        f"{layer}self_attn.o_proj.weight": odd,
        f"{layer}mlp.down_proj.weight": weight(640, 256),
        f"{layer}mlp.experts.gate_up_proj": weight(6, 256, 128),
        f"{layer}mlp.experts.down_proj": weight(6, 64, 256).astype(ml_dtypes.bfloat16),
    }
    arrays |= {f"{layer}self_attn.{part}_proj.weight": weight(384, 256) * (i + 1) for i, part in enumerate("qk")}
    cut = 0
    for model in ("test", "llama4_text"):
        source = write_shards(tmp_path / model, [arrays], {"model_type": model})
        source = source / "model-00001-of-00001.safetensors" if "gguf" in to else source
        outs = [tmp_path / f"{model}-{kind}{'.gguf' if 'gguf' in to else ''}" for kind in ("whole", "pieces")]
        try:
            convert(source, outs[0], to)
        except ValueError:
            continue  # a kind of file without such tensors
        cut += in_pieces(source, outs[1], to)
        assert tree(outs[1]) == tree(outs[0])
    assert cut
