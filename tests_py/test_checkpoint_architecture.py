# SPDX-License-Identifier: Apache-2.0
"""`breccia verify --complete` against the model's own class: names and shapes, of transformers and diffusers."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_peer
import pytest
from breccia import checkpoint
from breccia.checkpoint.judging.complete import render
from tiny_models import MODELS, made_once

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ("bf16", "nvfp4", "compressed-tensors:nvfp4", "compressed-tensors:int4", "modelopt:fp8", "deepseek:block")
TARGETS += ("mlx:int4", "torchao:fp8", "gptq:int4", "awq:int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return made_once(tmp_path_factory.mktemp("models"))


def changed(path: Path, out: Path, change: Callable[[dict[str, Any]], Any], **config: Any) -> dict[str, Any]:
    """What `complete` says of a checkpoint after a change of its tensors, and of its config.json."""
    shutil.copytree(path, out)
    file = out / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = safetensors.load_file(file)
    change(tensors)
    safetensors.save_file(tensors, file, metadata)
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(said | config))
    return checkpoint.complete(out)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.in_turn
def test_what_convert_writes_is_whole(name: str, to: str, models: Any, tmp_path: Path) -> None:
    checkpoint.convert(models(name), tmp_path / "out", to=to)
    report = checkpoint.complete(tmp_path / "out")
    assert report["ok"], render(report)
    assert report["checked"] == f"transformers' {MODELS[name][0]}ForCausalLM"
    assert f"compared with {report['checked']}" in render(report)


def test_what_only_the_class_knows(models: Any, tmp_path: Path) -> None:
    """Tensors that no layer has any more: nothing in the files tells that they are gone."""
    source = models("qwen3")
    norms = [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(2)]
    gone = [*norms, "model.norm.weight", "model.embed_tokens.weight"]
    report = changed(source, tmp_path / "a", lambda t: [t.pop(name) for name in gone])
    assert (report["missing"], report["extra"], report["ok"]) == (sorted(gone), [], False)
    report = changed(source, tmp_path / "b", lambda t: t.update({"model.norms.weight": t.pop("model.norm.weight")}))
    assert (report["missing"], report["extra"]) == (["model.norm.weight"], ["model.norms.weight"])
    report = changed(source, tmp_path / "c", lambda t: None, num_hidden_layers=3)
    assert report["missing"] == ["model.layers.2"]
    report = changed(source, tmp_path / "d", lambda t: None, vocab_size=400)
    said = {"model.embed_tokens.weight": "shape must be (400, 128) by config.json, it is (320, 128)"}
    said["lm_head.weight"] = said["model.embed_tokens.weight"]
    assert {p["tensor"]: p["problem"] for p in report["problems"]} == said
    lines = render(report).splitlines()
    assert sum(line.startswith("!") for line in lines) == 2


def test_a_shared_tensor_may_be_left_out(models: Any, tmp_path: Path) -> None:
    report = changed(models("llama-tied"), tmp_path / "a", lambda t: None)
    assert report["ok"]
    report = changed(models("llama-tied"), tmp_path / "b", lambda t: None, tie_word_embeddings=False)
    assert report["missing"] == ["lm_head.weight"]


def test_scales_that_all_layers_lack_are_found(models: Any, tmp_path: Path) -> None:
    checkpoint.convert(models("llama"), tmp_path / "fp8", to="modelopt:fp8")
    lost: list[str] = []

    def lose(tensors: dict[str, Any]) -> None:
        lost.extend(name for name in list(tensors) if "scale" in name)
        for name in lost:
            del tensors[name]

    report = changed(tmp_path / "fp8", tmp_path / "out", lose)
    weights = sorted({name.rpartition(".")[0] + ".weight" for name in lost})
    assert sorted(p["tensor"] for p in report["problems"]) == weights
    assert {p["problem"] for p in report["problems"]} == {"FP8 without a scale"}
    name = "model.layers.0.mlp.up_proj.weight"
    report = changed(models("llama"), tmp_path / "int8", lambda t: t.update({name: t[name].to(torch.int8)}))
    assert report["problems"] == [{"tensor": name, "problem": "I8 bytes whose meaning nothing says"}]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "of_somebody"}, "names only: transformers has no model_type 'of_somebody'"),
        ({"architectures": ["OfSomebody"]}, "names only: transformers has no class 'OfSomebody'"),
        ({"architectures": ["AutoTokenizer"]}, "names only: transformers has no class 'AutoTokenizer'"),
        ({"num_hidden_layers": 10**9}, "names only: num_hidden_layers is 1000000000, which is too many to build"),
        ({"text_config": {"n_layers": 5000}}, "names only: n_layers is 5000, which is too many to build"),
        ({"use_timm_backbone": True}, "names only: it is built around another model"),
        ({"hidden_size": -1}, "names only: the model cannot be built: "),
        (
            {"architectures": ["BertModel"], "model_type": "bert"},
            "names only: most of its tensors have other names",
        ),
    ],
)
def test_models_that_are_not_known_are_said(config: dict[str, Any], says: str, models: Any, tmp_path: Path) -> None:
    report = changed(models("llama"), tmp_path / "out", lambda t: None, **config)
    assert report["checked"].startswith(says)
    assert "names only: " in render(report)
    assert report["extra"] == []


def test_no_code_of_a_checkpoint_runs(models: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(models("llama"), out)
    said = json.loads((out / "config.json").read_text())
    said |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (out / "config.json").write_text(json.dumps(said))
    (out / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert checkpoint.complete(out)["checked"] == "names only: transformers has no model_type 'own'"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_no_code_that_a_checkpoint_names_is_fetched(
    key: str, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would load a kernel of that name from the hub, and run it."""
    import socket

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    report = changed(models("qwen3-moe"), tmp_path / "out", lambda t: None, **{key: "somebody/kernel"})
    assert report["ok"], render(report)
    assert report["checked"] == "transformers' Qwen3MoeForCausalLM"


def test_without_transformers_names_alone_are_compared(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    report = changed(models("llama"), tmp_path / "out", lambda t: t.pop("model.norm.weight"))
    assert report["checked"] == "names only: transformers is not installed"
    assert report["ok"]


def test_diffusion_models(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    lora_peer.peft()  # which its models import
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "in_channels": 4, "patch_size": 1}
    sizes |= {"joint_attention_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 64}
    diffusers.SD3Transformer2DModel(**sizes, sample_size=8, out_channels=4).save_pretrained(tmp_path / "model")
    checkpoint.convert(tmp_path / "model", tmp_path / "out", to="mxfp8")
    report = checkpoint.complete(tmp_path / "out")
    assert report["ok"], render(report)
    assert report["checked"] == "diffusers' SD3Transformer2DModel"
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(said | {"num_layers": 3}))
    assert any("transformer_blocks.2" in name for name in checkpoint.complete(tmp_path / "out")["missing"])
