# SPDX-License-Identifier: Apache-2.0
"""Write the known Hadamard matrices as compressed-tensors has them, those that models' layers are multiples of.

python benchmarks/make_hadamards.py            # write python/breccia/checkpoint/reading/hadamards.json
python benchmarks/make_hadamards.py --check    # exit 1 where it would change
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from breccia.checkpoint import SafetensorsFile

PLACE = Path(__file__).parents[1] / "python" / "breccia" / "checkpoint" / "reading" / "hadamards.json"
SIZES = (12, 20, 28, 36, 40, 44, 52, 60, 108, 140, 156, 172)


def text() -> str:
    """The file: a bit of each element, set where it is -1."""
    package = importlib.util.find_spec("compressed_tensors")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "transform" / "utils" / "hadamards.safetensors"
    with SafetensorsFile(source) as file:
        matrices = {size: np.asarray(file[str(size)]) for size in SIZES}
    return json.dumps({size: np.packbits(one < 0).tobytes().hex() for size, one in matrices.items()}, indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(text() != PLACE.read_text())
    PLACE.write_text(text())
