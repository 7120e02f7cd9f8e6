# SPDX-License-Identifier: Apache-2.0
"""The quickstarts run."""

import subprocess
import sys
from pathlib import Path

import peers
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", peers.PEERS)
def test_quickstart(name):
    path = EXAMPLES / f"quickstart_{name}.py"
    subprocess.run([sys.executable, str(path)], check=True, capture_output=True, timeout=120)
