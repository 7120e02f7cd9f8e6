# SPDX-License-Identifier: Apache-2.0
"""The core inside an interpreter: signals, its end, threads it cannot have, modes of arithmetic that others set."""

import os
import subprocess
import sys
import textwrap
import time

import breccia
import numpy as np
import pytest
from breccia import _core

LINUX = sys.platform == "linux"


def run(code, timeout=120, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "work",
    [
        "breccia.matmul(np.ones((2048, 8192), np.float32), w.T)",
        "breccia.cast(rows(x), breccia.MXFP4BlockScaling())",
        "breccia.requantize(many, breccia.NVFP4BlockScaling(scale_search='mse'))",
    ],
    ids=["matmul", "cast", "requantize"],
)
def test_ctrl_c_ends_long_work(work, threads):
    done = run(
        f"""
        import os, signal, threading, time
        import breccia, numpy as np
        signal.signal(signal.SIGINT, signal.default_int_handler)  # off in the background
        breccia.set_backend("portable")
        breccia.set_num_threads({threads})
        x = np.random.default_rng(0).normal(size=8192).astype(np.float32)
        def rows(one):  # a million times the same, in the memory of one
            return np.lib.stride_tricks.as_strided(one, (1 << 20, one.size), (0, one.itemsize))
        w = breccia.cast(np.tile(x, (8192, 1)), breccia.INT8Scaling())
        one = breccia.cast(x[np.newaxis], breccia.MXFP8BlockScaling())
        many = breccia.ScaledTensor(rows(one.data), rows(one.scale), one.recipe, one.layout)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            {work}
            print("finished", time.monotonic() - began)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began)
        again = breccia.cast(np.ones((2, 32)), breccia.MXFP8BlockScaling())
        np.testing.assert_array_equal(breccia.dequantize(again), 1)
        """
    )
    assert done.returncode == 0, done.stderr
    word, seconds = done.stdout.split()
    assert word == "interrupted", seconds
    assert float(seconds) < 10  # of some minutes


def test_a_handler_that_returns_interrupts_nothing():
    done = run(
        """
        import signal
        import breccia, numpy as np
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        x = np.random.default_rng(0).normal(size=(2048, 4096)).astype(np.float32)
        recipe = breccia.MXFP4BlockScaling(scale_search="mse")
        breccia.set_backend("portable")
        expected = breccia.cast(x, recipe)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        actual = breccia.cast(x, recipe)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert seen
        np.testing.assert_array_equal(actual.data, expected.data)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "work",
    ["breccia.matmul(x, w.T)", "breccia.cast(x, recipe)", "breccia.dequantize(w)", "breccia.formats.decode(d, 'int8')"],
)
def test_daemon_threads_may_be_at_work_when_the_interpreter_ends(work):
    code = f"""
        import threading, time
        import breccia, numpy as np
        recipe = breccia.MXFP8BlockScaling()
        x = np.ones((64, 512), np.float32)
        w = breccia.cast(x, recipe)
        d = np.zeros(1 << 16, np.uint8)
        def work():
            while True:
                {work}
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
        """
    for _ in range(5):
        done = run(code)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not LINUX, reason="limits memory through /proc and setrlimit")
def test_threads_that_the_system_refuses_are_done_without():
    done = run(
        """
        import hashlib, resource
        import breccia, numpy as np
        x = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
        recipe = breccia.MXFP8BlockScaling()
        breccia.set_num_threads(1)
        expected = hashlib.sha256(breccia.cast(x, recipe).data).digest()
        breccia.set_num_threads(64)
        pages = int(open("/proc/self/statm").read().split()[0])
        most = pages * resource.getpagesize() + (6 << 20)  # a thread's stack is 8 MiB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            import threading
            threading.Thread(target=print).start()
        except RuntimeError:
            print("no threads")
        assert hashlib.sha256(breccia.cast(x, recipe).data).digest() == expected
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "no threads"


def test_a_fork_inside_long_work_of_another_thread():
    """The forking thread holds the interpreter's lock, which the main thread wants when it looks for signals."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this platform")
    done = run(
        """
        import os, threading, time, warnings
        import breccia, numpy as np
        warnings.simplefilter("ignore")
        breccia.set_backend("portable")
        breccia.set_num_threads(2)
        x = np.random.default_rng(0).normal(size=(1024, 4096)).astype(np.float32)
        codes = []
        def fork():
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    breccia.cast(x[:64], breccia.MXFP8BlockScaling())
                    os._exit(7)
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                time.sleep(0.02)
        thread = threading.Thread(target=fork)
        thread.start()
        while thread.is_alive():
            breccia.cast(x, breccia.MXFP4BlockScaling(scale_search="mse"))
        print(codes)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([7] * 5)


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_of_a_dataloader(method, tmp_path):
    """They cast on threads of their own, whether they were forked after the parent's threads had begun or not."""
    pytest.importorskip("torch")
    path = tmp_path / "loads.py"
    path.write_text(
        textwrap.dedent(
            """
            import sys, warnings
            import breccia, numpy as np, torch
            class Rows(torch.utils.data.Dataset):
                def __init__(self, shared): self.shared = shared
                def __len__(self): return 6
                def __getitem__(self, i):
                    x = np.random.default_rng(i).normal(size=(256, 512)).astype(np.float32)
                    made = breccia.cast(x, breccia.MXFP8BlockScaling())
                    arrays = breccia.matmul(x, self.shared.T), breccia.dequantize(made)
                    return [torch.from_numpy(array) for array in arrays]
            if __name__ == "__main__":
                warnings.simplefilter("ignore")  # of forks with threads
                breccia.set_num_threads(3)
                shared = np.random.default_rng(9).normal(size=(32, 512)).astype(np.float32)
                rows = Rows(breccia.cast(shared, breccia.NVFP4BlockScaling()))
                wanted = [rows[i] for i in range(6)]
                loader = torch.utils.data.DataLoader(
                    rows, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=True
                )
                for _ in range(2):
                    for made, want in zip(loader, wanted, strict=True):
                        assert all(torch.equal(a, b) for a, b in zip(made, want))
                print("equal")
            """
        )
    )
    done = subprocess.run([sys.executable, path, method], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def subnormals(rows, columns):
    bits = np.random.default_rng(3).integers(0, 1 << 23, (rows, columns), np.uint32)
    return bits.view(np.float32)


def test_torchs_flushing_of_subnormals_changes_no_byte():
    torch = pytest.importorskip("torch")
    x = subnormals(1024, 1024)
    recipes = [breccia.Float8BlockScaling(), breccia.MXFP8BlockScaling(), breccia.INT8Scaling()]
    threads = _core.num_threads()

    def results():
        made = [breccia.cast(x, recipe) for recipe in recipes]
        return [part for scaled in made for part in (scaled.data, scaled.scale, breccia.dequantize(scaled))]

    try:
        breccia.set_num_threads(2)
        expected = results()
        if not torch.set_flush_denormal(True):
            pytest.skip("torch cannot flush subnormals here")
        try:
            actual = results()
            assert float(torch.tensor([1e-40]) * 1) == 0  # and the mode is as it was
        finally:
            torch.set_flush_denormal(False)
    finally:
        breccia.set_num_threads(threads)
    for a, b in zip(actual, expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_backend_scope_may_be_entered_again():
    before = _core.cpu_info()["backend"]
    breccia.set_backend(_core.cpu_info()["supported"][-1])
    try:
        outside = _core.cpu_info()["backend"]
        scope = _core.BackendScope("portable")
        with scope:
            with scope:
                assert _core.cpu_info()["backend"] == "portable"
            assert _core.cpu_info()["backend"] == "portable"
        assert _core.cpu_info()["backend"] == outside
        with pytest.raises(ValueError, match="entered"):
            scope.__exit__(None, None, None)
        scope.__enter__()
        scope.__enter__()
        del scope
        assert _core.cpu_info()["backend"] == outside
    finally:
        breccia.set_backend(before)


@pytest.mark.parametrize("shape", [(2**33, 0), (2**20, 2**20, 0), (2**40, 0, 128)])
def test_rows_without_columns_take_no_time(shape):
    began = time.monotonic()
    x = np.zeros(shape, np.float32)
    for recipe in (breccia.MXFP8BlockScaling(), breccia.DelayedScaling(), breccia.NVFP4BlockScaling()):
        scaled = breccia.cast(x, recipe)
        assert scaled.shape == shape
        assert breccia.dequantize(scaled).shape == shape
        assert breccia.requantize(scaled, breccia.INT4Scaling()).shape == shape
        assert breccia.dequantize(scaled.mT).size == 0
    assert time.monotonic() - began < 5
