# SPDX-License-Identifier: Apache-2.0
import gc
import os

import hypothesis
import required_peers

# Deadlines measure the machine. The examples are the same on every run, so that a failure in CI is a failure
# at home.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# One thread: eager torch on tiny tensors only loses time to its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish():
    """What was imported stays: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    config.pluginmanager.register(required_peers)
