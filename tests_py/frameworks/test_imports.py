# SPDX-License-Identifier: Apache-2.0
"""`import breccia` costs little and imports no framework."""

import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_no_framework_is_imported():
    heavy = "{'torch', 'jax', 'jaxlib', 'mlx', 'ml_dtypes', 'safetensors', 'triton'}"
    assert run(f"import sys, breccia; print({heavy} & sys.modules.keys())").strip() == "set()"
    using = "import numpy as np, breccia; breccia.cast(np.ones((2, 64), 'f4'), breccia.NVFP4BlockScaling())"
    assert run(f"import sys; {using}; print({heavy} & sys.modules.keys())").strip() == "set()"
