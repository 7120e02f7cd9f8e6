# SPDX-License-Identifier: Apache-2.0
"""Tests that run programs themselves: `.ci/run_programs` installs these programs, and sets BRECCIA_PROGRAMS."""

import os

if os.environ.get("BRECCIA_PROGRAMS"):
    import program_runs

    program_runs.settings()
else:
    collect_ignore_glob = ["test_*.py"]
