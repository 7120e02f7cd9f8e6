# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from breccia import checkpoint
from serving.programs import files_of

NOT_COMPILED = ("zmq", "cbor2", "aiohttp", "openai", "openai_harmony", "pybase64", "uvloop", "cpuinfo")
NOT_COMPILED += ("prometheus_client", "xgrammar", "fastapi", "partial_json_parser", "llguidance")


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
