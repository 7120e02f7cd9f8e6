# SPDX-License-Identifier: Apache-2.0
"""TorchTitan trains its debug model with breccia's layers, in its own loop, on two ranks over gloo."""

import importlib.util

import pytest

for name in ("torch", "torchdata", "datasets", "tokenizers", "tyro"):
    pytest.importorskip(name)
if importlib.util.find_spec("torchtitan") is None:  # whose import needs Triton
    pytest.skip("torchtitan is not installed", allow_module_level=True)
import torchtitan_runner  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("recipe", torchtitan_runner.RECIPES)
def test_it_trains_gathers_codes_and_resumes(recipe):
    torchtitan_runner.check(*torchtitan_runner.runs("cpu", recipe))
