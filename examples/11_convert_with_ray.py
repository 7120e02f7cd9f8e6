# SPDX-License-Identifier: Apache-2.0
"""A checkpoint converted by Ray's workers, each a part of it. A worker that dies is no loss: Ray runs its part again,
which goes on where it was, and `finish` writes the bytes that one process writes.

With a path it converts that: `python 11_convert_with_ray.py model/ out/ nvfp4 64` in 64 parts, on as many machines as
`ray.init` reaches; all must see both paths.
"""

import os
import sys
import tempfile
from pathlib import Path

import breccia
import numpy as np

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray


@ray.remote(max_retries=5)
def run(piece):
    return piece.run()


def convert(source, destination, to, parts):
    """The parts by whoever is free, then the whole."""
    pieces = breccia.checkpoint.plan(source, destination, to, parts)
    for done in ray.get([run.remote(piece) for piece in pieces]):
        print(f"part {done['part']} of {done['parts']}: {done['tensors']} tensors")
    return breccia.checkpoint.finish(source, destination, to)


def main():
    if len(sys.argv) > 1:
        source, destination, to, parts = sys.argv[1:]
        ray.init()
        convert(source, destination, to, int(parts))
        return
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        arrays = {f"layers.{i}.weight": rng.normal(0, 0.02, (512, 512)).astype(np.float32) for i in range(8)}
        source = Path(folder) / "model.safetensors"
        breccia.checkpoint.save_arrays(arrays, source)
        convert(source, Path(folder) / "by_ray.safetensors", "nvfp4", 4)
        breccia.checkpoint.convert(source, Path(folder) / "by_one.safetensors", "nvfp4")
        same = (Path(folder) / "by_ray.safetensors").read_bytes() == (Path(folder) / "by_one.safetensors").read_bytes()
        print(f"the bytes of one process: {same}")
    ray.shutdown()


if __name__ == "__main__":
    main()
