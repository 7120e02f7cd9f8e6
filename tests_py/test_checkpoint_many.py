# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many small tensors."""

import json
from typing import Any

import pytest
from breccia.checkpoint.writing import outputs

VALUES: list[Any] = [
    {},
    {"metadata": {"total_size": 12}, "weight_map": {"a.weight": "x.safetensors", 'ü"\n': "y"}},
    {"a": {"b": [1, 2.5, None, True, {"c": []}], "d": {}}, "e": (1, 2), "f": 1e-06, "g": float("inf"), "h": "\u2028"},
]


@pytest.mark.always
@pytest.mark.parametrize("value", VALUES)
def test_json_is_written_as_pythons_encoder_does(value: Any) -> None:
    assert outputs._indented(value) == json.dumps(value, indent=2, ensure_ascii=False)
