# SPDX-License-Identifier: Apache-2.0
"""The classes and formats that vLLM's own configurations choose for each of ten kinds of models: those that the scheme
means."""

from pathlib import Path
from typing import Any

import breccia
import pytest
from serving import scheme_classes
from serving.programs import needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", scheme_classes.LINEAR)
def test_compressed_tensors(name: str, vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as module

    said, rules = scheme_classes.said_of(name, "compressed-tensors", tmp_path)
    scheme_classes.stand_ins(module, monkeypatch)
    config = module.CompressedTensorsConfig.from_config(said)
    config.packed_modules_mapping = scheme_classes.FUSED
    layer = scheme_classes.linear()
    assert rules
    for prefix, rule in rules.items():
        chosen = config.get_scheme(layer, prefix)
        if isinstance(rule.weights, breccia.NVFP4BlockScaling):  # one class, which is told of inputs alone
            assert type(chosen).__name__ == "CompressedTensorsW4A4Fp4"
            assert getattr(chosen, "use_a16", False) == (not scheme_classes.when_of(rule))
        else:
            scheme_classes.same(chosen, rule)
    for prefix in [one for one in said["ignore"] if ":" not in one]:
        assert config.get_scheme(layer, prefix) is None
    wanted = breccia.load_scheme(tmp_path / "out").kv_cache
    assert (config.kv_cache_scheme is None) == (wanted is None)
    module.CompressedTensorsKVCacheMethod.validate_kv_cache_scheme(config.kv_cache_scheme)


@pytest.mark.parametrize("name", scheme_classes.LINEAR)
def test_modelopt(name: str, vllm: Any, tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization import modelopt as module

    said, rules = scheme_classes.said_of(name, "modelopt", tmp_path)
    kinds = (module.ModelOptFp8Config, module.ModelOptNvFp4Config, module.ModelOptMxFp8Config)
    kinds += (module.ModelOptMixedPrecisionConfig,)
    ours = [kind for kind in kinds if kind.override_quantization_method(said, None)]
    refused = [
        one for one in breccia.checkpoint.complete(tmp_path / "out")["readers"] if one.startswith("vLLM refuses")
    ]
    if refused:
        assert not ours or said["quant_algo"] == "MIXED_PRECISION"
        return
    kind = ours[0] if ours else module.ModelOptFp8Config  # that of "modelopt", where none asks for another
    assert len(ours) < 2
    config = kind.from_config(said)
    config.packed_modules_mapping = scheme_classes.FUSED
    for prefix, rule in rules.items():
        algorithm, part = said["quant_algo"].upper(), config
        if algorithm == "MIXED_PRECISION":
            algorithm = config._resolve_quant_algo(prefix)
            part = getattr(config, module.LINEAR_ALGOS[algorithm][1])
        made = module.resolve(algorithm, part, prefix)[0]
        assert made.activation is _key(module, rule), (prefix, rule)
        assert not config.is_layer_excluded(prefix)
    excluded = said.get("exclude_modules", said.get("ignore")) or []
    assert all(config.is_layer_excluded(one) for one in excluded if "*" not in one)


def _key(module: Any, rule: Any) -> Any:
    """vLLM's word for a rule's inputs."""
    keys = {
        "FP8 static": "kFp8StaticTensorSym",
        "FP8 per token dynamic": "kFp8DynamicTokenSym",
        "FP8 g128 dynamic": "kFp8Dynamic128Sym",
        "NVFP4 local": "kNvfp4Dynamic",
        "MXFP8 dynamic": "kMxfp8Dynamic",
    }
    return getattr(module, keys[str(rule.inputs)]) if scheme_classes.when_of(rule) else None


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_scales_of_caches_reach_attention(to: str, vllm: Any, tmp_path: Path) -> None:
    """By the names that its loader turns into those of its layer of attention."""
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    scheme_classes.check_names_of_caches(maybe_remap_kv_scale_name, to, tmp_path)
