# SPDX-License-Identifier: Apache-2.0
"""Many threads at the same tensors, with a global interpreter lock or without."""

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable

import breccia
import cases
import numpy as np
import pytest
from breccia import cast, dequantize, matmul, requantize

THREADS = 8


def every_verb(x: np.ndarray, scaled: breccia.ScaledTensor, ready: object, recipe: object) -> list[bytes]:
    """What a thread makes of tensors that all threads share."""
    again = cast(x, recipe)
    other = requantize(scaled, breccia.Float8CurrentScaling(granularity="row"))
    arrays = [again.data, again.scale, other.data, dequantize(scaled), dequantize(scaled.T), matmul(x, scaled.T)]
    return [
        np.ascontiguousarray(array).tobytes()
        for array in [*arrays, breccia.linear(x, ready), scaled[: len(scaled) // 2].data]
    ]


def at_once(work: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> list[object]:
    """What each of many threads returns that begin together; the first error of any."""
    gate, results, errors = threading.Barrier(THREADS + 1), [], []

    def run() -> None:
        try:
            gate.wait()
            results.append(work())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    gate.wait()
    while any(thread.is_alive() for thread in threads):
        meanwhile()
        threads[0].join(0.001)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@cases.ALL
def test_threads_share_tensors(recipe):
    """While another one changes how many threads a call may use."""
    x = cases.normal(cases.shape_for(recipe, rows=4 * getattr(recipe, "block_m", 1)), seed=3)
    scaled = cast(x, recipe)
    ready = breccia.prepare(scaled)
    before, counts = breccia.num_threads(), [1, 4, 2, 3]
    wanted = every_verb(x, scaled, ready, recipe)

    def change() -> None:
        counts.append(counts.pop(0))
        breccia.set_num_threads(counts[0])

    try:
        results = at_once(lambda: [every_verb(x, scaled, ready, recipe) for _ in range(4)], change)
    finally:
        breccia.set_num_threads(before)
    assert len(results) == THREADS
    assert all(made == wanted for result in results for made in result)


def test_threads_open_one_file(tmp_path):
    tensors = {f"{i}": cast(cases.normal((8, 64), seed=i), breccia.MXFP8BlockScaling()) for i in range(8)}
    breccia.save(tensors, tmp_path / "a.safetensors")
    wanted = {name: dequantize(tensor).tobytes() for name, tensor in tensors.items()}
    with breccia.open(tmp_path / "a.safetensors") as file:
        results = at_once(lambda: {name: dequantize(tensor).tobytes() for name, tensor in file})
    assert results == [wanted] * THREADS


def test_first_uses_at_once():
    """What is imported and looked up when it is needed first is needed by many threads first."""
    script = (
        "import breccia, numpy as np, test_threads\n"
        "def work():\n"
        "    q = breccia.cast(np.ones((4, 64), np.float32), 'nvfp4')\n"
        "    names = breccia.bridges.modules() and dir(breccia.bridges)\n"
        "    return len(names), breccia.cpu_info()['backend'], float(breccia.dequantize(q)[0, 0])\n"
        "results = test_threads.at_once(work)\n"
        "assert len(set(results)) == 1 and len(results) == test_threads.THREADS, results\n"
    )
    path = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a lock")
def test_the_lock_stays_off():
    code = "import sys, breccia; breccia.cpu_info(); sys.exit(sys._is_gil_enabled())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
