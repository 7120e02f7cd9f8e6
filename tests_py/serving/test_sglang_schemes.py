# SPDX-License-Identifier: Apache-2.0
"""The classes that SGLang's own configurations choose for each of ten kinds of models: those that the scheme means."""

from pathlib import Path
from typing import Any

import pytest
from serving import scheme_classes
from serving.programs import needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", scheme_classes.LINEAR)
def test_compressed_tensors(name: str, sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as module

    said, rules = scheme_classes.said_of(name, "compressed-tensors", tmp_path)
    scheme_classes.stand_ins(module, monkeypatch)
    monkeypatch.setattr(module.CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True)
    config = module.CompressedTensorsConfig.from_config(said)
    config.packed_modules_mapping = scheme_classes.FUSED
    layer = scheme_classes.linear()
    assert rules
    for prefix, rule in rules.items():
        scheme_classes.same(config.get_linear_scheme(layer, prefix), rule)
    for prefix in [one for one in said["ignore"] if ":" not in one]:
        assert config.get_linear_scheme(layer, prefix) is None


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_scales_of_caches_reach_attention(to: str, sglang: Any, tmp_path: Path) -> None:
    """By the names that its loader turns into those of its layer of attention."""
    from sglang.srt.model_loader.weight_utils import maybe_remap_kv_scale_name

    scheme_classes.check_names_of_caches(maybe_remap_kv_scale_name, to, tmp_path)
