# SPDX-License-Identifier: Apache-2.0
import gc
import os
import zlib
from pathlib import Path

import flushes  # noqa: F401 (takes their place)
import hypothesis
import pytest
import required_peers

# Deadlines measure the machine. The examples are the same on every run, so that a failure in CI is a failure
# at home.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# One thread: eager torch on tiny tensors only loses time to its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MANY = 30  # cases of a test, each of which takes little: those of fewer run in less time than it takes to find them
LONG = ("slow", "in_turn")


def pytest_collection_finish():
    """What was imported stays: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With BRECCIA_TESTS_ONE_OF=N, of the cases of a test that are alike about one of N runs, as of those of C++ tests:
    BRECCIA_TESTS_TURN says which share, and after N turns in a row each has run.

    Alike are the cases of a test that has MANY and is not marked always, and those of one that is marked in_turn: at
    least one of them runs in every turn, so that no test is silent. Alike are, too, all that are marked slow, whatever
    their test. Those whose name, or file, is a line of the file BRECCIA_TESTS_TOUCHED run whole."""
    of, turn = (int(os.environ.get(f"BRECCIA_TESTS_{name}") or 0) for name in ("ONE_OF", "TURN"))
    if of < 2:
        return
    touched = set(Path(os.environ.get("BRECCIA_TESTS_TOUCHED") or os.devnull).read_text().split())
    groups = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if touched.isdisjoint((name, name.partition("::")[0])):
            groups.setdefault("slow" if item.get_closest_marker("slow") else name, []).append(item)
    waits = set()
    for cases in groups.values():
        if are_alike(cases):
            waits.update(set(cases) - set(share_of(cases, of, turn)))
    if waits:
        config.hook.pytest_deselected(items=[item for item in items if item in waits])
        items[:] = [item for item in items if item not in waits]


def are_alike(its_cases):
    marks = {mark.name for item in its_cases for mark in item.iter_markers()}
    return not marks.isdisjoint(LONG) or (len(its_cases) >= MANY and "always" not in marks)


def share_of(its_cases, of, turn):
    """Those that a hash of their names gives to this turn; one of all where it gives none."""
    share = [item for item in its_cases if zlib.crc32(item.nodeid.encode()) % of == turn % of]
    return share or [its_cases[turn % len(its_cases)]]


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # this process collects
        gc.disable()  # what it imports and collects stays, and there is much
    config.pluginmanager.register(required_peers)


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    """A small language model of real weights, and its tokenizer, as transformers saves them."""
    import lora_peer

    return lora_peer.smollm2_folder(tmp_path_factory)
