# SPDX-License-Identifier: Apache-2.0
"""A test that passes by absence proves nothing: with REQUIRE_PEERS=1, as continuous integration sets it, every module
that a test asks for with pytest.importorskip must be there."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

# Not required: what no index has for the machines of continuous integration, or what would bring in much else.
OPTIONAL = {"comfy_kitchen.tensor", "llama_cpp", "peft", *(("tomllib",) if sys.version_info < (3, 11) else ())}
ASKED = re.compile(r"importorskip\(\s*\"([\w.]+)\"")


def asked_for():
    texts = (path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py"))
    return sorted({name for text in texts for name in ASKED.findall(text)} - OPTIONAL)


@pytest.mark.skipif(os.environ.get("REQUIRE_PEERS") != "1", reason="REQUIRE_PEERS is not 1")
@pytest.mark.filterwarnings("ignore")  # of what a peer says of its own peers
@pytest.mark.parametrize("name", asked_for())
def test_peers_are_here(name):
    importlib.import_module(name)


def test_the_list_is_not_empty():
    assert {"torch", "jax", "transformers", "diffusers", "compressed_tensors"} <= set(asked_for())
