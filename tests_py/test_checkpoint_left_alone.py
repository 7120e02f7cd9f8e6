# SPDX-License-Identifier: Apache-2.0
"""Weights that quantized checkpoints leave alone, by the names that models give them."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia import bridges, recipe_names
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, plan, save_arrays, target_names, verify
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.reading.source import is_float
from checkpoints import weight

ml_dtypes = pytest.importorskip("ml_dtypes")

ALONE = [
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "wte.weight",
    "shared.weight",
    "lm_head.weight",
    "head.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "transformer.output_layer.weight",
    "score.weight",
    "classifier.weight",
    "classifier.dense.weight",
    "qa_outputs.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.transform.dense.weight",
    "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    "visual.blocks.0.attn.qkv.weight",
    "model.visual.merger.mlp.0.weight",
    "model.multi_modal_projector.linear_1.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.0.self_attn.indexer.wq_b.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "audio_tower.layers.0.fc1.weight",
    "model.decoder.pos_emb.weight",
    "model.encoder.layers.0.attn.rel_pos_emb.weight",
    "query.weight",
    "model.query_feat.weight",
    "model.transformer_module.queries_features.weight",
    "transformer.w.weight",
    "vocoder.upsampler.0.weight",
    "depth_decoder.codebooks_head.weight",
]
TAKEN = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "decoder.block.0.layer.2.DenseReluDense.wi_0.weight",
    "encoder.layer.0.attention.self.query.weight",
    "pooler.dense.weight",
    "vision_model.encoder.layers.0.mlp.fc1.weight",
    "model.layers.0.mlp.experts.0.w1.weight",
    "transformer.encoder.layers.0.self_attention.query_key_value.weight",
]


@pytest.mark.parametrize("to", ["compressed-tensors:nvfp4", "modelopt:fp8", "mxfp8"])
def test_names_of_what_is_left_alone(to: str, tmp_path: Path) -> None:
    save_arrays({name: weight(64, 128) for name in (*ALONE, *TAKEN)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to)
    formats = {f.name: f.format for f in Checkpoint(tmp_path / "out.safetensors").found}
    assert {name for name, form in formats.items() if form == "plain"} == set(ALONE)
    convert(tmp_path / "in.safetensors", tmp_path / "all.safetensors", to, include=["*"])
    assert all(f.format != "plain" for f in Checkpoint(tmp_path / "all.safetensors").found)


# Parameters and buffers of models of transformers and torch that are the weight of no linear layer.
NO_WEIGHTS = {
    "query_tokens": (1, 32, 128),  # BLIP-2
    "quantizer.codevectors": (1, 64, 128),
    "model.layers.0.self_attn.diagonal_decay": (1, 4, 64, 64),  # MiniMax
    "model.layers.0.mamba.A_log": (2, 64, 16),  # Zamba
    "model.layers.0.mamba.x_proj_weight": (2, 64, 128),
    "model.layers.0.temporal_block.rg_lru.input_gate_weight": (2, 64, 64),  # RecurrentGemma
    "transformer.layer.0.rel_attn.q": (128, 16, 64),  # XLNet
    "head.attention.in_proj_weight": (192, 64),  # torch.nn.MultiheadAttention
}
IN_ONE = {
    "model.layers.0.mlp.experts.down_proj": (2, 64, 128),
    "model.layers.0.block_sparse_moe.input_linear.weight": (2, 64, 128),  # Granite
}


@pytest.mark.parametrize("include", [(), ("*",)])
@pytest.mark.parametrize("to", [name for name in target_names() if not name.startswith("onnx")])
def test_parameters_that_are_no_weight_of_a_layer_keep_name_and_values(
    to: str, include: tuple[str, ...], tmp_path: Path
) -> None:
    arrays = {name: weight(*shape) for name, shape in {**NO_WEIGHTS, **IN_ONE, "up_proj.weight": (64, 128)}.items()}
    save_arrays(arrays, tmp_path / "in.safetensors")
    try:
        convert(tmp_path / "in.safetensors", tmp_path / "out", to, include=include)
    except ValueError as error:
        assert "DeepSeek V4" in str(error) or (to, include) == ("fp32", ("*",))
        return
    found = {one.name: one for one in Checkpoint(tmp_path / "out").found}
    assert found.keys() == arrays.keys()
    assert all(found[name].shape == shape and is_float(found[name]) for name, shape in NO_WEIGHTS.items())
    if to in recipe_names.names():
        assert all(found[name].recipe is not None for name in IN_ONE)


@pytest.mark.parametrize("source", ["floats", "mxfp8"])
@pytest.mark.parametrize("name", [one for one in target_names() if ":" in one and not one.startswith("onnx")])
def test_experts_in_one_tensor_stay_where_no_program_knows_their_scales(name: str, source: str, tmp_path: Path) -> None:
    """transformers loads Granite's codes without their scales, and says nothing."""
    bridge = bridges.registry()[name.partition(":")[0]]
    if name == "deepseek:mxfp4" or bridge.container.whole:
        return
    expert = "model.layers.0.block_sparse_moe.input_linear.weight"
    arrays = {expert: weight(2, 128, 128), "model.layers.0.self_attn.q_proj.weight": weight(128, 128)}
    save_arrays(arrays, tmp_path / "floats.safetensors")
    convert(tmp_path / "floats.safetensors", tmp_path / "mxfp8.safetensors", "mxfp8")
    notes = convert(tmp_path / f"{source}.safetensors", tmp_path / "out.safetensors", name)["notes"]
    found = {one.name: one for one in Checkpoint(tmp_path / "out.safetensors").found}
    if name.startswith("mlx"):
        assert is_float(found[expert])
        assert [n for n in notes if n.startswith(expert) and "takes Granite's experts apart" in n]
    if bridge.readers.fused_experts:
        return
    assert is_float(found[expert])
    assert [n for n in notes if n.startswith(expert) and "experts of a layer in one tensor have no form" in n]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=4, vocab_size=320, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
        path = tmp_path_factory.mktemp("gpt2")
        model.save_pretrained(path)
    return path


def test_gpt2_is_quantized_along_its_inputs(gpt2: Path, tmp_path: Path) -> None:
    """Its layers are convolutions whose weights have inputs before outputs: turned, quantized, and turned back."""
    convert(gpt2, tmp_path / "q", "mxfp8")
    found = {f.name: f for f in Checkpoint(tmp_path / "q").found if f.format != "plain"}
    assert {name.rpartition("h.0.")[2] for name in found} == {
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    }
    assert next(f.shape for name, f in found.items() if "c_attn" in name) == (384, 128)
    assert verify(gpt2, tmp_path / "q", min_sqnr_db=25)["ok"]
    convert(tmp_path / "q", tmp_path / "back", "fp32")
    assert verify(tmp_path / "q", tmp_path / "back", min_sqnr_db=1e9)["ok"]
    before, after = (SafetensorsFile(path / "model.safetensors") for path in (gpt2, tmp_path / "back"))
    for name in before.entries:
        assert before[name].shape == after[name].shape
        assert np.abs(before[name] - after[name]).max() <= 0.05 * np.abs(before[name]).max()


@pytest.mark.parametrize("to", ["compressed-tensors:fp8", "mlx:mxfp4", "gptq"])
def test_gpt2_stays_where_no_program_would_load_it(to: str, gpt2: Path, tmp_path: Path) -> None:
    report = convert(gpt2, tmp_path / "q", to)
    assert set(report["tensors"]) == {"copy"}
    assert len([n for n in report["notes"] if "weights with inputs before outputs have no form in" in n]) == 4
    assert all(t["equal"] for t in verify(gpt2, tmp_path / "q", min_sqnr_db=1e9)["tensors"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_square_experts_are_turned_too(dtype: Any, tmp_path: Path) -> None:
    """Shapes do not tell a square matrix from its transpose; the model's type does."""
    (tmp_path / "in").mkdir()
    arrays = {
        f"model.layers.0.mlp.experts.{n}": weight(2, 64, c).astype(dtype)
        for n, c in (("down_proj", 64), ("gate_up_proj", 128))
    }
    save_arrays(arrays, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    convert(tmp_path / "in", tmp_path / "q", "gpt-oss:mxfp4")
    assert verify(tmp_path / "in", tmp_path / "q", min_sqnr_db=15)["ok"]
    convert(tmp_path / "q", tmp_path / "back", "fp32")
    written = SafetensorsFile(tmp_path / "back" / "model.safetensors")
    for name, array in arrays.items():
        wide = array.astype(np.float32)
        assert written[name].shape == wide.shape
        noise = np.linalg.norm(written[name] - wide) / np.linalg.norm(wide)
        assert noise < 0.2, name
    convert(tmp_path / "in", tmp_path / "same", "fp32")
    for name, array in SafetensorsFile(tmp_path / "same" / "model.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name].astype(np.float32))


@pytest.mark.parametrize("at", ["text_config", None])
def test_qwen3_vl_keeps_experts_in_either_order(at: str | None, tmp_path: Path) -> None:
    """Its makers' files have inputs before outputs, those of transformers outputs: the model's sizes tell which."""
    said = {"model_type": "qwen3_vl_moe_text", "hidden_size": 128, "moe_intermediate_size": 96}
    config = said if at is None else {"model_type": "qwen3_vl_moe", at: said}
    names = [f"model.language_model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]
    arrays = {names[0]: weight(2, 192, 128), names[1]: weight(2, 128, 96)}
    found = {}
    for order in ("outputs", "inputs"):
        (tmp_path / order).mkdir()
        turned = {n: a if order == "outputs" else np.ascontiguousarray(a.swapaxes(1, 2)) for n, a in arrays.items()}
        save_arrays(turned, tmp_path / order / "model.safetensors", {"format": "pt"})
        (tmp_path / order / "config.json").write_text(json.dumps(config))
        convert(tmp_path / order, tmp_path / f"{order}-q", "int8")
        opened = Checkpoint(tmp_path / f"{order}-q")
        found[order] = {one.name: opened.load(one) for one in opened.found}
        # Floats that are written have the order of the makers' files, which all programs read.
        convert(tmp_path / order, tmp_path / f"{order}-floats", "fp16")
        floats = SafetensorsFile(tmp_path / f"{order}-floats" / "model.safetensors")
        assert [floats[n].shape for n in names] == [(2, 128, 192), (2, 96, 128)]
    assert found["outputs"] == found["inputs"]
    for name, array in arrays.items():
        got = found["outputs"][name].dequantize()
        assert np.linalg.norm(got - array) / np.linalg.norm(array) < 0.01


@pytest.mark.parametrize("by", [None, "int8", "gpt-oss:mxfp4"])
def test_square_experts_of_qwen3_vl_stay_as_transformers_reads_them(by: str | None, tmp_path: Path) -> None:
    """It takes a matrix that has the model's shape for one that has its order."""
    (tmp_path / "in").mkdir()
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    array = weight(2, 128, 128)
    save_arrays({name: array}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    said = {"model_type": "qwen3_vl_moe_text", "hidden_size": 128, "moe_intermediate_size": 128}
    (tmp_path / "in" / "config.json").write_text(json.dumps(said))
    source = tmp_path / "in"
    if by is not None:
        convert(source, tmp_path / "q", by)
        source = tmp_path / "q"
    convert(source, tmp_path / "back", "fp16")
    got = SafetensorsFile(tmp_path / "back" / "model.safetensors")[name]
    assert np.linalg.norm(got - array) / np.linalg.norm(array) < 0.2


QUANTIZED = {
    "deepseek": "deepseek:block",
    "modelopt": "modelopt:nvfp4",
    "compressed-tensors": "compressed-tensors:fp8",
    "int4": "compressed-tensors:int4",
    "gptq": "gptq:int4",
    "mlx": "mlx:mxfp4",
    "affine": "mlx:int8",
    "breccia": "int8",
    "gguf": "gguf:q4_k",
}
LEFT_OUT, CHANGED = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.in_turn
@pytest.mark.parametrize("source", QUANTIZED)
@pytest.mark.parametrize("patterns", [{"exclude": ["*q_proj*"]}, {"include": ["*.mlp.*"]}], ids=["exclude", "include"])
def test_patterns_hold_for_what_is_quantized_already(source: str, patterns: Any, tmp_path: Path) -> None:
    """What they leave out keeps its numbers in every target: as its codes, or rounded to bfloat16 with a note."""
    save_arrays({LEFT_OUT: weight(256, 256), CHANGED: weight(256, 256)}, tmp_path / "floats.safetensors")
    before = tmp_path / ("in.gguf" if source == "gguf" else "in.safetensors")
    convert(tmp_path / "floats.safetensors", before, QUANTIZED[source])
    first = Checkpoint(before)
    old = {one.name: values(first.load(first.refined(one))) for one in first.found}
    formats = {to.partition(":")[0]: to for to in target_names()}  # the last recipe of each
    for i, to in enumerate(("gguf:q8_0", *formats.values())):
        after = tmp_path / f"{i}{'.gguf' if to.startswith('gguf') else '.safetensors'}"
        try:
            report = convert(before, after, to, **patterns)
        except ValueError as error:
            if "changes nothing" not in str(error):
                assert "all modules must have one recipe" in str(error), to
                continue
            report = convert(before, after, to)  # which leaves alone what the pattern would have left out
        second = Checkpoint(after)
        found = {one.name: second.refined(one) for one in second.found}
        new = values(second.load(found[LEFT_OUT]))
        noted = [note for note in report["notes"] if note.startswith(LEFT_OUT)]
        if to in ("bf16", "fp16", "fp32"):
            assert "though it is left out" in noted[0]
            np.testing.assert_allclose(new, old[LEFT_OUT], rtol=0, atol=4e-3 * np.abs(new).max())
        elif found[LEFT_OUT].format == "plain":
            assert any("written as bf16" in note for note in noted), to
            wide = old[LEFT_OUT].astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(new, wide)
        else:
            # the last bit is all that a global scale that divides may change
            np.testing.assert_allclose(new, old[LEFT_OUT], rtol=2e-7, err_msg=to)


def test_a_pattern_that_matches_nothing_is_an_error_of_quantized_sources_too(tmp_path: Path) -> None:
    save_arrays({CHANGED: weight(64, 128)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "q.safetensors", "mxfp8")
    for option in ("include", "exclude"):
        with pytest.raises(ValueError, match=rf"--{option} '\*lm_head\*' must match the name of a tensor"):
            convert(tmp_path / "q.safetensors", tmp_path / "out.safetensors", "mxfp4", **{option: ["*lm_head*"]})


NAMES = ("a.q_proj.weight", "a.norm.weight", "lm_head.weight", "a.up_proj.weight")
NOTHING = [
    ("nvfp4", {"exclude": ["*norm*"]}, "a.norm.weight, which it matches, is written the same without it"),
    ("nvfp4", {"exclude": ["*q_proj*", "lm_head*"]}, "lm_head.weight, which it matches, is written the same"),
    ("nvfp4", {"exclude": ["*weight", "*q_proj*"]}, None),
    ("nvfp4", {"include": ["*"], "exclude": ["lm_head*"]}, None),
    ("nvfp4", {"include": ["*norm*"]}, "a.norm.weight, which it matches, is written the same"),
    ("nvfp4", {"include": ["*_proj*", "*q_proj*"]}, None),
    ("fp32", {"exclude": ["*"]}, "a.norm.weight and 3 more that it matches are written the same"),
    ("fp32", {"include": ["*"]}, "a.norm.weight and 3 more that it matches are written the same"),
    ("bf16", {"exclude": ["*norm*"]}, None),
    ("gguf:q6_k", {"include": ["*norm*"]}, "a.norm.weight, which it matches, is written the same"),
]


@pytest.mark.parametrize(("to", "patterns", "message"), NOTHING, ids=str)
def test_a_pattern_that_changes_nothing_is_an_error(
    to: str, patterns: dict[str, list[str]], message: str | None, tmp_path: Path
) -> None:
    shapes = {"a.norm.weight": (256,)}
    save_arrays({name: weight(*shapes.get(name, (64, 256))) for name in NAMES}, tmp_path / "in.safetensors")
    out = tmp_path / f"out.{'gguf' if 'gguf' in to else 'safetensors'}"
    if message is None:
        convert(tmp_path / "in.safetensors", out, to, **patterns)
        return
    with pytest.raises(ValueError, match="must change what is written, and changes nothing") as error:
        convert(tmp_path / "in.safetensors", out, to, **patterns)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="changes nothing"):
        plan(tmp_path / "in.safetensors", out, to, 2, **patterns)


def test_a_pattern_that_changes_nothing_of_quantized_sources(tmp_path: Path) -> None:
    save_arrays({name: weight(64, 256) for name in NAMES}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "q.safetensors", "mxfp8")
    for to in ("mxfp8", "modelopt:mxfp8", "compressed-tensors"):  # the codes stay anyhow
        with pytest.raises(ValueError, match=r"--exclude '\*q_proj\*' must change what is written"):
            convert(tmp_path / "q.safetensors", tmp_path / "out.safetensors", to, exclude=["*q_proj*"])
    convert(tmp_path / "q.safetensors", tmp_path / "out.safetensors", "mxfp4", exclude=["*q_proj*"])
