# SPDX-License-Identifier: Apache-2.0
"""Experts in breccia's own format in vLLM's own classes: its router, its layer and that layer's loader."""

from typing import Any

import breccia
import pytest
from breccia import checkpoint
from serving import vllm_layers
from serving.programs import needs_files
from tiny_models import tiny

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
PREFIX = "model.layers.0.mlp.experts"


def made(vllm: Any, folder: Any, **options: Any) -> Any:
    """vLLM's layer of experts, filled."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    vllm.config.compilation_config.static_forward_context.clear()  # one layer of a name in a model
    said = vllm_layers.quantization(folder)
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128, "renormalize": True}
    runner = FusedMoEFactory(**sizes, quant_config=said, prefix=PREFIX, params_dtype=torch.bfloat16, **options)
    layer = runner.routed_experts
    tensors = {k: v for k, v in vllm_layers.stored(folder).items() if k.startswith(f"{PREFIX}.")}
    named = said.get_checkpoint_weight_mapper().apply(tensors.items())
    count = sum(1 for _ in layer.load_weights((k.removeprefix(f"{PREFIX}."), v) for k, v in named))
    assert count == len(tensors)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize(
    "recipe", ["nvfp4", "mxfp8", "int4", "fp8", "fp8-row", "fp8-block", "compressed-tensors:nvfp4", "modelopt:nvfp4"]
)
def test_experts(recipe: str, vllm: Any, tmp_path: Any) -> None:
    checkpoint.convert(tiny("qwen3-moe", tmp_path / "model"), tmp_path / "out", to=recipe)
    layer, opened = made(vllm, tmp_path / "out"), breccia.open(tmp_path / "out")
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [0, 1], [2, 1], [1, 0]], dtype=torch.int32)
    share = torch.rand(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    got = layer.forward_modular(x, share, ids)
    wanted = torch.zeros(6, 128, dtype=torch.float64)
    for row in range(6):
        for number, part in zip(ids[row].tolist(), share[row], strict=True):
            gate, up, down = (
                torch.from_numpy(breccia.dequantize(opened[f"{PREFIX}.{number}.{name}_proj.weight"])).double()
                for name in ("gate", "up", "down")
            )
            one = x[row].double()
            wanted[row] += part.double() * (down @ (torch.nn.functional.silu(gate @ one) * (up @ one)))
    assert got.dtype == x.dtype
    assert (got.double() - wanted).norm() <= 1e-2 * wanted.norm()
    torch._dynamo.reset()
    compiled = torch.compile(layer.forward_modular, fullgraph=True, backend="aot_eager")
    assert compiled(x, share, ids).equal(got)


def test_experts_of_other_kinds_are_refused(vllm: Any, tmp_path: Any) -> None:
    checkpoint.convert(tiny("qwen3-moe", tmp_path / "model"), tmp_path / "out", to="mxfp4")
    with pytest.raises(ValueError, match="experts must be gated by silu, gelu, gelu_tanh without bias or limit, they"):
        made(vllm, tmp_path / "out", activation="swigluoai")
