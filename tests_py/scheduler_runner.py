# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint as an example does, by Ray or Dask, and has one worker killed while it writes:
`python scheduler_runner.py EXAMPLE IN OUT TO FLAG`. FLAG is the file that the killed worker leaves."""

import importlib
import os
import signal
import sys

import breccia


class Mortal:
    """A piece whose first run, of all workers', ends by SIGKILL before its twentieth call to the disk."""

    def __init__(self, piece, flag):
        self.piece, self.flag = piece, flag

    def run(self):
        from breccia.checkpoint.files import disk

        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return self.piece.run()
        left = [20]

        def before(*_):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        disk.before = before
        self.piece.run()
        raise AssertionError("the worker must be killed before it is done")


def main(example, source, destination, to, flag):
    module = importlib.import_module(example)  # by a name that workers can import, too
    plan = breccia.checkpoint.plan
    breccia.checkpoint.plan = lambda *arguments: [Mortal(piece, flag) for piece in plan(*arguments)]
    if "ray" in example:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        module.convert(source, destination, to, 5)
        ray.shutdown()
        return
    from dask.distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        module.convert(client, source, destination, to, 5)


if __name__ == "__main__":
    main(*sys.argv[1:])
