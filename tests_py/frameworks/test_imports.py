# SPDX-License-Identifier: Apache-2.0
"""`import breccia` costs little and imports no framework."""

import subprocess
import sys

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_no_framework_is_imported():
    heavy = "{'torch', 'jax', 'jaxlib', 'mlx', 'ml_dtypes', 'safetensors', 'triton'}"
    assert run(f"import sys, breccia; print({heavy} & sys.modules.keys())").strip() == "set()"
    using = "import numpy as np, breccia; breccia.cast(np.ones((2, 64), 'f4'), breccia.NVFP4BlockScaling())"
    assert run(f"import sys; {using}; print({heavy} & sys.modules.keys())").strip() == "set()"


def test_documented_modules_are_there_after_the_import():
    names = "breccia.dlpack, breccia.bridges, breccia.checkpoint, breccia.kernels.triton, breccia.frameworks.numpy"
    run(f"import breccia; print({names})")
    assert "AttributeError" in run(
        "import breccia.frameworks as f\ntry: f.tensorflow\nexcept AttributeError as e: print(type(e).__name__)"
    )
    pytest.importorskip("torch")
    run("import torch, breccia; print(breccia.nn.QuantizedLinear, breccia.frameworks.torch)")


def test_dir_lists_what_is_public_and_nothing_else():
    code = "import breccia; print(*(n for n in dir(breccia) if n not in breccia.__all__))"
    named = "bridges checkpoint diffusers distributed dlpack nn sglang sharding transformers vllm"
    assert run(code).split() == named.split()
