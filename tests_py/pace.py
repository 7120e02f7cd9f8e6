# SPDX-License-Identifier: Apache-2.0
"""Limits of processor time hold for a fast core that nothing else shares: on others they are longer by as much."""

import contextlib
import importlib
import time

ALONE = 0.04  # seconds that a million rounds of the loop below take on such a core
ROUNDS = 500_000


def pace() -> float:
    """How many times as long as there a loop of Python takes here and now, at least 1."""
    begin, total = time.process_time(), 0
    for i in range(ROUNDS):
        total += i
    return max(1.0, (time.process_time() - begin) * 1e6 / ROUNDS / ALONE)


def import_peers() -> None:
    """What `verify --complete` imports, whose time is not a file's."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018
        importlib.import_module("transformers.core_model_loading")
