# SPDX-License-Identifier: Apache-2.0
"""`breccia.diffusers`: models of diffusers, tiny and random, keep codes, give the right values and are saved again."""

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import breccia
import lora_peer
import numpy as np
import pytest
from breccia import checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
lora_peer.peft()  # which models of diffusers import
pytestmark = pytest.mark.filterwarnings("ignore")
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            **HEADS,
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "axes_dims_rope": [8, 12, 12],
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 64,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 64,
            "out_channels": 4,
        },
    ),
}


def classes() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("breccia.diffusers")
        return importlib.import_module("diffusers")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved model: its name, class and folder."""
    name, sizes = MODELS[request.param]
    kind = getattr(classes(), name)
    torch.manual_seed(0)
    made = kind(**sizes)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return request.param, kind, path


def run(name: str, made: Any) -> Any:
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    said = {"encoder_hidden_states": some(1, 5, 64), "pooled_projections": some(1, 64), "timestep": torch.tensor([0.5])}
    if name == "flux":
        places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
        said |= {"hidden_states": some(1, 16, 16), **places}
    else:
        said |= {"hidden_states": some(1, 4, 8, 8)}
    with torch.no_grad():
        return made(**said, return_dict=False)[0]


def quantized(made: Any) -> dict[str, Any]:
    return {path: m.weight for path, m in made.named_modules() if isinstance(m, breccia.nn.QuantizedLinear)}


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "int4", "fp8"])
@pytest.mark.parametrize("shard", [None, "100KB"])
@pytest.mark.in_turn
def test_what_convert_writes_keeps_its_codes(recipe: str, shard: str | None, model: Any, tmp_path: Path) -> None:
    name, kind, path = model
    if shard:
        kind.from_pretrained(path).save_pretrained(tmp_path / "shards", max_shard_size=shard)
        path = tmp_path / "shards"
    checkpoint.convert(path, tmp_path / "out", to=recipe)
    made = kind.from_pretrained(tmp_path / "out")
    layers, opened = quantized(made), dict(breccia.open(tmp_path / "out"))
    stored = [key for key in opened if isinstance(opened[key], breccia.ScaledTensor)]
    assert sorted(f"{path}.weight" for path in layers) == sorted(stored)
    for path, weight in layers.items():
        assert weight.to("numpy") == opened[f"{path}.weight"]
    checkpoint.convert(tmp_path / "out", tmp_path / "dense", to="fp32")
    wanted = run(name, kind.from_pretrained(tmp_path / "dense"))
    assert (run(name, made) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("shard", ["10GB", "100KB"])
def test_quantized_on_load_saved_and_loaded_again(shard: str, model: Any, tmp_path: Path) -> None:
    from breccia.diffusers import BrecciaConfig

    name, kind, path = model
    said = BrecciaConfig("mxfp4", modules_to_not_convert=["to_k"])
    made = kind.from_pretrained(path, quantization_config=said)
    layers = quantized(made)
    assert layers
    assert not any("to_k" in key or "norm" in key or "embed" in key or key == "proj_out" for key in layers)
    plain = kind.from_pretrained(path)
    for key, weight in layers.items():
        assert weight == breccia.cast(plain.get_submodule(key).weight.detach(), "mxfp4")
    made.save_pretrained(tmp_path / "out", max_shard_size=shard)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "breccia"
    )
    again = kind.from_pretrained(tmp_path / "out")
    assert quantized(again) == layers
    wanted = run(name, made)
    assert (run(name, again) - wanted).norm() <= 1e-6 * wanted.norm()
    dense = again.dequantize()
    assert not quantized(dense)
    assert (run(name, dense) - wanted).norm() <= 1e-5 * wanted.norm()


def test_codes_are_a_part_of_the_memory(model: Any) -> None:
    from breccia.diffusers import BrecciaConfig

    _, kind, path = model
    made = kind.from_pretrained(path, quantization_config=BrecciaConfig("nvfp4"), torch_dtype=torch.bfloat16)
    for weight in quantized(made).values():
        assert weight.nbytes < 0.3 * 2 * np.prod(weight.shape)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}


def test_what_does_not_fit_is_refused(model: Any, tmp_path: Path) -> None:
    from breccia.diffusers import BrecciaConfig

    _, kind, path = model
    with pytest.raises(ValueError, match="modules_to_not_convert must name modules of the model, 'nothing' is none"):
        kind.from_pretrained(path, quantization_config=BrecciaConfig(modules_to_not_convert=["nothing"]))
    with pytest.raises(TypeError, match="modules_to_not_convert must be a list of names, got 'to_k'"):
        BrecciaConfig(modules_to_not_convert="to_k")
    made = kind.from_pretrained(path, quantization_config=BrecciaConfig("nvfp4"))
    with pytest.raises(ValueError, match="safe_serialization must be True"):
        made.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    made.save_pretrained(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    said["attention_head_dim"], said["num_attention_heads"] = 64, 4
    (tmp_path / "out" / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"must have shape \(256, 128\) as the model's|must have shape"):
        kind.from_pretrained(tmp_path / "out")


def test_inputs_of_a_checkpoint_are_quantized_as_it_says(model: Any, tmp_path: Path) -> None:
    """By scales made of them; a static scale, and a scheme on load, are refused by name."""
    from breccia.diffusers import BrecciaConfig

    _, kind, path = model
    checkpoint.convert(path, tmp_path / "out", to="fp8-row", activations="dynamic")
    made = kind.from_pretrained(tmp_path / "out")
    kinds = {layer.activations for layer in made.modules() if isinstance(layer, breccia.nn.QuantizedLinear)}
    assert kinds == {breccia.Float8CurrentScaling(granularity="row")}
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    said["quantization_config"]["inputs"] |= {"when": "static", "per": "tensor"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="must be quantized by scales made of them, they are FP8 static"):
        kind.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="scheme and moments must be left out"):
        BrecciaConfig(scheme=breccia.ModelScheme(()))
