# SPDX-License-Identifier: Apache-2.0
"""`convert --embeddings` and `--head`: what becomes of them, who loads it, and what is refused."""

import json

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert
from breccia.checkpoint.judging.rederive import rederive
from breccia.cli import main
from tiny_models import logits, made_once, random_model

torch = pytest.importorskip("torch")
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("models"))


def recipes(folder):
    """The recipe's name of each quantized tensor."""
    return {name: one.recipe.name for name, one in breccia.load(folder).items() if hasattr(one, "recipe")}


@pytest.mark.parametrize("kind", ["nvfp4", "int8", "mxfp8"])
@pytest.mark.parametrize("name", ["llama-tied", "llama"])
def test_mlx_lm_loads_quantized_embeddings_and_heads(models, tmp_path, name, kind):
    mx, mlx_lm = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    asked = {"embeddings": kind} | ({} if name == "llama-tied" else {"head": kind})
    report = convert(models(name), tmp_path / "out", "mlx:nvfp4", **asked)
    assert report["tensors"]["cast"] == 14 + len(asked) and not report["kept"]["tensors"]
    convert(tmp_path / "out", tmp_path / "floats", "fp32")
    model, _ = mlx_lm.load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    got = torch.from_numpy(np.array(model(mx.array([list(range(3, 43))])).astype(mx.float32)))
    wanted = logits(tmp_path / "floats", dtype=torch.float32)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-3


def test_each_has_what_it_was_asked_for(models, tmp_path):
    convert(models("llama"), tmp_path / "out", "nvfp4", embeddings="int8", head="fp8-row", scale_search="mse")
    found = recipes(tmp_path / "out")
    assert (found.pop(TABLE), found.pop(HEAD)) == ("int8", "current") and set(found.values()) == {"nvfp4"}
    assert found and len(found) == 14  # layers have what they had
    convert(models("llama"), tmp_path / "bare", "modelopt", head="nvfp4", embeddings="keep")
    assert len(recipes(tmp_path / "bare")) == 15
    convert(models("llama"), tmp_path / "a.gguf", "gguf:q4_0", embeddings="q8_0", head="q5_0")
    convert(models("llama"), tmp_path / "b.gguf", "gguf:q4_k_m", embeddings="keep")
    kinds = [{one.name: one.kind for one in Checkpoint(tmp_path / f"{name}.gguf").found} for name in "ab"]
    assert [one[TABLE].upper() for one in kinds] == ["Q8_0", "BF16"]
    assert [one[HEAD].upper() for one in kinds] == ["Q5_0", "Q8_0"], kinds


def test_a_tied_head_is_rounded_by_what_goes_into_it(models, tmp_path):
    model = random_model("Llama", {"tie_word_embeddings": True}).float()
    tokens = torch.randint(3, 300, (24, 60), generator=torch.Generator().manual_seed(0))
    found = breccia.calibrate(model, [{"input_ids": tokens}])
    assert "lm_head" not in found and found["model.embed_tokens"].level == "full"
    moments = tmp_path / "m.safetensors"
    found.save(moments)
    given = {"moments": moments, "method": "gptq", "embeddings": "nvfp4"}
    report = convert(models("llama-tied"), tmp_path / "out", "nvfp4", **given)
    said = report["output_errors"][TABLE]
    assert said["output_error"] < 0.8 * said["nearest"] and len(report["output_errors"]) == 15
    weight = model.get_input_embeddings().weight.detach().numpy()
    wanted = breccia.gptq(weight, found["model.embed_tokens"], "nvfp4")
    assert breccia.load(tmp_path / "out")[TABLE].data.tobytes() == wanted.data.tobytes()
    manifest = json.loads((tmp_path / "out" / "breccia.json").read_text())
    assert manifest["options"]["embeddings"] == "nvfp4"
    assert rederive(models("llama-tied"), tmp_path / "out", data=[moments])["ok"]
    assert any("breccia.transformers wants floats" in note for note in report["notes"])


def test_what_no_program_loads_is_refused_and_what_is_not_there_is_named(models, tmp_path):
    for to in ("compressed-tensors:nvfp4", "modelopt:nvfp4", "gptq:int4", "torchao:int8"):
        with pytest.raises(
            ValueError, match=f"embeddings must be 'keep' where to is '{to}', got 'int8': no program loads"
        ):
            convert(models("llama"), tmp_path / "out", to, embeddings="int8")
        convert(models("llama"), tmp_path / "out", to, embeddings="Keep", force=True, dry_run=True)
    with pytest.raises(ValueError, match=r"weights of a rule must be a recipe or a type of mlx, got 'int3'"):
        convert(models("llama"), tmp_path / "out", "mlx:int4", embeddings="int3")
    with pytest.raises(TypeError, match="head must be 'keep' or the name of a recipe or type, such as 'int8', got 8"):
        convert(models("llama"), tmp_path / "out", "mlx:int4", head=8)
    with pytest.raises(ValueError, match="embeddings and head must be left out where to is 'bf16'"):
        convert(models("llama"), tmp_path / "out", "bf16", head="int8")
    report = convert(models("llama-tied"), tmp_path / "out", "nvfp4", head="int8", dry_run=True)
    assert [note for note in report["notes"] if "--head has no part" in note]


def test_the_summary_offers_it(models, tmp_path, capsys):
    main(["convert", str(models("llama-tied")), str(tmp_path / "a"), "--to", "mlx:nvfp4", "--quiet"])
    out = " ".join(capsys.readouterr().out.split())
    assert "% of the bytes are the embedding: --embeddings int8 saves 41 kB" in out
    main(["convert", str(models("llama-tied")), str(tmp_path / "b"), "--to", "mlx:nvfp4", "--embeddings", "int8"])
    assert "of the bytes are the embedding" not in capsys.readouterr().out
