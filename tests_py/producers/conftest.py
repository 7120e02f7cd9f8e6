# SPDX-License-Identifier: Apache-2.0
"""Tests of whole models that producers quantize: `.ci/run_producers` installs these, and sets BRECCIA_PRODUCERS."""

import os

if not os.environ.get("BRECCIA_PRODUCERS"):
    collect_ignore_glob = ["test_*.py"]
