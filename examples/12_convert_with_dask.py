# SPDX-License-Identifier: Apache-2.0
"""A checkpoint converted by Dask's workers, each a part of it. A worker that dies is no loss: Dask runs its part again,
which goes on where it was, and `finish` writes the bytes that one process writes.

With a scheduler's address and paths it converts those:
`python 12_convert_with_dask.py tcp://head:8786 model/ out/ nvfp4 64` in 64 parts, on the scheduler's machines; all must
see both paths.
"""

import sys
import tempfile
from pathlib import Path

import breccia
import numpy as np
from dask.distributed import Client, LocalCluster


def run(piece):
    return piece.run()


def convert(client, source, destination, to, parts):
    """The parts by whoever is free, then the whole."""
    pieces = breccia.checkpoint.plan(source, destination, to, parts)
    for done in client.gather(client.map(run, pieces, retries=5, pure=False)):
        print(f"part {done['part']} of {done['parts']}: {done['tensors']} tensors")
    return breccia.checkpoint.finish(source, destination, to)


def main():
    if len(sys.argv) > 1:
        address, source, destination, to, parts = sys.argv[1:]
        with Client(address) as client:
            convert(client, source, destination, to, int(parts))
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        rng = np.random.default_rng(0)
        arrays = {f"layers.{i}.weight": rng.normal(0, 0.02, (512, 512)).astype(np.float32) for i in range(8)}
        source = Path(folder) / "model.safetensors"
        breccia.checkpoint.save_arrays(arrays, source)
        convert(client, source, Path(folder) / "by_dask.safetensors", "nvfp4", 4)
        breccia.checkpoint.convert(source, Path(folder) / "by_one.safetensors", "nvfp4")
        same = (Path(folder) / "by_dask.safetensors").read_bytes() == (Path(folder) / "by_one.safetensors").read_bytes()
        print(f"the bytes of one process: {same}")


if __name__ == "__main__":
    main()
