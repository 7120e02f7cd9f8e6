# SPDX-License-Identifier: Apache-2.0
"""JAX arrays over four devices: nothing is gathered that need not be, only codes are, and the bytes are those of one
device."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
SCRIPT = Path(__file__).parent / "jax_devices.py"
HELPERS = {
    "some",
    "recipes_in_turn",
    "mesh",
    "values",
    "same",
    "moved",
    "legal",
    "recipe_is_split",
    "of_bytes",
    "close",
}
TESTS = [one.name for one in ast.parse(SCRIPT.read_text()).body if isinstance(one, ast.FunctionDef)]
NAMES = [name for name in TESTS if name not in HELPERS]
GROUPS = [",".join(NAMES[i::3]) for i in range(3)]  # each of a process, which imports JAX once for all of them
PART = pytest.mark.parametrize("part", ["some", pytest.param("whole", marks=pytest.mark.slow)])


@PART
@pytest.mark.parametrize("names", GROUPS, ids=GROUPS)
def test_over_four_devices(names, part):
    over_four_devices(names, part)


@PART
@pytest.mark.parametrize("names", ["casts_at_once,explicit_axes,rotations_and_square_blocks"])
def test_without_handlers_for_xla(names, part):
    """As where the extension was built without jaxlib's headers."""
    over_four_devices(names, part, BRECCIA_XLA="callback")


def over_four_devices(names, part, **more):
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", **more}
    run = subprocess.run(
        [sys.executable, SCRIPT, names, part], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.split() == names.split(",")
