# SPDX-License-Identifier: Apache-2.0
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from breccia import checkpoint
from serving.programs import files_of

NOT_COMPILED = ("zmq", "cbor2", "aiohttp", "openai", "openai_harmony", "pybase64", "uvloop", "cpuinfo")
NOT_COMPILED += ("prometheus_client", "xgrammar", "fastapi", "partial_json_parser", "llguidance")
NOT_COMPILED_OF_SGLANG = ("zmq", "orjson", "pybase64", "starlette", "IPython", "aiohttp", "tvm_ffi", "torchvision")
NOT_COMPILED_OF_SGLANG += ("sentencepiece", "sgl_kernel", "partial_json_parser", "openai")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's modules on its CPU platform, with one rank and a configuration, after `breccia.vllm.register`."""
    torch = pytest.importorskip("torch")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    with files_of(*NOT_COMPILED):
        import breccia.vllm
        from vllm import distributed
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.kernels import linear as kernels
        from vllm.platforms import PlatformEnum

        breccia.vllm.register()
        breccia.vllm.register()
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, quantization_config=None)
        store = tmp_path_factory.mktemp("ranks") / "store"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as vLLM's loader does
        with set_current_vllm_config(config):
            distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            distributed.initialize_model_parallel(1)
            yield SimpleNamespace(kernels=kernels, config=config, cpu=PlatformEnum.CPU)
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
        torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def sglang() -> Iterator[Any]:
    """SGLang's modules on its CPU platform, with a configuration, after `breccia.sglang.register`."""
    torch = pytest.importorskip("torch")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    before = torch.get_default_dtype()
    # transformers asks for the version of torchvision: it must have looked for the package before.
    importlib.import_module("transformers.models.auto.image_processing_auto")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    with files_of(*NOT_COMPILED_OF_SGLANG):
        import breccia.sglang
        from sglang.srt import runtime_context
        from sglang.srt.layers import linear, logits_processor, quantization, vocab_parallel_embedding
        from sglang.srt.layers.moe import fused_moe_triton, topk

        breccia.sglang.register()
        breccia.sglang.register()
        torch.set_default_dtype(torch.bfloat16)

        def ranks(rank: int, count: int, experts: str = "tp") -> Any:
            """SGLang's parallel state on a rank, with experts cut ("tp") or dealt out ("ep")."""
            said = {"tp_size": count, "attn_tp_size": count, "tp_rank": rank, "attn_tp_rank": rank}
            for kind in ("tp", "ep"):
                said |= {f"moe_{kind}_size": 1, f"moe_{kind}_rank": 0}
            said |= {f"moe_{experts}_size": count, f"moe_{experts}_rank": rank}
            return runtime_context.get_parallel().override(**said, tp_group=None)

        with runtime_context.get_context().override_server_args(device="cpu"), ranks(0, 1):
            yield SimpleNamespace(
                linear=linear,
                quantization=quantization,
                embedding=vocab_parallel_embedding,
                logits=logits_processor,
                experts=fused_moe_triton.FusedMoE,
                chosen=topk.StandardTopKOutput,
                ranks=ranks,
                context=runtime_context.get_context,
            )
        torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from functools import cache

    folder = tmp_path_factory.mktemp("converted")
    from serving import vllm_layers

    model = vllm_layers.write_block(tmp_path_factory.mktemp("models") / "llama")

    @cache
    def made(target: str) -> Any:
        out = folder / target.replace(":", "-")
        checkpoint.convert(model, out, to=target)
        return out

    return made
