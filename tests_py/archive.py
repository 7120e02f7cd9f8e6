# SPDX-License-Identifier: Apache-2.0
"""A source archive has less than the repository: marks of tests that need the rest."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
needs_documents = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a source archive has no documents")
needs_benchmarks = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source archive has no benchmarks")
